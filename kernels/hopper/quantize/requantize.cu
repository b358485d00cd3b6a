// SPDX-License-Identifier: MIT
// FP8 rows to transposed FP8 with new scales along the routed rows: the double quantisation that the
// scaling-aware transpose avoids. Widths that are no multiple of 128: quantize_tiles.cu. Contract:
// kernels/ops/transpose.h.
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 128;  // a warp: 32 rows; a thread: 16 columns of 8 rows
constexpr int kCtas = 7;       // per SM: 112 KB in flight
constexpr int kRows = 8;
constexpr int kPiece = 16, kPieces = kTile / kPiece;  // bytes of a load or store
constexpr int kOctets = kTile / kRows;
constexpr int kColumnWords = kTile / 4;

struct RequantizeJob {
    RowView src;
    const float* block_scales;
    int64_t block_scale_stride;
    RowView columns;
    float* column_scales;  // [tile of rows, cols]
    DeviceGroups groups;
    int64_t extent;
    int cols, col_tiles;
    QuantizeRule rule;
};

// Four neighbouring values of a row.
template <DType kSource> __device__ __forceinline__ void decode(uint32_t fp8, float scale, float (&v)[4]) {
    const float2 low = unpack_fp8x2(static_cast<uint16_t>(fp8), kSource),
                 high = unpack_fp8x2(static_cast<uint16_t>(fp8 >> 16), kSource);
    v[0] = low.x * scale, v[1] = low.y * scale, v[2] = high.x * scale, v[3] = high.y * scale;
}

// The column that has its maximum and multiplier at `position`. The order avoids bank conflicts of 16-byte
// accesses.
__device__ __forceinline__ int column_at(int position) {
    return position % 32 / 4 * kPiece + position / 32 * 4 + position % 4;
}

// This thread's 16 FP8 values of eight rows, and the scales of these rows.
__device__ __forceinline__ void load_tile(const RequantizeJob& job, const TilePlace& place, int count,
                                          int64_t src_base, uint4 (&words)[kRows], float (&scales)[kRows]) {
    const int thread = static_cast<int>(threadIdx.x), octet = thread / kPieces, part = thread % kPieces,
              first_of_warp = octet * kRows % 32;
    const uint8_t* in = static_cast<const uint8_t*>(job.src.data) +
                        (src_base + place.row + octet * kRows) * job.cols + place.first_col() + part * kPiece;
#pragma unroll
    for (int k = 0; k < kRows; ++k, in += job.cols) {
        words[k] = uint4{0, 0, 0, 0};
        if (octet * kRows + k < count) words[k] = load_and_neighbour(in);
    }
    float own = 0.0f;  // the scale of row `thread`, for this warp
    if (thread < count)
        own = job.block_scales[place.col_tile * job.block_scale_stride + src_base + place.row + thread];
#pragma unroll
    for (int k = 0; k < kRows; ++k) scales[k] = __shfl_sync(kFullMask, own, first_of_warp + k);
}

// The column maxima of this thread's eight rows.
template <DType kSource>
__device__ __forceinline__ void store_maxima(const uint4 (&words)[kRows], const float (&scales)[kRows],
                                             uint4* pieces) {
    const int octet = static_cast<int>(threadIdx.x) / kPieces, part = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float largest[4] = {};  // fmaxf ignores a NaN
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            float v[4];
            decode<kSource>(word_of(words[k], j), scales[k], v);
#pragma unroll
            for (int e = 0; e < 4; ++e) largest[e] = fmaxf(largest[e], fabsf(v[e]));
        }
        pieces[octet * (kTile / 4) + j * 8 + part] =
            uint4{__float_as_uint(largest[0]), __float_as_uint(largest[1]), __float_as_uint(largest[2]),
                  __float_as_uint(largest[3])};
    }
}

// The new FP8 values of this thread's values in the transposed tile.
template <DType kSource, DType kFp8>
__device__ __forceinline__ void transpose_values(const uint4 (&words)[kRows], const float (&scales)[kRows],
                                                 const float4* multipliers, uint32_t* transposed) {
    const int octet = static_cast<int>(threadIdx.x) / kPieces, part = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 m = multipliers[j * 8 + part];
        uint32_t squares[2][4];  // a word: four rows of a column
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            float v[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                decode<kSource>(word_of(words[4 * q + k], j), scales[4 * q + k], v[k]);
            squares[q][0] = pack_fp8(v[0][0] * m.x, v[1][0] * m.x, v[2][0] * m.x, v[3][0] * m.x, kFp8);
            squares[q][1] = pack_fp8(v[0][1] * m.y, v[1][1] * m.y, v[2][1] * m.y, v[3][1] * m.y, kFp8);
            squares[q][2] = pack_fp8(v[0][2] * m.z, v[1][2] * m.z, v[2][2] * m.z, v[3][2] * m.z, kFp8);
            squares[q][3] = pack_fp8(v[0][3] * m.w, v[1][3] * m.w, v[2][3] * m.w, v[3][3] * m.w, kFp8);
        }
        uint32_t* out = transposed + transposed_index<kPiece>(part * kPiece, octet / 2) + octet % 2 * 2 +
                        j * 4 * kColumnWords;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<uint2*>(out + c * kColumnWords) = uint2{squares[0][c], squares[1][c]};
    }
}

// FP8 rows with 1x128 scales -> transposed FP8 with 128x1 scales along the routed rows.
// Lower bound: reads and writes every FP8 value once, reads and writes 128 scales per tile: 2.06 bytes per
// value, 0.118 ms at 32768 x 7168 and 4.1 TB/s. About 10 instructions per value; an SM can issue 15 in that
// time.
// Grid: one CTA per 128 x 128 tile, in the order and with the loads of transpose.cu. All 16 KB of a tile are
// loaded at once; seven CTAs per SM hide the latency (six: 4.5 % slower, eight: 1 %). Values stay FP8 in
// registers: they are decoded once for the maxima, and again for the new FP8 values.
// Barriers (__syncthreads):
// 1  the column maxima of every 8 rows are in shared memory; a thread then computes the scale of one column
// 2  the multipliers are in shared memory, the maxima have been read: the transposed tile overwrites them
// 3  the transposed tile is complete, and is stored in 16-byte pieces of columns
// 4  only if a CTA has another tile: this tile has been stored
// Deterministic: only maxima are reduced.
template <DType kSource, DType kFp8>
__global__ void __launch_bounds__(kThreads, kCtas) requantize_kernel(const RequantizeJob job) {
    __shared__ uint4 pieces[kTile * kPieces];  // first the maxima of every 8 rows, then the transposed tile
    __shared__ float4 multiplier_pieces[kTile / 4];
    uint32_t* const transposed = reinterpret_cast<uint32_t*>(pieces);
    const int thread = static_cast<int>(threadIdx.x);
    pdl_wait();
    const int64_t src_base = job.src.base(), dst_base = job.columns.base();
    const int64_t end = job.groups.counts != nullptr ? job.groups.total() : job.extent;
    const unsigned row_tiles = row_tiles_of(end), tiles = row_tiles * static_cast<unsigned>(job.col_tiles);
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TilePlace place = rows_fastest(tile, row_tiles);
        const int64_t row = place.row;
        if (tile != blockIdx.x) __syncthreads();
        const AlignedTile rows = aligned_tile(job.groups, job.extent, row);
        uint4 words[kRows];
        float scales[kRows];
        load_tile(job, place, rows.count, src_base, words, scales);
        store_maxima<kSource>(words, scales, pieces);
#pragma unroll
        for (int k = 0; k < kRows; ++k) opaque(words[k]);
        __syncthreads();
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < kOctets; ++i) amax = max(amax, transposed[i * kTile + thread]);
        BlockScale scale = {0.0f, 0.0f, 0};
        if (rows.count > 0) scale = block_scale(amax, kFp8, false, job.rule);
        reinterpret_cast<float*>(multiplier_pieces)[thread] = scale.multiplier;
        job.column_scales[(dst_base + row) / kTile * job.cols + place.first_col() + column_at(thread)] =
            scale.dequant;
        __syncthreads();
        transpose_values<kSource, kFp8>(words, scales, multiplier_pieces, transposed);
        __syncthreads();
        store_tile_columns<kThreads, kPiece>(job.columns, transposed, dst_base + row, rows.rows,
                                             place.col_tile);
    }
}

}  // namespace

bool launch_requantize_tiles(const TileSource& source, const TileShape& shape, const TileOutput& columns,
                             const QuantizeRule& rule, const Launch& launch) {
    const DType from = source.values.dtype;
    if (!is_fp8(from) || source.block_scales == nullptr || columns.share != Granularity::block ||
        shape.batches != 1 || shape.cols % kTile != 0 || !source.values.vector)
        return false;
    const RequantizeJob job = {.src = source.values,
                               .block_scales = source.block_scales,
                               .block_scale_stride = source.scale_stride,
                               .columns = columns.data,
                               .column_scales = static_cast<float*>(columns.scales.data),
                               .groups = shape.groups,
                               .extent = shape.extent,
                               .cols = shape.cols,
                               .col_tiles = shape.cols / kTile,
                               .rule = rule};
    const auto kernel = of_fp8(from, [&]<DType kFrom>() {
        return of_fp8(columns.data.dtype, [&]<DType kTo>() { return requantize_kernel<kFrom, kTo>; });
    });
    constexpr int kMostWaves = 32;  // the capacity may be far above the number of rows
    const int64_t tiles = ceil_div(shape.capacity, kTile) * job.col_tiles;
    const unsigned grid = grid_for(tiles, launch, launch.sm_limit > 0 ? kCtas : kMostWaves * kCtas);
    launch_pdl(kernel, grid, kThreads, 0, launch, "requantize_tiles", job);
    return true;
}

}  // namespace fp8flow::hopper::quantize
