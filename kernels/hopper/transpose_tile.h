// A tile of 128 x 128 codes turned by 128 threads: fetched, shifted to the largest of its rows' scales, turned, stored by columns. For the
// stand-alone transpose (transpose.cu) and the one beside the norm (norm_transpose.cu). Contract: kernels/ops/transpose.h.
#pragma once

#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/shift.h"
#include "kernels/hopper/device/tiles.h"

#ifndef NT_T_STORE
#define NT_T_STORE(p, v) (*(p) = (v))
#endif

namespace fp8flow::hopper {

namespace turning {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 128;  // a warp: 32 rows; a thread: 16 columns of 8 rows
constexpr int kRows = 8;
constexpr int kPiece = 16;  // codes of one load or store
constexpr int kPieceWords = kPiece / 4;
constexpr int kPieces = kTile / kPiece;
constexpr int kColumnWords = kTile / 4;
constexpr int kWarpRows = 32, kScales = kTile / kWarpRows;  // of a lane: rows lane, lane + 32, ..
constexpr uint32_t kAll = 0xFFFFFFFFu;

// Whether rows have scales of their own, or codes stay as they are.
enum class Shift { by_row, none };

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

// What a thread holds of a tile: 16 columns of 8 rows, and the scales of rows lane + 32 * i of the whole tile; nothing of pads, which are zeros.
struct Held {
    uint32_t words[kRows][kPieceWords];
    float scales[kScales];
};
template <Shift kShift, bool kFromL2 = false>
__device__ __forceinline__ void fetch(const Transposer& args, int64_t src_base, const TilePlace& place,
                                      int count, int thread, Held& held) {
    const int first = thread / kPieces * kRows, col = place.first_col() + thread % kPieces * kPiece,
              dim = args.src.cols;
    const uint8_t* in =
        static_cast<const uint8_t*>(args.src.data) + (src_base + place.row + first) * dim + col;
    if (args.wide && col + kPiece <= dim) {
#pragma unroll
        for (int k = 0; k < kRows; ++k, in += dim) {
            uint4 codes = {0, 0, 0, 0};
            if (first + k < count)
                codes = kFromL2 ? __ldcg(reinterpret_cast<const uint4*>(in)) : load_and_neighbour(in);
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
    if constexpr (kShift == Shift::none) return;
    const int lane = thread % kWarpRows;
#pragma unroll
    for (int i = 0; i < kScales; ++i) held.scales[i] = 0.0f;
    if (args.scales.dtype == DType::f32) {
        const float* scales = static_cast<const float*>(args.scales.data) +
                              args.scales.index(src_base + place.row + lane, place.col_tile);
#pragma unroll
        for (int i = 0; i < kScales; ++i, scales += kWarpRows * args.scales.row_stride)
            if (lane + i * kWarpRows < count) held.scales[i] = kFromL2 ? __ldcg(scales) : *scales;
    } else {
        const uint8_t* scales = static_cast<const uint8_t*>(args.scales.data) +
                                args.scales.index(src_base + place.row + lane, place.col_tile);
#pragma unroll
        for (int i = 0; i < kScales; ++i, scales += kWarpRows * args.scales.row_stride)
            if (lane + i * kWarpRows < count)
                held.scales[i] = e8m0_to_float(kFromL2 ? __ldcg(scales) : *scales);
    }
}

// From the registers of all threads to `turned`: scales are compared by every warp alone, rows shifted four codes at a time, and 4x4 squares of
// bytes turned in registers. The target.
template <DType kCodes> __device__ __forceinline__ float shift_rows(Held& held, int thread) {
    const int octet = thread / kPieces, warp = thread / kWarpRows;
    uint32_t largest = 0;
    float own = 0.0f;  // of row thread
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
        const float scale = held.scales[i];
        largest = max(largest, scale > 0.0f ? __float_as_uint(scale) : 0u);
        if (i == warp) own = scale;
    }
    const float target = __uint_as_float(__reduce_max_sync(kAll, largest));
    const RowShift shift = row_shift<kCodes>(target, own);
    const int first = octet * kRows % kWarpRows;  // of this thread's rows, in the warp
    const uint32_t kept = __ballot_sync(kAll, shift.keep != 0);
    if (kept != kAll) {  // rows without a scale, and pads
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            if ((kept >> (first + k) & 1) == 0)
                held.words[k][0] = held.words[k][1] = held.words[k][2] = held.words[k][3] = 0;
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
        const RowShift row = {__shfl_sync(kAll, shift.factor, first + k),
                              kCodes == DType::e5m2 ? __shfl_sync(kAll, shift.second, first + k) : 0, kAll};
#pragma unroll
        for (int i = 0; i < kPieceWords; ++i) held.words[k][i] = shift_four<kCodes>(held.words[k][i], row);
    }
    return target;
}

// 4x4 squares of bytes turned in registers, to shared memory.
__device__ __forceinline__ void turn(const Held& held, int thread, uint32_t* turned) {
    const int part = thread % kPieces, octet = thread / kPieces;
#pragma unroll
    for (int i = 0; i < kPieceWords; ++i) {  // bytes of 4 columns x 8 rows
        uint32_t squares[2][4];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const uint32_t(*words)[kPieceWords] = held.words + 4 * q;
            turn_square({words[0][i], words[1][i], words[2][i], words[3][i]}, squares[q]);
        }
        uint32_t* out =
            turned + turned_index<kPiece>(part * kPiece, octet / 2) + octet % 2 * 2 + i * 4 * kColumnWords;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<uint2*>(out + c * kColumnWords) = uint2{squares[0][c], squares[1][c]};
    }
}

// Columns leave shared memory in pieces of 16 rows, 8 threads a column: whole lines of 128 bytes. `aligned`: so is every column's start.
__device__ __forceinline__ void store_columns(const Transposer& args, const uint32_t* turned,
                                              int64_t dst_base, bool aligned, const TilePlace& place,
                                              int rows, int thread) {
    const int piece = thread % kPieces, first = piece * kPiece,
              cols = min(kTile, args.src.cols - place.first_col());
    const int64_t stride = args.dst.cols;
    int col = thread / kPieces;
    uint8_t* out = static_cast<uint8_t*>(args.dst.data) + (place.first_col() + col) * stride + dst_base +
                   place.row + first;
    if (aligned && rows == kTile && cols == kTile) {
#pragma unroll
        for (int i = 0; i < kTile * kPieces / kThreads; ++i, col += kThreads / kPieces) {
            NT_T_STORE(reinterpret_cast<uint4*>(out),
                       *reinterpret_cast<const uint4*>(turned + turned_index<kPiece>(col, piece)));
            out += kThreads / kPieces * stride;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
        if (col < cols) {
            const uint4 codes = *reinterpret_cast<const uint4*>(turned + turned_index<kPiece>(col, piece));
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

}  // namespace turning

}  // namespace fp8flow::hopper
