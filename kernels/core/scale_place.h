// SPDX-License-Identifier: MIT
// Where the scale of a value is stored, in every layout of scaled_tensor.h.
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow {

// The scale of the value at (row, k), k along the contiguous dimension, is
// scales[row / rows_per_scale * row_stride + k / block * block_stride]; block 0: it does not depend on k.
// group_row: those of group g begin at g * (stored rows).
struct ScalePlace {
    int64_t rows_per_scale = 1, row_stride = 0, block = 0, block_stride = 0;

    int64_t of(int64_t row, int64_t k) const {
        return row / rows_per_scale * row_stride + (block == 0 ? 0 : k / block * block_stride);
    }
};

// values: [rows, contraction], or [E, rows, contraction], where each entry has scales of its own.
inline ScalePlace scale_place(ScaleLayout layout, const TensorView& values) {
    const int64_t rows = values.dim(-2), blocks = ceil_div(values.dim(-1), kBlock);
    switch (layout) {
        case ScaleLayout::none:
        case ScaleLayout::tensor: break;
        case ScaleLayout::row:
        case ScaleLayout::group_row: return {1, 1};
        case ScaleLayout::vec128_wire: return {1, blocks, kBlock, 1};
        case ScaleLayout::vec128: return {1, 1, kBlock, rows};
        case ScaleLayout::block128: return {kBlock, round_up(blocks, 4), kBlock, 1};
        case ScaleLayout::tile128: return {kBlock, 1, kBlock, ceil_div(rows, kBlock)};
        case ScaleLayout::mx32: return {1, 1, kMxBlock, rows};
    }
    return {};
}

}  // namespace fp8flow
