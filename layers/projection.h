// SPDX-License-Identifier: MIT
// A linear layer without bias: y = x W^T. Attention and the output head call only this class, so that an FP8
// projection is a change here. Today: W as stored (BF16) in every recipe.
#pragma once

#include "layers/context.h"
#include "layers/parameter.h"

namespace fp8flow {

class Projection {
public:
    explicit Projection(Parameter& weight) : weight_(weight) {}

    // y [T, N] = x [T, K] W^T, W [N, K].
    void forward(Context& ctx, const TensorView& x, const TensorView& y) const {
        ctx.ops.gemm({.a = {.data = x}, .b = {.data = weight_.plain}, .d = y}, ctx.launch);
    }
    // W's main gradient = or += (mode) dy^T x; dx [T, K] = dy [T, N] W.
    void backward(Context& ctx, const TensorView& dy, const TensorView& x, Gradient mode,
                  const TensorView& dx) const {
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
    Parameter& weight_;
};

}  // namespace fp8flow
