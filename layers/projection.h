// SPDX-License-Identifier: MIT
// A linear layer without bias: y = x W^T. Attention and the output head call only this class. W is read as
// stored (BF16), or as the FP8 copies of a recipe's flow (precision.fp8_attention_linears).
#pragma once

#include "layers/flows/flow.h"

namespace fp8flow {

class Projection {
public:
    explicit Projection(Parameter& weight) : weight_(weight) {}
    // flow: runs it in FP8 and outlives it; null: W as stored. names: string literals.
    Projection(Parameter& weight, const Flow* flow, const Flow::LinearNames& names)
        : weight_(weight), flow_(flow), names_(names) {}

    // y [T, N] = x [T, K] W^T, W [N, K]. saved: what the backward needs in addition to x; may be dropped.
    void forward(Context& ctx, const TokenRows& x, ExpertsSaved& saved, const TensorView& y) const {
        if (flow_ != nullptr) return flow_->linear_forward(ctx, layer(), x, saved, y);
        forward(ctx, x.plain, y);
    }
    // W's main gradient = or += (ctx.grad_mode) dy^T x; dx [T, K] = dy [T, N] W.
    void backward(Context& ctx, const TokenRows& dy, const TokenRows& x, ExpertsSaved& saved,
                  const TensorView& dx) const {
        if (flow_ != nullptr) return flow_->linear_backward(ctx, layer(), x, dy, saved, dx);
        backward(ctx, dy.plain, x.plain, ctx.grad_mode, dx);
    }
    // FP8 rows that the operation that computes dy also writes; absent: none.
    ScaledTensor gradient_rows(Context& ctx) const {
        return flow_ != nullptr ? flow_->gradient_rows(ctx, weight_.spec.shape[0]) : ScaledTensor{};
    }

    // With W as stored.
    void forward(Context& ctx, const TensorView& x, const TensorView& y) const {
        ctx.ops.gemm({.a = {.data = x}, .b = {.data = weight_.plain}, .d = y}, ctx.launch);
    }
    void backward(Context& ctx, const TensorView& dy, const TensorView& x, Gradient mode,
                  const TensorView& dx) const {
        if (!weight_.frozen)
            ctx.ops.gemm({.a = {.data = dy},
                          .b = {.data = x},
                          .form = op::GemmForm::tn,
                          .mode = mode,
                          .d = weight_.main_grad},
                         ctx.launch);
        ctx.ops.gemm({.a = {.data = dy}, .b = {.data = weight_.plain}, .form = op::GemmForm::nn, .d = dx},
                     ctx.launch);
    }

private:
    Flow::Linear layer() const { return {names_, weight_}; }

    Parameter& weight_;
    const Flow* flow_ = nullptr;
    Flow::LinearNames names_{};
};

}  // namespace fp8flow
