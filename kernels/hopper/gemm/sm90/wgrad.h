// SPDX-License-Identifier: MIT
// What the weight gradients share (fp8_wgrad.cu, bf16_wgrad.cu): their raster order of tiles, and the
// epilogue: D between registers and global memory through staging boxes in shared memory and TMA.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper::gemm {

constexpr int kWgradRasterRows = 32;  // rasterisation: row tiles of a band

// A tile whose contraction runs over one set of operands, or two: then `steps` counts both, and a_k, b_k of
// WorkTile belong to the first set.
template <Sets kSets> constexpr int kNumSets = kSets == Sets::two ? 2 : 1;
template <Sets kSets> struct WgradTile : WorkTile {};
template <> struct WgradTile<Sets::two> : WorkTile {
    int32_t first_steps;             // steps of the first set
    int64_t second_a_k, second_b_k;  // contraction index of step 0, extrapolated from the second set
};

template <int kStageK, Sets kSets = Sets::one, class Each>
__device__ __forceinline__ void for_each_tile(const GemmProblem& p, Each each) {
    TileScheduler<kStageK, kWgradRasterRows, kSets> scheduler(p, static_cast<int>(cluster_rank()));
    int64_t group = -1, count = 0, offset = 0;  // of the second set
    for (int64_t index = blockIdx.x / kClusterCtas;; index += gridDim.x / kClusterCtas) {
        WgradTile<kSets> tile{};
        tile.past_end = !scheduler.find(index, tile);
        if constexpr (kSets == Sets::two) {
            if (!tile.past_end) {
                if (tile.group != group) {
                    group = tile.group;
                    count = p.second.groups.count(group);
                    offset = p.second.groups.offset(group);
                }
                tile.first_steps = tile.steps;
                tile.steps += static_cast<int32_t>((count + kStageK - 1) / kStageK);
                const int64_t before = offset - tile.first_steps * kStageK;
                tile.second_a_k = p.second.a.base() + before;
                tile.second_b_k = p.second.b.base() + before;
            }
        }
        each(tile);
        if (tile.past_end) return;
    }
}

// One warp: zeros in the tiles of groups without rows, 16 bytes a lane.
template <int kStageK, Sets kSets = Sets::one> __device__ void clear_tiles(const GemmProblem& p) {
    for_each_tile<kStageK, kSets>(p, [&](const WorkTile& tile) {
        if (tile.steps > 0 || tile.past_end) return;
        const int lane = static_cast<int>(threadIdx.x % 32);
        const int64_t end = min(tile.b_output + kTileCols, p.n);
        float* row = static_cast<float*>(p.d) + tile.d_row * p.n;
        for (int i = 0; i < tile.rows; ++i, row += p.n)
            for (int64_t col = tile.b_output + 4 * lane; col < end; col += 4 * 32)
                store_vector(reinterpret_cast<float4*>(row + col), float4{});
    });
}

// Staging memory of a warp's part of a block (64 rows x 128 columns): boxes of 16 rows x 32 columns, 128-byte
// swizzled.
constexpr int kWarpRows = 16, kF32BoxCols = kStageRowBytes / sizeof(float),
              kF32Boxes = kWarpgroupCols / kF32BoxCols;
constexpr uint32_t kF32BoxBytes = kWarpRows * kStageRowBytes;
struct F32Staging {
    uint8_t boxes[kF32Boxes][kF32BoxBytes];
};

// Coordinates in D of a warp's part of a block: first column, first row within the group, group.
struct BlockOrigin {
    int column, row, group;
};

// Visits a thread's pairs of sums in a box, those of column chunks j and j + 2 together: at(address in the
// box, pair). Odd rows take the two in the other order, so that the four rows of half a warp hit different
// banks; so does copy_in_store_order. Order: of `sum`, as wgmma leaves it (fragment) or already exchanged
// (store).
enum class Order { fragment, store };
constexpr int kF32BoxPairs = 8;
template <Order kOrder, class At>
__device__ __forceinline__ void for_pairs(F32Staging& staging, int box, const float (&sum)[64], At at) {
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, quad = lane % 4;
    const bool odd = row % 2 == 1, swap = kOrder == Order::fragment && odd;
    const int thread = row * kStageRowBytes + (((quad / 2) ^ row) * 16 ^ (odd ? 64 : 0)) + quad % 2 * 8;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int low = 4 * (4 * box + j) + 2 * r, high = low + 8;
            uint8_t* const to = staging.boxes[box] + 8 * r * kStageRowBytes;
            const float2 first{sum[low], sum[low + 1]}, second{sum[high], sum[high + 1]};
            at(reinterpret_cast<float2*>(to + (thread ^ 32 * j)), swap ? second : first);
            at(reinterpret_cast<float2*>(to + (thread ^ 32 * (j + 2))), swap ? first : second);
        }
}

// Copies sums, in store order, to registers that wgmma does not write. Not a plain copy: the compiler moves
// plain copies ahead of the wait for wgmma.
__device__ __forceinline__ void copy_in_store_order(const float (&sum)[64], float (&ordered)[64]) {
    const bool swap = threadIdx.x / 4 % 2 == 1;
#pragma unroll
    for (int i = 0; i < 64; ++i) ordered[i] = swap ? sum[i ^ 8] : sum[i];
    wgmma_fence_operand(ordered);
}

// How sums reach D: overwritten; added by TMA in memory (reduce_add); or added to the old values that were
// loaded into the staging boxes, pair by pair (add_pairs) or a box at a time (add_boxes). add_boxes reads all
// of a box before it writes the first sum: the compiler keeps a read after the writes before it, and a read
// takes 30 cycles.
enum class StoreD { overwrite, reduce_add, add_pairs, add_boxes };

// Stores half of the columns of a warp's part of a block; the copies are one bulk group of lane 0. The halves
// alternate.
template <StoreD kStore, Order kOrder>
__device__ __forceinline__ void store_half(const CUtensorMap* map, F32Staging& staging,
                                           const BlockOrigin& origin, const float (&sum)[64], int half,
                                           bool reduce = kStore == StoreD::reduce_add) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader) bulk_wait_read<1>();  // stores of this half, from the block before
    __syncwarp();
#pragma unroll
    for (int box = 2 * half; box < 2 * half + 2; ++box) {
        float2 before[kF32BoxPairs];
        int pair = 0;
        if (kStore == StoreD::add_boxes)
            for_pairs<kOrder>(staging, box, sum, [&](const float2* from, float2) { before[pair++] = *from; });
        pair = 0;
        for_pairs<kOrder>(staging, box, sum, [&](float2* to, float2 value) {
            if (kStore == StoreD::add_pairs || kStore == StoreD::add_boxes) {
                const float2 old = kStore == StoreD::add_pairs ? *to : before[pair++];
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
            const int column = origin.column + box * kF32BoxCols;
            if (reduce)
                tma_reduce_add(map, staging.boxes[box], column, origin.row, origin.group);
            else
                tma_store(map, staging.boxes[box], column, origin.row, origin.group);
        }
        bulk_commit();
    }
}
// Both halves.
template <StoreD kStore>
__device__ __forceinline__ void store_block(const CUtensorMap* map, F32Staging& staging,
                                            const BlockOrigin& origin, const float (&sum)[64]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) store_half<kStore, Order::fragment>(map, staging, origin, sum, half);
}
// Adds the staged old values of a warp's part of a block to its sums.
__device__ __forceinline__ void add_staged(F32Staging& staging, float (&sum)[64]) {
    const bool swap = threadIdx.x / 4 % 2 == 1;
#pragma unroll
    for (int box = 0; box < kF32Boxes; ++box) {
        int pair = 0;
        float2 earlier{};
        for_pairs<Order::fragment>(staging, box, sum, [&](const float2* from, float2) {
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
        wgmma_fence_operand(sum);  // else the addition moves past the wait for wgmma, with the values in
                                   // local memory till then
    }
}
// One lane loads the old values of a warp's part of a block into its staging boxes, once these have been
// stored.
__device__ __forceinline__ void fetch_d(const CUtensorMap* map, F32Staging& staging, Mbarrier* full,
                                        const BlockOrigin& origin) {
    bulk_wait_read<0>();
    mbarrier_arrive_expect_tx(full, sizeof(F32Staging));
#pragma unroll
    for (int box = 0; box < kF32Boxes; ++box)
        tma_load(map, full, staging.boxes[box], origin.column + box * kF32BoxCols, origin.row, origin.group);
}

}  // namespace fp8flow::hopper::gemm
