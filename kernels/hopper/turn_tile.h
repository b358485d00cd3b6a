// A tile of 128 rows x 128 columns of codes, turned by 128 threads: read, rows brought to one scale, and stored by columns. For the scaling-aware
// transpose (transpose.cu) and the norm that writes both copies (norm_bands.cu). A thread holds 16 columns of 8 rows; a warp, 32 rows.
#pragma once

#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/shift.h"

namespace fp8flow::hopper {

constexpr int kTurnThreads = 128;
constexpr int kTurnRows = 8;    // of a thread
constexpr int kTurnPiece = 16;  // codes of one load or store
constexpr int kTurnPieceWords = kTurnPiece / 4;
constexpr int kTurnPieces = static_cast<int>(kBlock) / kTurnPiece;
constexpr int kTurnColumnWords = static_cast<int>(kBlock) / 4;
constexpr int kTurnWarpRows = 32, kTurnScales = static_cast<int>(kBlock) / kTurnWarpRows;

// Rows of codes and their scales. `wide`: pieces can be loaded whole.
struct CodeRows {
    RowView codes;
    RowScales scales;
    bool wide;
};
inline CodeRows code_rows(const Fp8Tensor& t) {
    const bool wide =
        t.codes.cols() % kTurnPiece == 0 && reinterpret_cast<uintptr_t>(t.codes.data) % kTurnPiece == 0;
    return {row_view(t.codes), row_scales(t), wide};
}

// What a thread holds of a tile: 16 columns of 8 rows, and the scales of rows lane + 32 * i of the whole tile.
struct HeldTile {
    uint32_t words[kTurnRows][kTurnPieceWords];
    float scales[kTurnScales];
};
// `readable`: as many rows of the tile lie in memory; pads among them are read and cleared later, so that loads need not wait for the group's
// size. Everything comes from L2, where other multiprocessors may just have put it.
__device__ __forceinline__ void fetch_codes(const CodeRows& src, int64_t row, int col_tile, int readable,
                                            int thread, HeldTile& held) {
    const int first = thread / kTurnPieces * kTurnRows,
              col = col_tile * static_cast<int>(kBlock) + thread % kTurnPieces * kTurnPiece,
              dim = src.codes.cols;
    const uint8_t* in = static_cast<const uint8_t*>(src.codes.data) + (row + first) * dim + col;
    if (src.wide && col + kTurnPiece <= dim) {
#pragma unroll
        for (int k = 0; k < kTurnRows; ++k, in += dim) {
            uint4 codes = {0, 0, 0, 0};
            if (first + k < readable) codes = __ldcg(reinterpret_cast<const uint4*>(in));
            held.words[k][0] = codes.x, held.words[k][1] = codes.y;
            held.words[k][2] = codes.z, held.words[k][3] = codes.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kTurnRows; ++k, in += dim) {
            uint32_t(&words)[kTurnPieceWords] = held.words[k];
#pragma unroll 1
            for (int i = kTurnPiece - 1; i >= 0; --i) {  // one code after the other enters at the low end
                const uint32_t code = first + k < readable && col + i < dim ? __ldcg(in + i) : 0;
#pragma unroll
                for (int w = kTurnPieceWords - 1; w > 0; --w)
                    words[w] = __funnelshift_l(words[w - 1], words[w], 8);
                words[0] = words[0] << 8 | code;
            }
        }
    }
}
__device__ __forceinline__ void fetch_scales(const CodeRows& src, int64_t row, int col_tile, int readable,
                                             int thread, HeldTile& held) {
    const int lane = thread % kTurnWarpRows;
#pragma unroll
    for (int i = 0; i < kTurnScales; ++i) held.scales[i] = 0.0f;
    const int64_t at = src.scales.index(row + lane, col_tile), step = kTurnWarpRows * src.scales.row_stride;
    if (src.scales.dtype == DType::f32) {
        const float* scales = static_cast<const float*>(src.scales.data) + at;
#pragma unroll
        for (int i = 0; i < kTurnScales; ++i, scales += step)
            if (lane + i * kTurnWarpRows < readable) held.scales[i] = __ldcg(scales);
    } else {
        const uint8_t* scales = static_cast<const uint8_t*>(src.scales.data) + at;
#pragma unroll
        for (int i = 0; i < kTurnScales; ++i, scales += step)
            if (lane + i * kTurnWarpRows < readable) held.scales[i] = e8m0_to_float(__ldcg(scales));
    }
}

// Where the word of rows 4 * quad .. 4 * quad + 3 of a column stands: pieces of 16 rows change places by the column's own piece, so that
// 16 neighbouring pairs of words of one row and the 8 pieces of one column both lie in different banks.
struct TurnedTile {
    uint4 pieces[static_cast<int>(kBlock) * kTurnPieces];
    __device__ uint32_t* words() { return reinterpret_cast<uint32_t*>(pieces); }
    __device__ static int index(int col, int piece) {
        return col * kTurnColumnWords + (piece ^ (col / kTurnPiece)) * kTurnPieceWords;
    }
};

// Brings the first `count` rows of the tile to the scale of its largest, which is the answer, and clears the others. Scales are compared by every
// warp alone, rows shifted four codes at a time.
template <DType kCodes> __device__ __forceinline__ float shift_tile(HeldTile& held, int count, int thread) {
    constexpr uint32_t kAll = 0xFFFFFFFFu;
    const int octet = thread / kTurnPieces, lane = thread % kTurnWarpRows, warp = thread / kTurnWarpRows;
    uint32_t largest = 0;
    float own = 0.0f;  // of row thread
#pragma unroll
    for (int i = 0; i < kTurnScales; ++i) {
        const float scale = lane + i * kTurnWarpRows < count ? held.scales[i] : 0.0f;
        largest = max(largest, scale > 0.0f ? __float_as_uint(scale) : 0u);
        if (i == warp) own = scale;
    }
    const float target = __uint_as_float(__reduce_max_sync(kAll, largest));
    const RowShift shift = row_shift<kCodes>(target, own);
    const int first = octet * kTurnRows % kTurnWarpRows;  // of this thread's rows, in the warp
    const uint32_t kept = __ballot_sync(kAll, shift.keep != 0);
    if (kept != kAll) {  // pads and rows without a scale
#pragma unroll
        for (int k = 0; k < kTurnRows; ++k)
            if ((kept >> (first + k) & 1) == 0)
                held.words[k][0] = held.words[k][1] = held.words[k][2] = held.words[k][3] = 0;
    }
#pragma unroll
    for (int k = 0; k < kTurnRows; ++k) {
        const RowShift row = {__shfl_sync(kAll, shift.factor, first + k),
                              kCodes == DType::e5m2 ? __shfl_sync(kAll, shift.second, first + k) : 0, kAll};
#pragma unroll
        for (int i = 0; i < kTurnPieceWords; ++i)
            held.words[k][i] = shift_four<kCodes>(held.words[k][i], row);
    }
    return target;
}

// From the registers of all threads to `turned`: 4x4 squares of bytes are turned in registers.
__device__ __forceinline__ void turn_tile(const HeldTile& held, int thread, TurnedTile& turned) {
    const int part = thread % kTurnPieces, octet = thread / kTurnPieces;
#pragma unroll
    for (int i = 0; i < kTurnPieceWords; ++i) {  // bytes of 4 columns x 8 rows
        uint32_t squares[2][4];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const uint32_t(*words)[kTurnPieceWords] = held.words + 4 * q;
            const uint32_t low01 = __byte_perm(words[0][i], words[1][i], 0x5140),
                           high01 = __byte_perm(words[0][i], words[1][i], 0x7362);
            const uint32_t low23 = __byte_perm(words[2][i], words[3][i], 0x5140),
                           high23 = __byte_perm(words[2][i], words[3][i], 0x7362);
            squares[q][0] = __byte_perm(low01, low23, 0x5410);
            squares[q][1] = __byte_perm(low01, low23, 0x7632);
            squares[q][2] = __byte_perm(high01, high23, 0x5410);
            squares[q][3] = __byte_perm(high01, high23, 0x7632);
        }
        uint32_t* out = turned.words() + TurnedTile::index(part * kTurnPiece, octet / 2) + octet % 2 * 2 +
                        i * 4 * kTurnColumnWords;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<uint2*>(out + c * kTurnColumnWords) = uint2{squares[0][c], squares[1][c]};
    }
}

// Whether every piece of 16 rows can be stored whole.
__device__ __forceinline__ bool is_piece_aligned(const RowView& columns, int64_t first_row) {
    return (reinterpret_cast<uintptr_t>(columns.data) | static_cast<uintptr_t>(first_row | columns.cols)) %
               kTurnPiece ==
           0;
}
// Columns leave shared memory in pieces of 16 rows, 8 threads a column: whole lines of 128 bytes. `dim` columns there are, of which the
// tile has the first `rows` rows from `first_row` on.
__device__ __forceinline__ void store_columns(const RowView& to, int dim, int col_tile, int64_t first_row,
                                              int rows, bool aligned, int thread, TurnedTile& turned) {
    constexpr int kTile = static_cast<int>(kBlock);
    const int piece = thread % kTurnPieces, first = piece * kTurnPiece, first_col = col_tile * kTile,
              cols = min(kTile, dim - first_col);
    const uint32_t* words = turned.words();
    const int64_t stride = to.cols;
    int col = thread / kTurnPieces;
    uint8_t* out = static_cast<uint8_t*>(to.data) + (first_col + col) * stride + first_row + first;
    if (aligned && rows == kTile && cols == kTile) {
#pragma unroll
        for (int i = 0; i < kTile * kTurnPieces / kTurnThreads; ++i, col += kTurnThreads / kTurnPieces) {
            *reinterpret_cast<uint4*>(out) =
                *reinterpret_cast<const uint4*>(words + TurnedTile::index(col, piece));
            out += kTurnThreads / kTurnPieces * stride;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kTile * kTurnPieces / kTurnThreads; ++i) {
        if (col < cols) {
            const uint4 codes = *reinterpret_cast<const uint4*>(words + TurnedTile::index(col, piece));
            if (first + kTurnPiece <= rows && aligned) {
                *reinterpret_cast<uint4*>(out) = codes;
            } else {
                const uint32_t four[kTurnPieceWords] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
                for (int r = 0; r < kTurnPiece; ++r)
                    if (first + r < rows) out[r] = static_cast<uint8_t>(four[r / 4] >> (8 * (r % 4)));
            }
        }
        col += kTurnThreads / kTurnPieces;
        out += kTurnThreads / kTurnPieces * stride;
    }
}

}  // namespace fp8flow::hopper
