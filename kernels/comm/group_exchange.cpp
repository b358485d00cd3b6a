// SPDX-License-Identifier: MIT
// The reference exchange. Both sides of every message know its size and order from the plan, so only data is
// sent: a rank packs what a peer needs in ascending token order, the peer unpacks it in order (source rank,
// token).
#include "kernels/comm/group_exchange.h"

#include "kernels/core/scalar_math.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace fp8flow {

namespace {

using Parts = std::vector<ProcessGroup::Part>;

int64_t base_of(const TensorView& view) { return view.row_base != nullptr ? *view.row_base : 0; }

// Consecutive parts: part r holds counts[r] items.
Parts packed_parts(const std::vector<int64_t>& counts, int64_t item_bytes) {
    Parts parts;
    std::size_t offset = 0;
    for (int64_t count : counts) {
        parts.push_back({offset, static_cast<std::size_t>(count * item_bytes)});
        offset += parts.back().bytes;
    }
    return parts;
}

double bytes_to_others(const Parts& parts, int rank) {
    double bytes = 0;
    for (std::size_t r = 0; r < parts.size(); ++r)
        if (r != static_cast<std::size_t>(rank)) bytes += static_cast<double>(parts[r].bytes);
    return bytes;
}

// Sizes of a plan.
struct Sizes {
    int64_t ranks, slots, topk, local_experts;

    explicit Sizes(const DispatchPlan& plan)
        : ranks(plan.all_ids.dim(0)),
          slots(plan.all_ids.dim(1)),
          topk(plan.topk),
          local_experts(plan.num_local_experts) {}
    // The rank that hosts an expert; -1 for the id of an absent token.
    int64_t host_of(int64_t expert) const {
        return expert >= 0 && expert < ranks * local_experts ? expert / local_experts : -1;
    }
};

// Rows that arrive from each rank, and rows that go to each rank.
std::vector<int64_t> received_counts(const DispatchPlan& plan) {
    const int64_t* offsets = plan.recv_offsets.as<int64_t>();
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < plan.all_ids.dim(0); ++r) counts.push_back(offsets[r + 1] - offsets[r]);
    return counts;
}
std::vector<int64_t> sent_counts(const DispatchPlan& plan) {
    const int64_t* counts = plan.send_counts.as<int64_t>();
    return {counts, counts + plan.all_ids.dim(0)};
}

// (token, k) choices of rank `owner`'s tokens by the rank that hosts the expert.
std::vector<int64_t> choices_of(const DispatchPlan& plan, int64_t owner) {
    const Sizes sizes(plan);
    const int32_t* ids = plan.all_ids.as<int32_t>() + owner * sizes.slots * sizes.topk;
    std::vector<int64_t> counts(static_cast<std::size_t>(sizes.ranks), 0);
    for (int64_t i = 0; i < sizes.slots * sizes.topk; ++i)
        if (const int64_t host = sizes.host_of(ids[i]); host >= 0) ++counts[static_cast<std::size_t>(host)];
    return counts;
}
// Choices of every rank's tokens for the experts of rank `host`.
std::vector<int64_t> choices_for(const DispatchPlan& plan, int64_t host) {
    std::vector<int64_t> counts;
    for (int64_t owner = 0; owner < plan.all_ids.dim(0); ++owner)
        counts.push_back(choices_of(plan, owner)[static_cast<std::size_t>(host)]);
    return counts;
}

// Calls visit(n, row) for the n-th (token, expert) choice that rank `host` hosts, in order (source rank,
// token, expert); row is the M-row of that choice, -1 where an overflow cut it off (the step is then redone,
// but counts must still agree).
template <class Visit> void for_each_choice(const DispatchPlan& plan, int64_t host, Visit visit) {
    const Sizes sizes(plan);
    const int32_t* ids = plan.all_ids.as<int32_t>();
    const int32_t* source = plan.recv_source.as<int32_t>();
    const int32_t* rows = plan.recv_rows.as<int32_t>();
    const int64_t received = plan.recv_offsets.as<int64_t>()[sizes.ranks];
    int64_t n = 0;
    for (int64_t i = 0; i < received; ++i) {
        int64_t next = 0;  // choice of this token
        for (int64_t k = 0; k < sizes.topk; ++k)
            if (sizes.host_of(ids[source[i] * sizes.topk + k]) == host)
                visit(n++, int64_t{rows[i * sizes.topk + next++]});
    }
}

// sum += row, or sum = fma(weight, row, sum).
template <class T, class... Weight>
void add_row_as(const TensorView& rows, int64_t row, float* sum, Weight... weight) {
    const int64_t width = rows.dim(1);
    const T* values = rows.as<T>() + row * width;
    for (int64_t h = 0; h < width; ++h) {
        float value;
        if constexpr (std::is_same_v<T, float>) {
            value = values[h];
        } else {
            value = to_float(values[h]);
        }
        if constexpr (sizeof...(Weight) == 0) {
            sum[h] += value;
        } else {
            sum[h] = fma_float(weight..., value, sum[h]);
        }
    }
}
template <class... Weight> void add_row(const TensorView& rows, int64_t row, float* sum, Weight... weight) {
    rows.dtype == DType::f32 ? add_row_as<float>(rows, row, sum, weight...)
                             : add_row_as<Bf16>(rows, row, sum, weight...);
}
void store_row(const float* sum, const TensorView& rows, int64_t row) {
    const int64_t width = rows.dim(1);
    if (rows.dtype == DType::f32) {
        std::copy_n(sum, width, rows.as<float>() + row * width);
    } else {
        std::transform(sum, sum + width, rows.as<Bf16>() + row * width, [](float x) { return to_bf16(x); });
    }
}

TensorView byte_buffer(Arena& scratch, int64_t bytes, const char* category) {
    return scratch.tensor(DType::e8m0, {bytes}, category);  // the one-byte type
}

// Messages of `rows`: the FP8 values of the chosen rows, then their scales.
struct MessageShape {
    int64_t row_bytes, scale_bytes;

    explicit MessageShape(const ScaledTensor& rows)
        : row_bytes(rows.data.cols() * size_of(rows.data.dtype)),
          scale_bytes(rows.scales ? rows.scales.cols() * size_of(rows.scales.dtype) : 0) {}
    int64_t total() const { return row_bytes + scale_bytes; }
};

void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

GroupExchange::GroupExchange(ProcessGroup& group, Ops& ops, CombineOrder order)
    : group_(group), ops_(ops), order_(order) {}

void GroupExchange::do_gather_routing(const TensorView& ids, const TensorView& probs,
                                      const TensorView& all_ids, const TensorView& all_probs, const Launch&) {
    const int64_t own_slots = all_ids.dim(1) * all_ids.dim(2), present = ids.numel();
    int32_t* own_ids = all_ids.as<int32_t>() + rank() * own_slots;
    float* own_probs = all_probs.as<float>() + rank() * own_slots;
    std::copy_n(ids.as<int32_t>(), present, own_ids);
    std::fill(own_ids + present, own_ids + own_slots, -1);
    std::copy_n(probs.as<float>(), present, own_probs);
    std::fill(own_probs + present, own_probs + own_slots, 0.0f);
    const auto bytes = static_cast<std::size_t>(own_slots) * sizeof(float);
    group_.all_gather(own_ids, bytes, all_ids.data);
    group_.all_gather(own_probs, bytes, all_probs.data);
    wire_.routing += static_cast<double>(size() - 1) * 2.0 * static_cast<double>(bytes);
}

void GroupExchange::do_dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst,
                                Arena& scratch, const Launch& launch) {
    dispatch_through_rows(ops_, rows, plan, dst, scratch, launch);
}

void GroupExchange::do_dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan,
                                     const ScaledTensor& received, Arena& scratch, const Launch&) {
    ArenaScope scope(scratch);
    const MessageShape shape(rows);
    const Sizes sizes(plan);
    const std::vector<int64_t> sent = sent_counts(plan), arriving = received_counts(plan);
    const Parts send_parts = packed_parts(sent, shape.total()),
                recv_parts = packed_parts(arriving, shape.total());

    const TensorView outbox =
        byte_buffer(scratch, plan.num_tokens * std::min(sizes.ranks, sizes.topk) * shape.total(), "dispatch");
    for (int64_t r = 0; r < sizes.ranks; ++r) {
        const int32_t* tokens = plan.send_tokens.as<int32_t>() + r * sizes.slots;
        const int64_t count = sent[static_cast<std::size_t>(r)];
        uint8_t* codes = outbox.bytes_ptr() + send_parts[static_cast<std::size_t>(r)].offset;
        uint8_t* scales = codes + count * shape.row_bytes;
        for (int64_t i = 0; i < count; ++i) {
            copy_bytes(codes + i * shape.row_bytes, rows.data.bytes_ptr() + tokens[i] * shape.row_bytes,
                       shape.row_bytes);
            copy_bytes(scales + i * shape.scale_bytes,
                       rows.scales.bytes_ptr() + tokens[i] * shape.scale_bytes, shape.scale_bytes);
        }
    }
    // Plain rows are received in place; FP8 messages are split into values and scales.
    const bool plain = shape.scale_bytes == 0;
    const TensorView inbox =
        plain ? received.data : byte_buffer(scratch, received.data.dim(0) * shape.total(), "dispatch");
    group_.all_to_all(outbox.data, send_parts, inbox.data, recv_parts);
    wire_.dispatch += bytes_to_others(send_parts, rank());
    if (plain) return;
    for (int64_t r = 0; r < sizes.ranks; ++r) {
        const int64_t first = plan.recv_offsets.as<int64_t>()[r],
                      count = arriving[static_cast<std::size_t>(r)];
        const uint8_t* message = inbox.bytes_ptr() + recv_parts[static_cast<std::size_t>(r)].offset;
        copy_bytes(received.data.bytes_ptr() + first * shape.row_bytes, message, count * shape.row_bytes);
        copy_bytes(received.scales.bytes_ptr() + first * shape.scale_bytes, message + count * shape.row_bytes,
                   count * shape.scale_bytes);
    }
}

// What this rank sends back in order `rank`: one sum per received row.
TensorView GroupExchange::rank_sums(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                                    const Launch& launch) {
    const Sizes sizes(plan);
    const TensorView sums =
        scratch.tensor(args.src.dtype, {sizes.ranks * sizes.slots, args.src.dim(1)}, "combine");
    ops_.unpermute_unpad({.src = args.src,
                          .recv_rows = plan.recv_rows,
                          .num_rows = plan.recv_offsets.slice(sizes.ranks, 1),
                          .row_prob = args.row_prob,
                          .dst = sums},
                         launch);
    return sums;
}

// What this rank sends back in order `invariant`: the row of every (token, expert) choice.
TensorView GroupExchange::choice_rows(const TensorView& src, const DispatchPlan& plan, Arena& scratch) {
    const Sizes sizes(plan);
    const int64_t capacity = sizes.ranks * sizes.slots * std::min(sizes.topk, sizes.local_experts);
    const TensorView rows = scratch.tensor(src.dtype, {capacity, src.dim(1)}, "combine");
    const int64_t row_bytes = src.dim(1) * size_of(src.dtype), base = base_of(src);
    for_each_choice(plan, rank(), [&](int64_t n, int64_t row) {
        uint8_t* to = rows.bytes_ptr() + n * row_bytes;
        if (row >= 0) {
            copy_bytes(to, src.bytes_ptr() + (base + row) * row_bytes, row_bytes);
        } else {
            std::fill_n(to, row_bytes, uint8_t{0});
        }
    });
    return rows;
}

void GroupExchange::do_combine(const Combine& args, const DispatchPlan& plan, Arena& scratch,
                               const Launch& launch) {
    ArenaScope scope(scratch);
    const Sizes sizes(plan);
    const bool by_rank = order_ == CombineOrder::rank;
    const int64_t width = args.src.dim(1), row_bytes = width * size_of(args.src.dtype),
                  tokens = plan.num_tokens;
    const std::vector<int64_t> choices_sent = choices_for(plan, rank()),
                               choices_returned = choices_of(plan, rank());

    const TensorView sent =
        by_rank ? rank_sums(args, plan, scratch, launch) : choice_rows(args.src, plan, scratch);
    const TensorView returned = scratch.tensor(
        args.src.dtype, {tokens * (by_rank ? std::min(sizes.ranks, sizes.topk) : sizes.topk), width},
        "combine");
    const Parts send_parts = packed_parts(by_rank ? received_counts(plan) : choices_sent, row_bytes);
    const Parts recv_parts = packed_parts(by_rank ? sent_counts(plan) : choices_returned, row_bytes);
    group_.all_to_all(sent.data, send_parts, returned.data, recv_parts);
    wire_.combine += bytes_to_others(send_parts, rank());

    TensorView probs_returned;
    if (args.dprob) {
        const int64_t num_sent = std::accumulate(choices_sent.begin(), choices_sent.end(), int64_t{0});
        const TensorView probs_sent = scratch.tensor(DType::f32, {num_sent}, "combine");
        probs_returned = scratch.tensor(DType::f32, {tokens * sizes.topk}, "combine");
        const float* drow_prob = args.drow_prob.as<float>() + base_of(args.drow_prob);
        for_each_choice(plan, rank(), [&](int64_t n, int64_t row) {
            probs_sent.as<float>()[n] = row >= 0 ? drow_prob[row] : 0.0f;
        });
        const Parts prob_send_parts = packed_parts(choices_sent, sizeof(float));
        group_.all_to_all(probs_sent.data, prob_send_parts, probs_returned.data,
                          packed_parts(choices_returned, sizeof(float)));
        wire_.combine += bytes_to_others(prob_send_parts, rank());
    }
    Combine added = args;
    added.residual = residual_with_addend(ops_, args, launch);
    add_returned_rows(added, plan, returned, recv_parts, probs_returned);
}

// Owner's side: a token's rows in ascending expert order, which is also ascending rank order; every rank's
// rows arrive in the order in which they are used here. In order `rank` its sums are weighted already.
void GroupExchange::add_returned_rows(const Combine& args, const DispatchPlan& plan,
                                      const TensorView& returned,
                                      const std::vector<ProcessGroup::Part>& parts,
                                      const TensorView& probs_returned) {
    const Sizes sizes(plan);
    const int64_t row_bytes = returned.dim(1) * size_of(returned.dtype);
    std::vector<int64_t> next_row, next_prob(1, 0);  // by rank
    for (const auto& part : parts) next_row.push_back(static_cast<int64_t>(part.offset) / row_bytes);
    for (int64_t count : choices_of(plan, rank())) next_prob.push_back(next_prob.back() + count);

    std::vector<float> sum(static_cast<std::size_t>(returned.dim(1)));
    std::vector<int64_t> order;
    for (int64_t token = 0; token < plan.num_tokens; ++token) {
        const int64_t first = (rank() * sizes.slots + token) * sizes.topk;
        const int32_t* ids = plan.all_ids.as<int32_t>() + first;
        float* dprob = args.dprob ? args.dprob.as<float>() + token * sizes.topk : nullptr;
        if (dprob != nullptr) std::fill_n(dprob, sizes.topk, 0.0f);
        order.resize(static_cast<std::size_t>(sizes.topk));
        std::iota(order.begin(), order.end(), int64_t{0});
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });

        std::fill(sum.begin(), sum.end(), 0.0f);
        int64_t last_host = -1;
        for (int64_t k : order) {
            const int64_t host = sizes.host_of(ids[k]);
            if (host < 0) continue;
            int64_t& next = next_row[static_cast<std::size_t>(host)];
            if (order_ == CombineOrder::invariant && args.row_prob)
                add_row(returned, next++, sum.data(), plan.all_probs.as<float>()[first + k]);
            else if (order_ == CombineOrder::invariant || host != last_host)
                add_row(returned, next++, sum.data());
            last_host = host;
            if (dprob != nullptr)
                dprob[k] = probs_returned.as<float>()[next_prob[static_cast<std::size_t>(host)]++];
        }
        if (args.residual) add_row(args.residual, token, sum.data());
        store_row(sum.data(), args.y, token);
    }
}

}  // namespace fp8flow
