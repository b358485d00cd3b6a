// SPDX-License-Identifier: MIT
// Tile iterator over routed rows that are gathered from tokens' rows: an order in which a token's row is read
// from memory once.
#pragma once

#include "kernels/core/tensor.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::permute {

constexpr int kTileRows = 8;  // consecutive rows of a group; their scales of one block fill a 32-byte sector
constexpr int kWalkSteps = 8;
constexpr int kRangeRows = kWalkSteps * kTileRows;

// Grid for walk_tiles: one tile per CTA on average; CTAs without a tile exit at once.
inline unsigned walk_grid(int64_t row_capacity, const Launch& launch) {
    return grid_of_items(ceil_div(row_capacity, int64_t{kRangeRows}) * kWalkSteps, launch);
}

// How many of a group's `tiles` belong to its first `row` of `rows` rows: monotonic in row, from 0 to tiles.
__device__ __forceinline__ int share_of(int row, int rows, int tiles) {
    if (row == rows) return tiles;
    const float part = static_cast<float>(row) / static_cast<float>(rows);
    return min(tiles, static_cast<int>(part * static_cast<float>(tiles)));
}

// Calls visit(group, the group's first row, first row, end row) for this CTA's tiles; all threads of the CTA
// get the same ones. Rows are counted in 32 bits, as in plans.
//
// Rows of a group ascend by token, and a token feeds K groups: in row order a token's row is read K times,
// far apart in time, from memory. So tiles are ordered in kWalkSteps steps: step s covers the s-th eighth of
// every group, that is about one eighth of the tokens, which stays in L2.
//
// Within a step, tiles are distributed in proportion to rows: range r is rows [kRangeRows r, kRangeRows (r +
// 1)), and its CTA takes from each group it overlaps the same share of the step's tiles as it has of the
// group's rows. Every CTA gets zero to two tiles, whatever the group sizes, without a prefix sum over groups.
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
            const int shift = group % kWalkSteps;  // small groups have their tiles in different steps
            const int step_begin = (tiles * step + shift) / kWalkSteps,
                      step_tiles = (tiles * (step + 1) + shift) / kWalkSteps - step_begin;
            const int end_tile = step_begin + share_of(min(end, stop) - start, rows, step_tiles);
            for (int tile = step_begin + share_of(max(begin, start) - start, rows, step_tiles);
                 tile < end_tile; ++tile) {
                const int first = start + tile * kTileRows;
                visit(group, start, first, min(stop, first + kTileRows));
            }
        }
    }
}

}  // namespace fp8flow::hopper::permute
