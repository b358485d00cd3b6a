// Tiles of 128 routed rows: which rows a tile has, found on the device, and the way a turned tile of codes leaves shared memory.
// The tile quantiser's.
#pragma once

#include "kernels/hopper/launch.h"

namespace fp8flow::hopper {

// Rows [row, row + count) are valid, [row + count, row + rows) pads; `row` is relative to the row base (and to the batch).
struct RowTile {
    int64_t batch, group, row;
    int count, rows;  // rows in 1..128
};

// Tiles of 128 rows, counted from the first row of each group; group after group, batch after batch. A CTA asks for rising tiles, so
// that it walks over the groups once.
class TileWalker {
public:
    // extent: end of the only group where there are no groups; from its row count on, all rows are pads.
    __device__ TileWalker(const DeviceGroups& groups, int64_t extent, int64_t batches)
        : groups_(groups), extent_(extent), batches_(batches) {}

    // False behind the last tile. The answer is the same for all threads that ask for the same tile.
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

// A turned tile in shared memory: where the word of rows 4w .. 4w + 3 of column c stands. Pieces of 16 rows change places by every eight
// columns, so that the words of one row and the pieces of one column lie in different banks (but for two of 16 threads).
constexpr int kTurnedWords = static_cast<int>(kBlock) * static_cast<int>(kBlock) / 4;
__device__ __forceinline__ int turned_word(int c, int w) {
    return c * static_cast<int>(kBlock) / 4 + (w / 4 ^ c / 8 % 8) * 4 + w % 4;
}

// Stores rows [0, rows) of `cols` columns at out[c * stride + r]; 16-byte pieces where the column is aligned and whole. `turned` is aligned
// to 16 bytes.
template <int kThreads>
__device__ __forceinline__ void store_turned(const uint32_t* turned, uint8_t* out, int64_t stride, int cols,
                                             int rows) {
    constexpr int kPiece = 16, kPieces = static_cast<int>(kBlock) / kPiece;
    const int piece = static_cast<int>(threadIdx.x) % kPieces, first = piece * kPiece;
    for (int c = static_cast<int>(threadIdx.x) / kPieces; c < cols; c += kThreads / kPieces) {
        const uint32_t* words = turned + turned_word(c, piece * (kPiece / 4));
        uint8_t* to = out + c * stride + first;
        if (first + kPiece <= rows && reinterpret_cast<uintptr_t>(to) % kPiece == 0) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(words);
        } else {
            for (int r = 0; r < kPiece && first + r < rows; ++r)
                to[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
        }
    }
}

// Rows [first, last) of a piece of 16 of one column; `aligned`: the piece itself is.
__device__ __forceinline__ void store_piece(uint8_t* out, uint4 codes, int first, int last, bool aligned) {
    constexpr int kPiece = 16;
    if (aligned && first <= 0 && last >= kPiece) {
        *reinterpret_cast<uint4*>(out) = codes;
        return;
    }
    if (first >= kPiece || last <= 0) return;
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int r = 0; r < kPiece; ++r)
        if (r >= first && r < last) out[r] = static_cast<uint8_t>(words[r / 4] >> (8 * (r % 4)));
}

}  // namespace fp8flow::hopper
