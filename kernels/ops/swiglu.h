// SPDX-License-Identifier: MIT
// SwiGLU weighted by the routing probability, forward and backward, plain and fused with quantisation.
// h = [gate, up] halves along the columns. All arithmetic in fp32 from the stored inputs (scalar_math.h silu
// / sigmoid), one rounding. Sources: Shazeer 2020; FP8-Flow-MoE (fused weighted SwiGLU + quantise); Megatron
// (probabilities before fc2). Pads: row_prob is 0 there; outputs are written as zeros (value 0, scale 0.0f).
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

// Another gated unit: g = min(gate, limit), u = up within +-limit, g * sigmoid(alpha * g) * (u + offset). In
// the formulas below gate is then g, s = sigmoid(alpha * g), up is u + offset, and gate * (1 - s) is (alpha *
// g) * (1 - s). dgate is 0 where gate > limit, dup where |up| > limit; at the limit they are not, as in
// PyTorch. NaN stays NaN.
struct GluForm {
    float alpha = 1.0f;  // 1 to kMaxAlpha
    float offset = 0.0f;
    float limit = 0.0f;  // 0: none

    static constexpr float kMaxAlpha = 1.75f;  // of a kernel's table of sigmoids (hopper/device/sigmoid.h)
    bool is_swiglu() const { return alpha == 1.0f && offset == 0.0f && limit == 0.0f; }
};

// a = (silu(gate) * up) * prob. Absent prob means 1.
struct Swiglu {
    TensorView h;     // [M, 2F] bf16 | f32
    TensorView prob;  // [M] f32, optional
    RowGroups groups;
    GluForm form = {};
    TensorView a;  // out [M, F]
};

// The same quantised in 1x128 blocks straight from fp32 (no BF16 rounding in between).
struct SwigluQuantize {
    TensorView h;
    TensorView prob;
    RowGroups groups;
    GluForm form = {};
    ScaleFormat scale_format = ScaleFormat::pow2;
    ScaledTensor a;  // out [M, F] vec128
};

// g' = da * prob; dgate = ((g' * up) * s) * (1 + gate * (1 - s)), s = sigmoid(gate); dup = g' * silu(gate),
// silu(gate) = gate * s; dprob = sum_j da * (silu(gate) * up): in 128 columns, 16 units of 8 neighbouring
// columns (a chain of fma from 0, ascending), neighbours added first, then pairs, and so on; the sums of 128
// columns are added to 0 in ascending order. No fma but in the units.
struct SwigluBackward {
    TensorView da;    // [M, F] bf16 | f32
    TensorView h;     // [M, 2F]
    TensorView prob;  // [M] f32, optional
    RowGroups groups;
    GluForm form = {};
    TensorView dh;     // out [M, 2F]
    TensorView dprob;  // out [M] f32, 0 in pads; optional
};
struct SwigluBackwardQuantize {
    TensorView da;
    TensorView h;
    TensorView prob;
    RowGroups groups;
    GluForm form = {};
    ScaleFormat scale_format = ScaleFormat::pow2;
    ScaledTensor dh;  // out [M, 2F] vec128: gate half and up half in their own blocks
    TensorView dprob;
};

}  // namespace fp8flow::op
