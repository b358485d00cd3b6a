// SPDX-License-Identifier: MIT
// One row for every (token, expert) pair, by plain messages.
#include "model/bench/cases/all_to_all.h"

#include <algorithm>

namespace fp8flow::bench {

namespace {

std::size_t index(int64_t i) { return static_cast<std::size_t>(i); }

std::vector<ProcessGroup::Part> parts_of(const std::vector<int64_t>& rows, int64_t row_bytes) {
    std::vector<ProcessGroup::Part> parts;
    std::size_t offset = 0;
    for (const int64_t count : rows) {
        parts.push_back({offset, index(count * row_bytes)});
        offset += parts.back().bytes;
    }
    return parts;
}

int64_t bytes_of_row(const TensorView& view) { return view.cols() * size_of(view.dtype); }

// Scales of one byte as plain elements, so that rows of them can be moved like any others.
ScaledTensor plain(TensorView view) {
    if (view.dtype == DType::e8m0) view.dtype = DType::e4m3;
    return {view, {}, ScaleLayout::none};
}

}  // namespace

PairExchange::Lists PairExchange::lists_of(const std::vector<Routing>& all, int64_t rank, int64_t alignment) {
    const auto ranks = static_cast<int64_t>(all.size());
    const Routing& own = all[index(rank)];
    const int64_t experts = own.experts, local = experts / ranks;
    const auto rows_of = [&](const Routing& routing) {
        std::vector<int64_t> rows(index(experts));
        for (const int32_t id : routing.ids) ++rows[index(id)];
        return rows;
    };
    Lists lists;
    lists.expert_rows = rows_of(own);
    lists.sent = own.tokens * own.topk;
    lists.sent_to.assign(index(ranks), 0);
    for (int64_t e = 0; e < experts; ++e) lists.sent_to[index(e / local)] += lists.expert_rows[index(e)];

    std::vector<int64_t> next(index(experts));
    for (int64_t e = 1; e < experts; ++e)
        next[index(e)] = next[index(e - 1)] + lists.expert_rows[index(e - 1)];
    lists.sent_token.resize(index(lists.sent));
    lists.sent_rows.resize(index(lists.sent));
    for (int64_t t = 0; t < own.tokens; ++t) {
        const auto of_token = lists.sent_rows.begin() + t * own.topk;
        for (int64_t k = 0; k < own.topk; ++k) {
            const int64_t row = next[index(own.ids[index(t * own.topk + k)])]++;
            lists.sent_token[index(row)] = static_cast<int32_t>(t);
            of_token[k] = static_cast<int32_t>(row);
        }
        std::sort(of_token, of_token + own.topk);  // rows are ordered by expert
    }

    std::vector<std::vector<int64_t>> rows;  // [source rank][expert]
    for (const Routing& routing : all) {
        rows.push_back(rows_of(routing));
        lists.received_from.push_back(0);
        for (int64_t e = rank * local; e < (rank + 1) * local; ++e)
            lists.received_from.back() += rows.back()[index(e)];
        lists.received += lists.received_from.back();
    }
    lists.received_place.resize(index(lists.received));
    std::vector<int64_t> begin(index(ranks));  // of the rows of the expert at hand, by source rank
    for (int64_t r = 1; r < ranks; ++r)
        begin[index(r)] = begin[index(r - 1)] + lists.received_from[index(r - 1)];
    for (int64_t e = rank * local; e < (rank + 1) * local; ++e) {
        for (int64_t r = 0; r < ranks; ++r)
            for (int64_t i = 0; i < rows[index(r)][index(e)]; ++i) {
                lists.received_place[index(begin[index(r)])] =
                    static_cast<int32_t>(lists.place_source.size());
                lists.place_source.push_back(static_cast<int32_t>(begin[index(r)]++));
            }
        const auto filled = static_cast<int64_t>(lists.place_source.size());
        lists.place_source.resize(index(round_up(filled, alignment)), -1);
    }
    return lists;
}

PairExchange::PairExchange(Buffers& buffers, const std::vector<Routing>& all, int64_t rank,
                           const RowGroups& plan_groups)
    : lists_(buffers.once<Lists>([&] { return lists_of(all, rank, plan_groups.alignment); })),
      tokens_(all[index(rank)].tokens),
      topk_(all[index(rank)].topk),
      plan_groups_(plan_groups),
      by_expert_(buffers.routed(lists_.expert_rows, 1)),
      in_one_group_(buffers.routed({lists_.received}, 1)),
      sent_token_(buffers.values(lists_.sent_token)),
      place_source_(buffers.values(lists_.place_source)),
      received_place_(buffers.values(lists_.received_place)),
      sent_rows_(buffers.values(lists_.sent_rows).reshape({tokens_, topk_})),
      num_tokens_(buffers.values(std::vector<int64_t>{tokens_})) {}

std::function<void(const Launch&)> PairExchange::dispatch(Ops& ops, Messages& messages, Buffers& buffers,
                                                          const ScaledTensor& rows,
                                                          const ScaledTensor& dst) const {
    const bool scaled = rows.layout != ScaleLayout::none;
    const auto buffer = [&](int64_t count) {
        return scaled ? buffers.fp8_output(rows.data.dtype, {count, rows.data.cols()}, rows.layout)
                      : ScaledTensor{
                            buffers.output(rows.data.dtype, {count, rows.data.cols()}), {}, rows.layout};
    };
    const ScaledTensor sent = buffer(lists_.sent), received = buffer(lists_.received);
    std::vector<std::pair<ScaledTensor, ScaledTensor>> packed{{plain(rows.data), plain(sent.data)}};
    if (scaled) packed.emplace_back(plain(rows.scales), plain(sent.scales));
    std::vector<Messages::AllToAll> wire;
    const auto send = [&](const TensorView& from, const TensorView& to) {
        const int64_t bytes = bytes_of_row(from);
        wire.push_back(
            {from.data, to.data, parts_of(lists_.sent_to, bytes), parts_of(lists_.received_from, bytes)});
    };
    send(sent.data, received.data);
    if (scaled) send(sent.scales, received.scales);
    return [&ops, &messages, packed, wire, received, dst, sent_token = sent_token_,
            by_expert = by_expert_.groups, place_source = place_source_,
            groups = plan_groups_](const Launch& launch) {
        for (const auto& [from, to] : packed)
            ops.permute_pad({.src = from, .row_source = sent_token, .groups = by_expert, .dst = to}, launch);
        messages.all_to_all(wire, launch);
        ops.permute_pad({.src = received, .row_source = place_source, .groups = groups, .dst = dst}, launch);
    };
}

std::function<void(const Launch&)> PairExchange::combine(Ops& ops, Messages& messages, Buffers& buffers,
                                                         const TensorView& src, const TensorView& y) const {
    const TensorView sent = buffers.output(src.dtype, {lists_.received, src.cols()}),
                     returned = buffers.output(src.dtype, {lists_.sent, src.cols()});
    const int64_t bytes = bytes_of_row(src);
    const std::vector<Messages::AllToAll> wire{
        {sent.data, returned.data, parts_of(lists_.received_from, bytes), parts_of(lists_.sent_to, bytes)}};
    return [&ops, &messages, wire, src, sent, returned, y, received_place = received_place_,
            groups = in_one_group_.groups, sent_rows = sent_rows_,
            num_tokens = num_tokens_](const Launch& launch) {
        ops.permute_pad(
            {.src = plain(src), .row_source = received_place, .groups = groups, .dst = plain(sent)}, launch);
        messages.all_to_all(wire, launch);
        ops.unpermute_unpad(
            {.src = returned, .recv_rows = sent_rows, .num_rows = num_tokens, .row_prob = {}, .dst = y},
            launch);
    };
}

}  // namespace fp8flow::bench
