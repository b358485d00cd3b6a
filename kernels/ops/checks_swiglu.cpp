// SPDX-License-Identifier: MIT
// Argument checks and costs of SwiGLU. Tensors of routed rows may be longer than the rows of this op (row
// arenas).
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

void check_plain(const TensorView& view, const char* what) {
    FP8FLOW_CHECK(view.rank == 2 && is_bf16_or_f32(view.dtype), "{} is {}, must be bf16 or f32 of rank 2",
                  what, describe(view));
}

// One row per routed row; without groups, as many rows as h.
void check_rows(const TensorView& view, const char* what, const RowGroups& groups, const TensorView& h,
                std::initializer_list<int64_t> row_shape) {
    check_routed_rows(view, what, groups, row_shape);
    FP8FLOW_CHECK(groups.num_groups > 0 || (view.dim(0) == h.dim(0) && view.row_base == nullptr),
                  "{} is {}, but h is {}", what, describe(view), describe(h));
}

void check_inputs(const TensorView& h, const TensorView& prob, const RowGroups& groups, int64_t width) {
    if (groups.num_groups > 0) check_group_arrays(groups);
    check_plain(h, "h");
    check_rows(h, "h", groups, h, {2 * width});
    if (!prob) return;
    FP8FLOW_CHECK(prob.dtype == DType::f32, "prob is {}, must be f32", describe(prob));
    check_rows(prob, "prob", groups, h, {});
}

void check_quantized(const ScaledTensor& out, const char* what, ScaleFormat format, const RowGroups& groups,
                     const TensorView& h, int64_t cols) {
    FP8FLOW_CHECK(out.layout == ScaleLayout::vec128, "{} has scales {}, must be vec128", what,
                  name_of(out.layout));
    check_fp8(out, what);
    check_written(out, what, format);
    check_rows(out.data, what, groups, h, {cols});
}

template <class Args> void check_backward(const Args& args) {
    check_plain(args.da, "da");
    check_inputs(args.h, args.prob, args.groups, args.da.cols());
    check_rows(args.da, "da", args.groups, args.h, {args.da.cols()});
    if (!args.dprob) return;
    FP8FLOW_CHECK(args.dprob.dtype == DType::f32, "dprob is {}, must be f32", describe(args.dprob));
    check_rows(args.dprob, "dprob", args.groups, args.h, {});
}

int64_t rows_of(const RowGroups& groups, const TensorView& h) {
    return groups.num_groups > 0 ? groups.cost_rows() : h.dim(0);
}

double row_bytes(const TensorView& view) {
    if (!view) return 0;
    return static_cast<double>((view.rank > 1 ? view.cols() : 1) * size_of(view.dtype));
}
double row_bytes(const ScaledTensor& tensor) {
    return row_bytes(tensor.data) + static_cast<double>(tensor.scales.dim(0) * size_of(tensor.scales.dtype));
}

// Operations per column of `width`: exp counts as one.
OpCost row_cost(const RowGroups& groups, const TensorView& h, double bytes_per_row, double flops_per_column,
                double written_per_row) {
    const double rows = static_cast<double>(rows_of(groups, h));
    return {rows * bytes_per_row, rows * flops_per_column * static_cast<double>(h.cols()) / 2, Unit::vector,
            rows * written_per_row};
}

constexpr double kForwardFlops = 6, kBackwardFlops = 15, kQuantizeFlops = 3;

}  // namespace

void check(const op::Swiglu& args) {
    check_plain(args.a, "a");
    check_inputs(args.h, args.prob, args.groups, args.a.cols());
    check_rows(args.a, "a", args.groups, args.h, {args.a.cols()});
}
OpCost cost(const op::Swiglu& args) {
    return row_cost(args.groups, args.h, row_bytes(args.h) + row_bytes(args.prob) + row_bytes(args.a),
                    kForwardFlops, row_bytes(args.a));
}

void check(const op::SwigluQuantize& args) {
    const int64_t width = args.a.data.cols();
    check_inputs(args.h, args.prob, args.groups, width);
    check_quantized(args.a, "a", args.scale_format, args.groups, args.h, width);
}
OpCost cost(const op::SwigluQuantize& args) {
    return row_cost(args.groups, args.h, row_bytes(args.h) + row_bytes(args.prob) + row_bytes(args.a),
                    kForwardFlops + kQuantizeFlops, row_bytes(args.a));
}

void check(const op::SwigluBackward& args) {
    check_backward(args);
    check_plain(args.dh, "dh");
    check_rows(args.dh, "dh", args.groups, args.h, {2 * args.da.cols()});
}
OpCost cost(const op::SwigluBackward& args) {
    return row_cost(args.groups, args.h,
                    row_bytes(args.da) + row_bytes(args.h) + row_bytes(args.prob) + row_bytes(args.dh) +
                        row_bytes(args.dprob),
                    kBackwardFlops, row_bytes(args.dh) + row_bytes(args.dprob));
}

void check(const op::SwigluBackwardQuantize& args) {
    check_backward(args);
    const int64_t width = args.da.cols();
    FP8FLOW_CHECK(
        width % kBlock == 0,
        "gate and up of {} columns need scale blocks of their own: the width must be a multiple of {} "
        "(moe_ffn_hidden_size)",
        width, kBlock);
    check_quantized(args.dh, "dh", args.scale_format, args.groups, args.h, 2 * width);
}
OpCost cost(const op::SwigluBackwardQuantize& args) {
    return row_cost(args.groups, args.h,
                    row_bytes(args.da) + row_bytes(args.h) + row_bytes(args.prob) + row_bytes(args.dh) +
                        row_bytes(args.dprob),
                    kBackwardFlops + 2 * kQuantizeFlops, row_bytes(args.dh) + row_bytes(args.dprob));
}

}  // namespace fp8flow
