// SPDX-License-Identifier: MIT
// Scales on the device: from a block's amax to multiplier and stored scale, and the index of a scale in the
// row layouts. The same rule as the reference (kernels/core/scalar_math.h). Read next:
// kernels/hopper/quantize/quantize_rows.cu.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/view.h"

namespace fp8flow::hopper {

// How a block is quantised: the formats of one op call.
struct QuantizeRule {
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
};

struct BlockScale {
    float multiplier;
    float dequant;  // stored in f32 scales
    uint8_t e8m0;   // stored in e8m0 scales
};
__device__ __forceinline__ BlockScale block_scale(uint32_t amax, DType fp8, bool mx,
                                                  const QuantizeRule& rule) {
    if (mx) {
        const MxScale scale = mx_scale(__uint_as_float(amax), fp8, rule.mx_rounding);
        return {scale.multiplier, 0.0f, scale.code};
    }
    const QuantScale scale = quant_scale(__uint_as_float(amax), fp8_max(fp8), rule.scale_format);
    return {scale.multiplier, scale.dequant, float_to_e8m0(scale.dequant)};
}

// Scales by rows: the scale of (row, block) is at row * row_stride + block * block_stride.
struct RowScales {
    void* data = nullptr;
    DType dtype = DType::f32;
    int64_t row_stride = 0, block_stride = 0;
    int block = 1;  // columns that share a scale; 0: the whole row
    __device__ int64_t index(int64_t row, int64_t at) const { return row * row_stride + at * block_stride; }
    __device__ void store(int64_t row, int64_t at, const BlockScale& scale) const {
        if (dtype == DType::e8m0)
            static_cast<uint8_t*>(data)[index(row, at)] = scale.e8m0;
        else
            static_cast<float*>(data)[index(row, at)] = scale.dequant;
    }
    __device__ float load(int64_t row, int64_t at) const { return load_float(data, dtype, index(row, at)); }
};
inline RowScales row_scales(const ScaledTensor& t) {
    if (!t) return {};
    const int64_t rows = t.data.dim(-2);
    RowScales scales{t.scales.data, t.scales.dtype, 1, rows, static_cast<int>(kBlock)};
    switch (t.layout) {
        case ScaleLayout::vec128_wire:
            scales.row_stride = t.scales.cols();
            scales.block_stride = 1;
            break;
        case ScaleLayout::mx32: scales.block = static_cast<int>(kMxBlock); break;
        case ScaleLayout::row:
            scales.block_stride = 0;
            scales.block = 0;
            break;
        case ScaleLayout::tensor:  // one scale for every index
            scales.row_stride = 0;
            scales.block_stride = 0;
            break;
        default: break;
    }
    return scales;
}

// Quantises a unit of a row in blocks of 32 or 128 columns: amax over the block's threads, FP8 values and
// scale. Pads: value 0, scale 0. All threads of the 128 columns must call it; those past the row's end hold
// zeros.
__device__ __forceinline__ void quantize_unit(const float (&v)[kUnit], bool valid, const RowView& fp8,
                                              const RowScales& scales, int64_t row, int col,
                                              const QuantizeRule& rule) {
    const bool mx = scales.block == kMxBlock;
    const uint32_t amax = max_over(unit_magnitude(v), scales.block / kUnit);
    BlockScale scale = {0.0f, 0.0f, 0};
    uint2 unit = {0, 0};
    if (valid) {
        scale = block_scale(amax, fp8.dtype, mx, rule);
        unit = encode_unit(v, scale.multiplier, fp8.dtype);
    }
    if (col >= fp8.cols) return;
    store_fp8(fp8, row, col, unit);
    if (col % scales.block == 0) scales.store(row, col / scales.block, scale);
}

}  // namespace fp8flow::hopper
