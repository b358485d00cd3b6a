// SPDX-License-Identifier: MIT
// An FP8 tensor as a kernel argument, and the scale of one of its values in every layout.
#pragma once

#include "kernels/hopper/device/groups.h"

namespace fp8flow::hopper::quantize {

struct Dequantizer {
    RowView fp8, dst;
    const void* scales;
    DType scale_dtype;
    ScaleLayout layout;
    int scale_cols;
    int64_t scale_batch_stride;
    int64_t rows;  // of one batch
    DeviceGroups groups;
};

// Without destination and groups.
inline Dequantizer dequantizer_of(const ScaledTensor& tensor) {
    const TensorView& scales = tensor.scales;
    const bool per_batch = tensor.data.rank == 3 && scales.rank > 1;
    return {.fp8 = row_view(tensor.data),
            .dst = {},
            .scales = scales.data,
            .scale_dtype = scales.dtype,
            .layout = tensor.layout,
            .scale_cols = static_cast<int>(scales.cols()),
            .scale_batch_stride = per_batch ? scales.numel() / scales.dim(0) : 0,
            .rows = tensor.data.dim(-2),
            .groups = {}};
}

// The scale of the value at (row, col), both absolute in their buffers.
__device__ __forceinline__ float scale_of(const Dequantizer& args, int64_t batch, int64_t row, int64_t col,
                                          int64_t group) {
    constexpr int64_t kTile = kBlock, kMx = kMxBlock;
    const int64_t width = args.scale_cols;
    int64_t at = 0;
    switch (args.layout) {
        case ScaleLayout::none: return 1.0f;
        case ScaleLayout::tensor: return load_float(args.scales, args.scale_dtype, 0);
        case ScaleLayout::row: at = row; break;
        case ScaleLayout::vec128_wire: at = row * width + col / kTile; break;
        case ScaleLayout::vec128: at = col / kTile * width + row; break;
        case ScaleLayout::block128: at = row / kTile * width + col / kTile; break;
        case ScaleLayout::tile128: at = col / kTile * width + row / kTile; break;
        case ScaleLayout::group_row: at = group * width + row; break;
        case ScaleLayout::mx32: at = col / kMx * width + row; break;
    }
    return load_float(args.scales, args.scale_dtype, batch * args.scale_batch_stride + at);
}

}  // namespace fp8flow::hopper::quantize
