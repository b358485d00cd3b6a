// SPDX-License-Identifier: MIT
// RMSNorm: plain, with FP8 outputs, backward. Source: Zhang & Sennrich 2019; fused FP8 outputs after
// ROCm/TransformerEngine#593.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/ops/norm_order.h"

namespace fp8flow::op {

// Megatron's apply_layernorm_1p: the effective weight is 1 + gamma.
enum class GammaForm { plain, zero_centered };

// y = x * rstd * g, rstd = 1/sqrt(mean(x^2) + eps), all in fp32, one rounding to y's dtype. Any H >= 1, any T
// >= 0. Sums over a row run in the order of kernels/ops/norm_order.h.
struct RmsNorm {
    TensorView x;      // [T, H] bf16 | f16 | f32
    TensorView gamma;  // [H] f32
    float eps = 1e-5f;
    GammaForm gamma_form = GammaForm::plain;
    TensorView y;     // out [T, H] bf16 | f16 | f32
    TensorView rstd;  // out [T] f32
};

// The same, with FP8 outputs from the same pass. Every output but rstd is optional (absent view). FP8 values
// are made from the fp32 value of y (block layouts: from the BF16-rounded y, so that fused and composed agree
// bit for bit).
struct RmsNormQuantize {
    TensorView x;      // [T, H]
    TensorView gamma;  // [H] f32
    float eps = 1e-5f;
    GammaForm gamma_form = GammaForm::plain;
    ScaleFormat scale_format = ScaleFormat::pow2;
    TensorView y;  // out [T, H] bf16, optional
    // FP8 outputs, both optional. Layout tensor is delayed scaling: `scales` is an INPUT, 1/multiplier
    // (usually one view for both outputs). tile128 is transpose_fp8 of the rows, which must be present, with
    // pow2 scales.
    ScaledTensor rows;        // out [T, H]: vec128_wire, vec128 or tensor
    ScaledTensor transposed;  // out [H, >= T], columns past T are pads: tile128 or tensor
    // out [1] f32: max |y| of this call (maxed into what it holds, which is not NaN), for delayed scaling;
    // optional
    TensorView amax;
    TensorView rstd;  // out [T] f32
};

// dx = rstd * (dy*g - x*rstd^2*mean(dy*g*x)) + dresidual, one rounding; dgamma_j = sum_t dy*x*rstd, in the
// order of kernels/ops/norm_order.h.
struct RmsNormBackward {
    TensorView dy;         // [T, H]
    TensorView x;          // [T, H]
    TensorView gamma;      // [H] f32
    TensorView rstd;       // [T] f32
    TensorView dresidual;  // [T, H], optional: added to dx before rounding
    GammaForm gamma_form = GammaForm::plain;
    Gradient dgamma_mode = Gradient::overwrite;
    TensorView dx;      // out [T, H]
    TensorView dgamma;  // out [H] f32
};

}  // namespace fp8flow::op
