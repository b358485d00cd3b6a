// SPDX-License-Identifier: MIT
// Tiles of column_tiles.cu: their shape, and which tile of which group comes next, found by a warp on the
// device.
#pragma once

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/quantize/column_codes.h"

namespace fp8flow::hopper {

// A tile: 128 rows of the output x 64 columns, so that a row is a line of 128 bytes of the source, a column
// one of the output.
constexpr int kTileColumns = 64, kRows = static_cast<int>(kBlock), kRowBytes = 2 * kTileColumns;
constexpr int kUnits = kTileColumns / kUnit, kPairs = kTileColumns / 2, kUnitPairs = kUnit / 2;
constexpr int kTileBytes = kRows * kRowBytes;
// Rows of a column that a thread stores at once, and of a small copy.
constexpr int kPiece = 16, kPieces = kRows / kPiece, kPieceBytes = kPiece * kRowBytes;
// A group's tiles are counted from a multiple of so many rows of the output: whole sectors.
constexpr int kSector = 32;
constexpr int kRun = 4;  // neighbouring tiles that a CTA takes at once: 512 bytes of a row

// A tile of a group. tiles == 0: none any more.
struct TileTask {
    int item, tiles;  // group and panel (64 columns side by side); how many tiles these have
    int col, row;     // the tile's first ones; the row is one of the output
    // of its 128 rows: the first of the group, behind its valid ones, behind its pads
    int begin, valid_end, end;
    bool sends, encodes, stores_scales;
};

// Finds runs of tiles by rising numbers: group after group, kRun panels at a time, tile after tile. Of 32
// groups each lane knows one, so that it takes a vote. A group has at least one tile, for its scales. If its
// tiles are too many to wait for each other on chip, they come twice: first all maxima are sent, then codes
// made.
class RunFinder {
public:
    // extent: end of the only group where there are no groups; most_tiles: that may wait for each other.
    __device__ RunFinder(const DeviceGroups& groups, int64_t extent, int64_t dst_base, int panels,
                         int most_tiles)
        : groups_(groups),
          extent_(extent),
          dst_base_(dst_base),
          panels_(panels),
          runs_((panels + kRun - 1) / kRun),
          most_tiles_(most_tiles) {
        look();
    }
    // The first task of a run, its row counted from the row base; false behind the last. All lanes call it
    // with the same number.
    __device__ bool find(int number, TileTask& task) {
        unsigned found;
        while ((found = __ballot_sync(kFullMask, number - before_ < upto_)) == 0) {
            before_ += __shfl_sync(kFullMask, upto_, 31);
            first_ += 32;
            if (first_ >= groups_.num_groups) return false;
            look();
        }
        const int lane = __ffs(static_cast<int>(found)) - 1;
        const auto of = [lane](int value) { return __shfl_sync(kFullMask, value, lane); };
        const int turns = of(turns_), tiles = of(tiles_);
        const int index = number - before_ - (of(upto_) - turns * runs_), run = index / turns,
                  turn = index - run * turns, tile = turn < tiles ? turn : turn - tiles;
        const int first = tile * kRows - of(lead_);  // of the group's rows
        task.item = (first_ + lane) * panels_ + run * kRun;
        task.tiles = tiles;
        task.col = run * kRun * kTileColumns;
        task.row = of(offset_) + first;
        task.begin = max(0, -first);
        task.valid_end = max(task.begin, min(kRows, of(count_) - first));
        task.end = max(task.begin, min(kRows, of(rows_) - first));
        task.sends = turn < tiles;
        task.encodes = turns - turn <= tiles;
        task.stores_scales = task.encodes && tile == 0;
        return true;
    }

private:
    __device__ void look() {
        const int lane = static_cast<int>(threadIdx.x) % 32, group = first_ + lane;
        offset_ = count_ = rows_ = lead_ = tiles_ = 0;
        if (group < groups_.num_groups) {
            const int64_t begin = groups_.offset(group),
                          end = groups_.counts != nullptr ? groups_.offset(group + 1) : extent_;
            offset_ = static_cast<int>(begin);
            rows_ = static_cast<int>(end - begin);
            count_ = static_cast<int>(groups_.count(group));
            lead_ = static_cast<int>((dst_base_ + begin) % kSector);
            tiles_ = max(1, (lead_ + rows_ + kRows - 1) / kRows);
        }
        turns_ = tiles_ > most_tiles_ ? 2 * tiles_ : tiles_;
        upto_ = turns_ * runs_;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int lower = __shfl_up_sync(kFullMask, upto_, step);
            if (lane >= step) upto_ += lower;
        }
    }

    const DeviceGroups& groups_;
    const int64_t extent_, dst_base_;
    const int panels_, runs_, most_tiles_;
    int first_ = 0, before_ = 0;                        // of the 32 groups; runs of those before
    int offset_, count_, rows_, lead_, tiles_, turns_;  // of this lane's
    int upto_;                                          // runs of the window's groups up to it
};

}  // namespace fp8flow::hopper
