// SPDX-License-Identifier: MIT
// Argument checks and costs of the dispatch plan and the row movers. Checks look at shapes only: counts and
// offsets are device data.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

#include <algorithm>

namespace fp8flow {

namespace {

void check_groups(const RowGroups& groups) {
    FP8FLOW_CHECK(groups.num_groups >= 1, "{} groups", groups.num_groups);
    FP8FLOW_CHECK(groups.alignment >= 1,
                  "alignment of expert groups is {}, must be at least 1 (moe_row_alignment)",
                  groups.alignment);
    FP8FLOW_CHECK(groups.row_capacity >= 0, "row capacity {}", groups.row_capacity);
    check_tensor(groups.counts, "group counts", DType::i64, {groups.num_groups});
    check_tensor(groups.offsets, "group offsets", DType::i64, {groups.num_groups + 1});
}

// M-tensors may be longer than one layer's rows (row arena).
void check_rows(const TensorView& view, const char* what, const RowGroups& groups) {
    FP8FLOW_CHECK(view.rank >= 1 && view.dim(0) >= groups.row_capacity,
                  "{} is {}: too few rows for a row capacity of {}", what, describe(view),
                  groups.row_capacity);
}

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

double row_bytes(const ScaledTensor& rows) {
    const int64_t scales = rows.layout == ScaleLayout::none ? 0 : ceil_div(rows.data.cols(), kBlock);
    return static_cast<double>(rows.data.cols() * size_of(rows.data.dtype) +
                               scales * size_of(rows.scales.dtype));
}

}  // namespace

void check(const op::PlanDispatch& args) {
    FP8FLOW_CHECK(args.all_ids.rank == 3 && args.all_ids.dim(0) >= 1 && args.all_ids.dim(2) >= 1,
                  "all_ids is {}", describe(args.all_ids));
    const int64_t ranks = args.all_ids.dim(0), slots = args.all_ids.dim(1), topk = args.all_ids.dim(2);
    check_tensor(args.all_ids, "all_ids", DType::i32, {ranks, slots, topk});
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
    FP8FLOW_CHECK(args.row_source.rank == 1 && args.row_source.dtype == DType::i32, "row_source is {}",
                  describe(args.row_source));
    FP8FLOW_CHECK(args.row_prob.rank == 1 && args.row_prob.dtype == DType::f32, "row_prob is {}",
                  describe(args.row_prob));
    check_tensor(args.recv_rows, "recv_rows", DType::i32, {ranks * slots, topk});
    check_tensor(args.recv_offsets, "recv_offsets", DType::i64, {ranks + 1});
    check_tensor(args.recv_source, "recv_source", DType::i32, {ranks * slots});
    check_tensor(args.send_tokens, "send_tokens", DType::i32, {ranks, slots});
    check_tensor(args.send_counts, "send_counts", DType::i64, {ranks});
    if (args.next_row_base) check_tensor(args.next_row_base, "next_row_base", DType::i64, {1});
    if (args.rows_wanted) check_tensor(args.rows_wanted, "rows_wanted", DType::i64, {1});
    check_tensor(args.overflow, "overflow", DType::i32, {1});
    FP8FLOW_CHECK(ranks * slots <= INT32_MAX && args.groups.row_capacity <= INT32_MAX,
                  "{} ranks of {} tokens and {} rows: row numbers must fit 32 bits", ranks, slots,
                  args.groups.row_capacity);
}

OpCost cost(const op::PlanDispatch& args) {
    const double rows = static_cast<double>(args.groups.cost_rows());
    const double lists = bytes_of(
        {args.all_ids, args.all_ids, args.all_probs, args.recv_rows, args.recv_source, args.send_tokens});
    return with_writes({.bytes = lists + rows * 8, .flops = 0},
                       bytes_of({args.recv_rows, args.recv_source, args.send_tokens}) + rows * 8);
}

// The optional other side of a plan.
void check_recv_rows(const TensorView& recv_rows, const TensorView& num_rows, const TensorView& received) {
    if (!recv_rows && !num_rows) return;
    FP8FLOW_CHECK(recv_rows.rank == 2 && recv_rows.dtype == DType::i32 && recv_rows.dim(0) <= received.dim(0),
                  "recv_rows is {} for {} received rows", describe(recv_rows), received.dim(0));
    check_tensor(num_rows, "num_rows", DType::i64, {1});
}

void check(const op::PermutePad& args) {
    check_groups(args.groups);
    check_movable(args.src, ScaleLayout::vec128_wire, args.dst);
    FP8FLOW_CHECK(args.row_source.rank == 1 && args.row_source.dtype == DType::i32, "row_source is {}",
                  describe(args.row_source));
    check_recv_rows(args.recv_rows, args.num_rows, args.src.data);
    check_rows(args.row_source, "row_source", args.groups);
    check_rows(args.dst.data, "dst", args.groups);
}

OpCost cost(const op::PermutePad& args) {
    const double rows = static_cast<double>(args.groups.cost_rows());
    return with_writes({.bytes = rows * (row_bytes(args.src) + row_bytes(args.dst) + 4), .flops = 0},
                       rows * row_bytes(args.dst));
}

void check(const op::UnpermuteUnpad& args) {
    FP8FLOW_CHECK(args.src.rank == 2 && is_bf16_or_f32(args.src.dtype), "src is {}", describe(args.src));
    FP8FLOW_CHECK(args.recv_rows.rank == 2 && args.recv_rows.dtype == DType::i32, "recv_rows is {}",
                  describe(args.recv_rows));
    check_tensor(args.num_rows, "num_rows", DType::i64, {1});
    if (args.row_prob)
        FP8FLOW_CHECK(args.row_prob.rank == 1 && args.row_prob.dtype == DType::f32, "row_prob is {}",
                      describe(args.row_prob));
    FP8FLOW_CHECK(is_bf16_or_f32(args.dst.dtype), "dst is {}", describe(args.dst));
    check_tensor(args.dst, "dst", args.dst.dtype, {args.recv_rows.dim(0), args.src.dim(1)});
}

OpCost cost(const op::UnpermuteUnpad& args) {
    const double rows = static_cast<double>(std::min(args.src.dim(0), args.recv_rows.numel()));
    const double elements = rows * static_cast<double>(args.src.cols());
    return with_writes({.bytes = elements * static_cast<double>(size_of(args.src.dtype)) +
                                 bytes_of({args.dst, args.recv_rows}),
                        .flops = args.row_prob ? 2 * elements : elements},
                       bytes_of({args.dst}));
}

void check(const op::UnpermuteProbsBackward& args) {
    check_groups(args.groups);
    FP8FLOW_CHECK(args.src.rank == 2 && is_bf16_or_f32(args.src.dtype), "src is {}", describe(args.src));
    FP8FLOW_CHECK(
        args.ddst.rank == 2 && is_bf16_or_f32(args.ddst.dtype) && args.ddst.dim(1) == args.src.dim(1),
        "ddst is {}", describe(args.ddst));
    FP8FLOW_CHECK(args.row_source.rank == 1 && args.row_source.dtype == DType::i32, "row_source is {}",
                  describe(args.row_source));
    FP8FLOW_CHECK(args.drow_prob.rank == 1 && args.drow_prob.dtype == DType::f32, "drow_prob is {}",
                  describe(args.drow_prob));
    check_recv_rows(args.recv_rows, args.num_rows, args.ddst);
    check_rows(args.src, "src", args.groups);
    check_rows(args.row_source, "row_source", args.groups);
    check_rows(args.drow_prob, "drow_prob", args.groups);
}

OpCost cost(const op::UnpermuteProbsBackward& args) {
    const double elements = static_cast<double>(args.groups.cost_rows() * args.src.cols());
    return {.bytes = elements * static_cast<double>(size_of(args.src.dtype) + size_of(args.ddst.dtype)),
            .flops = 2 * elements};
}

void check(const op::PadRows& args) {
    check_groups(args.src_groups);
    check_groups(args.dst_groups);
    FP8FLOW_CHECK(args.src_groups.num_groups == args.dst_groups.num_groups, "{} groups become {}",
                  args.src_groups.num_groups, args.dst_groups.num_groups);
    check_movable(args.src, ScaleLayout::vec128, args.dst);
    check_rows(args.src.data, "src", args.src_groups);
    check_rows(args.dst.data, "dst", args.dst_groups);
}

OpCost cost(const op::PadRows& args) {
    return with_writes({.bytes = static_cast<double>(args.src_groups.cost_rows()) * row_bytes(args.src) +
                                 static_cast<double>(args.dst_groups.cost_rows()) * row_bytes(args.dst),
                        .flops = 0},
                       static_cast<double>(args.dst_groups.cost_rows()) * row_bytes(args.dst));
}

void check(const op::UnpadRows& args) {
    check_groups(args.src_groups);
    check_groups(args.dst_groups);
    FP8FLOW_CHECK(args.src_groups.num_groups == args.dst_groups.num_groups, "{} groups become {}",
                  args.src_groups.num_groups, args.dst_groups.num_groups);
    check_movable({.data = args.src, .scales = {}}, ScaleLayout::none, {.data = args.dst, .scales = {}});
    check_rows(args.src, "src", args.src_groups);
    check_rows(args.dst, "dst", args.dst_groups);
}

OpCost cost(const op::UnpadRows& args) {
    const double row = static_cast<double>(args.dst.cols() * size_of(args.dst.dtype));
    return with_writes({.bytes = 2 * row * static_cast<double>(args.dst_groups.cost_rows()), .flops = 0},
                       row * static_cast<double>(args.dst_groups.cost_rows()));
}

}  // namespace fp8flow
