// SPDX-License-Identifier: MIT
// Quantisers: activations by rows and by columns, per tensor, MX blocks, weights; and back. One rule for all:
// amax = max|x| (fp32, NaN ignored), at least kAmaxEps; multiplier = max_code/amax (IEEE division), for pow2
// rounded down to a power of two and at most 2^126; value = x*multiplier, rounded to nearest even and
// saturated (NaN stays NaN);
// stored scale = 1/multiplier. See scalar_math.h quant_scale. Sources: TransformerEngine's block quantisers,
// DeepSeek-V3, torchao (per-row, per-group, MX).
//
// M-tensors (with `groups`): only rows of the groups are read; pad rows are written as value 0, scale 0.0f
// (e8m0: 0); rows past offsets[G] are untouched. A tensor without groups (groups.num_groups == 0) is one
// group of all its rows, without pads.
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

// [M, K] -> FP8 [M, K] scaled along K. Layouts: vec128_wire, vec128, row, mx32, tensor (see QuantizeTensor
// for transposed).
struct QuantizeRows {
    TensorView src;  // [M, K] bf16 | f16 | f32
    RowGroups groups;
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
    ScaledTensor dst;
};

// [M, K] -> transposed FP8 [K, M] scaled along M inside each group. Layouts: vec128 (128x1 blocks) and mx32
// (32x1 blocks), both with groups aligned to the block; group_row (one scale per group and column, any
// alignment; 0.0f for a group of 0 rows). A block of pads alone has scale 0. Without groups dst may be wider
// than M: the rest is pads. src2 and dst2 are an optional second operand (torchao's dual form: both operands
// of a weight gradient in one launch).
struct QuantizeColumns {
    TensorView src;  // [M, K]
    RowGroups groups;
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
    ScaledTensor dst;   // out [K, M]
    TensorView src2;    // [M, K2], optional
    ScaledTensor dst2;  // out [K2, M]
};

// Both orientations from one read: one cast. Row layout vec128, row or mx32 with column layout vec128,
// group_row or mx32.
struct QuantizeDual {
    TensorView src;  // [M, K]
    RowGroups groups;
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
    ScaledTensor rows;     // out [M, K]
    ScaledTensor columns;  // out [K, M]
};

// One scale for the whole tensor (current scaling): amax over all valid rows first. Both outputs share the
// scale. Without groups the transposed copy may be wider than M: the rest is pads.
struct QuantizeTensor {
    TensorView src;  // [M, K]
    RowGroups groups;
    ScaleFormat scale_format = ScaleFormat::pow2;
    ScaledTensor rows;        // out [M, K] layout tensor, optional
    ScaledTensor transposed;  // out [K, M] layout tensor, optional
};

// Weights [E, N, K] -> fprop copy [E, N, K] and dgrad copy [E, K, N]; both optional. Layouts: block128
// (logical 128x128 blocks; the dgrad values are the exact transpose and its scales the transposed table;
// entries that pad a table are 0.0f), row (per stored row of each copy), tensor (one scale for all experts:
// [1]), mx32 (each copy along its own contiguous dimension: fprop 1x32 along K; dgrad = "3D column-wise",
// 32x1 along N, stored per-expert column-major; torchao#3002). A weight may also come as [N, K].
struct QuantizeWeight {
    TensorView src;  // [E, N, K] f32 | bf16
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
    ScaledTensor fprop;
    ScaledTensor dgrad;
};

// dst = value * scale in fp32, one rounding to dst's dtype; any layout; dst has the shape of src.data. Pads
// give 0. With groups the routed dimension is the columns for tile128 and group_row, the rows for the rest
// (other transposed copies: without groups).
struct Dequantize {
    ScaledTensor src;
    RowGroups groups;  // needed for M-tensors
    TensorView dst;    // out
};

// limit = share x the dtype's largest value, rounded to FP8. Values with a larger magnitude become the limit
// with their sign; NaN stays NaN. With groups: rows of the groups, pads included.
struct ClipFp8 {
    RowGroups groups;
    float share = 1;
    TensorView rows;  // in/out [M, K] FP8
};

// Wire scales [T, C/128] (e8m0 or f32) -> GEMM scales vec128 [C/128, T] f32: moves scales only, no cast.
struct RelayoutScales {
    TensorView wire;
    TensorView vec128;  // out
};

// Delayed scaling at the end of a step: history[position % N] = amax; scale = 1/multiplier for the largest of
// the history (quant_scale, E4M3); amax = 0. Skipped when *status != 0.
struct DelayedScaleUpdate {
    TensorView position;  // [1] i64
    ScaleFormat scale_format = ScaleFormat::pow2;
    TensorView status;   // [1] i32, optional
    TensorView amax;     // in/out [1] f32
    TensorView history;  // in/out [N] f32
    TensorView scale;    // out [1] f32
};

}  // namespace fp8flow::op
