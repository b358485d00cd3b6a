// Which group a routed row belongs to, found by a whole warp at once, and a walk over neighbouring rows that asks only where a group ends.
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

}  // namespace fp8flow::hopper
