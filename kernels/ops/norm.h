// SPDX-License-Identifier: MIT
// RMSNorm: plain, with FP8 outputs, backward. Source: Zhang & Sennrich 2019; fused FP8 outputs after
// ROCm/TransformerEngine#593.
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

// Megatron's apply_layernorm_1p: the effective weight is 1 + gamma.
enum class GammaForm { plain, zero_centered };

// y = x * rstd * g, rstd = 1/sqrt(mean(x^2) + eps), all in fp32, one rounding to y's dtype. Any H >= 1, any T
// >= 0. A sum over a row runs in 256 strands: units of 8 neighbouring columns, unit u to strand u % 256 (fma,
// ascending; empty strands are 0). Each 32 neighbouring strands are added in halves (s + (s+16), then + 8, 4,
// 2, 1), and the eight sums of these pairwise
// ((0+4)+(2+6)) + ((1+5)+(3+7)); so that host and device agree. A row of more than 8192 columns falls into as
// few segments as have no more, of norm_segment_cols columns (the last: the rest), each summed like this, and
// their sums are added in ascending order.
constexpr int64_t kNormStrands = 256, kNormUnit = 8, kNormSegment = 8192;
constexpr int64_t norm_segments(int64_t cols) {
    return cols > kNormSegment ? (cols + kNormSegment - 1) / kNormSegment : 1;
}
constexpr int64_t norm_segment_cols(int64_t cols) {
    const int64_t segments = norm_segments(cols), share = (cols + segments - 1) / segments;
    return (share + kBlock - 1) / kBlock * kBlock;
}
struct RmsNorm {
    TensorView x;      // [T, H] bf16 | f16 | f32
    TensorView gamma;  // [H] f32
    float eps = 1e-5f;
    GammaForm gamma_form = GammaForm::plain;
    TensorView y;     // out [T, H] bf16 | f16 | f32
    TensorView rstd;  // out [T] f32
};

// The same, with FP8 outputs from the same pass. Every output but rstd is optional (absent view). FP8 codes
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

// dx = rstd * (dy*g - x*rstd^2*mean(dy*g*x)) + dresidual, one rounding; dgamma_j = sum_t dy*x*rstd in P parts
// of K chunks, P = gamma_parts(H), K = gamma_chunks(H). Chunk c has rows c, c + K*P, c + 2*K*P, ... and is
// summed by fma, ascending. The sums of chunks p, p + P, ... are added, ascending; then those of 11
// neighbouring parts, ascending; then these, ascending. (132 SMs, each with one, two or four rows
// at a time. The segments of a row need as many SMs of one GPC, which has about 16: as many parts
// as such clusters surely find room at once, lest a second wave waits for the first. Of 32 clusters of four,
// 30 fitted; of two, all: a GPC has an even number.)
constexpr int64_t kGammaParts = 132, kGammaGroup = 11, kNarrowRow = 2048, kFewSegments = 4;
constexpr int64_t kGammaClusters[] = {66, 41, 29, 22, 18, 14, 13};  // of 2 to 8 segments and more
constexpr int64_t gamma_parts(int64_t cols) {
    const int64_t segments = norm_segments(cols);
    return segments == 1 ? kGammaParts : kGammaClusters[segments < 8 ? segments - 2 : 6];
}
constexpr int64_t gamma_chunks(int64_t cols) {
    return cols <= kNarrowRow ? 4 : cols <= 2 * kNarrowRow || norm_segments(cols) > kFewSegments ? 2 : 1;
}
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
