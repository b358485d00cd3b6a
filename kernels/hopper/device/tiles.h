// SPDX-License-Identifier: MIT
// Tiles of 128 routed rows: which rows a tile has, found on the device; the layout of a transposed tile of
// FP8 values in shared memory; and its stores.
#pragma once

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/view.h"

namespace fp8flow::hopper {

// Rows [row, row + count) are valid, [row + count, row + rows) pads; `row` is relative to the row base (and
// to the batch).
struct RowTile {
    int64_t batch, group, row;
    int count, rows;  // rows in 1..128
};

// An iterator over tiles of 128 rows, counted from the first row of each group; group after group, batch
// after batch. A CTA seeks ascending tiles, so that it passes the groups once.
class TileWalker {
public:
    // extent: end of the only group where there are no groups; from its row count on, all rows are pads.
    __device__ TileWalker(const DeviceGroups& groups, int64_t extent, int64_t batches)
        : groups_(groups), extent_(extent), batches_(batches) {}

    // False past the last tile. The result is the same for all threads that seek the same tile.
    __device__ bool seek(int64_t index, RowTile& tile) {
        while (batch_ < batches_) {
            const int64_t first = groups_.offset(group_),
                          end = groups_.counts != nullptr ? groups_.offset(group_ + 1) : extent_;
            const int64_t tiles = (end - first + kBlock - 1) / kBlock;
            if (index < before_ + tiles) {
                const int64_t skipped = (index - before_) * kBlock;
                tile.batch = batch_;
                tile.group = group_;
                tile.row = first + skipped;
                tile.rows = static_cast<int>(min(kBlock, end - tile.row));
                tile.count = static_cast<int>(
                    max(int64_t{0}, min(static_cast<int64_t>(tile.rows), groups_.count(group_) - skipped)));
                return true;
            }
            before_ += tiles;
            if (++group_ == groups_.num_groups) {
                group_ = 0;
                ++batch_;
            }
        }
        return false;
    }

private:
    const DeviceGroups& groups_;
    int64_t extent_, batches_;
    int64_t batch_ = 0, group_ = 0, before_ = 0;
};

// Position of the index-th tile of 128 x 128, rows fastest: CTAs that run at the same time write long runs of
// every column that they transpose.
struct TilePlace {
    int col_tile;
    int64_t row;
    __device__ int first_col() const { return col_tile * static_cast<int>(kBlock); }
};
__device__ __forceinline__ TilePlace rows_fastest(unsigned index, unsigned row_tiles) {
    return {static_cast<int>(index / row_tiles), int64_t{index % row_tiles} * kBlock};
}
__device__ __forceinline__ unsigned row_tiles_of(int64_t rows) {
    return static_cast<unsigned>((rows + kBlock - 1) / kBlock);
}

// Loads 16 aligned bytes and prefetches their 256-byte block into L2, for the CTA of the neighbouring tile.
__device__ __forceinline__ uint4 load_and_neighbour(const void* from) {
    uint4 words;
    asm volatile("ld.global.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

// A transposed tile in shared memory: the index of the word of rows 4w .. 4w + 3 of column c, and of a piece,
// 16 rows of a column. Pieces are swizzled every kColumns columns, as many as a thread transposes, so that
// the words of one row and the pieces of one column are in different banks (except for two of 16 threads).
constexpr int kTransposedWords = static_cast<int>(kBlock) * static_cast<int>(kBlock) / 4;
constexpr int kTransposedPiece = 16;                                            // rows
constexpr int kTransposedPieces = static_cast<int>(kBlock) / kTransposedPiece;  // of a column
template <int kColumns> __device__ __forceinline__ int transposed_index(int col, int piece) {
    const int swizzle =
        kColumns * kTransposedPieces < kBlock ? col / kColumns % kTransposedPieces : col / kColumns;
    return col * (static_cast<int>(kBlock) / 4) + (piece ^ swizzle) * (kTransposedPiece / 4);
}
__device__ __forceinline__ int transposed_word(int c, int w) { return transposed_index<8>(c, w / 4) + w % 4; }

// Stores rows [0, rows) of `cols` columns at out[c * stride + r]; 16-byte pieces where the column is aligned
// and whole. `transposed` is aligned to 16 bytes.
template <int kThreads>
__device__ __forceinline__ void store_transposed(const uint32_t* transposed, uint8_t* out, int64_t stride,
                                                 int cols, int rows) {
    constexpr int kPiece = 16, kPieces = static_cast<int>(kBlock) / kPiece;
    const int piece = static_cast<int>(threadIdx.x) % kPieces, first = piece * kPiece;
    for (int c = static_cast<int>(threadIdx.x) / kPieces; c < cols; c += kThreads / kPieces) {
        const uint32_t* words = transposed + transposed_word(c, piece * (kPiece / 4));
        uint8_t* to = out + c * stride + first;
        if (first + kPiece <= rows && reinterpret_cast<uintptr_t>(to) % kPiece == 0) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(words);
        } else {
            for (int r = 0; r < kPiece && first + r < rows; ++r)
                to[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
        }
    }
}

// Stores the first kCols columns of a whole transposed tile. Columns are aligned. A thread stores piece
// `piece` of column `col` to `out`, and then that piece of every kThreads / kTransposedPieces-th column after
// it.
template <int kThreads, int kColumns, int kCols = static_cast<int>(kBlock)>
__device__ __forceinline__ void store_whole_columns(const uint32_t* transposed, int col, int piece,
                                                    uint8_t* out, int64_t stride) {
#pragma unroll
    for (int i = 0; i < kCols * kTransposedPieces / kThreads; ++i, col += kThreads / kTransposedPieces) {
        *reinterpret_cast<uint4*>(out) =
            *reinterpret_cast<const uint4*>(transposed + transposed_index<kColumns>(col, piece));
        out += kThreads / kTransposedPieces * stride;
    }
}

// Stores a transposed tile of 128 columns, columns [col_tile * 128, ...) of `to`, rows [row, row + rows) of
// its contiguous dimension: 8 threads per column, so that stores cover whole lines of 128 bytes where the
// tile is whole and its rows are aligned.
template <int kThreads, int kColumns>
__device__ __forceinline__ void store_tile_columns(const RowView& to, const uint32_t* transposed, int64_t row,
                                                   int rows, int col_tile) {
    constexpr int kTile = static_cast<int>(kBlock), kSteps = kTile * kTransposedPieces / kThreads;
    const int piece = static_cast<int>(threadIdx.x) % kTransposedPieces, first = piece * kTransposedPiece;
    const int64_t stride = to.cols;
    int col = static_cast<int>(threadIdx.x) / kTransposedPieces;
    uint8_t* out = static_cast<uint8_t*>(to.data) + (static_cast<int64_t>(col_tile) * kTile + col) * stride +
                   row + first;
    const bool aligned =
        (reinterpret_cast<uintptr_t>(to.data) | static_cast<uintptr_t>(row | stride)) % kTransposedPiece == 0;
    if (aligned && rows == kTile)
        return store_whole_columns<kThreads, kColumns>(transposed, col, piece, out, stride);
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i, col += kThreads / kTransposedPieces) {
        const uint32_t* words = transposed + transposed_index<kColumns>(col, piece);
        for (int r = 0; r < kTransposedPiece && first + r < rows; ++r)
            out[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
        out += kThreads / kTransposedPieces * stride;
    }
}

// Rows [first, last) of a piece of 16 of one column; `aligned`: the piece itself is.
__device__ __forceinline__ void store_piece(uint8_t* out, uint4 fp8, int first, int last, bool aligned) {
    constexpr int kPiece = 16;
    if (aligned && first <= 0 && last >= kPiece) {
        *reinterpret_cast<uint4*>(out) = fp8;
        return;
    }
    if (first >= kPiece || last <= 0) return;
    const uint32_t words[4] = {fp8.x, fp8.y, fp8.z, fp8.w};
#pragma unroll
    for (int r = 0; r < kPiece; ++r)
        if (r >= first && r < last) out[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
}

}  // namespace fp8flow::hopper
