// SPDX-License-Identifier: MIT
// What the weight gradients share (fp8_wgrad.cu, bf16_wgrad.cu): their order of tiles, and the way of D
// between a warp's registers and memory, through shared memory and TMA.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper {

constexpr int kBandRows = 32;  // row tiles that are walked together

// ---- tiles
// A tile over the rows of one set of operands, or of two: then `steps` are those of both, and a_k, b_k of
// MathTile those of the first set.
template <Sets kSets> constexpr int kNumSets = kSets == Sets::two ? 2 : 1;
template <Sets kSets> struct GradientTile : MathTile {};
template <> struct GradientTile<Sets::two> : MathTile {
    int32_t first_steps;             // of the first set
    int64_t second_a_k, second_b_k;  // contraction index of step 0, if all steps were of the second set
};

template <int kDepth, Sets kSets = Sets::one, class Each>
__device__ __forceinline__ void walk_tiles(const DeviceProduct& p, Each each) {
    TileWalk<kDepth, kBandRows, kSets> walk(p, static_cast<int>(cluster_rank()));
    int64_t group = -1, count = 0, offset = 0;  // of the second set
    for (int64_t index = blockIdx.x / kPair;; index += gridDim.x / kPair) {
        GradientTile<kSets> tile{};
        tile.past_end = !walk.find(index, tile);
        if constexpr (kSets == Sets::two) {
            if (!tile.past_end) {
                if (tile.group != group) {
                    group = tile.group;
                    count = p.second.groups.count(group);
                    offset = p.second.groups.offset(group);
                }
                tile.first_steps = tile.steps;
                tile.steps += static_cast<int32_t>((count + kDepth - 1) / kDepth);
                const int64_t before = offset - tile.first_steps * kDepth;
                tile.second_a_k = p.second.a.base() + before;
                tile.second_b_k = p.second.b.base() + before;
            }
        }
        each(tile);
        if (tile.past_end) return;
    }
}

// One warp: zeros to the tiles of groups without rows, 16 bytes a lane.
template <int kDepth, Sets kSets = Sets::one> __device__ void clear_tiles(const DeviceProduct& p) {
    walk_tiles<kDepth, kSets>(p, [&](const MathTile& tile) {
        if (tile.steps > 0 || tile.past_end) return;
        const int lane = static_cast<int>(threadIdx.x % 32);
        const int64_t end = min(tile.b_output + kTileCols, p.n);
        float* row = static_cast<float*>(p.d) + tile.d_row * p.n;
        for (int i = 0; i < tile.rows; ++i, row += p.n)
            for (int64_t col = tile.b_output + 4 * lane; col < end; col += 4 * 32)
                store_vector(reinterpret_cast<float4*>(row + col), float4{});
    });
}

// ---- D
// A warp's part of a block of sums on its way to D: boxes of 16 rows x 32 columns, 128-byte swizzled.
constexpr int kWarpRows = 16, kBoxColumns = kStageRowBytes / sizeof(float), kBoxes = kColumns / kBoxColumns;
constexpr uint32_t kPieceBytes = kWarpRows * kStageRowBytes;
struct Slab {
    uint8_t boxes[kBoxes][kPieceBytes];
};

// Where a warp's part of a block is in D: first column, first row of its group, group.
struct Place {
    int column, row, group;
};

// Each pair of sums of a thread in a box, in column blocks j and j + 2: at(address in the slab, sums of the
// one, sums of the other). Odd rows take the two in the other order, so that the four rows of half a warp are
// in banks of their own; so does set_aside.
enum class Order { as_summed, as_stored };
constexpr int kBoxPairs = 8;
template <Order kOrder, class At>
__device__ __forceinline__ void for_pairs(Slab& slab, int box, const float (&sum)[64], At at) {
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, quad = lane % 4;
    const bool odd = row % 2 == 1, swap = kOrder == Order::as_summed && odd;
    const int thread = row * kStageRowBytes + (((quad / 2) ^ row) * 16 ^ (odd ? 64 : 0)) + quad % 2 * 8;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int low = 4 * (4 * box + j) + 2 * r, high = low + 8;
            uint8_t* const to = slab.boxes[box] + 8 * r * kStageRowBytes;
            const float2 first{sum[low], sum[low + 1]}, second{sum[high], sum[high + 1]};
            at(reinterpret_cast<float2*>(to + (thread ^ 32 * j)), swap ? second : first);
            at(reinterpret_cast<float2*>(to + (thread ^ 32 * (j + 2))), swap ? first : second);
        }
}

// Sums in the order in which they will be stored, to registers that products do not write. It must not be a
// plain copy: the compiler moves copies in front of the wait for the products.
__device__ __forceinline__ void set_aside(const float (&sum)[64], float (&ordered)[64]) {
    const bool swap = threadIdx.x / 4 % 2 == 1;
#pragma unroll
    for (int i = 0; i < 64; ++i) ordered[i] = swap ? sum[i ^ 8] : sum[i];
    wgmma_fence_operand(ordered);
}

// How sums leave: over what is in D; added to it by the memory; or added to what the slab holds of it, pair
// by pair or a box at a time. Of a box all is read before the first sum is written: the compiler keeps a read
// behind the writes that stand before it, and a read takes 30 cycles.
enum class Leave { store, add, add_here, add_boxes };

// Half of the columns of a warp's part of a block; its copies are a group of lane 0. The halves leave in
// turn.
template <Leave kLeave, Order kOrder>
__device__ __forceinline__ void leave_half(const CUtensorMap* map, Slab& slab, const Place& place,
                                           const float (&sum)[64], int half,
                                           bool by_memory = kLeave == Leave::add) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader) bulk_wait_read<1>();  // those of this half, of the block before
    __syncwarp();
#pragma unroll
    for (int box = 2 * half; box < 2 * half + 2; ++box) {
        float2 before[kBoxPairs];
        int pair = 0;
        if (kLeave == Leave::add_boxes)
            for_pairs<kOrder>(slab, box, sum, [&](const float2* from, float2) { before[pair++] = *from; });
        pair = 0;
        for_pairs<kOrder>(slab, box, sum, [&](float2* to, float2 value) {
            if (kLeave == Leave::add_here || kLeave == Leave::add_boxes) {
                const float2 old = kLeave == Leave::add_here ? *to : before[pair++];
                value = {old.x + value.x, old.y + value.y};
            }
            *to = value;
        });
    }
    fence_async_shared();
    __syncwarp();
    if (leader) {
#pragma unroll
        for (int box = 2 * half; box < 2 * half + 2; ++box) {
            const int column = place.column + box * kBoxColumns;
            if (by_memory)
                tma_reduce_add(map, slab.boxes[box], column, place.row, place.group);
            else
                tma_store(map, slab.boxes[box], column, place.row, place.group);
        }
        bulk_commit();
    }
}
// A warp's part of a block.
template <Leave kLeave>
__device__ __forceinline__ void leave(const CUtensorMap* map, Slab& slab, const Place& place,
                                      const float (&sum)[64]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) leave_half<kLeave, Order::as_summed>(map, slab, place, sum, half);
}
// Adds what the slab holds of a warp's part of a block to its sums.
__device__ __forceinline__ void add_held(Slab& slab, float (&sum)[64]) {
    const bool swap = threadIdx.x / 4 % 2 == 1;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
        int pair = 0;
        float2 earlier{};
        for_pairs<Order::as_summed>(slab, box, sum, [&](const float2* from, float2) {
            const float2 held = *from;
            if (pair++ % 2 == 0) {
                earlier = held;
                return;
            }
            const float2 low = swap ? held : earlier, high = swap ? earlier : held;
            const int at = 4 * (4 * box + (pair - 1) / 4) + (pair - 1) / 2 % 2 * 2;
            sum[at] += low.x;
            sum[at + 1] += low.y;
            sum[at + 8] += high.x;
            sum[at + 9] += high.y;
        });
        wgmma_fence_operand(sum);  // or it is added only where products have been waited for, and kept in
                                   // local memory till then
    }
}
// D of a warp's part of a block to its slab, by one lane, once the slab's last content is on its way.
__device__ __forceinline__ void fetch(const CUtensorMap* map, Slab& slab, Mbarrier* full,
                                      const Place& place) {
    bulk_wait_read<0>();
    mbarrier_arrive_expect_tx(full, sizeof(Slab));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
        tma_load(map, full, slab.boxes[box], place.column + box * kBoxColumns, place.row, place.group);
}

}  // namespace fp8flow::hopper
