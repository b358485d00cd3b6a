// SPDX-License-Identifier: MIT
// The reference exchange. Sender and receiver know the size and order of every message from the plan, so only
// data is sent. A rank packs the rows for a peer in ascending token order. Received rows are in order (source
// rank, token).
#include "kernels/comm/group_exchange.h"

#include "kernels/comm/plan_messages.h"
#include "kernels/core/error.h"

#include <algorithm>
#include <numeric>
#include <span>

namespace fp8flow {

using namespace comm;

void GroupExchange::count_sent(double& counter, const Parts& parts) {
    for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        const auto bytes = static_cast<double>(parts[static_cast<std::size_t>(r)].bytes);
        counter += bytes;
        if (!groups_.hosts.same_host(r, rank())) wire_.between_hosts += bytes;
    }
}

void GroupExchange::exchange_rows(double& counter, const TensorView& outbox, const Parts& send_parts,
                                  const TensorView& inbox, const Parts& recv_parts) {
    groups_.expert_parallel.all_to_all(outbox.data, send_parts, inbox.data, recv_parts);
    count_sent(counter, send_parts);
}

void GroupExchange::do_gather_routing(const Routing& routing, const Launch&) {
    const auto& [ids, probs, all_ids, all_probs] = routing;
    const int64_t own_slots = all_ids.dim(1) * all_ids.dim(2), present = ids.numel();
    int32_t* own_ids = all_ids.as<int32_t>() + rank() * own_slots;
    float* own_probs = all_probs.as<float>() + rank() * own_slots;
    std::copy_n(ids.as<int32_t>(), present, own_ids);
    std::fill(own_ids + present, own_ids + own_slots, -1);
    std::copy_n(probs.as<float>(), present, own_probs);
    std::fill(own_probs + present, own_probs + own_slots, 0.0f);
    for (const TensorView& all : {all_ids, all_probs}) {
        const auto bytes = static_cast<std::size_t>(all.bytes() / size());
        groups_.expert_parallel.all_gather(all.bytes_ptr() + static_cast<std::size_t>(rank()) * bytes, bytes,
                                           all.data);
        count_sent(wire_.routing, Parts(static_cast<std::size_t>(size()), {0, bytes}));
    }
}

void GroupExchange::do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received,
                                     const Call& call) {
    const auto& [plan, scratch, launch] = call;
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
        uint8_t* fp8 = outbox.bytes_ptr() + send_parts[static_cast<std::size_t>(r)].offset;
        uint8_t* scales = fp8 + count * shape.row_bytes;
        for (int64_t i = 0; i < count; ++i) {
            copy_bytes(fp8 + i * shape.row_bytes, rows.data.bytes_ptr() + tokens[i] * shape.row_bytes,
                       shape.row_bytes);
            copy_bytes(scales + i * shape.scale_bytes,
                       rows.scales.bytes_ptr() + tokens[i] * shape.scale_bytes, shape.scale_bytes);
        }
    }
    // Plain rows are received in place; FP8 messages are split into values and scales.
    const bool plain = shape.scale_bytes == 0;
    const TensorView inbox =
        plain ? received.data : byte_buffer(scratch, received.data.dim(0) * shape.total(), "dispatch");
    exchange_rows(wire_.dispatch, outbox, send_parts, inbox, recv_parts);
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

// What this rank sends back in order `invariant`: the row of every (token, expert) choice.
TensorView GroupExchange::choice_rows(const TensorView& src, const Call& call) {
    const auto& [plan, scratch, launch] = call;
    const Sizes sizes(plan);
    const int64_t capacity = sizes.ranks * sizes.slots * std::min(sizes.topk, sizes.local_experts);
    const TensorView rows = scratch.tensor(src.dtype, {capacity, src.dim(1)}, "combine");
    const int64_t row_bytes = src.dim(1) * size_of(src.dtype), base = base_of(src);
    for_each_choice(plan, rank(), plan.recv_rows, [&](int64_t n, int64_t row) {
        uint8_t* to = rows.bytes_ptr() + n * row_bytes;
        if (row >= 0) {
            copy_bytes(to, src.bytes_ptr() + (base + row) * row_bytes, row_bytes);
        } else {
            std::fill_n(to, row_bytes, uint8_t{0});
        }
    });
    return rows;
}

void GroupExchange::do_combine(const Combine& args, const Call& call) {
    ArenaScope scope(call.scratch);
    if (args.dprob) return_dprobs(args, call);
    if (order_ == CombineOrder::rank)
        combine_rank_sums(args, call);
    else
        combine_choices(args, call);
}

// Each (token, k) gets its row's value. A rank's values arrive in ascending expert order of each token.
void GroupExchange::return_dprobs(const Combine& args, const Call& call) {
    const auto& [plan, scratch, launch] = call;
    ArenaScope scope(scratch);
    const Sizes sizes(plan);
    const std::vector<int64_t> sent = choices_for(plan, rank()), returned = choices_of(plan, rank());
    const int64_t num_sent = std::accumulate(sent.begin(), sent.end(), int64_t{0});
    const TensorView outbox = scratch.tensor(DType::f32, {num_sent}, "combine"),
                     inbox = scratch.tensor(DType::f32, {plan.num_tokens * sizes.topk}, "combine");
    const float* drow_prob = args.drow_prob.as<float>() + base_of(args.drow_prob);
    for_each_choice(plan, rank(), plan.rows_of_probs(), [&](int64_t n, int64_t row) {
        outbox.as<float>()[n] = row >= 0 ? drow_prob[row] : 0.0f;
    });
    const Parts send_parts = packed_parts(sent, sizeof(float)),
                recv_parts = packed_parts(returned, sizeof(float));
    exchange_rows(wire_.combine, outbox, send_parts, inbox, recv_parts);

    std::vector<const float*> next;  // by rank
    for (const auto& part : recv_parts) next.push_back(inbox.as<float>() + part.offset / sizeof(float));
    std::vector<int64_t> order;
    for (int64_t token = 0; token < plan.num_tokens; ++token) {
        const int32_t* ids = plan.all_ids.as<int32_t>() + (rank() * sizes.slots + token) * sizes.topk;
        float* dprob = args.dprob.as<float>() + token * sizes.topk;
        sort_choices(ids, sizes.topk, order);
        for (int64_t k : order) {
            const int64_t expert_rank = sizes.rank_of(ids[k]);
            dprob[k] = expert_rank < 0 ? 0.0f : *next[static_cast<std::size_t>(expert_rank)]++;
        }
    }
}

// Sends one sum per received row.
void GroupExchange::combine_rank_sums(const Combine& args, const Call& call) {
    const auto& [plan, scratch, launch] = call;
    const Sizes sizes(plan);
    const TensorView& src = args.src.data;
    const int64_t width = src.dim(1), row_bytes = width * size_of(src.dtype);
    const TensorView sums = scratch.tensor(src.dtype, {sizes.ranks * sizes.slots, width}, "combine"),
                     returned = scratch.tensor(
                         src.dtype, {plan.num_tokens * std::min(sizes.ranks, sizes.topk), width}, "combine");
    ops_.unpermute_unpad({.src = src,
                          .recv_rows = plan.recv_rows,
                          .num_rows = plan.recv_offsets.slice(sizes.ranks, 1),
                          .row_prob = args.row_prob,
                          .dst = sums},
                         launch);
    const Parts send_parts = packed_parts(received_counts(plan), row_bytes),
                recv_parts = packed_parts(sent_counts(plan), row_bytes);
    exchange_rows(wire_.combine, sums, send_parts, returned, recv_parts);
    add_returned_rows(args, call, returned, recv_parts);
}

void GroupExchange::combine_choices(const Combine& args, const Call& call) {
    const DispatchPlan& plan = call.plan;
    const TensorView& src = args.src.data;
    FP8FLOW_CHECK(!args.row_prob || plan.all_probs, "a plan without all_probs");
    const int64_t row_bytes = src.dim(1) * size_of(src.dtype);
    const TensorView sent = choice_rows(src, call),
                     returned =
                         call.scratch.tensor(src.dtype, {plan.num_tokens * plan.topk, src.dim(1)}, "combine");
    const Parts send_parts = packed_parts(choices_for(plan, rank()), row_bytes),
                recv_parts = packed_parts(choices_of(plan, rank()), row_bytes);
    exchange_rows(wire_.combine, sent, send_parts, returned, recv_parts);
    add_returned_rows(args, call, returned, recv_parts);
}

// On the token's owner: adds the rows of a token in ascending expert order, which is also ascending rank
// order. The rows of each rank arrive in the order in which they are used here. In order `rank` the sums
// already have their weights.
void GroupExchange::add_returned_rows(const Combine& args, const Call& call, const TensorView& returned,
                                      const Parts& parts) {
    const DispatchPlan& plan = call.plan;
    const Sizes sizes(plan);
    const TensorView residual = residual_with_addend(args, call.launch);
    const int64_t row_bytes = returned.dim(1) * size_of(returned.dtype);
    std::vector<int64_t> next_row;  // by rank
    next_row.reserve(parts.size());
    for (const auto& part : parts) next_row.push_back(static_cast<int64_t>(part.offset) / row_bytes);

    std::vector<float> sum(static_cast<std::size_t>(returned.dim(1)));
    std::vector<int64_t> order;
    for (int64_t token = 0; token < plan.num_tokens; ++token) {
        const int64_t first = (rank() * sizes.slots + token) * sizes.topk;
        const int32_t* ids = plan.all_ids.as<int32_t>() + first;
        sort_choices(ids, sizes.topk, order);
        std::fill(sum.begin(), sum.end(), 0.0f);
        int64_t last_rank = -1;
        for (int64_t k : order) {
            const int64_t expert_rank = sizes.rank_of(ids[k]);
            if (expert_rank < 0) continue;
            int64_t& next = next_row[static_cast<std::size_t>(expert_rank)];
            if (order_ == CombineOrder::invariant && args.row_prob)
                add_row(returned, next++, sum.data(), plan.all_probs.as<float>()[first + k]);
            else if (order_ == CombineOrder::invariant || expert_rank != last_rank)
                add_row(returned, next++, sum.data());
            last_rank = expert_rank;
        }
        if (residual) add_row(residual, token, sum.data());
        store_row(sum.data(), args.y.data, token);
    }
}

namespace {

// visit(values) as a span of their type: f32, bf16 or i64.
template <class Visit> void visit_values(const TensorView& values, Visit visit) {
    const auto count = static_cast<std::size_t>(values.numel());
    switch (values.dtype) {
        case DType::i64: return visit(std::span(values.as<int64_t>(), count));
        case DType::bf16: return visit(std::span(values.as<Bf16>(), count));
        default: return visit(std::span(values.as<float>(), count));
    }
}

}  // namespace

void GroupExchange::do_all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch&) {
    ProcessGroup& group = groups_.among(ranks);
    if (reduce == Reduce::sum) {
        FP8FLOW_CHECK(values.dtype != DType::i32, "no sums of {}", describe(values));
        return visit_values(values, [&](auto span) { group.all_reduce_sum(span); });
    }
    if (values.dtype == DType::f32)
        return group.all_reduce_max(std::span(values.as<float>(), static_cast<std::size_t>(values.numel())));
    FP8FLOW_CHECK(values.dtype == DType::i32 && values.numel() == 1,
                  "only the maximum of f32 or one i32, not of {}", describe(values));
    int64_t word = *values.as<int32_t>();
    group.all_reduce_max(std::span<int64_t>(&word, 1));
    *values.as<int32_t>() = static_cast<int32_t>(word);
}

void GroupExchange::do_reduce_scatter(const Sharded& sharded, const Launch&) {
    visit_values(sharded.values,
                 [&](auto span) { groups_.among(sharded.ranks).reduce_scatter_sum(span, sharded.shards); });
}

void GroupExchange::do_all_gather(const Sharded& sharded, const Launch&) {
    const auto element = static_cast<std::size_t>(size_of(sharded.values.dtype));
    groups_.among(sharded.ranks).all_gather_shards(sharded.values.data, element, sharded.shards);
}

}  // namespace fp8flow
