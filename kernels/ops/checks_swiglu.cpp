// SPDX-License-Identifier: MIT
// Argument checks and costs of SwiGLU. Tensors of routed rows may be longer than the rows of this op (row
// arenas).
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

#include <cmath>

namespace fp8flow {

namespace {

// One row per routed row; without groups, as many rows as h.
void check_rows(const TensorView& view, const char* what, const RowGroups& groups, const TensorView& h) {
    check_capacity(view, what, groups);
    FP8FLOW_CHECK(groups.num_groups > 0 || (view.dim(0) == h.dim(0) && view.row_base == nullptr),
                  "{} is {}, but h is {}", what, describe(view), describe(h));
}
// The same in bf16 or f32.
void check_plain_rows(const TensorView& view, const char* what, const RowGroups& groups, const TensorView& h,
                      int64_t width) {
    check_plain(view, what, {kAny, width});
    check_rows(view, what, groups, h);
}
// Merging probabilities or their gradients.
void check_probs(const TensorView& probs, const char* what, const RowGroups& groups, const TensorView& h) {
    if (!probs) return;
    check_tensor(probs, what, DType::f32, {kAny});
    check_rows(probs, what, groups, h);
}

template <class Args> void check_inputs(const Args& args, int64_t width) {
    check_optional_groups(args.groups);
    check_plain_rows(args.h, "h", args.groups, args.h, 2 * width);
    check_probs(args.prob, "prob", args.groups, args.h);
    const op::GluForm& form = args.form;
    FP8FLOW_CHECK(form.alpha >= 1.0f && form.alpha <= op::GluForm::kMaxAlpha && form.limit >= 0.0f &&
                      std::isfinite(form.limit) && std::isfinite(form.offset),
                  "the gated unit has alpha {}, offset {}, limit {}; alpha must be 1 to {}, limit at least 0",
                  form.alpha, form.offset, form.limit, op::GluForm::kMaxAlpha);
}

void check_output(const ScaledTensor& out, const char* what, ScaleFormat format, const RowGroups& groups,
                  const TensorView& h, int64_t width) {
    check_quantized(out, what, format, {ScaleLayout::vec128});
    check_tensor(out.data, what, out.data.dtype, {kAny, width});
    check_rows(out.data, what, groups, h);
}

template <class Args> void check_backward(const Args& args) {
    check_inputs(args, args.da.cols());
    check_plain_rows(args.da, "da", args.groups, args.h, args.da.cols());
    check_probs(args.dprob, "dprob", args.groups, args.h);
}

// Bytes are per row. FLOPs are per column of `width`: exp counts as one.
OpCost row_cost(const RowGroups& groups, const TensorView& h, double read, double written, double flops) {
    const auto rows = static_cast<double>(groups.num_groups > 0 ? groups.cost_rows() : h.dim(0));
    return moves(rows * read, rows * written, rows * flops * static_cast<double>(h.cols()) / 2);
}
template <class Args> OpCost forward_cost(const Args& args, double flops) {
    return row_cost(args.groups, args.h, row_bytes(args.h) + row_bytes(args.prob), row_bytes(args.a), flops);
}
template <class Args> OpCost backward_cost(const Args& args, double flops) {
    return row_cost(args.groups, args.h, row_bytes(args.da) + row_bytes(args.h) + row_bytes(args.prob),
                    row_bytes(args.dh) + row_bytes(args.dprob), flops);
}

constexpr double kForwardFlops = 6, kBackwardFlops = 15, kQuantizeFlops = 3;

}  // namespace

void check(const op::Swiglu& args) {
    check_inputs(args, args.a.cols());
    check_plain_rows(args.a, "a", args.groups, args.h, args.a.cols());
}
OpCost cost(const op::Swiglu& args) { return forward_cost(args, kForwardFlops); }

void check(const op::SwigluQuantize& args) {
    const int64_t width = args.a.data.cols();
    check_inputs(args, width);
    check_output(args.a, "a", args.scale_format, args.groups, args.h, width);
}
OpCost cost(const op::SwigluQuantize& args) { return forward_cost(args, kForwardFlops + kQuantizeFlops); }

void check(const op::SwigluBackward& args) {
    check_backward(args);
    check_plain_rows(args.dh, "dh", args.groups, args.h, 2 * args.da.cols());
}
OpCost cost(const op::SwigluBackward& args) { return backward_cost(args, kBackwardFlops); }

void check(const op::SwigluBackwardQuantize& args) {
    check_backward(args);
    const int64_t width = args.da.cols();
    FP8FLOW_CHECK(
        width % kBlock == 0,
        "gate and up of {} columns need scale blocks of their own: the width must be a multiple of {} "
        "(moe_ffn_hidden_size)",
        width, kBlock);
    check_output(args.dh, "dh", args.scale_format, args.groups, args.h, 2 * width);
}
OpCost cost(const op::SwigluBackwardQuantize& args) {
    return backward_cost(args, kBackwardFlops + 2 * kQuantizeFlops);
}

}  // namespace fp8flow
