// SPDX-License-Identifier: MIT
// Tiles of column_tiles.cu, and the tile scheduler that assigns runs of them to CTAs. One warp runs it on the
// device.
#pragma once

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/quantize/column_fp8.h"

namespace fp8flow::hopper::quantize {

// A tile: 128 rows of the output x 64 columns. A row is a line of 128 bytes of the source, a column a line of
// the output.
constexpr int kTileColumns = 64, kRows = static_cast<int>(kBlock), kRowBytes = 2 * kTileColumns;
constexpr int kUnits = kTileColumns / kUnit, kPairs = kTileColumns / 2, kUnitPairs = kUnit / 2;
constexpr int kTileBytes = kRows * kRowBytes;
// A piece: 16 rows of a column that a thread stores at once, and the smallest box that TMA loads.
constexpr int kPiece = 16, kPieces = kRows / kPiece, kPieceBytes = kPiece * kRowBytes;
constexpr int kRun = 4;  // neighbouring tiles that a CTA loads together: 512 bytes of a row

// A tile of a group. tiles == 0: no more tiles.
struct TileTask {
    int item, tiles;  // group x column block (64 columns), and how many tiles it has
    int col, row;     // first column; first row, counted in the output
    // in its 128 rows: first row of the group, end of its valid rows, end of its padding
    int begin, valid_end, end;
    bool publishes, encodes, stores_scales;
};

// The tile scheduler: find(n) returns run n. The order is group by group, kRun column blocks at a time, tile
// by tile. Each lane has one of 32 groups, so that one warp vote finds a run. A group has at least one tile,
// for its scales. Groups of more than most_tiles tiles do not fit into shared memory and are scheduled twice:
// first all of their tiles publish maxima, then all are encoded.
class RunScheduler {
public:
    // extent: end of the only group, if the tensor has no groups. most_tiles: tiles of a group that may wait
    // for each other in shared memory.
    __device__ RunScheduler(const DeviceGroups& groups, int64_t extent, int64_t dst_base, int column_blocks,
                            int most_tiles)
        : groups_(groups),
          extent_(extent),
          dst_base_(dst_base),
          column_blocks_(column_blocks),
          runs_((column_blocks + kRun - 1) / kRun),
          most_tiles_(most_tiles) {
        load_window();
    }
    // The first task of a run, its row counted from the row base; false after the last run. All lanes call it
    // with the same number.
    __device__ bool find(int number, TileTask& task) {
        unsigned found;
        while ((found = __ballot_sync(kFullMask, number - before_ < prefix_)) == 0) {
            before_ += __shfl_sync(kFullMask, prefix_, 31);
            first_ += 32;
            if (first_ >= groups_.num_groups) return false;
            load_window();
        }
        const int lane = __ffs(static_cast<int>(found)) - 1;
        const auto of = [lane](int value) { return __shfl_sync(kFullMask, value, lane); };
        const int tasks = of(tasks_), tiles = of(tiles_);
        const int index = number - before_ - (of(prefix_) - tasks * runs_), run = index / tasks,
                  at = index - run * tasks, tile = at < tiles ? at : at - tiles;
        const int first = tile * kRows - of(lead_);  // row within the group
        task.item = (first_ + lane) * column_blocks_ + run * kRun;
        task.tiles = tiles;
        task.col = run * kRun * kTileColumns;
        task.row = of(offset_) + first;
        task.begin = max(0, -first);
        task.valid_end = max(task.begin, min(kRows, of(count_) - first));
        task.end = max(task.begin, min(kRows, of(rows_) - first));
        task.publishes = at < tiles;
        task.encodes = tasks - at <= tiles;
        task.stores_scales = task.encodes && tile == 0;
        return true;
    }

private:
    __device__ void load_window() {
        const int lane = static_cast<int>(threadIdx.x) % 32, group = first_ + lane;
        offset_ = count_ = rows_ = lead_ = tiles_ = 0;
        if (group < groups_.num_groups) {
            const int64_t begin = groups_.offset(group),
                          end = groups_.counts != nullptr ? groups_.offset(group + 1) : extent_;
            offset_ = static_cast<int>(begin);
            rows_ = static_cast<int>(end - begin);
            count_ = static_cast<int>(groups_.count(group));
            lead_ = static_cast<int>((dst_base_ + begin) % kSectorRows);
            tiles_ = max(1, (lead_ + rows_ + kRows - 1) / kRows);
        }
        tasks_ = tiles_ > most_tiles_ ? 2 * tiles_ : tiles_;
        prefix_ = tasks_ * runs_;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int lower = __shfl_up_sync(kFullMask, prefix_, step);
            if (lane >= step) prefix_ += lower;
        }
    }

    const DeviceGroups& groups_;
    const int64_t extent_, dst_base_;
    const int column_blocks_, runs_, most_tiles_;
    int first_ = 0, before_ = 0;  // first group of the window; runs of the groups before it
    int offset_, count_, rows_, lead_, tiles_, tasks_;  // this lane's group
    int prefix_;                                        // runs of the window up to and with this lane's group
};

}  // namespace fp8flow::hopper::quantize
