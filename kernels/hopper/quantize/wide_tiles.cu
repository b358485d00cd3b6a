// SPDX-License-Identifier: MIT
// 128x128 tiles of BF16 rows with a width that is a multiple of 128: transposed FP8 values with scales along
// the routed rows, alone or together with the row copy. Everything else: quantize_tiles.cu. Contract:
// kernels/ops/quantize.h.
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kRows = 4;  // per thread, 16 bytes of each
constexpr int kQuads = kTile / kRows;
constexpr int kColumnWords = kTile / 4;

constexpr int kThreadsOfRow = kTile / kUnit, kThreads = kThreadsOfRow * kQuads;
constexpr int kCtas = 2;  // per SM: 64 KB of loads in flight
// column maxima before the last reduction: pairs of BF16 from every warp
constexpr int kParts = kThreads / 32, kPartWords = kTile / 2;

struct WideJob {
    RowView src;
    RowView rows;  // optional
    RowScales row_scales;
    RowView columns;
    float* column_scales;  // [tile of rows, cols]
    DeviceGroups groups;
    int64_t extent;
    int cols, col_tiles, step_rows, step_cols;
    QuantizeRule rule;
};

__device__ __forceinline__ void load_tile(const WideJob& job, int64_t src_base, const RowTile& tile,
                                          int col_tile, uint4 (&words)[kRows]) {
    const int quad = static_cast<int>(threadIdx.x) / kThreadsOfRow,
              part = static_cast<int>(threadIdx.x) % kThreadsOfRow;
    const uint16_t* in = static_cast<const uint16_t*>(job.src.data) +
                         (src_base + tile.row + quad * kRows) * job.cols + col_tile * kTile + part * kUnit;
#pragma unroll
    for (int k = 0; k < kRows; ++k, in += job.cols) {
        words[k] = uint4{0, 0, 0, 0};
        if (quad * kRows + k < tile.count) words[k] = *reinterpret_cast<const uint4*>(in);
    }
}

// Index of the multipliers of a pair of columns: neighbouring threads access neighbouring banks.
__device__ __forceinline__ int pair_index(int pair) { return pair % 4 * kBlockThreads + pair / 4; }

// The row copy of the tile: maxima of 128 columns over 16 threads. Four rows are reduced together: every
// shuffle halves the rows of a thread, so that each of four neighbours ends with the maximum of one row,
// computes its scale, and broadcasts it.
template <DType kFp8>
__device__ __forceinline__ void write_rows(const WideJob& job, const uint4 (&words)[kRows],
                                           const RowTile& tile, int col_tile) {
    static_assert(kRows == 4 && kBlockThreads == 16);
    const int quad = static_cast<int>(threadIdx.x) / kBlockThreads,
              part = static_cast<int>(threadIdx.x) % kBlockThreads;
    const int64_t row = job.rows.base() + tile.row + quad * kRows;
    uint8_t* out = static_cast<uint8_t*>(job.rows.data) + row * job.cols + col_tile * kTile + part * kUnit;
    // without groups only the transposed copy has padding
    const int inside = job.groups.counts != nullptr ? tile.rows : tile.count;
    uint32_t pairs[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k)
        pairs[k] = max_bf16x2(max_bf16x2(abs_bf16x2(words[k].x), abs_bf16x2(words[k].y)),
                              max_bf16x2(abs_bf16x2(words[k].z), abs_bf16x2(words[k].w)));
    const bool upper = part % 2 != 0, odd = part / 2 % 2 != 0;  // upper: rows 2 and 3; odd: the second of two
    const uint32_t even_row = max_bf16x2(upper ? pairs[2] : pairs[0],
                                         __shfl_xor_sync(kFullMask, upper ? pairs[0] : pairs[2], 1)),
                   odd_row = max_bf16x2(upper ? pairs[3] : pairs[1],
                                        __shfl_xor_sync(kFullMask, upper ? pairs[1] : pairs[3], 1));
    uint32_t pair =
        max_bf16x2(odd ? odd_row : even_row, __shfl_xor_sync(kFullMask, odd ? even_row : odd_row, 2));
    pair = max_bf16x2(pair, __shfl_xor_sync(kFullMask, pair, 4));
    pair = max_bf16x2(pair, __shfl_xor_sync(kFullMask, pair, 8));
    const int own = part % 2 * 2 + part / 2 % 2;
    BlockScale scale = {0.0f, 0.0f, 0};
    if (quad * kRows + own < tile.count)
        scale = block_scale(max(low_magnitude(pair), high_magnitude(pair)), kFp8, false, job.rule);
    if (part < kRows && quad * kRows + own < inside) job.row_scales.store(row + own, col_tile, scale);
#pragma unroll
    for (int k = 0; k < kRows; ++k, out += job.cols) {
        const float multiplier = __shfl_sync(kFullMask, scale.multiplier, k / 2 + k % 2 * 2, kBlockThreads);
        float v[kUnit];
        unpack_unit(words[k], DType::bf16, v);
        if (quad * kRows + k < inside)  // padding 0 encodes to 0
            *reinterpret_cast<uint2*>(out) = encode_unit(v, multiplier, kFp8);
    }
}

// The column maxima of this warp's eight rows, as pairs of BF16.
__device__ __forceinline__ void store_maxima(const uint4 (&words)[kRows], uint4* part_pieces) {
    const int thread = static_cast<int>(threadIdx.x), part = thread % kThreadsOfRow;
    uint32_t largest[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        largest[j] = abs_bf16x2(word_of(words[0], j));
#pragma unroll
        for (int k = 1; k < kRows; ++k) largest[j] = max_bf16x2(largest[j], abs_bf16x2(word_of(words[k], j)));
        largest[j] = max_bf16x2(largest[j], __shfl_xor_sync(kFullMask, largest[j], kThreadsOfRow));
    }
    if (thread % 32 < kThreadsOfRow)
        part_pieces[thread / 32 * (kPartWords / 4) + part] =
            uint4{largest[0], largest[1], largest[2], largest[3]};
}

// From the maxima of all warps: multipliers and scales of a pair of columns, by one thread each.
template <DType kFp8>
__device__ __forceinline__ void scale_columns(const WideJob& job, const RowTile& tile, int col_tile,
                                              int64_t dst_base, const uint4* part_pieces,
                                              float* multipliers) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kPartWords) return;
    const uint32_t* parts = reinterpret_cast<const uint32_t*>(part_pieces) + thread;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) largest = max_bf16x2(largest, parts[i * kPartWords]);
    float* scales =
        job.column_scales + (dst_base + tile.row) / kTile * job.cols + col_tile * kTile + 2 * thread;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        BlockScale scale = {0.0f, 0.0f, 0};
        if (tile.count > 0)
            scale =
                block_scale(i == 0 ? low_magnitude(largest) : high_magnitude(largest), kFp8, false, job.rule);
        multipliers[pair_index(thread) * 2 + i] = scale.multiplier;
        scales[i] = scale.dequant;
    }
}

// The FP8 values of this thread's values in the transposed tile, a word for four rows of a column.
template <DType kFp8>
__device__ __forceinline__ void transpose_values(const uint4 (&words)[kRows], const float* multipliers,
                                                 uint32_t* transposed) {
    const int quad = static_cast<int>(threadIdx.x) / kThreadsOfRow,
              part = static_cast<int>(threadIdx.x) % kThreadsOfRow;
    // padding 0 encodes to 0
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 m = reinterpret_cast<const float2*>(multipliers)[pair_index(part * 4 + j)];
        float low[kRows], high[kRows];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const uint32_t pair = word_of(words[k], j);
            low[k] = __uint_as_float(pair << 16) * m.x;
            high[k] = __uint_as_float(pair & 0xFFFF0000u) * m.y;
        }
        uint32_t* out = transposed + transposed_index<kUnit>(part * kUnit + 2 * j, quad / 4) + quad % 4;
        out[0] = pack_fp8(low[0], low[1], low[2], low[3], kFp8);
        out[kColumnWords] = pack_fp8(high[0], high[1], high[2], high[3], kFp8);
    }
}

// BF16 [M, K] -> transposed FP8 [K, M] with 128x1 scales, with kBoth also FP8 [M, K] with 1x128 scales.
// Lower bound: reads every value once, writes its FP8 value once or twice, plus scales. At 32768 x 7168:
// columns 712 MB, 0.174 ms at 4.1 TB/s; both 954 MB, 0.233 ms.
// Grid-stride over tiles, columns fastest. A thread keeps 4 rows x 16 bytes as BF16. The loads of the next
// tile are issued as soon as these registers are free, so that they are in flight while the tile is stored:
// 64 KB per SM. Maxima of BF16 magnitudes are taken two at a time and stay BF16.
// Barriers (__syncthreads):
// 1  the column maxima of all warps are in shared memory, and the previous tile has been stored; a quarter
//    of the threads then computes multipliers and stores scales
// 2  the multipliers are in shared memory
// 3  the transposed tile is complete (a word: the FP8 values of four rows), and is stored in 16-byte
//    pieces of columns
// Deterministic: only maxima are reduced.
template <DType kFp8, bool kBoth>
__global__ void __launch_bounds__(kThreads, kCtas) quantize_wide_tiles_kernel(const WideJob job) {
    __shared__ uint4 part_pieces[kParts * kPartWords / 4];
    __shared__ float4 multiplier_pieces[kTile / 4];
    __shared__ uint4 transposed_pieces[kTransposedWords / 4];
    uint32_t* const transposed = reinterpret_cast<uint32_t*>(transposed_pieces);
    float* const multipliers = reinterpret_cast<float*>(multiplier_pieces);
    const int64_t src_base = job.src.base(), dst_base = job.columns.base();
    int row_tile = static_cast<int>(blockIdx.x) / job.col_tiles,
        col_tile = static_cast<int>(blockIdx.x) % job.col_tiles;
    TileWalker walker(job.groups, job.extent, 1);
    RowTile tile;
    uint4 words[kRows];
    bool more = walker.seek(row_tile, tile);
    if (more) load_tile(job, src_base, tile, col_tile, words);
    while (more) {
        store_maxima(words, part_pieces);
        if constexpr (kBoth) {
            write_rows<kFp8>(job, words, tile, col_tile);
#pragma unroll
            for (int k = 0; k < kRows; ++k) opaque(words[k]);
        }
        __syncthreads();
        scale_columns<kFp8>(job, tile, col_tile, dst_base, part_pieces, multipliers);
        __syncthreads();
        transpose_values<kFp8>(words, multipliers, transposed);

        const RowTile done = tile;
        const int done_col = col_tile;
        row_tile += job.step_rows;
        col_tile += job.step_cols;
        if (col_tile >= job.col_tiles) {
            col_tile -= job.col_tiles;
            ++row_tile;
        }
        more = walker.seek(row_tile, tile);
        if (more) load_tile(job, src_base, tile, col_tile, words);
        __syncthreads();
        store_tile_columns<kThreads, kUnit>(job.columns, transposed, dst_base + done.row, done.rows,
                                            done_col);
    }
}

}  // namespace

bool launch_quantize_wide_tiles(const TileSource& source, const TileShape& shape, const TileOutput& rows,
                                const TileOutput& columns, const QuantizeRule& rule, const Launch& launch) {
    const bool both = rows.share != Granularity::none;
    if (source.values.dtype != DType::bf16 || source.block_scales != nullptr || shape.batches != 1 ||
        source.rstd != nullptr || shape.cols % kTile != 0 || !source.values.vector)
        return false;
    if (columns.share != Granularity::block) return false;
    if (both &&
        (rows.share != Granularity::block || !rows.data.vector || rows.data.dtype != columns.data.dtype))
        return false;
    const int64_t row_tiles = ceil_div(shape.capacity, kTile) + shape.groups.num_groups;
    const int col_tiles = shape.cols / kTile;
    const unsigned grid = grid_for(row_tiles * col_tiles, launch, kCtas);
    const WideJob job = {.src = source.values,
                         .rows = rows.data,
                         .row_scales = rows.scales,
                         .columns = columns.data,
                         .column_scales = static_cast<float*>(columns.scales.data),
                         .groups = shape.groups,
                         .extent = shape.extent,
                         .cols = shape.cols,
                         .col_tiles = col_tiles,
                         .step_rows = static_cast<int>(grid) / col_tiles,
                         .step_cols = static_cast<int>(grid) % col_tiles,
                         .rule = rule};
    const auto kernel = of_fp8(columns.data.dtype, [&]<DType kFp8>() {
        return both ? quantize_wide_tiles_kernel<kFp8, true> : quantize_wide_tiles_kernel<kFp8, false>;
    });
    launch_kernel(kernel, grid, kThreads, launch, "quantize_wide_tiles", job);
    return true;
}

}  // namespace fp8flow::hopper::quantize
