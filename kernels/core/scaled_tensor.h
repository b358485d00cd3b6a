// SPDX-License-Identifier: MIT
// ScaledTensor: FP8 values together with their scales and the layout of those scales; the same bytes in both
// backends. Scales are stored as DEQUANTISATION factors: value = data * scale. 0.0f occurs in pads only.
// Sources: DeepSeek-V3 (1x128 / 128x128 blocks), FP8-Flow-MoE (tile scales after the scaling-aware
// transpose), torchao (per-row, per-group-and-column, MX blocks).
#pragma once

#include "kernels/core/tensor.h"

namespace fp8flow {

constexpr int64_t kBlock = 128;   // contraction elements per scale, and per FP32 promotion of the GEMM
constexpr int64_t kMxBlock = 32;  // elements per E8M0 scale of MXFP8

// Which values share a scale, and where that scale is stored. R x C are the dimensions of the stored values
// (C contiguous). Where R x C is [dim, M] (a transposed copy), the M axis is the contiguous one.
enum class ScaleLayout : uint8_t {
    none,         // no scales: an ordinary tensor
    tensor,       // [1] f32
    row,          // [R] f32 (weights [E, R]): one scale per stored row
    vec128_wire,  // [R, C/128] e8m0 or f32: 1x128 blocks, row-major as sent over the wire
    // [ceil(C/128), R] f32: 1x128 blocks, the layout of a GEMM operand; of a transposed copy: per column
    vec128,
    block128,   // weights: [(E,) ceil(R/128), pad4(ceil(C/128))] f32: 128x128 blocks
    tile128,    // transposed copy [dim, M]: [M/128, dim/128] f32: one scale per 128x128 tile
    group_row,  // transposed copy [dim, M]: [G, dim] f32: one scale per (group, column of the source)
    mx32,       // [(E,) ceil(C/32), R] e8m0: 1x32 blocks along the contiguous dimension
};

// pow2: scales are powers of two (the multiplier is rounded down, so nothing saturates); fp32: amax / max
// exactly. undeclared: the owner of the tensor has not said; a quantiser cannot write it.
enum class ScaleFormat : uint8_t { pow2, fp32, undeclared };
// Rounding of MXFP8's E8M0 scales: floor (OCP reference) or rceil (round up amax/448, as cuBLAS).
enum class MxRounding : uint8_t { floor, rceil };

const char* name_of(ScaleLayout layout);
const char* name_of(ScaleFormat format);

struct ScaledTensor {
    TensorView data;  // [R, C] or [E, R, C]: FP8 values, e4m3 or e5m2; layout none: any dtype
    TensorView scales;
    ScaleLayout layout = ScaleLayout::none;
    // What the owner of the memory declares. A quantiser writes no other format, operations that move scales
    // do not change it, and transpose_fp8 takes pow2 only.
    ScaleFormat format = ScaleFormat::undeclared;

    explicit operator bool() const { return static_cast<bool>(data); }
};

// Shape of the scales of FP8 values of the given shape; `groups` only for group_row.
struct ScaleShape {
    int rank;
    int64_t dims[3];
    DType dtype;
};
ScaleShape scale_shape(ScaleLayout layout, const TensorView& values, int64_t groups = 0);
// Throws unless data is FP8 and scales have exactly the layout's shape and dtype (vec128_wire: e8m0 or
// f32).
void check_fp8(const ScaledTensor& tensor, const char* what, int64_t groups = 0);

// pow2 where the scales are E8M0, else what the tensor declares.
ScaleFormat format_of(const ScaledTensor& tensor);
// Throws unless scales of `written` fit into dst (E8M0 holds powers of two only) and dst declares that or
// nothing. check_moved: the same for scales that an operation copies from src.
void check_written(const ScaledTensor& dst, const char* what, ScaleFormat written);
void check_moved(const ScaledTensor& src, const ScaledTensor& dst, const char* what);

}  // namespace fp8flow
