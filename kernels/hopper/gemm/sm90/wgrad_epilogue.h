// SPDX-License-Identifier: MIT
// Epilogue of the weight gradients (fp8_wgrad.cu, bf16_wgrad.cu): D between registers and global memory
// through staging boxes in shared memory and TMA; sums of the squares of what is stored.
#pragma once

#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper::gemm {

// Whether a kernel also sums the squares of what it stores, patch by patch (kernels/ops/squares.h).
enum class Squares { none, sum };
static_assert(op::kSquaresTile == kTileRows && op::kSquaresTile == kWarpgroupCols);

// The patches of a row tile and a column tile of 128; of the warps of a warpgroup, one each.
__device__ __forceinline__ double* squares_of(const GemmProblem& p, int64_t group, int64_t row,
                                              int64_t column) {
    const auto tiles = [](int64_t elements) { return (elements + op::kSquaresTile - 1) / op::kSquaresTile; };
    return p.squares +
           ((group * tiles(p.m) + row / op::kSquaresTile) * tiles(p.n) + column / op::kSquaresTile) *
               op::kSquaresPatches;
}

// Staging memory of a warp. FP32: its part of one block (64 rows x 128 columns), 32 columns a box. BF16: its
// parts of both blocks of a tile, two boxes of 64 columns each.
constexpr int kF32BoxCols = kStageRowBytes / sizeof(float), kF32Boxes = kWarpgroupCols / kF32BoxCols;
struct Staging {
    uint8_t boxes[kF32Boxes][kBoxBytes];
};
static_assert(2 * kBf16Boxes == kF32Boxes);

// Coordinates in D of a warp's part of a block: first column, first row within the group, group.
struct BlockOrigin {
    int column, row, group;
};
__device__ __forceinline__ BlockOrigin second_block(const BlockOrigin& first) {
    return {first.column, first.row + 64, first.group};
}
// The row of the block before the first: past every D, so that its store writes nothing.
constexpr int kNoRow = 1 << 30;

// Squares of a warp's patch: the sum over the quarters that this thread has stored so far.
template <Squares kSquares> struct PatchSquares {
    float quarters = 0.0f;

    __device__ __forceinline__ void add_quarter(const op::SquareStrands& strands) {
        quarters += strands.sum();
    }
    // Called by all lanes. Adds their sums, writes the patch of the tile at `origin` (of either block),
    // begins the next patch. Before the first tile, and past the last column, nothing is written.
    __device__ __forceinline__ void finish(const GemmProblem& p, const BlockOrigin& origin) {
        double sum = op::lane_of_squares(quarters);
        for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
        if (threadIdx.x % kWarpSize == 0 && origin.row < kNoRow && origin.column < p.n)
            squares_of(p, origin.group, origin.row,
                       origin.column)[threadIdx.x / kWarpSize % op::kSquaresPatches] = sum;
        quarters = 0.0f;
    }
};
template <> struct PatchSquares<Squares::none> {
    __device__ __forceinline__ void add_quarter(const op::SquareStrands&) {}
    __device__ __forceinline__ void finish(const GemmProblem&, const BlockOrigin&) {}
};

// Visits a thread's pairs of sums in a box, those of column chunks j and j + 2 together: at(address in the
// box, pair). Odd rows take the two in the other order, so that the four rows of half a warp hit different
// banks; so does copy_in_store_order. Order: of `sum`, as wgmma leaves it (fragment) or already exchanged
// (store).
enum class Order { fragment, store };
constexpr int kF32BoxPairs = 8;
template <Order kOrder, class At>
__device__ __forceinline__ void for_pairs(Staging& staging, int box, const float (&sum)[64], At at) {
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

// What goes to the staging boxes: sums (overwrite), or sums added to the old values that were loaded there,
// pair by pair (add_pairs) or a box at a time (add_boxes). add_boxes reads all of a box before it writes the
// first sum: the compiler keeps a read after the writes before it, and a read takes 30 cycles.
enum class StoreD { overwrite, add_pairs, add_boxes };
// What TMA does with the boxes: overwrites D, or adds to it in memory.
enum class BulkStore : bool { overwrite, reduce_add };

// Stores half of the columns of a warp's part of a block; the copies are one bulk group of lane 0. The halves
// alternate. squares: of the values stored, unless they are reduce-added.
template <StoreD kStore, Order kOrder, Squares kSquares>
__device__ __forceinline__ void store_half(const CUtensorMap* map, Staging& staging,
                                           const BlockOrigin& origin, const float (&sum)[64], int half,
                                           PatchSquares<kSquares>& squares,
                                           BulkStore bulk = BulkStore::overwrite) {
    op::SquareStrands strands;
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
        int visit = 0;  // odd rows visit the halves the other way round: the same bits
        for_pairs<kOrder>(staging, box, sum, [&](float2* to, float2 value) {
            if (kStore == StoreD::add_pairs || kStore == StoreD::add_boxes) {
                const float2 old = kStore == StoreD::add_pairs ? *to : before[pair++];
                value = {old.x + value.x, old.y + value.y};
            }
            *to = value;
            if constexpr (kSquares == Squares::sum) strands.add(visit++ % 2, value.x, value.y);
        });
    }
    squares.add_quarter(strands);
    fence_async_shared();
    __syncwarp();
    if (leader) {
#pragma unroll
        for (int box = 2 * half; box < 2 * half + 2; ++box) {
            const int column = origin.column + box * kF32BoxCols;
            if (bulk == BulkStore::reduce_add)
                tma_reduce_add(map, staging.boxes[box], column, origin.row, origin.group);
            else
                tma_store(map, staging.boxes[box], column, origin.row, origin.group);
        }
        bulk_commit();
    }
}
// Adds the staged old values of a warp's part of a block to its sums.
__device__ __forceinline__ void add_staged(Staging& staging, float (&sum)[64]) {
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

// ---- D in BF16
//
// Both blocks of a tile have boxes of their own: the old values of both are loaded at once, and lie there
// until their block is stored over them.

// Stores half of the columns of a warp's part of a block, rounded to nearest even; accumulating, added to the
// old values in the box and rounded stochastically. origin: of this block. The copy is a bulk group of lane
// 0.
template <Gradient kMode, Order kOrder, Squares kSquares>
__device__ __forceinline__ void store_half_bf16(const GemmProblem& p, const CUtensorMap* map,
                                                Staging& staging, const BlockOrigin& origin,
                                                const float (&sum)[64], int block, int half,
                                                PatchSquares<kSquares>& squares) {
    op::SquareStrands strands;
    constexpr int kChunks = kBf16BoxCols / 8;  // 16 bytes
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, quad = lane % 4;
    uint8_t* const box = staging.boxes[kBf16Boxes * block + half];
    const int64_t counted = p.rounding.first + origin.group * p.m + origin.row + row;
    const uint64_t key = p.rounding.step_key();
    const uint32_t counters[2] = {rounding_row(key, counted), rounding_row(key, counted + 8)};
    const int flip = kOrder == Order::store && row % 2 == 1 ? 2 : 0;  // of chunks
    const uint32_t first_pair = static_cast<uint32_t>((origin.column + kBf16BoxCols * half) / 2 + quad);
    if (lane == 0) bulk_wait_read<2 * kBf16Boxes - 1>();  // the store of this box, a tile before
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = 4 * (kChunks * half + chunk) + 2 * r;
            auto* const to = reinterpret_cast<uint32_t*>(box + (row + 8 * r) * kStageRowBytes +
                                                         ((chunk ^ flip ^ row) * 16) + quad * 4);
            uint32_t stored;
            if constexpr (kMode == Gradient::accumulate) {
                const float2 old = unpack_bf16x2(*to);
                const uint32_t pair = first_pair + 4 * static_cast<uint32_t>(chunk ^ flip);
                stored = round_pair(old.x + sum[at], old.y + sum[at + 1], rounding_word(counters[r], pair));
            } else {
                stored = pack_bf16(sum[at], sum[at + 1]);
            }
            *to = stored;
            if constexpr (kSquares == Squares::sum) {
                const float2 values = unpack_bf16x2(stored);
                strands.add(chunk / 2 % 2, values.x, values.y);
            }
        }
    squares.add_quarter(strands);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
        tma_store(map, box, origin.column + kBf16BoxCols * half, origin.row, origin.group);
        bulk_commit();
    }
}

// D of one consumer warp: old values in, results out. `full`: its barrier for loads of old values.
template <Gradient kMode, DType kOutput, Squares kSquares> struct WarpGradient {
    static constexpr bool kAdds = kMode == Gradient::accumulate, kBf16 = kOutput == DType::bf16;
    const GemmProblem& p;
    const CUtensorMap* map;
    Staging& staging;
    Mbarrier* full;
    uint32_t parity = 0;
    PatchSquares<kSquares> squares{};

    // Starts to load old values, once the boxes have been stored: in FP32 of the block at `origin`, in BF16
    // of both, `origin` of block 0.
    __device__ __forceinline__ void fetch(const BlockOrigin& origin) {
        constexpr int kBoxCols = kBf16 ? kBf16BoxCols : kF32BoxCols, kBoxes = kBf16 ? kBf16Boxes : kF32Boxes;
        if (threadIdx.x % kWarpSize == 0) {
            bulk_wait_read<0>();
            mbarrier_arrive_expect_tx(full, sizeof(Staging));
#pragma unroll
            for (int box = 0; box < kF32Boxes; ++box)
                tma_load(map, full, staging.boxes[box], origin.column + box % kBoxes * kBoxCols,
                         origin.row + box / kBoxes * 64, origin.group);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void wait_for_fetched() {
        mbarrier_wait(full, parity);
        parity ^= 1;
    }
    // Stores half of the columns of block 1. kStore, bulk: of D in FP32.
    template <StoreD kStore, Order kOrder>
    __device__ __forceinline__ void store_second(const BlockOrigin& origin, const float (&sum)[64], int half,
                                                 BulkStore bulk = BulkStore::overwrite) {
        if constexpr (kBf16)
            store_half_bf16<kMode, kOrder>(p, map, staging, origin, sum, 1, half, squares);
        else
            store_half<kStore, kOrder>(map, staging, origin, sum, half, squares, bulk);
    }
    // Stores block 0.
    template <StoreD kStore>
    __device__ __forceinline__ void store_first(const BlockOrigin& origin, const float (&sum)[64]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if constexpr (kBf16)
                store_half_bf16<kMode, Order::fragment>(p, map, staging, origin, sum, 0, half, squares);
            else
                store_half<kStore, Order::fragment>(map, staging, origin, sum, half, squares);
    }
};

}  // namespace fp8flow::hopper::gemm
