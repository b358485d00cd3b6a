// The order in which kernels go over routed rows that are made from tokens' rows, so that a token's row is read from memory once.
#pragma once

#include "kernels/hopper/launch.h"

namespace fp8flow::hopper {

constexpr int kTileRows = 8;  // neighbouring rows of a group; their scales of one block make a 32-byte sector

// Calls visit(first row, end of rows) for this CTA's tiles. Rows of a group stand in ascending order of tokens, and a token feeds K groups: in
// the order of rows its row would be read K times, long after each other, from memory. So neighbouring CTAs take different groups, at
// the same fraction of each: what they read at a time is one part of the tokens' rows, which stays in L2.
// A group is cut into parts, as many as a power of two, so that no long division is needed; a single group into its tiles.
template <class Visit> __device__ __forceinline__ void walk_tiles(const DeviceGroups& groups, Visit visit) {
    const unsigned count = static_cast<unsigned>(groups.num_groups);
    const unsigned tiles = static_cast<unsigned>((groups.total() + kTileRows - 1) / kTileRows);
    const int shift = 31 - __clz(static_cast<int>(max(1u, tiles / count)));
    const unsigned items = count == 1 || tiles == 0 ? tiles : count << shift;
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t part = item / count, group = item % count;
        const int64_t start = groups.offset(group), end = groups.offset(group + 1),
                      in_group = (end - start + kTileRows - 1) / kTileRows;
        const int64_t first_tile = count == 1 ? part : in_group * part >> shift,
                      end_tile = count == 1 ? part + 1 : in_group * (part + 1) >> shift;
        for (int64_t tile = first_tile; tile < end_tile; ++tile) {
            const int64_t first = start + tile * kTileRows;
            visit(first, min(end, first + kTileRows));
        }
    }
}

}  // namespace fp8flow::hopper
