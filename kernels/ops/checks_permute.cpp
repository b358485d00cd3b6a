// SPDX-License-Identifier: MIT
// Argument checks and costs of the dispatch plan and the row movers. Checks look at shapes only: counts and
// offsets are device data.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

#include <algorithm>

namespace fp8flow {

namespace {

void check_movable(const ScaledTensor& src, ScaleLayout src_layout, const ScaledTensor& dst) {
    FP8FLOW_CHECK(src.data.rank == 2 && dst.data.rank == 2 && src.data.dim(1) == dst.data.dim(1) &&
                      src.data.dtype == dst.data.dtype,
                  "rows {} cannot become {}", describe(src.data), describe(dst.data));
    if (src.layout == ScaleLayout::none && dst.layout == ScaleLayout::none) return;
    FP8FLOW_CHECK(src.layout == src_layout && dst.layout == ScaleLayout::vec128,
                  "scales {} -> {}, must be {} -> vec128", name_of(src.layout), name_of(dst.layout),
                  name_of(src_layout));
    check_fp8(src, "src");
    check_fp8(dst, "dst");
    check_moved(src, dst, "dst");
}

// The optional other side of a plan.
void check_recv_rows(const TensorView& recv_rows, const TensorView& num_rows, const TensorView& received) {
    if (!recv_rows && !num_rows) return;
    check_tensor(recv_rows, "recv_rows", DType::i32, {kAny, kAny});
    FP8FLOW_CHECK(recv_rows.dim(0) <= received.dim(0), "recv_rows is {} for {} received rows",
                  describe(recv_rows), received.dim(0));
    check_tensor(num_rows, "num_rows", DType::i64, {1});
}

double rows_of(const RowGroups& groups) { return static_cast<double>(groups.cost_rows()); }

}  // namespace

void check(const op::PlanDispatch& args) {
    check_tensor(args.all_ids, "all_ids", DType::i32, {kAny, kAny, kAny});
    const int64_t ranks = args.all_ids.dim(0), slots = args.all_ids.dim(1), topk = args.all_ids.dim(2);
    FP8FLOW_CHECK(ranks >= 1 && topk >= 1, "all_ids is {}", describe(args.all_ids));
    check_tensor(args.all_probs, "all_probs", DType::f32, {ranks, slots, topk});
    FP8FLOW_CHECK(args.rank >= 0 && args.rank < ranks, "rank {} of {}", args.rank, ranks);
    FP8FLOW_CHECK(args.num_local_experts >= 1 && args.first_expert == args.rank * args.num_local_experts,
                  "rank {} with {} local experts begins at expert {}, must begin at {}", args.rank,
                  args.num_local_experts, args.first_expert, args.rank * args.num_local_experts);
    check_groups(args.groups);
    FP8FLOW_CHECK(args.num_sources == 1 || args.num_sources == ranks, "{} sources of {} ranks",
                  args.num_sources, ranks);
    FP8FLOW_CHECK(args.groups.num_groups == args.num_sources * args.num_local_experts,
                  "{} groups for {} local experts of {} sources", args.groups.num_groups,
                  args.num_local_experts, args.num_sources);
    check_tensor(args.row_source, "row_source", DType::i32, {kAny});
    check_tensor(args.row_prob, "row_prob", DType::f32, {kAny});
    check_tensor(args.recv_rows, "recv_rows", DType::i32, {ranks * slots, topk});
    check_tensor(args.recv_offsets, "recv_offsets", DType::i64, {ranks + 1});
    check_tensor(args.recv_source, "recv_source", DType::i32, {ranks * slots});
    check_tensor(args.send_tokens, "send_tokens", DType::i32, {ranks, slots});
    check_tensor(args.send_counts, "send_counts", DType::i64, {ranks});
    check_optional(args.next_row_base, "next_row_base", DType::i64, {1});
    check_optional(args.rows_wanted, "rows_wanted", DType::i64, {1});
    check_tensor(args.overflow, "overflow", DType::i32, {1});
    FP8FLOW_CHECK(ranks * slots <= INT32_MAX && args.groups.row_capacity <= INT32_MAX,
                  "{} ranks of {} tokens and {} rows: row numbers must fit 32 bits", ranks, slots,
                  args.groups.row_capacity);
}
OpCost cost(const op::PlanDispatch& args) {
    return moves(bytes_of({args.all_ids, args.all_ids, args.all_probs}),
                 bytes_of({args.recv_rows, args.recv_source, args.send_tokens}) + rows_of(args.groups) * 8);
}

void check(const op::PermutePad& args) {
    check_groups(args.groups);
    check_movable(args.src, ScaleLayout::vec128_wire, args.dst);
    check_tensor(args.row_source, "row_source", DType::i32, {kAny});
    check_recv_rows(args.recv_rows, args.num_rows, args.src.data);
    check_capacity(args.row_source, "row_source", args.groups);
    check_capacity(args.dst.data, "dst", args.groups);
}

// A row that goes to several experts is read once.
OpCost cost(const op::PermutePad& args) {
    const double rows = rows_of(args.groups),
                 read = std::min(rows, static_cast<double>(args.src.data.dim(0)));
    return moves(read * row_bytes(args.src) + 4 * rows, rows * row_bytes(args.dst));
}

void check(const op::UnpermuteUnpad& args) {
    check_plain(args.src, "src", {kAny, kAny});
    check_tensor(args.recv_rows, "recv_rows", DType::i32, {kAny, kAny});
    check_tensor(args.num_rows, "num_rows", DType::i64, {1});
    check_optional(args.row_prob, "row_prob", DType::f32, {kAny});
    check_plain(args.dst, "dst", {args.recv_rows.dim(0), args.src.dim(1)});
}
OpCost cost(const op::UnpermuteUnpad& args) {
    const double rows = static_cast<double>(std::min(args.src.dim(0), args.recv_rows.numel()));
    return moves(rows * row_bytes(args.src) + bytes_of({args.recv_rows}), bytes_of({args.dst}),
                 (args.row_prob ? 2 : 1) * rows * static_cast<double>(args.src.cols()));
}

void check(const op::UnpermuteProbsBackward& args) {
    check_groups(args.groups);
    check_plain(args.src, "src", {kAny, kAny});
    check_plain(args.ddst, "ddst", {kAny, args.src.dim(1)});
    check_tensor(args.row_source, "row_source", DType::i32, {kAny});
    check_tensor(args.drow_prob, "drow_prob", DType::f32, {kAny});
    check_recv_rows(args.recv_rows, args.num_rows, args.ddst);
    check_capacity(args.src, "src", args.groups);
    check_capacity(args.row_source, "row_source", args.groups);
    check_capacity(args.drow_prob, "drow_prob", args.groups);
}
OpCost cost(const op::UnpermuteProbsBackward& args) {
    const double rows = rows_of(args.groups), tokens = std::min(rows, static_cast<double>(args.ddst.dim(0)));
    return moves(rows * (row_bytes(args.src) + 4) + tokens * row_bytes(args.ddst), 4 * rows,
                 2 * rows * static_cast<double>(args.src.cols()));
}

static void check_regrouped(const RowGroups& src_groups, const ScaledTensor& src, const RowGroups& dst_groups,
                            const ScaledTensor& dst) {
    check_groups(src_groups);
    check_groups(dst_groups);
    FP8FLOW_CHECK(src_groups.num_groups == dst_groups.num_groups, "{} groups become {}",
                  src_groups.num_groups, dst_groups.num_groups);
    check_movable(src, ScaleLayout::vec128, dst);
    check_capacity(src.data, "src", src_groups);
    check_capacity(dst.data, "dst", dst_groups);
}

void check(const op::PadRows& args) { check_regrouped(args.src_groups, args.src, args.dst_groups, args.dst); }
OpCost cost(const op::PadRows& args) {
    return moves(rows_of(args.src_groups) * row_bytes(args.src),
                 rows_of(args.dst_groups) * row_bytes(args.dst));
}

void check(const op::UnpadRows& args) {
    check_regrouped(args.src_groups, {.data = args.src}, args.dst_groups, {.data = args.dst});
}
OpCost cost(const op::UnpadRows& args) {
    const double bytes = rows_of(args.dst_groups) * row_bytes(args.dst);
    return moves(bytes, bytes);
}

}  // namespace fp8flow
