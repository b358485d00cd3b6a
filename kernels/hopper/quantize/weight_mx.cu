// SPDX-License-Identifier: MIT
// Weights to their MXFP8 dgrad copy: blocks of 32 along N, stored by columns. Other shapes, and both copies
// at once: quantize_tiles.cu. Contract: kernels/ops/quantize.h.
#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize/weight_tiles.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kThreads = 128;  // a warp: the 32 rows of a block; a thread: 16 bytes of 8 rows
constexpr int kCtas = 8;       // per SM: 128 KB in flight
constexpr int kRows = 8;
constexpr int kTileRows = static_cast<int>(kBlock), kUnits = 8;  // of 16 bytes each in a row of a tile
constexpr int kPiece = 16, kPieces = kTileRows / kPiece;         // of a transposed column
constexpr int kColumnWords = kTileRows / 4;

template <DType kSource> constexpr int kUnitCols = kSource == DType::f32 ? 4 : 8;
template <DType kSource> constexpr int kTileCols = kUnits* kUnitCols<kSource>;

struct MxJob {
    const uint8_t* src;
    uint8_t *fp8, *scales;
    int64_t scale_batch_stride, scale_stride;  // from one block of rows to the next
    int row_tiles, col_tiles, tiles;
    MxRounding rounding;
};

__device__ __forceinline__ uint32_t pick(const uint32_t (&words)[4], int i) {
    return i == 0 ? words[0] : i == 1 ? words[1] : i == 2 ? words[2] : words[3];
}

// Maxima of the 32 rows of a block for the four words of this thread. BF16: a word is a pair of columns;
// FP32: the bits of one column.
template <DType kSource>
__device__ __forceinline__ void block_maxima(const uint4 (&words)[kRows], uint32_t (&largest)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if constexpr (kSource == DType::f32) {
            float most = 0.0f;  // fmaxf ignores a NaN
#pragma unroll
            for (int k = 0; k < kRows; ++k) most = fmaxf(most, fabsf(__uint_as_float(word_of(words[k], j))));
            largest[j] = __float_as_uint(most);
#pragma unroll
            for (int step = kUnits; step < 32; step *= 2)
                largest[j] = max(largest[j], __shfl_xor_sync(kFullMask, largest[j], step));
        } else {
            largest[j] = abs_bf16x2(word_of(words[0], j));
#pragma unroll
            for (int k = 1; k < kRows; ++k)
                largest[j] = max_bf16x2(largest[j], abs_bf16x2(word_of(words[k], j)));
#pragma unroll
            for (int step = kUnits; step < 32; step *= 2)
                largest[j] = max_bf16x2(largest[j], __shfl_xor_sync(kFullMask, largest[j], step));
        }
    }
}

// The scales of the quarter of its columns that this thread computes, from the maximum `own` of their word,
// and the FP8 values of all its values in the transposed tile.
template <DType kSource, DType kFp8>
__device__ __forceinline__ void encode_tile(const uint4 (&words)[kRows], uint32_t own, MxRounding rounding,
                                            uint8_t* scales, uint32_t* transposed) {
    constexpr int kCols = kUnitCols<kSource>;
    const int octet = static_cast<int>(threadIdx.x) / kUnits, unit = static_cast<int>(threadIdx.x) % kUnits,
              quarter = octet % 4;
    if constexpr (kSource == DType::f32) {
        const MxScale scale = mx_scale(__uint_as_float(own), kFp8, rounding);
        scales[quarter] = scale.code;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float m = __shfl_sync(kFullMask, scale.multiplier, j * kUnits + unit);
            uint32_t fp8[2];
#pragma unroll
            for (int q = 0; q < 2; ++q)
                fp8[q] = pack_fp8(__uint_as_float(word_of(words[4 * q], j)) * m,
                                  __uint_as_float(word_of(words[4 * q + 1], j)) * m,
                                  __uint_as_float(word_of(words[4 * q + 2], j)) * m,
                                  __uint_as_float(word_of(words[4 * q + 3], j)) * m, kFp8);
            *reinterpret_cast<uint2*>(transposed + transposed_index<kCols>(unit * kCols + j, octet / 2) +
                                      octet % 2 * 2) = uint2{fp8[0], fp8[1]};
        }
    } else {
        const MxScale low = mx_scale(__uint_as_float(low_magnitude(own)), kFp8, rounding),
                      high = mx_scale(__uint_as_float(high_magnitude(own)), kFp8, rounding);
        *reinterpret_cast<uint16_t*>(scales + 2 * quarter) =
            static_cast<uint16_t>(low.code | uint32_t{high.code} << 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float m_low = __shfl_sync(kFullMask, low.multiplier, j * kUnits + unit),
                        m_high = __shfl_sync(kFullMask, high.multiplier, j * kUnits + unit);
            uint32_t fp8_low[2], fp8_high[2];
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                float a[4], b[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const uint32_t pair = word_of(words[4 * q + k], j);
                    a[k] = __uint_as_float(pair << 16) * m_low;
                    b[k] = __uint_as_float(pair & 0xFFFF0000u) * m_high;
                }
                fp8_low[q] = pack_fp8(a[0], a[1], a[2], a[3], kFp8);
                fp8_high[q] = pack_fp8(b[0], b[1], b[2], b[3], kFp8);
            }
            uint32_t* out =
                transposed + transposed_index<kCols>(unit * kCols + 2 * j, octet / 2) + octet % 2 * 2;
            *reinterpret_cast<uint2*>(out) = uint2{fp8_low[0], fp8_low[1]};
            *reinterpret_cast<uint2*>(out + kColumnWords) = uint2{fp8_high[0], fp8_high[1]};
        }
    }
}

// Weights [E, N, K] -> transposed FP8 [E, K, N] with one E8M0 scale per 32 values along N.
// Lower bound: reads 2 or 4 bytes per weight, writes an FP8 value and 1/32 scale: from BF16 at 32 x 8192 x
// 5120 4.07 GB, 0.99 ms at 4.1 TB/s. About 5 instructions per weight; an SM can issue 20 in that time.
// Grid: one CTA per tile of 128 rows x 128 bytes, eight CTAs per SM. All 16 KB of a tile are loaded at once.
// A warp has the 32 rows of a block: maxima take shuffles, and each of the four lanes with the same columns
// computes the scales of a quarter of them.
// Barriers (__syncthreads): the transposed tile is complete, and is stored in whole lines of 128 bytes. If a
// CTA takes several tiles (SM limit), a second barrier follows the stores.
// Deterministic: only maxima are reduced.
template <DType kSource, DType kFp8>
__global__ void __launch_bounds__(kThreads, kCtas) mx_columns_kernel(const MxJob job) {
    constexpr int kCols = kUnitCols<kSource>, kWidth = kTileCols<kSource>;
    __shared__ uint4 transposed_pieces[kWidth * kPieces];
    uint32_t* const transposed = reinterpret_cast<uint32_t*>(transposed_pieces);
    const int thread = static_cast<int>(threadIdx.x), octet = thread / kUnits, unit = thread % kUnits,
              warp = thread / 32;
    const int64_t rows = int64_t{job.row_tiles} * kTileRows, cols = int64_t{job.col_tiles} * kWidth;
    for (int tile = static_cast<int>(blockIdx.x); tile < job.tiles; tile += static_cast<int>(gridDim.x)) {
        if (tile != static_cast<int>(blockIdx.x)) __syncthreads();
        const int row_of_tiles = tile / job.col_tiles, batch = row_of_tiles / job.row_tiles,
                  row_tile = row_of_tiles % job.row_tiles;
        const int64_t col0 = int64_t{tile % job.col_tiles} * kWidth;
        const int64_t stride = cols * (16 / kCols);
        const uint8_t* in = job.src + (int64_t{row_of_tiles} * kTileRows + octet * kRows) * stride +
                            col0 * (16 / kCols) + unit * 16;
        uint4 words[kRows];
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += stride) words[k] = *reinterpret_cast<const uint4*>(in);
        uint32_t largest[4];
        block_maxima<kSource>(words, largest);
        uint8_t* const scales = job.scales + batch * job.scale_batch_stride +
                                (int64_t{row_tile} * (kTileRows / 32) + warp) * job.scale_stride + col0 +
                                unit * kCols;
        encode_tile<kSource, kFp8>(words, pick(largest, octet % 4), job.rounding, scales, transposed);
        __syncthreads();
        const int piece = thread % kPieces;
        const int col = thread / kPieces;
        uint8_t* out =
            job.fp8 + (batch * cols + col0 + col) * rows + int64_t{row_tile} * kTileRows + piece * kPiece;
        store_whole_columns<kThreads, kCols, kWidth>(transposed, col, piece, out, rows);
    }
}

}  // namespace

bool launch_mx_columns(const TensorView& src, const QuantizeRule& rule, const ScaledTensor& dgrad,
                       const Launch& launch) {
    const int64_t rows = src.dim(-2), cols = src.dim(-1), batches = src.rank == 3 ? src.dim(0) : 1;
    if (src.dtype != DType::f32 && src.dtype != DType::bf16) return false;
    const int64_t width = src.dtype == DType::f32 ? kTileCols<DType::f32> : kTileCols<DType::bf16>;
    if (rows % kTileRows != 0 || cols % width != 0) return false;
    for (const void* data : {src.data, dgrad.data.data, dgrad.scales.data})
        if (!is_aligned(data)) return false;
    const int64_t tiles = batches * (rows / kTileRows) * (cols / width);
    if (tiles == 0 || tiles > INT32_MAX / 2) return false;
    const MxJob job = {
        .src = static_cast<const uint8_t*>(src.data),
        .fp8 = static_cast<uint8_t*>(dgrad.data.data),
        .scales = static_cast<uint8_t*>(dgrad.scales.data),
        .scale_batch_stride = dgrad.scales.rank == 3 ? dgrad.scales.dim(1) * dgrad.scales.dim(2) : 0,
        .scale_stride = cols,
        .row_tiles = static_cast<int>(rows / kTileRows),
        .col_tiles = static_cast<int>(cols / width),
        .tiles = static_cast<int>(tiles),
        .rounding = rule.mx_rounding};
    const auto kernel = of_fp8(dgrad.data.dtype, [&]<DType kFp8>() {
        return src.dtype == DType::f32 ? mx_columns_kernel<DType::f32, kFp8>
                                       : mx_columns_kernel<DType::bf16, kFp8>;
    });
    launch_kernel(kernel, grid_of_items(tiles, launch, kCtas), kThreads, launch, "mx_columns", job);
    return true;
}

}  // namespace fp8flow::hopper::quantize
