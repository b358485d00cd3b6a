// SPDX-License-Identifier: MIT
// 128x128 tiles to FP8 in both orientations, from any source (quantize_tiles.h). Whole BF16 tiles run in
// wide_tiles.cu. Contract: kernels/ops/quantize.h.
#include "kernels/hopper/quantize/quantize_tiles.h"

#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize/quantize_rows.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 512;  // 16 threads per row, 4 rows per thread: 32 values in registers
constexpr int kRows = 4;
constexpr int kSubTiles = kTile / static_cast<int>(kMxBlock);
constexpr int kWarps = kThreads / 32;
constexpr int kSubWarps = kWarps / kSubTiles;  // warps that hold the 32 rows of an MX block

struct TileThread {
    int group, first_row, col;  // rows 4 * group .. 4 * group + 3; first_row and col within the tile
};
__device__ __forceinline__ TileThread tile_thread() {
    const int thread = static_cast<int>(threadIdx.x), group = thread / kBlockThreads;
    return {group, group * kRows, thread % kBlockThreads * kUnit};
}

// The 4 x 8 values of this thread; zeros outside the valid rows and the columns.
__device__ __forceinline__ void load_values(const TileSource& source, const RowTile& tile, int64_t col0,
                                            const TileThread& at, float (&v)[kRows][kUnit]) {
    RowView values = source.values;
    const int col = static_cast<int>(col0) + at.col;
    const int64_t base = values.base() + tile.row + at.first_row;
    values.data =
        static_cast<uint8_t*>(values.data) + tile.batch * source.batch_stride * size_of(values.dtype);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        if (at.first_row + k < tile.count && col < values.cols) {
            load_unit(values, base + k, col, v[k]);
        } else {
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[k][i] = 0.0f;
        }
    }
    if (col >= values.cols) return;
    if (source.block_scales != nullptr) {
        const float* scales = source.block_scales + col / kTile * source.scale_stride + base;
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const float scale = at.first_row + k < tile.count ? scales[k] : 0.0f;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[k][i] *= scale;
        }
    }
    if (source.rstd != nullptr) {
        float gamma[kUnit];
        load_unit(source.gamma, 0, col, gamma);
#pragma unroll
        for (int i = 0; i < kUnit; ++i)
            gamma[i] = source.gamma_offset != 0.0f ? source.gamma_offset + gamma[i] : gamma[i];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const float rstd = at.first_row + k < tile.count ? source.rstd[base + k] : 0.0f;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[k][i] = v[k][i] * rstd * gamma[i];
        }
    }
}

__device__ __forceinline__ void column_magnitudes(const float (&v)[kRows][kUnit], uint32_t (&amax)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
        float largest = 0.0f;  // fmaxf ignores a NaN
#pragma unroll
        for (int k = 0; k < kRows; ++k) largest = fmaxf(largest, fabsf(v[k][i]));
        amax[i] = __float_as_uint(largest);
        amax[i] = max(amax[i],
                      __shfl_xor_sync(kFullMask, amax[i], kBlockThreads));  // the other four rows of the warp
    }
}

// One half of the warp writes them for over_warps().
__device__ __forceinline__ void store_magnitudes(const uint32_t (&amax)[kUnit],
                                                 uint32_t (&part)[kWarps][kTile], const TileThread& at) {
    if (threadIdx.x % 32 >= kBlockThreads) return;
    uint4* to = reinterpret_cast<uint4*>(&part[threadIdx.x / 32][at.col]);
    to[0] = uint4{amax[0], amax[1], amax[2], amax[3]};
    to[1] = uint4{amax[4], amax[5], amax[6], amax[7]};
}

// Maximum of column `c` over warps [first, first + count), each with 8 rows.
__device__ __forceinline__ uint32_t over_warps(const uint32_t (&part)[kWarps][kTile], int c, int first,
                                               int count) {
    uint32_t amax = 0;
    for (int w = 0; w < count; ++w) amax = max(amax, part[first + w][c]);
    return amax;
}

struct TileJob {
    TileSource source;
    TileShape shape;
    TileOutput rows, columns;
    QuantizeRule rule;
};

constexpr bool is_per_block(Granularity share) {
    return share == Granularity::block || share == Granularity::mx;
}

// From the column maxima of every 8 rows: multipliers and scales of the columns, or the amax of the tile by
// four warps.
__device__ __forceinline__ void reduce_columns(const TileJob& job, const RowTile& tile, int64_t col0,
                                               const uint32_t (&part)[kWarps][kTile],
                                               float (&multipliers)[kSubTiles][kTile],
                                               uint32_t (&tile_amax)[kTile / 32]) {
    const TileOutput& columns = job.columns;
    const int thread = static_cast<int>(threadIdx.x), c = thread % kTile, sub = thread / kTile;
    const bool has_column = col0 + c < job.shape.cols;
    if (columns.share == Granularity::mx) {
        const int first = sub * static_cast<int>(kMxBlock);
        BlockScale scale = {0.0f, 0.0f, 0};
        if (first < tile.count)
            scale = block_scale(over_warps(part, c, sub * kSubWarps, kSubWarps), columns.data.dtype, true,
                                job.rule);
        multipliers[sub][c] = scale.multiplier;
        if (has_column && first < tile.rows)
            static_cast<uint8_t*>(columns.scales.data)[tile.batch * columns.scale_batch_stride +
                                                       (columns.data.base() + tile.row + first) / kMxBlock *
                                                           columns.scales.block_stride +
                                                       col0 + c] = scale.e8m0;
        return;
    }
    if (sub != 0) return;
    uint32_t column_amax = over_warps(part, c, 0, kWarps);
    if (columns.share == Granularity::block) {
        BlockScale scale = {0.0f, 0.0f, 0};
        if (tile.count > 0) scale = block_scale(column_amax, columns.data.dtype, false, job.rule);
        multipliers[0][c] = scale.multiplier;
        if (has_column)
            static_cast<float*>(
                columns.scales.data)[tile.batch * columns.scale_batch_stride +
                                     (columns.data.base() + tile.row) / kTile * columns.scales.block_stride +
                                     col0 + c] = scale.dequant;
    } else {
        for (int step = 16; step > 0; step /= 2)
            column_amax = max(column_amax, __shfl_xor_sync(kFullMask, column_amax, step));
        if (thread % 32 == 0) tile_amax[thread / 32] = column_amax;
    }
}

// Granularity::tile: stores the scale of the tile and returns its multiplier.
__device__ __forceinline__ float scale_tile(const TileJob& job, const RowTile& tile, int64_t col_tile,
                                            const uint32_t (&tile_amax)[kTile / 32]) {
    const TileOutput &rows = job.rows, &columns = job.columns;
    const uint32_t amax = max(max(tile_amax[0], tile_amax[1]), max(tile_amax[2], tile_amax[3]));
    const DType dtype = rows.share == Granularity::tile ? rows.data.dtype : columns.data.dtype;
    const BlockScale scale = block_scale(amax, dtype, false, job.rule);
    if (threadIdx.x == 0) {
        const auto store = [&](const TileOutput& output) {
            static_cast<float*>(output.scales.data)[tile.batch * output.scale_batch_stride +
                                                    output.scales.index(tile.row / kTile, col_tile)] =
                scale.dequant;
        };
        if (rows.share == Granularity::tile) store(rows);
        if (columns.share == Granularity::tile) store(columns);
    }
    return scale.multiplier;
}

// Stores the FP8 values by rows: with block scales, or with one multiplier.
__device__ __forceinline__ void write_rows(const TileJob& job, const RowTile& tile, int64_t col0,
                                           const TileThread& at, const float (&v)[kRows][kUnit],
                                           float multiplier) {
    const TileOutput& rows = job.rows;
    RowView fp8 = rows.data;
    RowScales scales = rows.scales;
    fp8.data = static_cast<uint8_t*>(fp8.data) + tile.batch * rows.batch_stride;
    const int64_t scale_shift = tile.batch * rows.scale_batch_stride;
    scales.data = static_cast<uint8_t*>(scales.data) + scale_shift * size_of(scales.dtype);
    const int col = static_cast<int>(col0) + at.col;
    const int64_t base = fp8.base() + tile.row + at.first_row;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        const int r = at.first_row + k;
        // without groups only the transposed copy has padding
        const bool inside = r < (job.shape.groups.counts != nullptr ? tile.rows : tile.count),
                   valid = r < tile.count;
        if (is_per_block(rows.share)) {
            // a half-warp owns the row: all of it is inside or none
            if (inside) quantize_unit(v[k], valid, fp8, scales, base + k, col, job.rule);
        } else if (inside && col < job.shape.cols) {
            store_fp8(fp8, base + k, col, valid ? encode_unit(v[k], multiplier, fp8.dtype) : uint2{0, 0});
        }
    }
}

// The FP8 values of this thread's values in the transposed tile, a word for four rows of a column; pads: 0.
__device__ __forceinline__ void transpose_values(const TileJob& job, const RowTile& tile, int64_t col0,
                                                 const TileThread& at, const float (&v)[kRows][kUnit],
                                                 const float (&multipliers)[kSubTiles][kTile],
                                                 float shared_multiplier, uint32_t* transposed) {
    const TileOutput& columns = job.columns;
    const int cols = job.shape.cols;
    const int sub = columns.share == Granularity::mx ? at.first_row / static_cast<int>(kMxBlock) : 0;
    const uint32_t valid_bytes = tile.count - at.first_row >= kRows ? 0xFFFFFFFFu
                                 : tile.count <= at.first_row
                                     ? 0u
                                     : (1u << (8 * (tile.count - at.first_row))) - 1u;
    uint32_t* const words = transposed + transposed_word(at.col, at.group);  // the same for all eight columns
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
        float m = shared_multiplier;
        if (is_per_block(columns.share))
            m = multipliers[sub][at.col + i];
        else if (columns.share == Granularity::column && col0 + at.col + i < cols)
            m = columns.multipliers[(tile.batch + tile.group) * cols + col0 + at.col + i];
        words[i * (kTile / 4)] =
            pack_fp8(v[0][i] * m, v[1][i] * m, v[2][i] * m, v[3][i] * m, columns.data.dtype) & valid_bytes;
    }
}

// Any source (TileSource) -> FP8 values by rows, transposed, or both, plus scales.
// Lower bound: reads every value once, writes its FP8 value once or twice, plus scales.
// A CTA takes tiles grid-stride, columns fastest; a thread keeps 4 rows x 8 columns in registers.
// Barriers (__syncthreads):
// 1  the column maxima of every 8 rows are in shared memory
// 2  the multipliers, or the amax of the tile, are in shared memory
// 3  the transposed tile is complete in shared memory (a word: the FP8 values of four rows); it is stored in
//    16-byte pieces of columns
// 4  the transposed tile has been read
// Deterministic: only maxima are reduced.
__global__ void __launch_bounds__(kThreads, 2) quantize_tiles_kernel(const TileJob job) {
    __shared__ alignas(16) uint32_t part[kWarps][kTile];
    __shared__ float multipliers[kSubTiles][kTile];
    __shared__ uint32_t tile_amax[kTile / 32];
    __shared__ alignas(16) uint32_t transposed[kTransposedWords];
    const TileThread at = tile_thread();
    const int cols = job.shape.cols;
    const int64_t col_tiles = (cols + kTile - 1) / kTile;
    const TileOutput &rows = job.rows, &columns = job.columns;
    TileWalker walker(job.shape.groups, job.shape.extent, job.shape.batches);
    RowTile tile;
    for (int64_t work = blockIdx.x; walker.seek(work / col_tiles, tile); work += gridDim.x) {
        const int64_t col_tile = work % col_tiles, col0 = col_tile * kTile;
        float v[kRows][kUnit];
        load_values(job.source, tile, col0, at, v);

        const bool of_tile = columns.share == Granularity::tile || rows.share == Granularity::tile;
        if (is_per_block(columns.share) || of_tile) {
            uint32_t amax[kUnit];
            column_magnitudes(v, amax);
            store_magnitudes(amax, part, at);
            __syncthreads();
            reduce_columns(job, tile, col0, part, multipliers, tile_amax);
            __syncthreads();
        }
        float shared_multiplier = 0.0f;  // for Granularity::tile and Granularity::tensor
        if (of_tile) shared_multiplier = scale_tile(job, tile, col_tile, tile_amax);
        if (rows.share == Granularity::tensor || columns.share == Granularity::tensor) {
            const TileOutput& output = rows.share == Granularity::tensor ? rows : columns;
            shared_multiplier = output.multipliers_are_scales ? div_float(1.0f, output.multipliers[0])
                                                              : output.multipliers[0];
        }

        if (rows.share != Granularity::none) write_rows(job, tile, col0, at, v, shared_multiplier);
        if (columns.share == Granularity::none) {
            __syncthreads();  // tile_amax may be overwritten
            continue;
        }
        transpose_values(job, tile, col0, at, v, multipliers, shared_multiplier, transposed);
        __syncthreads();
        uint8_t* out = static_cast<uint8_t*>(columns.data.data) + tile.batch * columns.batch_stride +
                       col0 * columns.data.cols + columns.data.base() + tile.row;
        store_transposed<kThreads>(transposed, out, columns.data.cols,
                                   static_cast<int>(min(static_cast<int64_t>(kTile), cols - col0)),
                                   tile.rows);
        __syncthreads();
    }
}

struct AmaxJob {
    TileSource source;
    TileShape shape;
    AmaxOf what;
    uint32_t* amax;
};

// The amax of everything, or of every column of every group. Reads every valid value once, in tiles as above.
// Deterministic: the order of integer atomic maxima does not matter.
__global__ void __launch_bounds__(kThreads, 2) tile_amax_kernel(const AmaxJob job) {
    __shared__ alignas(16) uint32_t part[kWarps][kTile];
    const TileThread at = tile_thread();
    const int thread = static_cast<int>(threadIdx.x), cols = job.shape.cols;
    const int64_t col_tiles = (cols + kTile - 1) / kTile;
    TileWalker walker(job.shape.groups, job.shape.extent, job.shape.batches);
    RowTile tile;
    uint32_t largest = 0;
    for (int64_t work = blockIdx.x; walker.seek(work / col_tiles, tile); work += gridDim.x) {
        const int64_t col0 = work % col_tiles * kTile;
        float v[kRows][kUnit];
        load_values(job.source, tile, col0, at, v);
        if (job.what == AmaxOf::everything) {
#pragma unroll
            for (int k = 0; k < kRows; ++k) largest = max(largest, unit_magnitude(v[k]));
            continue;
        }
        uint32_t amax[kUnit];
        column_magnitudes(v, amax);
        store_magnitudes(amax, part, at);
        __syncthreads();
        if (thread < kTile && col0 + thread < cols)
            atomicMax(job.amax + (tile.batch + tile.group) * cols + col0 + thread,
                      over_warps(part, thread, 0, kWarps));
        __syncthreads();
    }
    if (job.what == AmaxOf::columns) return;
    for (int step = 16; step > 0; step /= 2)
        largest = max(largest, __shfl_xor_sync(kFullMask, largest, step));
    if (thread % 32 == 0) atomicMax(job.amax, largest);
}

// One entry per thread: reads 4 bytes, writes 4 to 12. No reduction.
__global__ void table_scales_kernel(const TableScales table) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < table.entries;
         i += stride) {
        BlockScale scale = {0.0f, 0.0f, 0};
        if (table.counts == nullptr || table.counts[i / table.columns] > 0)
            scale = block_scale(table.amax[i], table.dtype, false, table.rule);
        table.amax[i] = __float_as_uint(scale.multiplier);
        if (table.scales != nullptr) table.scales[i] = scale.dequant;
        if (table.scales2 != nullptr) table.scales2[i] = scale.dequant;
    }
}

int64_t column_entries(const TileShape& shape) {
    return shape.batches * shape.groups.num_groups * shape.cols;
}
unsigned tile_grid(const TileShape& shape, const Launch& launch) {
    const int64_t row_tiles = (ceil_div(shape.capacity, kTile) + shape.groups.num_groups) * shape.batches;
    return grid_for(row_tiles * ceil_div(shape.cols, kTile), launch, 2);
}

}  // namespace

TileShape tile_shape(const TensorView& src, const RowGroups& groups, const TensorView& transposed) {
    const int64_t rows = src.dim(0), extent = transposed ? transposed.cols() : rows;
    return {.groups = device_groups(groups, rows),
            .extent = extent,
            .capacity = groups.num_groups > 0 ? groups.row_capacity : extent,
            .cols = static_cast<int>(src.cols())};
}

TileOutput tile_rows(const ScaledTensor& rows, Granularity share) {
    if (!rows) return {};
    TileOutput output{.share = share, .data = row_view(rows.data), .scales = row_scales(rows)};
    if (rows.data.rank == 3) output.batch_stride = rows.data.dim(1) * rows.data.dim(2);
    if (rows.scales.rank == 3) output.scale_batch_stride = rows.scales.dim(1) * rows.scales.dim(2);
    if (share == Granularity::tile) {
        output.scales.row_stride = rows.scales.cols();
        output.scales.block_stride = 1;
    }
    return output;
}

TileOutput tile_columns(const ScaledTensor& transposed, Granularity share) {
    TileOutput output = tile_rows(transposed, share);
    if (share == Granularity::tile) {
        output.scales.row_stride = 1;
        output.scales.block_stride = transposed.scales.cols();
    } else if (transposed) {
        output.scales.block_stride = transposed.data.dim(-2);
    }
    return output;
}

void launch_quantize_tiles(const TileSource& source, const TileShape& shape, const TileOutput& rows,
                           const TileOutput& columns, const QuantizeRule& rule, const Launch& launch) {
    if (shape.capacity == 0 || shape.cols == 0 || shape.batches == 0) return;
    if (launch_quantize_wide_tiles(source, shape, rows, columns, rule, launch)) return;
    if (rows.share == Granularity::none && launch_requantize_tiles(source, shape, columns, rule, launch))
        return;
    launch_kernel(quantize_tiles_kernel, tile_grid(shape, launch), kThreads, launch, "quantize_tiles",
                  TileJob{source, shape, rows, columns, rule});
}

void launch_tile_amax(const TileSource& source, const TileShape& shape, AmaxOf what, uint32_t* amax,
                      const Launch& launch) {
    const int64_t entries = what == AmaxOf::everything ? 1 : column_entries(shape);
    clear_memory(amax, entries * static_cast<int64_t>(sizeof(uint32_t)), launch, "clearing amax");
    if (shape.capacity == 0 || shape.cols == 0 || shape.batches == 0) return;
    if (what == AmaxOf::everything && shape.batches == 1 && source.block_scales == nullptr &&
        source.rstd == nullptr && launch_rows_amax(source.values, shape.groups, shape.capacity, amax, launch))
        return;
    launch_kernel(tile_amax_kernel, tile_grid(shape, launch), kThreads, launch, "tile_amax",
                  AmaxJob{source, shape, what, amax});
}

void launch_table_scales(const TableScales& table, const Launch& launch) {
    if (table.entries == 0) return;
    launch_kernel(table_scales_kernel, grid_for(ceil_div(table.entries, 256), launch), 256, launch,
                  "table_scales", table);
}

TileOutput launch_column_scales(const TileSource& source, const TileShape& shape, uint32_t* amax,
                                const QuantizeRule& rule, const ScaledTensor& columns, const Launch& launch) {
    launch_tile_amax(source, shape, AmaxOf::columns, amax, launch);
    launch_table_scales({.amax = amax,
                         .columns = shape.cols,
                         .counts = shape.groups.counts,
                         .entries = column_entries(shape),
                         .dtype = columns.data.dtype,
                         .rule = rule,
                         .scales = columns.scales.as<float>()},
                        launch);
    TileOutput output = tile_columns(columns, Granularity::column);
    output.multipliers = reinterpret_cast<const float*>(amax);
    return output;
}

void launch_tensor_scale(const TileSource& source, const TileShape& shape, uint32_t* amax, DType dtype,
                         const QuantizeRule& rule, const ScaledTensor& copy, const ScaledTensor& other,
                         const Launch& launch) {
    launch_tile_amax(source, shape, AmaxOf::everything, amax, launch);
    launch_table_scales({.amax = amax,
                         .columns = 1,
                         .entries = 1,
                         .dtype = dtype,
                         .rule = rule,
                         .scales = copy ? copy.scales.as<float>() : nullptr,
                         .scales2 = other ? other.scales.as<float>() : nullptr},
                        launch);
}

}  // namespace fp8flow::hopper::quantize
