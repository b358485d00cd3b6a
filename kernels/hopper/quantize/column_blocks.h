// SPDX-License-Identifier: MIT
// Column blocks of group_columns.cu (64, 32 or 16 columns of a group), and the tile scheduler that chooses
// their width and order. One warp runs it on the device.
#pragma once

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/quantize/column_fp8.h"

namespace fp8flow::hopper::quantize {

// A tile is 16 KB of a column block: kPartRows rows if a row has 1 << kWidestShift units (128 bytes), more
// rows if the column block is narrower.
constexpr int kBlockSlots = 14;  // tiles in shared memory, per CTA
constexpr int kBlockTileBytes = 16384, kPartRows = static_cast<int>(kBlock);
constexpr int kNarrowestShift = 1;
__host__ __device__ constexpr int block_columns(int shift) { return kUnit << shift; }
__host__ __device__ constexpr int block_tile_rows(int shift) { return kPartRows << (kWidestShift - shift); }
// Columns of a sweep of the widest column blocks (below).
constexpr int kSweepColumns = 256;
constexpr int kNarrowWaves = 1;  // waves of narrow column blocks at the end

struct ColumnBlock {
    int group, col, shift;    // col: first column; a row has 1 << shift units
    int offset, rows, count;  // first row of the group, its rows with padding, without padding
    int lead, tiles;          // lead: rows of the first tile before the first row of the group
};

// The tile scheduler: find(n) returns column block n. The order is a sweep of kSweepColumns columns over
// every group, then the next sweep. So groups that share a sector of the output write it at about the same
// time, and column blocks that share 256 bytes of the source read them at about the same time. Column blocks
// have the width with the least cost: narrow ones keep more rows in shared memory, wide ones are read faster.
// The last column blocks are half as wide and are ordered by group, the largest group first, so that all SMs
// end together. (More than 32 groups keep their order: each is a small part of the launch.) A lane has one of
// 32 groups; all lanes call every function together.
class ColumnBlockScheduler {
public:
    // extent: end of the only group, where the tensor has no groups.
    __device__ ColumnBlockScheduler(const DeviceGroups& groups, int64_t extent, int64_t dst_base, int cols)
        : groups_(groups),
          extent_(extent),
          lead_base_(static_cast<int>(dst_base % kSectorRows)),
          lane_(static_cast<int>(threadIdx.x) % kWindow),
          cols_(cols) {
        choose_width();
        number_blocks();
        rank_groups();
    }
    __device__ int blocks() const { return wide_items_ + narrow_items_; }
    __device__ ColumnBlock find(int number) {
        const bool narrow = number >= wide_items_;
        const int index = narrow ? number - wide_items_ : number, shift = narrow ? shift_ - 1 : shift_,
                  blocks = narrow ? narrow_blocks_ : wide_blocks_, columns = block_columns(shift),
                  groups = static_cast<int>(groups_.num_groups);
        // narrow blocks: one sweep over all columns of a group, so that reads of its rows are long
        const int width = shift == kWidestShift ? kSweepColumns / columns : blocks,
                  sweep = index / (groups * width), rest = index - sweep * groups * width,
                  here = min(width, blocks - sweep * width), rank = rest / here;
        const int group = narrow ? group_of_rank(rank) : rank;
        if (group / kWindow != window_) load_window(group / kWindow);
        const auto of_group = [group](int value) { return __shfl_sync(kFullMask, value, group % kWindow); };
        ColumnBlock block = {};
        block.group = group;
        block.col = (narrow ? wide_blocks_ * block_columns(shift_) : 0) +
                    (sweep * width + rest - rank * here) * columns;
        block.shift = shift;
        block.offset = of_group(begin_);
        block.rows = of_group(rows_);
        block.count = of_group(count_);
        block.lead = lead(block.offset);
        block.tiles = tiles(block.lead + block.rows, shift);
        return block;
    }

private:
    static constexpr int kWindow = 32;

    __device__ static int tiles(int rows, int shift) {
        return max(1, (rows + block_tile_rows(shift) - 1) / block_tile_rows(shift));
    }
    __device__ int lead(int offset) const { return (lead_base_ + offset) % kSectorRows; }
    // Each lane loads one group, beginning with group window * kWindow.
    __device__ void load_window(int window) {
        window_ = window;
        begin_ = rows_ = count_ = 0;
        const int64_t group = int64_t{window} * kWindow + lane_;
        if (group >= groups_.num_groups) return;
        const int64_t begin = groups_.offset(group),
                      end = groups_.counts != nullptr ? groups_.offset(group + 1) : extent_;
        count_ = static_cast<int>(groups_.count(group));
        begin_ = static_cast<int>(begin);
        rows_ = static_cast<int>(end - begin);
    }
    // Ends with the first window loaded.
    __device__ void choose_width() {
        constexpr float kCosts[] = {1.25f, 1.06f, 1.0f}, kReadTwice = 1.5f;
        float costs[3] = {};
        for (int window = (static_cast<int>(groups_.num_groups) - 1) / kWindow; window >= 0; --window) {
            load_window(window);
#pragma unroll
            for (int s = kNarrowestShift; s <= kWidestShift; ++s)
                costs[s - 1] += static_cast<float>(rows_) * kCosts[s - 1] *
                                (tiles(lead(begin_) + rows_, s) > kBlockSlots ? kReadTwice : 1.0f);
        }
        shift_ = kWidestShift;
        float least = 0;
#pragma unroll
        for (int s = kWidestShift; s >= kNarrowestShift; --s) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                costs[s - 1] += __shfl_xor_sync(kFullMask, costs[s - 1], step);
            if (s == kWidestShift || costs[s - 1] < least) {
                least = costs[s - 1];
                shift_ = s;
            }
        }
    }
    __device__ void number_blocks() {
        const int groups = static_cast<int>(groups_.num_groups), columns = block_columns(shift_),
                  blocks = (cols_ - 1) / columns + 1;
        const int tail =
            shift_ == kWidestShift
                ? min(blocks / 2, (static_cast<int>(gridDim.x) * kNarrowWaves + groups - 1) / groups)
                : 0;
        wide_blocks_ = blocks - tail;
        narrow_blocks_ = tail == 0 ? 0 : (cols_ - wide_blocks_ * columns - 1) / (columns / 2) + 1;
        wide_items_ = wide_blocks_ * groups;
        narrow_items_ = narrow_blocks_ * groups;
    }
    __device__ void rank_groups() {
        rank_ = 0;
#pragma unroll 4
        for (int other = 0; other < kWindow; ++other) {
            const int rows = __shfl_sync(kFullMask, rows_, other);
            rank_ += rows > rows_ || (rows == rows_ && other < lane_) ? 1 : 0;
        }
    }
    // The group with `rank` larger groups.
    __device__ int group_of_rank(int rank) const {
        if (groups_.num_groups > kWindow) return rank;
        return __ffs(static_cast<int>(__ballot_sync(kFullMask, rank_ == rank))) - 1;
    }

    const DeviceGroups& groups_;
    const int64_t extent_;
    const int lead_base_, lane_, cols_;
    int shift_;
    int wide_blocks_, narrow_blocks_, wide_items_, narrow_items_;
    int window_, begin_, rows_, count_;  // this lane's group of the window
    int rank_;                           // how many groups are larger than this lane's, in the first window
};

}  // namespace fp8flow::hopper::quantize
