// SPDX-License-Identifier: MIT
// The order in which kernels go over routed rows that are made from tokens' rows, so that a token's row is
// read from memory once.
#pragma once

#include "kernels/core/tensor.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper {

constexpr int kTileRows = 8;  // neighbouring rows of a group; their scales of one block make a 32-byte sector
constexpr int kWalkSteps = 8;
constexpr int kRangeRows = kWalkSteps * kTileRows;

// CTAs for all tiles, one tile each on average; more leave at once.
inline unsigned walk_grid(int64_t row_capacity, const Launch& launch) {
    const int64_t items = ceil_div(row_capacity, int64_t{kRangeRows}) * kWalkSteps;
    return launch.sm_limit > 0 ? grid_for(items, launch) : static_cast<unsigned>(items);
}

// How many of a group's `tiles` belong to its first `row` rows of `rows`: ascends with row, from none to all
// of them.
__device__ __forceinline__ int share_of(int row, int rows, int tiles) {
    if (row == rows) return tiles;
    const float part = static_cast<float>(row) / static_cast<float>(rows);
    return min(tiles, static_cast<int>(part * static_cast<float>(tiles)));
}

// Calls visit(group, its first row, first row, end of rows) for this CTA's tiles; all threads of the CTA take
// the same ones. Rows are counted in 32 bits, as in plans. Rows of a group stand in ascending order of
// tokens, and a token feeds K groups: in the order of rows its row would be read K times, long after each
// other, from memory. So the walk has steps: in step s every group's s-th eighth is worked on, hence about
// one eighth of the tokens, which stays in L2. In a step the CTAs divide the tiles as they divide all rows:
// CTA r stands for the rows from kRangeRows r on, and takes of each group that it touches as large a part of
// the step's tiles as it has of the group's rows. So CTAs have one tile each (none to two), whatever the
// sizes of the groups, and nobody needs a sum over groups.
template <class Visit> __device__ __forceinline__ void walk_tiles(const DeviceGroups& groups, Visit visit) {
    const int total = static_cast<int>(groups.total()), count = static_cast<int>(groups.num_groups);
    const unsigned ranges = (static_cast<unsigned>(total) + kRangeRows - 1) / kRangeRows;
    for (unsigned item = blockIdx.x; item < ranges * kWalkSteps; item += gridDim.x) {
        const int step = static_cast<int>(item / ranges),
                  begin = static_cast<int>(item % ranges) * kRangeRows, end = min(begin + kRangeRows, total);
        for (int group = first_candidate(groups, begin, 1); group < count; ++group) {
            const int start = static_cast<int>(groups.offset(group)),
                      stop = static_cast<int>(groups.offset(group + 1));
            if (start >= end) break;
            const int rows = stop - start, tiles = (rows + kTileRows - 1) / kTileRows;
            const int turn = group % kWalkSteps;  // so that groups of few tiles have them in different steps
            const int step_begin = (tiles * step + turn) / kWalkSteps,
                      step_tiles = (tiles * (step + 1) + turn) / kWalkSteps - step_begin;
            const int end_tile = step_begin + share_of(min(end, stop) - start, rows, step_tiles);
            for (int tile = step_begin + share_of(max(begin, start) - start, rows, step_tiles);
                 tile < end_tile; ++tile) {
                const int first = start + tile * kTileRows;
                visit(group, start, first, min(stop, first + kTileRows));
            }
        }
    }
}

}  // namespace fp8flow::hopper
