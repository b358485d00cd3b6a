// SPDX-License-Identifier: MIT
// Shared parts of all quantisers of the reference backend: amax, FP8 values, the position of a scale in each
// layout, column blocks, and the scaling-aware transpose of a tile. The operations (quantize*.cpp, norm.cpp,
// transpose.cpp) iterate over these.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/core/scaled_tensor.h"
#include "kernels/reference/rows.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace fp8flow::reference {

// The formats of one quantisation.
struct QuantizeRule {
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
};

// max|x| ignoring NaN; 0 for no values.
float amax_of(const float* values, int64_t count);
// fp8[i] = to_fp8(values[i] * multiplier).
void encode(const float* values, int64_t count, float multiplier, DType dtype, uint8_t* fp8);

// One row of dst (absolute, row_base included) in layout vec128_wire, vec128, row or mx32: scales along the
// row.
void quantize_row(const float* values, const ScaledTensor& dst, int64_t row, const QuantizeRule& rule);
// The same row as a pad: values 0, scales 0.
void zero_row(const ScaledTensor& dst, int64_t row);

// [M, K] -> dst [M, K] row by row; pads of the ranges are written as value 0, scale 0.
void quantize_by_rows(const TensorView& src, const std::vector<GroupRange>& ranges, const QuantizeRule& rule,
                      const ScaledTensor& dst);

// `count` source values of row `row` (relative to the tensor's row base) from column `col`, as fp32.
using LoadSegment = std::function<void(int64_t row, int64_t col, int64_t count, float* out)>;
LoadSegment segments_of(const TensorView& src);

// Quantises [M, num_cols] to the transposed copy dst [num_cols, M] with scales along M, in layout vec128,
// mx32, group_row (one block a group) or row (weights: the single group is the block). Pads of the ranges are
// written as value 0, scale 0.
void quantize_by_columns(const LoadSegment& load, int64_t num_cols, const std::vector<GroupRange>& ranges,
                         const QuantizeRule& rule, const ScaledTensor& dst);

// Tiles that share one multiplier and are written in both orientations: rows [row, row + count) hold values,
// [row + count, end) are pads.
struct Tile {
    int64_t row, count, end, col, cols;
};
// Tiles of at most 128 x 128, counted from the first row of each range.
std::vector<Tile> tiles_of(const std::vector<GroupRange>& ranges, int64_t num_cols);
void load_tile(const LoadSegment& load, const Tile& tile, float* values);  // [count, cols]
// FP8 values of a loaded tile into `rows` and / or `transposed` (absent: skipped); pads become 0. No scales
// are written.
void store_tile(const float* values, const Tile& tile, float multiplier, const TensorView& rows,
                const TensorView& transposed);

// Groups for a transposed copy. Without groups, the columns of the copy past the rows of the source are pads.
std::vector<GroupRange> column_ranges(const RowGroups& groups, int64_t rows, const TensorView& transposed);

// FP8 rows and their 1x128 scales as fp32: scale of (row r, column block b) = scales[b * scale_stride + r];
// both begin at row 0 of the groups.
struct ScaledRows {
    const uint8_t* data;
    const float* scales;
    int64_t dim;
    int64_t scale_stride;
};
// The scaling-aware transpose (contract: kernels/ops/transpose.h).
void transpose_tiles(const ScaledRows& src, DType dtype, const std::vector<GroupRange>& ranges,
                     const ScaledTensor& dst);

}  // namespace fp8flow::reference
