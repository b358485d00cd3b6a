// SPDX-License-Identifier: MIT
// DispatchPlan: who receives what, as dispatch, combine and their backwards read it. One factory makes it:
// allocate_plan gives plan_dispatch its outputs, plan_of views them as a DispatchPlan. Read next:
// kernels/ops/permute.h (what each tensor holds), kernels/exchange.h.
#pragma once

#include "kernels/ops/permute.h"

namespace fp8flow {

// Views into the caller's arena. Saved with the layer, never recomputed (except under recompute `moe` and
// `full`).
struct DispatchPlan {
    TensorView all_ids;    // [G, S, K] i32
    TensorView all_probs;  // [G, S, K] f32
    RowGroups groups;
    TensorView row_source, row_prob;  // [M cap]
    TensorView recv_rows, recv_offsets, recv_source;
    TensorView send_tokens, send_counts;
    // [G*S, K] i32, optional: rows of drow_prob that combine returns for received row i, in the order of
    // recv_rows, where they are others than those of src; drow_prob then has no row base.
    TensorView prob_rows;
    int64_t num_local_experts = 0;
    int64_t num_tokens = 0;  // T of this rank
    int64_t topk = 0;

    const TensorView& rows_of_probs() const { return prob_rows ? prob_rows : recv_rows; }
};

// Fills in the outputs of `args` that are absent, in their shapes, from allocate(dtype, {dims...}); all_ids,
// num_local_experts, num_sources, groups.row_capacity and groups.alignment are set. next_row_base and
// rows_wanted stay as they are: optional; overflow too: it outlives the plan.
template <class Allocate> void allocate_plan(op::PlanDispatch& args, Allocate allocate) {
    const int64_t ranks = args.all_ids.dim(0), slots = args.all_ids.dim(1), topk = args.all_ids.dim(2),
                  groups = args.num_sources * args.num_local_experts, capacity = args.groups.row_capacity;
    const auto output = [&](TensorView& view, DType dtype, std::initializer_list<int64_t> shape) {
        if (!view) view = allocate(dtype, shape);
    };
    args.groups.num_groups = groups;
    output(args.groups.counts, DType::i64, {groups});
    output(args.groups.offsets, DType::i64, {groups + 1});
    output(args.row_source, DType::i32, {capacity});
    output(args.row_prob, DType::f32, {capacity});
    output(args.recv_rows, DType::i32, {ranks * slots, topk});
    output(args.recv_offsets, DType::i64, {ranks + 1});
    output(args.recv_source, DType::i32, {ranks * slots});
    output(args.send_tokens, DType::i32, {ranks, slots});
    output(args.send_counts, DType::i64, {ranks});
}

// The plan that plan_dispatch writes with these arguments, for a rank with `num_tokens` tokens.
inline DispatchPlan plan_of(const op::PlanDispatch& args, int64_t num_tokens) {
    return {.all_ids = args.all_ids,
            .all_probs = args.all_probs,
            .groups = args.groups,
            .row_source = args.row_source,
            .row_prob = args.row_prob,
            .recv_rows = args.recv_rows,
            .recv_offsets = args.recv_offsets,
            .recv_source = args.recv_source,
            .send_tokens = args.send_tokens,
            .send_counts = args.send_counts,
            .prob_rows = {},
            .num_local_experts = args.num_local_experts,
            .num_tokens = num_tokens,
            .topk = args.all_ids.dim(2)};
}

}  // namespace fp8flow
