// SPDX-License-Identifier: MIT
// Exchange: the checks every exchange shares, and the counts of its calls.
#include "kernels/exchange.h"

#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

void check_plan(const DispatchPlan& plan, int64_t ranks) {
    check_tensor(plan.all_ids, "all_ids", DType::i32, {ranks, kAny, plan.topk});
    const int64_t slots = plan.all_ids.dim(1);
    FP8FLOW_CHECK(plan.num_tokens >= 0 && plan.num_tokens <= slots, "{} tokens in {} slots", plan.num_tokens,
                  slots);
    FP8FLOW_CHECK(plan.num_local_experts >= 1 && plan.groups.num_groups % plan.num_local_experts == 0,
                  "{} groups of {} local experts", plan.groups.num_groups, plan.num_local_experts);
    check_tensor(plan.recv_rows, "recv_rows", DType::i32, {ranks * slots, plan.topk});
    check_tensor(plan.recv_offsets, "recv_offsets", DType::i64, {ranks + 1});
    check_tensor(plan.recv_source, "recv_source", DType::i32, {ranks * slots});
    check_tensor(plan.send_tokens, "send_tokens", DType::i32, {ranks, slots});
    check_tensor(plan.send_counts, "send_counts", DType::i64, {ranks});
    check_optional(plan.prob_rows, "prob_rows", DType::i32, {ranks * slots, plan.topk});
}

// Rows as they are sent: plain, or FP8 values with 1x128 scales.
void check_wire_rows(const ScaledTensor& rows, const char* what, int64_t num_rows) {
    FP8FLOW_CHECK(rows.data.rank == 2 && rows.data.dim(0) == num_rows && rows.data.row_base == nullptr,
                  "{} is {}, must have {} rows", what, describe(rows.data), num_rows);
    check_layout(rows, what, {ScaleLayout::none, ScaleLayout::vec128_wire});
    if (rows.layout == ScaleLayout::none) return;
    check_fp8(rows, what);
    FP8FLOW_CHECK(rows.data.dim(1) % kBlock == 0, "hidden size {} is no multiple of {} (hidden_size)",
                  rows.data.dim(1), kBlock);
}

void check_shards(const Shards& shards, const TensorView& values, int ranks) {
    FP8FLOW_CHECK(values.rank == 1 && values.row_base == nullptr, "values are {}, must have one dimension",
                  describe(values));
    FP8FLOW_CHECK(shards.size() == static_cast<size_t>(ranks), "{} shards for {} ranks", shards.size(),
                  ranks);
    for (const std::vector<Slice>& shard : shards) {
        int64_t end = 0;
        for (const Slice& slice : shard) {
            FP8FLOW_CHECK(
                slice.first >= end && slice.count >= 0 && slice.first + slice.count <= values.numel(),
                "elements {} to {} of {}, after those before {}", slice.first, slice.first + slice.count,
                describe(values), end);
            end = slice.first + slice.count;
        }
    }
}

double bytes_of_shard(const std::vector<Slice>& shard, const TensorView& values) {
    return static_cast<double>(elements_of(shard) * size_of(values.dtype));
}

}  // namespace

template <class Step> void Exchange::observed(const char* name, const OpCost& cost, Step step) {
    if (observer_ == nullptr) return step();
    observer_->exchange_began({.op = name, .cost = cost});
    const double sent = wire_.total();
    step();
    observer_->exchange_ended(wire_.total() - sent);
}

// Every rank receives about as much as it sends.
template <class Step> void Exchange::reduced(const char* name, double sent, Step step) {
    if (observer_ == nullptr) return step();
    observer_->exchange_began({.op = name, .cost = moves(sent, sent)});
    step();
    observer_->exchange_ended(sent);
}

void Exchange::gather_routing(const TensorView& ids, const TensorView& probs, const TensorView& all_ids,
                              const TensorView& all_probs, const Launch& launch) {
    FP8FLOW_CHECK(ids.rank == 2 && all_ids.rank == 3, "ids {} into {}", describe(ids), describe(all_ids));
    const int64_t tokens = ids.dim(0), topk = ids.dim(1), slots = all_ids.dim(1);
    check_tensor(ids, "ids", DType::i32, {tokens, topk});
    check_tensor(probs, "probs", DType::f32, {tokens, topk});
    check_tensor(all_ids, "all_ids", DType::i32, {size(), slots, topk});
    check_tensor(all_probs, "all_probs", DType::f32, {size(), slots, topk});
    FP8FLOW_CHECK(tokens <= slots, "{} tokens on rank {}, but {} slots per rank", tokens, rank(), slots);
    observed("gather_routing", moves({ids, probs}, {all_ids, all_probs}), [&] {
        do_gather_routing({ids, probs, all_ids, all_probs}, launch);
    });
}

void Exchange::dispatch(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& dst,
                        Arena& scratch, const Launch& launch) {
    check_plan(plan, size());
    check_wire_rows(rows, "rows", plan.num_tokens);
    check_capacity(dst.data, "dst", plan.groups);
    check_capacity(plan.row_source, "row_source", plan.groups);
    const bool plain = rows.layout == ScaleLayout::none;
    FP8FLOW_CHECK(dst.data.rank == 2 && dst.data.dim(1) == rows.data.dim(1) &&
                      dst.data.dtype == rows.data.dtype &&
                      dst.layout == (plain ? ScaleLayout::none : ScaleLayout::vec128),
                  "rows {} with scales {} cannot become {} with scales {}", describe(rows.data),
                  name_of(rows.layout), describe(dst.data), name_of(dst.layout));
    if (!plain) check_fp8(dst, "dst");
    check_moved(rows, dst, "dst");
    ++num_dispatches_;
    const double written = static_cast<double>(plan.groups.cost_rows()) * row_bytes(dst);
    observed("dispatch", moves(bytes_of_scaled(rows), written), [&] {
        do_dispatch(rows, dst, {plan, scratch, launch});
    });
}

void Exchange::dispatch_rows(const ScaledTensor& rows, const DispatchPlan& plan, const ScaledTensor& received,
                             Arena& scratch, const Launch& launch) {
    check_plan(plan, size());
    check_wire_rows(rows, "rows", plan.num_tokens);
    check_wire_rows(received, "received", plan.all_ids.dim(0) * plan.all_ids.dim(1));
    FP8FLOW_CHECK(received.data.dim(1) == rows.data.dim(1) && received.data.dtype == rows.data.dtype &&
                      received.layout == rows.layout && received.scales.dtype == rows.scales.dtype,
                  "rows {} with scales {} {} arrive as {} with scales {} {}", describe(rows.data),
                  name_of(rows.layout), describe(rows.scales), describe(received.data),
                  name_of(received.layout), describe(received.scales));
    check_moved(rows, received, "received");
    ++num_dispatches_;
    const double moved = bytes_of_scaled(rows);
    observed("dispatch_rows", moves(moved, moved), [&] {
        do_dispatch_rows(rows, received, {plan, scratch, launch});
    });
}

void Exchange::combine(const Combine& args, const DispatchPlan& plan, Arena& scratch, const Launch& launch) {
    check_plan(plan, size());
    const TensorView &src = args.src.data, &y = args.y.data;
    check_layout(args.src, "src", {ScaleLayout::none});
    check_layout(args.y, "y", {ScaleLayout::none});
    check_plain(src, "src", {kAny, kAny});
    check_plain(y, "y", {plan.num_tokens, src.dim(1)});
    check_capacity(src, "src", plan.groups);
    if (args.row_prob) {
        check_tensor(args.row_prob, "row_prob", DType::f32, {kAny});
        check_capacity(args.row_prob, "row_prob", plan.groups);
        check_optional(plan.all_probs, "all_probs", DType::f32,  // read in order invariant
                       {plan.all_ids.dim(0), plan.all_ids.dim(1), plan.topk});
    }
    check_optional(args.residual, "residual", y.dtype, {y.dim(0), y.dim(1)});
    check_optional(args.addend, "addend", y.dtype, {y.dim(0), y.dim(1)});
    FP8FLOW_CHECK(!args.addend || args.residual, "addend {} without a residual", describe(args.addend));
    FP8FLOW_CHECK(static_cast<bool>(args.drow_prob) == static_cast<bool>(args.dprob),
                  "drow_prob {}, dprob {}", describe(args.drow_prob), describe(args.dprob));
    if (args.drow_prob) {
        check_tensor(args.drow_prob, "drow_prob", DType::f32, {kAny});
        check_capacity(args.drow_prob, "drow_prob", plan.groups);
        check_tensor(args.dprob, "dprob", DType::f32, {plan.num_tokens, plan.topk});
    }
    ++num_combines_;
    const double row = row_bytes(args.src) + (args.row_prob ? 4 : 0) + (args.drow_prob ? 4 : 0);
    const double written = bytes_of({y, args.dprob});
    const double read =
        static_cast<double>(plan.groups.cost_rows()) * row + bytes_of({args.residual, args.addend});
    observed("combine", moves(read, written), [&] { do_combine(args, {plan, scratch, launch}); });
}

void Exchange::all_reduce(Reduce reduce, Ranks ranks, const TensorView& values, const Launch& launch) {
    // Shards to their owners and sums back: each rank sends all but its own shard, twice.
    const double others = static_cast<double>(num_ranks(ranks) - 1) / static_cast<double>(num_ranks(ranks));
    reduced("all_reduce", 2 * others * bytes_of({values}), [&] {
        if (num_ranks(ranks) > 1 && values.numel() > 0) do_all_reduce(reduce, ranks, values, launch);
    });
}

void Exchange::reduce_scatter(Ranks ranks, const TensorView& values, const Shards& shards,
                              const Launch& launch) {
    check_shards(shards, values, num_ranks(ranks));
    FP8FLOW_CHECK(values.dtype == DType::f32 || values.dtype == DType::bf16 || values.dtype == DType::i64,
                  "no sum of {}", describe(values));
    if (num_ranks(ranks) == 1) return;
    // Each rank sends every shard but its own to the rank that has it.
    double sent = 0;
    for (size_t r = 0; r < shards.size(); ++r)
        if (r != static_cast<size_t>(rank_among(ranks))) sent += bytes_of_shard(shards[r], values);
    reduced("reduce_scatter", sent, [&] { do_reduce_scatter({ranks, values, shards}, launch); });
}

void Exchange::all_gather(Ranks ranks, const TensorView& values, const Shards& shards, const Launch& launch) {
    check_shards(shards, values, num_ranks(ranks));
    if (num_ranks(ranks) == 1) return;
    const double own = bytes_of_shard(shards[static_cast<size_t>(rank_among(ranks))], values);
    const double sent = static_cast<double>(num_ranks(ranks) - 1) * own;
    reduced("all_gather", sent, [&] { do_all_gather({ranks, values, shards}, launch); });
}

void Exchange::require_capturable() const {
    fail(ExitCode::usage,
         "schedule.cuda_graph_impl: full_iteration: the host takes part in every call of this exchange; set "
         "it to "
         "none, or run on GPUs with parallel.moe_token_dispatcher_type flex or alltoall");
}

void Exchange::reset_counts() {
    wire_ = {};
    num_dispatches_ = num_combines_ = 0;
}

ScaledTensor Exchange::rows_like(const ScaledTensor& rows, int64_t count, Arena& scratch) {
    const auto like = [&](const TensorView& view) {
        return view ? scratch.tensor(view.dtype, {count, view.dim(1)}, "dispatch") : TensorView{};
    };
    return {like(rows.data), like(rows.scales), rows.layout, rows.format};
}

void Exchange::do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) {
    ArenaScope scope(call.scratch);
    const DispatchPlan& plan = call.plan;
    const ScaledTensor received = rows_like(rows, plan.all_ids.dim(0) * plan.all_ids.dim(1), call.scratch);
    do_dispatch_rows(rows, received, call);
    ops_.permute_pad({.src = received, .row_source = plan.row_source, .groups = plan.groups, .dst = dst},
                     call.launch);
}

TensorView Exchange::residual_with_addend(const Combine& args, const Launch& launch) const {
    if (!args.addend) return args.residual;
    ops_.add({.a = args.residual, .b = args.addend, .y = args.y.data}, launch);
    return args.y.data;
}

namespace {
[[noreturn]] void fail_alone() { fail(ExitCode::internal, "an exchange of one rank is asked to reduce"); }
}  // namespace

void Exchange::do_all_reduce(Reduce, Ranks, const TensorView&, const Launch&) { fail_alone(); }
void Exchange::do_reduce_scatter(const Sharded&, const Launch&) { fail_alone(); }
void Exchange::do_all_gather(const Sharded&, const Launch&) { fail_alone(); }

}  // namespace fp8flow
