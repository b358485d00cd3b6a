// SPDX-License-Identifier: MIT
// Two levels: between hosts over the rail, and inside the host. Every message's rows are in order (source
// rank, token), so that both sides know them from the plan; received rows end in the order of the flat
// exchange, so what follows has its bits.
#include "kernels/comm/hierarchical_exchange.h"

#include "kernels/comm/plan_messages.h"
#include "kernels/core/error.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace fp8flow {

using namespace comm;

namespace {

// True where one of the token's experts is on a rank that is wanted.
template <class Wanted>
bool goes_to(const DispatchPlan& plan, const Sizes& sizes, int64_t source, int64_t token, Wanted wanted) {
    const int32_t* ids = plan.all_ids.as<int32_t>() + (source * sizes.slots + token) * sizes.topk;
    return std::any_of(ids, ids + sizes.topk, [&](int32_t id) {
        const int64_t rank = sizes.rank_of(id);
        return rank >= 0 && wanted(static_cast<int>(rank));
    });
}

template <class Wanted>
std::vector<int64_t> tokens_where(const DispatchPlan& plan, int64_t source, Wanted wanted) {
    const Sizes sizes(plan);
    std::vector<int64_t> tokens;
    for (int64_t token = 0; token < sizes.slots; ++token)
        if (goes_to(plan, sizes, source, token, wanted)) tokens.push_back(token);
    return tokens;
}

std::vector<int64_t> tokens_for_rank(const DispatchPlan& plan, int source, int rank) {
    return tokens_where(plan, source, [&](int r) { return r == rank; });
}

std::vector<int64_t> counts_of(const std::vector<std::vector<int64_t>>& tokens) {
    std::vector<int64_t> counts(tokens.size());
    std::transform(tokens.begin(), tokens.end(), counts.begin(),
                   [](const auto& list) { return static_cast<int64_t>(list.size()); });
    return counts;
}

}  // namespace

HierarchicalExchange::HierarchicalExchange(ProcessGroup& group, Ops& ops, CombineOrder order,
                                           HostLayout hosts)
    : GroupExchange(group, ops, order) {
    set_hosts(std::move(hosts));
    FP8FLOW_CHECK(hosts_.num_ranks() == size(), "hosts of {} ranks for {}", hosts_.num_ranks(), size());
    require(hosts_.even(), ExitCode::usage,
            "parallel.moe_token_dispatcher_type: hierarchical needs as many ranks of a group that shares the "
            "experts on each of its hosts, but of {} ranks {} are on the host of rank 0, {} hosts in all; "
            "choose parallel.expert_model_parallel_size, or flex or alltoall",
            size(), hosts_.ranks(0).size(), hosts_.num_hosts());
    host_ = hosts_.host(rank());
    place_ = hosts_.place(rank());
    rails_.resize(hosts_.ranks(0).size());
    for (int r = 0; r < size(); ++r) rails_[static_cast<std::size_t>(hosts_.place(r))].push_back(r);
    for (int host = 0; host < hosts_.num_hosts(); ++host) {
        const int there = hosts_.ranks(host)[static_cast<std::size_t>(place_)];
        on_rail_.push_back(static_cast<int>(std::find(rail().begin(), rail().end(), there) - rail().begin()));
    }
    rail_group_ = group_.split(place_);
    inside_group_ = group_.split(host_);
}

std::vector<int64_t> HierarchicalExchange::tokens_for_host(const DispatchPlan& plan, int source,
                                                           int host) const {
    return tokens_where(plan, source, [&](int r) { return hosts_.host(r) == host; });
}

HierarchicalExchange::Tokens HierarchicalExchange::leaving(const DispatchPlan& plan) const {
    Tokens tokens;
    for (int there : rail()) tokens.push_back(tokens_for_host(plan, rank(), hosts_.host(there)));
    return tokens;
}

HierarchicalExchange::Tokens HierarchicalExchange::arriving(const DispatchPlan& plan) const {
    Tokens tokens;
    for (int source : rail()) tokens.push_back(tokens_for_host(plan, source, host_));
    return tokens;
}

void HierarchicalExchange::count_rail(double& leg, const Parts& parts) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
        if (rail()[i] == rank()) continue;
        leg += static_cast<double>(parts[i].bytes);
        wire_.between_hosts += static_cast<double>(parts[i].bytes);
    }
}

void HierarchicalExchange::count_inside(double& leg, const Parts& parts) {
    for (std::size_t place = 0; place < parts.size(); ++place)
        if (place != static_cast<std::size_t>(place_)) leg += static_cast<double>(parts[place].bytes);
}

void HierarchicalExchange::do_gather_routing(const TensorView& ids, const TensorView& probs,
                                             const TensorView& all_ids, const TensorView& all_probs,
                                             const Launch&) {
    place_own_routing(ids, probs, all_ids, all_probs);
    gather_blocks(all_ids);
    gather_blocks(all_probs);
}

// A rank's block goes along its rail, then all blocks of the rail go through the host.
void HierarchicalExchange::gather_blocks(const TensorView& all) {
    const auto block = static_cast<std::size_t>(all.bytes() / size()), hosts = rails_[0].size(),
               ranks = rails_.size();
    std::vector<uint8_t> of_rail(hosts * block), of_host(ranks * hosts * block);
    rail_group_->all_gather(all.bytes_ptr() + static_cast<std::size_t>(rank()) * block, block,
                            of_rail.data());
    inside_group_->all_gather(of_rail.data(), of_rail.size(), of_host.data());
    const uint8_t* from = of_host.data();
    for (const std::vector<int>& rail : rails_)
        for (int source : rail) {
            std::copy_n(from, block, all.bytes_ptr() + static_cast<std::size_t>(source) * block);
            from += block;
        }
    count_rail(wire_.routing, Parts(hosts, {0, block}));
    count_inside(wire_.routing, Parts(ranks, {0, of_rail.size()}));
}

// One item, a row and its scales, for each (token, host): to this host's own items, and from the rail's
// ranks. Returns those that arrive, in the order of arriving().
TensorView HierarchicalExchange::cross_hosts(const ScaledTensor& rows, const DispatchPlan& plan,
                                             Arena& scratch) {
    const Sizes sizes(plan);
    const MessageShape shape(rows);
    const auto num_hosts = static_cast<int64_t>(rail().size());
    const Tokens sent = leaving(plan);
    const TensorView outbox = byte_buffer(scratch,
                                          plan.num_tokens * std::min(num_hosts, sizes.topk) * shape.total(),
                                          "dispatch"),
                     inbox = byte_buffer(scratch, num_hosts * sizes.slots * shape.total(), "dispatch");
    uint8_t* to = outbox.bytes_ptr();
    for (const auto& tokens : sent)
        for (int64_t token : tokens) {
            copy_bytes(to, rows.data.bytes_ptr() + token * shape.row_bytes, shape.row_bytes);
            if (rows.scales)
                copy_bytes(to + shape.row_bytes, rows.scales.bytes_ptr() + token * shape.scale_bytes,
                           shape.scale_bytes);
            to += shape.total();
        }
    const Parts parts = packed_parts(counts_of(sent), shape.total());
    rail_group_->all_to_all(outbox.data, parts, inbox.data,
                            packed_parts(counts_of(arriving(plan)), shape.total()));
    count_rail(wire_.dispatch, parts);
    return inbox;
}

void HierarchicalExchange::do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan,
                                            const ScaledTensor& received, Arena& scratch, const Launch&) {
    ArenaScope scope(scratch);
    const Sizes sizes(plan);
    const MessageShape shape(rows);
    const auto num_hosts = static_cast<int64_t>(rail().size()), on_host = static_cast<int64_t>(rails_.size());
    const TensorView landed = cross_hosts(rows, plan, scratch);
    const Tokens tokens = arriving(plan);

    const TensorView outbox = byte_buffer(
                         scratch, num_hosts * sizes.slots * std::min(on_host, sizes.topk) * shape.total(),
                         "dispatch"),
                     inbox = byte_buffer(scratch, received.data.dim(0) * shape.total(), "dispatch");
    std::vector<int64_t> sent, arrived;
    uint8_t* to = outbox.bytes_ptr();
    for (int there : hosts_.ranks(host_)) {
        const uint8_t *from = landed.bytes_ptr(), *begin = to;
        for (std::size_t i = 0; i < tokens.size(); ++i)
            for (int64_t token : tokens[i]) {
                if (goes_to(plan, sizes, rail()[i], token, [&](int r) { return r == there; })) {
                    copy_bytes(to, from, shape.total());
                    to += shape.total();
                }
                from += shape.total();
            }
        sent.push_back((to - begin) / shape.total());
    }
    const int64_t* offsets = plan.recv_offsets.as<int64_t>();
    for (const std::vector<int>& rail : rails_)
        arrived.push_back(std::accumulate(rail.begin(), rail.end(), int64_t{0}, [&](int64_t n, int source) {
            return n + offsets[source + 1] - offsets[source];
        }));
    const Parts parts = packed_parts(sent, shape.total());
    inside_group_->all_to_all(outbox.data, parts, inbox.data, packed_parts(arrived, shape.total()));
    count_inside(wire_.dispatch, parts);

    const uint8_t* from = inbox.bytes_ptr();
    for (const std::vector<int>& rail : rails_)
        for (int source : rail)
            for (int64_t row = offsets[source]; row < offsets[source + 1]; ++row) {
                copy_bytes(received.data.bytes_ptr() + row * shape.row_bytes, from, shape.row_bytes);
                if (received.scales)
                    copy_bytes(received.scales.bytes_ptr() + row * shape.scale_bytes, from + shape.row_bytes,
                               shape.scale_bytes);
                from += shape.total();
            }
}

// The sums of this host's ranks for each token of the rail's ranks, in order (source rank, token): rows for
// other hosts are returned, rounded; those of this rank's own tokens go to `own` in FP32, by token.
TensorView HierarchicalExchange::host_sums(const Combine& args, const DispatchPlan& plan,
                                           const TensorView& own, Arena& scratch, const Launch& launch) {
    const Sizes sizes(plan);
    const int64_t width = args.src.dim(1), row_bytes = width * size_of(args.src.dtype),
                  rail_slots = static_cast<int64_t>(rail().size()) * sizes.slots,
                  on_host = static_cast<int64_t>(rails_.size());
    const TensorView sums = rank_sums(args, plan, scratch, launch),
                     outbox = scratch.tensor(args.src.dtype, {sizes.ranks * sizes.slots, width}, "combine"),
                     inbox = scratch.tensor(args.src.dtype,
                                            {rail_slots * std::min(on_host, sizes.topk), width}, "combine"),
                     result = scratch.tensor(args.src.dtype, {rail_slots, width}, "combine");
    const int64_t* offsets = plan.recv_offsets.as<int64_t>();
    std::vector<int64_t> sent, arrived;
    uint8_t* to = outbox.bytes_ptr();
    for (const std::vector<int>& rail : rails_) {
        sent.push_back(0);
        for (int source : rail) {
            const int64_t count = offsets[source + 1] - offsets[source];
            copy_bytes(to, sums.bytes_ptr() + offsets[source] * row_bytes, count * row_bytes);
            to += count * row_bytes;
            sent.back() += count;
        }
    }
    for (int there : hosts_.ranks(host_)) {
        arrived.push_back(0);
        for (int source : rail())
            arrived.back() += static_cast<int64_t>(tokens_for_rank(plan, source, there).size());
    }
    const Parts parts = packed_parts(sent, row_bytes), inbox_parts = packed_parts(arrived, row_bytes);
    inside_group_->all_to_all(outbox.data, parts, inbox.data, inbox_parts);
    count_inside(wire_.combine, parts);

    std::vector<int64_t> next;  // by place
    for (const auto& part : inbox_parts) next.push_back(static_cast<int64_t>(part.offset) / row_bytes);
    std::vector<float> sum(static_cast<std::size_t>(width));
    int64_t row = 0;
    for (int source : rail())
        for (int64_t token : tokens_for_host(plan, source, host_)) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (std::size_t place = 0; place < next.size(); ++place) {
                const int there = hosts_.ranks(host_)[place];
                if (goes_to(plan, sizes, source, token, [&](int r) { return r == there; }))
                    add_row(inbox, next[place]++, sum.data());
            }
            if (source == rank())
                store_row(sum.data(), own, token);
            else
                store_row(sum.data(), result, row++);
        }
    return result;
}

void HierarchicalExchange::combine_rank_sums(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                                             const Launch& launch) {
    const Sizes sizes(plan);
    const int64_t width = args.src.dim(1), row_bytes = width * size_of(args.src.dtype);
    const TensorView own = scratch.tensor(DType::f32, {plan.num_tokens, width}, "combine"),
                     sent = host_sums(args, plan, own, scratch, launch),
                     returned = scratch.tensor(
                         args.src.dtype,
                         {plan.num_tokens * std::min(static_cast<int64_t>(rail().size()), sizes.topk), width},
                         "combine");
    const auto crossing = [&](const Tokens& tokens) {  // own sums stay
        std::vector<int64_t> counts = counts_of(tokens);
        counts[static_cast<std::size_t>(on_rail_[static_cast<std::size_t>(host_)])] = 0;
        return packed_parts(counts, row_bytes);
    };
    const Parts parts = crossing(arriving(plan)), returned_parts = crossing(leaving(plan));
    rail_group_->all_to_all(sent.data, parts, returned.data, returned_parts);
    count_rail(wire_.combine, parts);

    const TensorView residual = residual_with_addend(ops_, args, launch);
    std::vector<int64_t> next;  // by host
    for (int i : on_rail_) next.push_back(offset_of(returned_parts, i) / row_bytes);
    std::vector<float> sum(static_cast<std::size_t>(width));
    for (int64_t token = 0; token < plan.num_tokens; ++token) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int host = 0; host < hosts_.num_hosts(); ++host) {
            if (!goes_to(plan, sizes, rank(), token, [&](int r) { return hosts_.host(r) == host; })) continue;
            if (host == host_)
                add_row(own, token, sum.data());
            else
                add_row(returned, next[static_cast<std::size_t>(host)]++, sum.data());
        }
        if (residual) add_row(residual, token, sum.data());
        store_row(sum.data(), args.y, token);
    }
}

}  // namespace fp8flow
