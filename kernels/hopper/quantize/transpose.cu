// SPDX-License-Identifier: MIT
// The scaling-aware FP8 transpose for weight gradients, all experts in one launch. Contract:
// kernels/ops/transpose.h.
#include "kernels/hopper/quantize/transpose.h"

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/shift.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow {

using namespace hopper;

namespace hopper {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 128;  // a warp: 32 rows; a thread: 16 columns of 8 rows
constexpr int kCtas = 8;       // of an SM: 128 KB of codes on their way
constexpr int kRows = 8;
constexpr int kPiece = 16;  // codes of one load or store
constexpr int kPieceWords = kPiece / 4;
constexpr int kPieces = kTile / kPiece;
constexpr int kColumnWords = kTile / 4;
constexpr int kWarpRows = 32, kScales = kTile / kWarpRows;  // of a lane: rows lane, lane + 32, ..

struct Transposer {
    RowView src, dst;
    RowScales scales;
    DeviceGroups groups;
    int64_t extent;
    float* tile_scales;
    int tile_cols;  // tiles side by side
    int scale_stride;
    bool wide;  // 16-byte loads
};

// What a thread holds of a tile: 16 columns of 8 rows, and the scales of rows lane + 32 * i of the whole
// tile; nothing of pads, which are zeros.
struct Held {
    uint32_t words[kRows][kPieceWords];
    float scales[kScales];
};
__device__ __forceinline__ void fetch(const Transposer& args, int64_t src_base, const TilePlace& place,
                                      int count, Held& held) {
    const int thread = static_cast<int>(threadIdx.x), first = thread / kPieces * kRows,
              col = place.first_col() + thread % kPieces * kPiece, dim = args.src.cols;
    const uint8_t* in =
        static_cast<const uint8_t*>(args.src.data) + (src_base + place.row + first) * dim + col;
    if (args.wide && col + kPiece <= dim) {
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += dim) {
            uint4 codes = {0, 0, 0, 0};
            if (first + k < count) codes = load_and_neighbour(in);
            held.words[k][0] = codes.x, held.words[k][1] = codes.y;
            held.words[k][2] = codes.z, held.words[k][3] = codes.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += dim) {
            uint32_t(&words)[kPieceWords] = held.words[k];
#pragma unroll 1
            for (int i = kPiece - 1; i >= 0; --i) {  // one code after the other enters at the low end
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
    for (int i = 0; i < kScales; ++i) held.scales[i] = 0.0f;
    if (args.scales.dtype == DType::f32) {
        const float* scales = static_cast<const float*>(args.scales.data) +
                              args.scales.index(src_base + place.row + lane, place.col_tile);
#pragma unroll
        for (int i = 0; i < kScales; ++i, scales += kWarpRows * args.scales.row_stride)
            if (lane + i * kWarpRows < count) held.scales[i] = *scales;
    } else {
#pragma unroll
        for (int i = 0; i < kScales; ++i)
            if (lane + i * kWarpRows < count)
                held.scales[i] =
                    args.scales.load(src_base + place.row + lane + i * kWarpRows, place.col_tile);
    }
}

// From the registers of all threads to `turned`: scales are compared by every warp alone, rows shifted four
// codes at a time, and 4x4 squares of bytes turned in registers. The target.
template <DType kCodes> __device__ __forceinline__ float turn(Held& held, uint32_t* turned) {
    const int thread = static_cast<int>(threadIdx.x), part = thread % kPieces, octet = thread / kPieces,
              warp = thread / kWarpRows;
    uint32_t largest = 0;
    float own = 0.0f;  // of row thread
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
        const float scale = held.scales[i];
        largest = max(largest, scale > 0.0f ? __float_as_uint(scale) : 0u);
        if (i == warp) own = scale;
    }
    const float target = __uint_as_float(__reduce_max_sync(kFullMask, largest));
    const RowShift shift = row_shift<kCodes>(target, own);
    const int first = octet * kRows % kWarpRows;  // of this thread's rows, in the warp
    const uint32_t kept = __ballot_sync(kFullMask, shift.keep != 0);
    if (kept != kFullMask) {  // rows without a scale, and pads
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            if ((kept >> (first + k) & 1) == 0)
                held.words[k][0] = held.words[k][1] = held.words[k][2] = held.words[k][3] = 0;
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        const RowShift row = {__shfl_sync(kFullMask, shift.factor, first + k),
                              kCodes == DType::e5m2 ? __shfl_sync(kFullMask, shift.second, first + k) : 0,
                              kFullMask};
#pragma unroll
        for (int i = 0; i < kPieceWords; ++i) held.words[k][i] = shift_four<kCodes>(held.words[k][i], row);
    }
#pragma unroll
    for (int i = 0; i < kPieceWords; ++i) {  // bytes of 4 columns x 8 rows
        uint32_t squares[2][4];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const uint32_t(*words)[kPieceWords] = held.words + 4 * q;
            transpose_4x4({words[0][i], words[1][i], words[2][i], words[3][i]}, squares[q]);
        }
        uint32_t* out = turned + transposed_index<kPiece>(part * kPiece, octet / 2) + octet % 2 * 2 +
                        i * 4 * kColumnWords;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<uint2*>(out + c * kColumnWords) = uint2{squares[0][c], squares[1][c]};
    }
    return target;
}

// Columns leave shared memory in pieces of 16 rows, 8 threads a column: whole lines of 128 bytes. `aligned`:
// so is every column's start.
__device__ __forceinline__ void store_columns(const Transposer& args, const uint32_t* turned,
                                              int64_t dst_base, bool aligned, const TilePlace& place,
                                              int rows) {
    const int piece = static_cast<int>(threadIdx.x) % kPieces, first = piece * kPiece,
              cols = min(kTile, args.src.cols - place.first_col());
    const int64_t stride = args.dst.cols;
    int col = static_cast<int>(threadIdx.x) / kPieces;
    uint8_t* out = static_cast<uint8_t*>(args.dst.data) + (place.first_col() + col) * stride + dst_base +
                   place.row + first;
    if (aligned && rows == kTile && cols == kTile) {
#pragma unroll
        for (int i = 0; i < kTile * kPieces / kThreads; ++i, col += kThreads / kPieces) {
            *reinterpret_cast<uint4*>(out) =
                *reinterpret_cast<const uint4*>(turned + transposed_index<kPiece>(col, piece));
            out += kThreads / kPieces * stride;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
        if (col < cols) {
            const uint4 codes =
                *reinterpret_cast<const uint4*>(turned + transposed_index<kPiece>(col, piece));
            if (first + kPiece <= rows && aligned) {
                *reinterpret_cast<uint4*>(out) = codes;
            } else {
                const uint32_t words[kPieceWords] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
                for (int r = 0; r < kPiece; ++r)
                    if (first + r < rows) out[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
            }
        }
        col += kThreads / kPieces;
        out += kThreads / kPieces * stride;
    }
}

// Moves every code in and out (and 128 scales in, one out, a tile): 2.06 bytes a code, 0.118 ms at 32768 x
// 7168 and 4.1 TB/s. A CTA turns one tile, and SMs take CTAs as these become free: rows fastest, so that CTAs
// under way together write long runs of every column (columns fastest: 4 % slower, and so was a kernel that
// left out all arithmetic); what the tile to the right will read comes into L2 with this one's requests, 256
// bytes each (3 %). Eight CTAs an SM, each with all of its 16 KB requested at once, behind one round of loads
// that says which rows are pads: what it waits for is hidden by the other seven. (With four tiles a CTA, two
// of them on their way, behind a binary search of dependent loads: 3.48 TB/s. Loads that leave L1 or L2
// first: 4 % slower. Columns by TMA: as fast, slower where a kernel is short.) Every warp
// compares all scales of the tile itself; barrier: the tile is turned. Where the launch may not use all SMs,
// or has more tiles than kMostWaves, a CTA takes every gridDim.x-th tile; barrier: the tile before has left.
// Only maxima are reduced: deterministic.
template <DType kCodes>
__global__ void __launch_bounds__(kThreads, kCtas) transpose_kernel(const Transposer args) {
    __shared__ uint4 turned_pieces[kTile * kPieces];
    uint32_t* const turned = reinterpret_cast<uint32_t*>(turned_pieces);
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
        Held held;
        fetch(args, src_base, place, rows.count, held);
        const float target = turn<kCodes>(held, turned);
        if (threadIdx.x == 0)
            args.tile_scales[(dst_base + place.row) / kTile * args.scale_stride + place.col_tile] = target;
        __syncthreads();
        store_columns(args, turned, dst_base, aligned, place, rows.rows);
    }
}

}  // namespace

void launch_transpose_tiles(const ScaledTensor& src, const RowGroups& groups, const ScaledTensor& dst,
                            const Launch& launch) {
    const int64_t rows = src.data.dim(0), dim = src.data.cols(), extent = dst.data.cols();
    const int64_t capacity = groups.num_groups > 0 ? groups.row_capacity : extent;
    if (capacity == 0 || dim == 0) return;
    const int64_t tile_cols = ceil_div(dim, kTile), tiles = tile_cols * ceil_div(capacity, kTile);
    const bool wide = dim % kPiece == 0 && reinterpret_cast<uintptr_t>(src.data.data) % kPiece == 0;
    const auto kernel =
        src.data.dtype == DType::e5m2 ? transpose_kernel<DType::e5m2> : transpose_kernel<DType::e4m3>;
    const Transposer job = {.src = row_view(src.data),
                            .dst = row_view(dst.data),
                            .scales = row_scales(src),
                            .groups = device_groups(groups, rows),
                            .extent = extent,
                            .tile_scales = dst.scales.as<float>(),
                            .tile_cols = static_cast<int>(tile_cols),
                            .scale_stride = static_cast<int>(dst.scales.cols()),
                            .wide = wide};
    constexpr int kMostWaves = 32;  // a capacity may be far above the rows there are
    const unsigned grid = grid_for(tiles, launch, launch.sm_limit > 0 ? kCtas : kMostWaves * kCtas);
    launch_pdl(kernel, grid, kThreads, 0, launch, "transpose_fp8", job);
}

}  // namespace hopper

void HopperOps::do_transpose_fp8(const op::TransposeFp8& args, const Launch& launch) {
    launch_transpose_tiles(args.src, args.groups, args.dst, launch);
}

}  // namespace fp8flow
