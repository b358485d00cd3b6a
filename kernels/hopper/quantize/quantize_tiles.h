// SPDX-License-Identifier: MIT
// The 128x128 tile quantiser: one read of a tile gives FP8 values by rows, transposed FP8 values, or both,
// with one scale per block, per tile, per column of a group or for the whole tensor. quantize_columns,
// quantize_dual, quantize_tensor, quantize_weight, transpose_requantize and the transposed output of the norm
// launch it. Read next: quantize_tiles.cu.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stream.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/scales.h"

namespace fp8flow::hopper::quantize {

// The source of the tiles: plain values, FP8 values with 1x128 scales, or values that RMSNorm normalises on
// the way.
struct TileSource {
    RowView values;
    int64_t batch_stride = 0;             // elements from one batch to the next
    const float* block_scales = nullptr;  // of vec128 FP8 values: [K/128, scale_stride]
    int64_t scale_stride = 0;
    const float* rstd = nullptr;  // [rows]: value * rstd[row] * gamma[col]
    RowView gamma;
    float gamma_offset = 0.0f;  // 1: zero-centered gamma
};

// The tiles of all groups, counted from the first row of each group, times `batches` (experts of a weight).
struct TileShape {
    DeviceGroups groups;
    int64_t extent = 0;    // without groups: columns of the transposed copy, with padding
    int64_t capacity = 0;  // rows, at most
    int64_t batches = 1;
    int cols = 0;
};
TileShape tile_shape(const TensorView& src, const RowGroups& groups, const TensorView& transposed);

// Which values share a scale. column and tensor: an earlier kernel computes the multipliers and stores the
// scales.
enum class Granularity : uint8_t {
    none,    // no such output
    block,   // 128 values along the contraction
    mx,      // 32 values
    tile,    // 128 x 128
    column,  // a column of a group or batch: multipliers[group or batch][column]; transposed output only
    tensor,  // multipliers[0]
};

struct TileOutput {
    Granularity share = Granularity::none;
    RowView data;
    int64_t batch_stride = 0;  // FP8 values from one batch to the next
    // Scale tables with their own batch stride. Rows: row_scales(). Columns: block b of column c at b *
    // block_stride + c. tile: (tile row of the source, tile column) at row_stride and block_stride.
    RowScales scales;
    int64_t scale_batch_stride = 0;
    const float* multipliers = nullptr;
    bool multipliers_are_scales = false;  // tensor: multipliers[0] is a scale, the inverse of the multiplier
};
TileOutput tile_rows(const ScaledTensor& rows, Granularity share);
TileOutput tile_columns(const ScaledTensor& transposed, Granularity share);

void launch_quantize_tiles(const TileSource& source, const TileShape& shape, const TileOutput& rows,
                           const TileOutput& columns, const QuantizeRule& rule, const Launch& launch);

// The same for whole BF16 tiles (wide_tiles.cu): true if launched.
bool launch_quantize_wide_tiles(const TileSource& source, const TileShape& shape, const TileOutput& rows,
                                const TileOutput& columns, const QuantizeRule& rule, const Launch& launch);

// FP8 values with 1x128 scales to columns (requantize.cu): true if launched.
bool launch_requantize_tiles(const TileSource& source, const TileShape& shape, const TileOutput& columns,
                             const QuantizeRule& rule, const Launch& launch);

// One scale per column of a group from one read of aligned BF16 rows: true if launched.
// launch_quantize_group_columns chooses group_columns.cu (many groups that fit into a CTA), small_groups.cu
// (groups of a few hundred rows) or column_tiles.cu (all SMs on one group). `zeros`: column_tiles_zeros bytes
// that are zero before and after the launch.
struct GroupColumns {
    const TensorView& src;
    const TileShape& shape;
    const ScaledTensor& dst;
    QuantizeRule rule;
    void* zeros;
};
std::size_t column_tiles_zeros(const TileShape& shape);
bool launch_quantize_group_columns(const GroupColumns& args, const Launch& launch);
bool launch_quantize_small_groups(const GroupColumns& args, const Launch& launch);
bool launch_quantize_column_tiles(const GroupColumns& args, const Launch& launch);

// max|x| as bits: of the tensor into amax[0], or of every column of every group (batch) into
// amax[group][column]. Sets all entries.
enum class AmaxOf { everything, columns };
void launch_tile_amax(const TileSource& source, const TileShape& shape, AmaxOf what, uint32_t* amax,
                      const Launch& launch);

// Replaces amax bits by multipliers and stores the scales; a group of 0 rows has scale 0.
struct TableScales {
    uint32_t* amax;
    int64_t columns;                  // entries per group
    const int64_t* counts = nullptr;  // rows of the groups; null: none is empty
    int64_t entries;
    DType dtype;
    QuantizeRule rule;
    float* scales = nullptr;   // optional
    float* scales2 = nullptr;  // optional
};
void launch_table_scales(const TableScales& table, const Launch& launch);

// One scale per column of a group (or batch), stored in `columns`, the output that is returned; `amax`
// [group][column] holds its multipliers afterwards.
TileOutput launch_column_scales(const TileSource& source, const TileShape& shape, uint32_t* amax,
                                const QuantizeRule& rule, const ScaledTensor& columns, const Launch& launch);

// One scale for the whole tensor, stored in both copies (either may be absent); `amax` (one word) holds its
// multiplier afterwards.
void launch_tensor_scale(const TileSource& source, const TileShape& shape, uint32_t* amax, DType dtype,
                         const QuantizeRule& rule, const ScaledTensor& copy, const ScaledTensor& other,
                         const Launch& launch);

}  // namespace fp8flow::hopper::quantize
