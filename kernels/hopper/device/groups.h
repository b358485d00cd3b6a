// Which group a routed row belongs to, found by a whole warp at once, and walks over rows that ask only where a group ends.
#pragma once

#include "kernels/hopper/launch.h"

namespace fp8flow::hopper {

// The group of padded row r < total(): as many groups as end at or before it. One load a lane and 32 groups, none waiting for another
// (a binary search waits log2(groups) times). All 32 lanes call it with the same row.
__device__ __forceinline__ int64_t warp_group_of(const DeviceGroups& groups, int64_t row) {
    if (groups.counts == nullptr) return 0;
    int64_t group = 0;
    const int lane = static_cast<int>((threadIdx.y * blockDim.x + threadIdx.x) % 32);
    for (int64_t first = 0; first < groups.num_groups; first += 32) {
        const bool past = first + lane < groups.num_groups && groups.offsets[first + lane + 1] <= row;
        group += __popc(__ballot_sync(0xFFFFFFFFu, past));
    }
    return group;
}

// The tile of 128 rows from `row` on, where groups are aligned to 128: its first `count` rows are valid, the other `rows` pads. `extent`: end of
// the only group where there are no groups. All lanes of a warp call it with the same row.
struct AlignedTile {
    int count, rows;
};
__device__ __forceinline__ AlignedTile aligned_tile(const DeviceGroups& groups, int64_t extent, int64_t row) {
    int64_t valid_end = groups.rows, end = extent;
    if (groups.counts != nullptr) {
        const int64_t group = warp_group_of(groups, row);
        valid_end = groups.offsets[group] + groups.counts[group];
        end = groups.offsets[group + 1];
    }
    const int rows = static_cast<int>(min(kBlock, end - row));
    return {static_cast<int>(max(int64_t{0}, min(int64_t{rows}, valid_end - row))), rows};
}
// As many of its rows as lie in memory, known before the group is: pads among them may be read.
__device__ __forceinline__ int readable_rows(const DeviceGroups& groups, int64_t row) {
    return groups.counts != nullptr ? static_cast<int>(kBlock)
                                    : static_cast<int>(max(int64_t{0}, min(kBlock, groups.rows - row)));
}

// Neighbouring rows of a warp, one after the other.
class RowCursor {
public:
    __device__ RowCursor(const DeviceGroups& groups, int64_t first) : groups_(groups) {
        const int64_t group = warp_group_of(groups, first);
        group_ = static_cast<int>(group);
        rows_ = static_cast<int>(groups.offset(group + 1) - first);
        valid_rows_ = static_cast<int>(groups.offset(group) + groups.count(group) - first);
    }
    // Whether the next row is valid: `first`, the row behind it, and so on; all below total().
    __device__ bool next_is_valid() {
        while (rows_ == 0) {
            ++group_;
            rows_ = static_cast<int>(groups_.offset(group_ + 1) - groups_.offset(group_));
            valid_rows_ = static_cast<int>(groups_.count(group_));
        }
        --rows_;
        return valid_rows_-- > 0;
    }

private:
    const DeviceGroups& groups_;
    int group_, rows_, valid_rows_;  // what is left of the group
};

enum class RowKind { valid, pad };

// The valid rows of all groups counted through, or all their pads: so that work can be shared out by what a row costs. All 32 lanes of a warp
// call everything together. The first round of loads brings all that seek() needs.
template <RowKind kKind> class CountedRows {
public:
    __device__ explicit CountedRows(const DeviceGroups& groups) : groups_(groups) {
        for (int64_t first = 0; first < groups.num_groups; first += 32) {
            const int64_t group = first + lane();
            if (group >= groups.num_groups) continue;
            const int64_t valid = groups.count(group),
                          pads = groups.offset(group + 1) - groups.offset(group) - valid;
            total_ += kKind == RowKind::valid ? valid : pads;
            any_pads_ = any_pads_ || pads != 0;
        }
        any_pads_ = __ballot_sync(0xFFFFFFFFu, any_pads_) != 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) total_ += __shfl_xor_sync(0xFFFFFFFFu, total_, step);
    }
    __device__ int64_t total() const { return total_; }
    __device__ bool any_pads() const { return any_pads_; }

    // Goes to the row that `index` others are before, index < total().
    __device__ void seek(int64_t index) {
        for (int64_t first = 0;; first += 32) {
            const int64_t group = first + lane(), own = group < groups_.num_groups ? size(group) : 0;
            int64_t end = own;  // of the group, behind this turn's first row
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int64_t before = __shfl_up_sync(0xFFFFFFFFu, end, step);
                if (lane() >= step) end += before;
            }
            const unsigned found = __ballot_sync(0xFFFFFFFFu, end > index);
            if (found == 0) {
                index -= __shfl_sync(0xFFFFFFFFu, end, 31);
                continue;
            }
            const int at = __ffs(static_cast<int>(found)) - 1;
            group_ = static_cast<int>(first) + at;
            left_ = static_cast<int>(__shfl_sync(0xFFFFFFFFu, end, at) - index);
            row_ = static_cast<int>(first_row(group_) + size(group_)) - left_;
            return;
        }
    }
    // Goes `count` rows further, below total(); the row there.
    __device__ int advance(int count) {
        while (count >= left_) {
            count -= left_;
            ++group_;
            left_ = static_cast<int>(size(group_));
            row_ = static_cast<int>(first_row(group_));
        }
        left_ -= count;
        return row_ += count;
    }

private:
    __device__ static int lane() { return static_cast<int>((threadIdx.y * blockDim.x + threadIdx.x) % 32); }
    __device__ int64_t size(int64_t group) const {
        const int64_t valid = groups_.count(group);
        return kKind == RowKind::valid ? valid : groups_.offset(group + 1) - groups_.offset(group) - valid;
    }
    __device__ int64_t first_row(int64_t group) const {
        return groups_.offset(group) + (kKind == RowKind::valid ? 0 : groups_.count(group));
    }

    const DeviceGroups& groups_;
    int64_t total_ = 0;
    bool any_pads_ = false;
    int group_ = 0, row_ = 0, left_ = 0;  // left_: of the group, this row included
};

}  // namespace fp8flow::hopper
