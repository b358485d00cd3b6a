// SPDX-License-Identifier: MIT
// The scaling-aware FP8 transpose for weight gradients, all experts in one launch. Contract:
// kernels/ops/transpose.h.
#include "kernels/hopper/quantize/transpose.h"

#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/shift.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 128;  // a warp: 32 rows; a thread: 16 columns of 8 rows
constexpr int kCtas = 8;       // per SM: 128 KB in flight
constexpr int kRows = 8;
constexpr int kPiece = 16;  // bytes of a load or store
constexpr int kPieceWords = kPiece / 4;
constexpr int kPieces = kTile / kPiece;
constexpr int kColumnWords = kTile / 4;
constexpr int kWarpRows = 32, kScales = kTile / kWarpRows;  // kScales per lane: rows lane, lane + 32, ..

struct Transposer {
    RowView src, dst;
    RowScales scales;
    DeviceGroups groups;
    int64_t extent;
    float* tile_scales;
    int tile_cols;  // tiles per row of tiles
    int scale_stride;
    bool wide;  // 16-byte loads
};

// The part of a tile that a thread holds: 16 columns of 8 rows, and the scales of rows lane + 32 * i of the
// tile. Padding is 0.
struct Fragment {
    uint32_t words[kRows][kPieceWords];
    float scales[kScales];
};
__device__ __forceinline__ void load_tile(const Transposer& args, int64_t src_base, const TilePlace& place,
                                          int count, Fragment& fragment) {
    const int thread = static_cast<int>(threadIdx.x), first = thread / kPieces * kRows,
              col = place.first_col() + thread % kPieces * kPiece, dim = args.src.cols;
    const uint8_t* in =
        static_cast<const uint8_t*>(args.src.data) + (src_base + place.row + first) * dim + col;
    if (args.wide && col + kPiece <= dim) {
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += dim) {
            uint4 fp8 = {0, 0, 0, 0};
            if (first + k < count) fp8 = load_and_neighbour(in);
            fragment.words[k][0] = fp8.x, fragment.words[k][1] = fp8.y;
            fragment.words[k][2] = fp8.z, fragment.words[k][3] = fp8.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += dim) {
            uint32_t(&words)[kPieceWords] = fragment.words[k];
#pragma unroll 1
            for (int i = kPiece - 1; i >= 0; --i) {  // FP8 values are shifted in at the low end, one by one
                const uint32_t code = first + k < count && col + i < dim ? in[i] : 0;
#pragma unroll
                for (int w = kPieceWords - 1; w > 0; --w)
                    words[w] = __funnelshift_l(words[w - 1], words[w], 8);
                words[0] = words[0] << 8 | code;
            }
        }
    }
    const int lane = thread % kWarpRows;
#pragma unroll
    for (int i = 0; i < kScales; ++i) fragment.scales[i] = 0.0f;
    if (args.scales.dtype == DType::f32) {
        const float* scales = static_cast<const float*>(args.scales.data) +
                              args.scales.index(src_base + place.row + lane, place.col_tile);
#pragma unroll
        for (int i = 0; i < kScales; ++i, scales += kWarpRows * args.scales.row_stride)
            if (lane + i * kWarpRows < count) fragment.scales[i] = *scales;
    } else {
#pragma unroll
        for (int i = 0; i < kScales; ++i)
            if (lane + i * kWarpRows < count)
                fragment.scales[i] =
                    args.scales.load(src_base + place.row + lane + i * kWarpRows, place.col_tile);
    }
}

// Transposes a tile from the registers of all threads to shared memory. Every warp computes the target scale
// itself; FP8 values are shifted to it four at a time, and 4x4 squares of bytes transposed in registers.
// Returns the target scale.
template <DType kFp8>
__device__ __forceinline__ float transpose_tile(Fragment& fragment, uint32_t* transposed) {
    const int thread = static_cast<int>(threadIdx.x), part = thread % kPieces, octet = thread / kPieces,
              warp = thread / kWarpRows;
    uint32_t largest = 0;
    float own = 0.0f;  // of row `thread`
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
        const float scale = fragment.scales[i];
        largest = max(largest, scale > 0.0f ? __float_as_uint(scale) : 0u);
        if (i == warp) own = scale;
    }
    const float target = __uint_as_float(__reduce_max_sync(kFullMask, largest));
    const RowShift shift = row_shift<kFp8>(target, own);
    const int first = octet * kRows % kWarpRows;  // first row of this thread within the warp
    const uint32_t kept = __ballot_sync(kFullMask, shift.keep != 0);
    if (kept != kFullMask) {  // rows with scale 0, and pads
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            if ((kept >> (first + k) & 1) == 0)
                fragment.words[k][0] = fragment.words[k][1] = fragment.words[k][2] = fragment.words[k][3] = 0;
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        const RowShift row = {__shfl_sync(kFullMask, shift.factor, first + k),
                              kFp8 == DType::e5m2 ? __shfl_sync(kFullMask, shift.second, first + k) : 0,
                              kFullMask};
#pragma unroll
        for (int i = 0; i < kPieceWords; ++i)
            fragment.words[k][i] = shift_four<kFp8>(fragment.words[k][i], row);
    }
#pragma unroll
    for (int i = 0; i < kPieceWords; ++i) {  // bytes of 4 columns x 8 rows
        uint32_t squares[2][4];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const uint32_t(*words)[kPieceWords] = fragment.words + 4 * q;
            transpose_4x4({words[0][i], words[1][i], words[2][i], words[3][i]}, squares[q]);
        }
        uint32_t* out = transposed + transposed_index<kPiece>(part * kPiece, octet / 2) + octet % 2 * 2 +
                        i * 4 * kColumnWords;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<uint2*>(out + c * kColumnWords) = uint2{squares[0][c], squares[1][c]};
    }
    return target;
}

// Stores the transposed tile in pieces of 16 rows, 8 threads per column: whole lines of 128 bytes. `aligned`:
// every column starts at a multiple of 16 bytes.
__device__ __forceinline__ void store_columns(const Transposer& args, const uint32_t* transposed,
                                              int64_t dst_base, bool aligned, const TilePlace& place,
                                              int rows) {
    const int piece = static_cast<int>(threadIdx.x) % kPieces, first = piece * kPiece,
              cols = min(kTile, args.src.cols - place.first_col());
    const int64_t stride = args.dst.cols;
    int col = static_cast<int>(threadIdx.x) / kPieces;
    uint8_t* out = static_cast<uint8_t*>(args.dst.data) + (place.first_col() + col) * stride + dst_base +
                   place.row + first;
    if (aligned && rows == kTile && cols == kTile)
        return store_whole_columns<kThreads, kPiece>(transposed, col, piece, out, stride);
#pragma unroll 1
    for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
        if (col < cols) {
            const uint4 fp8 =
                *reinterpret_cast<const uint4*>(transposed + transposed_index<kPiece>(col, piece));
            if (first + kPiece <= rows && aligned) {
                *reinterpret_cast<uint4*>(out) = fp8;
            } else {
                const uint32_t words[kPieceWords] = {fp8.x, fp8.y, fp8.z, fp8.w};
#pragma unroll
                for (int r = 0; r < kPiece; ++r)
                    if (first + r < rows) out[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
            }
        }
        col += kThreads / kPieces;
        out += kThreads / kPieces * stride;
    }
}

// FP8 [M, dim] with power-of-two 1x128 scales -> FP8 [dim, M] with one scale per 128x128 tile (tile128): FP8
// values are shifted to the target scale, not dequantised.
// Lower bound: reads and writes every FP8 value once, reads 128 scales and writes one per tile: 2.06 bytes
// per value, 0.118 ms at 32768 x 7168 and 4.1 TB/s.
// Grid: one CTA per tile, rows fastest, so that concurrent CTAs write neighbouring parts of the same columns
// (columns fastest: 4 % slower). A 16-byte load prefetches 256 bytes into L2, for the tile to the right (3
// %). Eight CTAs per SM; each issues all of its 16 KB of loads at once, after one round of loads that finds
// padding rows. The other seven hide its latency.
// Barriers (__syncthreads): the transposed tile is complete. If a CTA takes several tiles (SM limit, or more
// than kMostWaves), a second barrier follows the stores.
// Deterministic: only maxima are reduced; every warp computes the target scale of the tile itself.
template <DType kFp8>
__global__ void __launch_bounds__(kThreads, kCtas) transpose_kernel(const Transposer args) {
    __shared__ uint4 transposed_pieces[kTile * kPieces];
    uint32_t* const transposed = reinterpret_cast<uint32_t*>(transposed_pieces);
    pdl_wait();
    const int64_t src_base = args.src.base(), dst_base = args.dst.base();
    const int64_t end = args.groups.counts != nullptr ? args.groups.total() : args.extent;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(args.dst.data) | static_cast<uintptr_t>(dst_base | args.dst.cols)) %
            kPiece ==
        0;
    const unsigned row_tiles = row_tiles_of(end), tiles = row_tiles * static_cast<unsigned>(args.tile_cols);
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TilePlace place = rows_fastest(tile, row_tiles);
        if (tile != blockIdx.x) __syncthreads();
        const AlignedTile rows = aligned_tile(args.groups, end, place.row);
        Fragment fragment;
        load_tile(args, src_base, place, rows.count, fragment);
        const float target = transpose_tile<kFp8>(fragment, transposed);
        if (threadIdx.x == 0)
            args.tile_scales[(dst_base + place.row) / kTile * args.scale_stride + place.col_tile] = target;
        __syncthreads();
        store_columns(args, transposed, dst_base, aligned, place, rows.rows);
    }
}

}  // namespace

void launch_transpose_tiles(const ScaledTensor& src, const RowGroups& groups, const ScaledTensor& dst,
                            const Launch& launch) {
    const int64_t rows = src.data.dim(0), dim = src.data.cols(), extent = dst.data.cols();
    const int64_t capacity = groups.num_groups > 0 ? groups.row_capacity : extent;
    if (capacity == 0 || dim == 0) return;
    const int64_t tile_cols = ceil_div(dim, kTile), tiles = tile_cols * ceil_div(capacity, kTile);
    const bool wide = dim % kPiece == 0 && is_aligned(src.data.data);
    const auto kernel = of_fp8(src.data.dtype, [&]<DType kFp8>() { return transpose_kernel<kFp8>; });
    const Transposer job = {.src = row_view(src.data),
                            .dst = row_view(dst.data),
                            .scales = row_scales(src),
                            .groups = device_groups(groups, rows),
                            .extent = extent,
                            .tile_scales = dst.scales.as<float>(),
                            .tile_cols = static_cast<int>(tile_cols),
                            .scale_stride = static_cast<int>(dst.scales.cols()),
                            .wide = wide};
    constexpr int kMostWaves = 32;  // the capacity may be much larger than the number of rows
    const unsigned grid = grid_for(tiles, launch, launch.sm_limit > 0 ? kCtas : kMostWaves * kCtas);
    launch_pdl(kernel, grid, kThreads, 0, launch, "transpose_fp8", job);
}

}  // namespace fp8flow::hopper::quantize

namespace fp8flow {

using namespace hopper::quantize;

void HopperOps::do_transpose_fp8(const op::TransposeFp8& args, const Launch& launch) {
    launch_transpose_tiles(args.src, args.groups, args.dst, launch);
}

}  // namespace fp8flow
