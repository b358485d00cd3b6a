// SPDX-License-Identifier: MIT
// The groups of routed rows on the device: which group a row belongs to, found by a whole warp at once, and
// cursors over ascending rows.
#pragma once

#include "kernels/core/tensor.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace fp8flow::hopper {

// The groups of routed rows on the device; groups.num_groups == 0 becomes one group of `rows` rows without
// pads.
struct DeviceGroups {
    int64_t num_groups;
    const int64_t* counts;
    const int64_t* offsets;
    int64_t rows;
    __device__ int64_t count(int64_t g) const { return counts != nullptr ? counts[g] : rows; }
    __device__ int64_t offset(int64_t g) const {
        return counts != nullptr ? offsets[g] : (g == 0 ? 0 : rows);
    }
    __device__ int64_t total() const { return counts != nullptr ? offsets[num_groups] : rows; }
    // The group of padded row r (r < total()); binary search.
    __device__ int64_t group_of(int64_t r) const {
        int64_t low = 0, high = num_groups;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (offset(middle) <= r)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
    // False for pad rows.
    __device__ bool is_valid(int64_t r) const {
        const int64_t g = group_of(r);
        return r - offset(g) < count(g);
    }
};
inline DeviceGroups device_groups(const RowGroups& groups, int64_t rows) {
    if (groups.num_groups == 0) return {1, nullptr, nullptr, rows};
    return {groups.num_groups, groups.counts.as<int64_t>(), groups.offsets.as<int64_t>(), rows};
}

// The group of padded row r < total(): the number of groups that end at or before it. One independent load a
// lane for 32 groups (a binary search has log2(groups) dependent loads). All 32 lanes call it with the same
// row.
__device__ __forceinline__ int64_t warp_group_of(const DeviceGroups& groups, int64_t row) {
    if (groups.counts == nullptr) return 0;
    int64_t group = 0;
    const int lane = static_cast<int>((threadIdx.y * blockDim.x + threadIdx.x) % 32);
    for (int64_t first = 0; first < groups.num_groups; first += 32) {
        const bool past = first + lane < groups.num_groups && groups.offsets[first + lane + 1] <= row;
        group += __popc(__ballot_sync(kFullMask, past));
    }
    return group;
}

// The first of up to `most` neighbouring groups that include the last group beginning at or before `row`
// (offsets ascend): 32 groups are compared at a time. All 32 lanes call it with the same row.
__device__ __forceinline__ int first_candidate(const DeviceGroups& groups, int64_t row, int most) {
    const int lane = static_cast<int>((threadIdx.y * blockDim.x + threadIdx.x) % 32);
    int low = 0;
    for (int left = static_cast<int>(groups.num_groups); left > most;) {
        const int stride = (left + 31) / 32, at = lane * stride;
        const unsigned begun = __ballot_sync(kFullMask, at < left && groups.offset(low + at) <= row);
        const int skipped = (__popc(begun) - 1) * stride;
        low += skipped;
        left = min(stride, left - skipped);
    }
    return low;
}

// The tile of 128 rows at `row`, where groups are aligned to 128: of its `rows` rows the first `count` are
// valid, the others pads. `extent`: end of the only group where there are no groups. All lanes of a warp call
// it with the same row. Up to 32 groups: one round of loads.
struct AlignedTile {
    int count, rows;
};
__device__ __forceinline__ AlignedTile aligned_tile(const DeviceGroups& groups, int64_t extent, int64_t row) {
    const auto tile_of = [&](int64_t valid_end, int64_t end) {
        const int rows = static_cast<int>(min(kBlock, end - row));
        return AlignedTile{static_cast<int>(max(int64_t{0}, min(int64_t{rows}, valid_end - row))), rows};
    };
    if (groups.counts == nullptr) return tile_of(groups.rows, extent);
    const int64_t group = first_candidate(groups, row, 32) + (threadIdx.y * blockDim.x + threadIdx.x) % 32;
    int64_t begin = 0, valid = 0, end = 0;
    if (group < groups.num_groups)
        begin = groups.offsets[group], valid = groups.counts[group], end = groups.offsets[group + 1];
    const unsigned found = __ballot_sync(kFullMask, begin <= row && row < end);
    const int lane = __ffs(static_cast<int>(found)) - 1;
    const AlignedTile own = tile_of(begin + valid, end);
    return {__shfl_sync(kFullMask, own.count, lane), __shfl_sync(kFullMask, own.rows, lane)};
}

// A cursor over consecutive rows of a warp.
class RowCursor {
public:
    __device__ RowCursor(const DeviceGroups& groups, int64_t first) : groups_(groups) {
        const int64_t group = warp_group_of(groups, first);
        group_ = static_cast<int>(group);
        rows_ = static_cast<int>(groups.offset(group + 1) - first);
        valid_rows_ = static_cast<int>(groups.offset(group) + groups.count(group) - first);
    }
    // Whether the next row is valid: `first`, the row after it, and so on; all below total().
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

// Whether ascending rows are valid: each lane holds one of 32 neighbouring groups, and the warp votes. For
// warps with rows so far apart that they pass many groups. All 32 lanes call every member together.
class GroupWindow {
public:
    __device__ explicit GroupWindow(const DeviceGroups& groups) : groups_(groups) { look(); }
    // `row` is below total() and not below the row of the call before.
    __device__ bool is_valid(int row) {
        unsigned found;
        while ((found = __ballot_sync(kFullMask, end_ > row)) == 0) {
            first_ += 32;
            look();
        }
        return row < __shfl_sync(kFullMask, valid_end_, __ffs(static_cast<int>(found)) - 1);
    }

private:
    __device__ void look() {
        const int64_t group = first_ + (threadIdx.y * blockDim.x + threadIdx.x) % 32;
        end_ = valid_end_ = 0;
        if (group >= groups_.num_groups) return;
        end_ = static_cast<int>(groups_.offset(group + 1));
        valid_end_ = static_cast<int>(groups_.offset(group) + groups_.count(group));
    }

    DeviceGroups groups_;
    int first_ = 0;        // of the 32 groups
    int end_, valid_end_;  // of this lane's: its rows end, its valid rows end
};

}  // namespace fp8flow::hopper
