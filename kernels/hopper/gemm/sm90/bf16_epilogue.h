// SPDX-License-Identifier: MIT
// Finished sums on their way to BF16 rows of D: through shared memory and TMA, so that no warp
// waits for memory and the other accesses of an SM do not queue behind 64 KiB of stores. Included
// by fp8.cu.
#pragma once

#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/mma.h"
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/gemm/sm90/fp8_scales.h"

namespace fp8flow::hopper {

// A warp's part of a chain: 16 rows of 128 columns, as boxes of 64 columns, 128-byte swizzled.
constexpr int kBoxRows = 16, kBoxColumns = kStageRowBytes / static_cast<int>(sizeof(Bf16)),
              kBoxes = kColumns / kBoxColumns;
constexpr uint32_t kBoxBytes = kBoxRows * kStageRowBytes;
struct RowSlab {
    alignas(1024) uint8_t boxes[kBoxes][kBoxBytes];
};
inline CUtensorMap rows_map(const DeviceProduct& p) {
    constexpr int64_t kAnyRows =
        INT32_MAX;  // D's base is known on the device only; rows behind a group are never stored
    return tensor_map(p.d, DType::bf16, kAnyRows, p.n, kBoxRows);
}

// What becomes of finished tiles (multiply_tiles_overlapped): BF16 rows of D. A warpgroup has the tile's rows
// of its own 128 columns. The first chain leaves behind the tile's last product and the second one behind the
// second product of the next tile: the copies of a slab's boxes have the time of two products in between.
struct StoreTile {
    static constexpr Owned kOwned = Owned::columns;
    static constexpr bool kHoldsStage = false;
    const DeviceProduct& p;
    const CUtensorMap* map;
    RowSlab& slab;  // of this warp
    int warpgroup;

    __device__ __forceinline__ void prepare(const MathTile& tile, float (&sums)[2][64]) const {
        leave<0>(tile, sums[0]);
    }
    template <int kChain>
    __device__ __forceinline__ void behind(const MathTile& tile, float (&sums)[2][64], uint8_t*) const {
        if (kChain == 1) leave<1>(tile, sums[1]);
    }
    __device__ __forceinline__ void freed() const {}
    // What is under way reads this CTA's shared memory.
    __device__ __forceinline__ void end() const {
        if (threadIdx.x % 32 == 0) bulk_wait_all();
    }

private:
    template <int kChain>
    __device__ __forceinline__ void leave(const MathTile& tile, float (&sum)[64]) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
        const int first = 64 * kChain + kBoxRows * warp;  // row of the tile
        if (warp_uniform(tile.valid) < kTileRows) {
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (first + lane / 4 + 8 * (i / 2 % 2) >= tile.valid) sum[i] = 0.0f;
        }
        // where this lane's row of the first four matrices goes: matrices of upper and lower rows in turn
        const int matrix = lane / 8, row = lane % 8;
        uint32_t to = shared_address(slab.boxes) + (8 * (matrix % 2) + row) * kStageRowBytes +
                      ((matrix / 2) ^ row) * 16;
        opaque(to);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
            if (lane == 0) bulk_wait_read<kBoxes - 1>();  // those of this box, of the chain before
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                uint32_t words[4];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int at = 4 * (8 * box + j + c / 2) + 2 * (c % 2);
                    words[c] = pack_bf16(sum[at], sum[at + 1]);
                }
                stmatrix_x4((to ^ (16 * j)) + box * kBoxBytes, words);
            }
            fence_async_shared();
            __syncwarp();
            const int column = static_cast<int>(tile.b_output) + warpgroup * kColumns + box * kBoxColumns;
            if (first + kBoxRows > warp_uniform(tile.rows))
                store_rows_of(tile, slab.boxes[box], first, column);
            else if (lane == 0)
                tma_store(map, slab.boxes[box], column, static_cast<int>(tile.d_row) + first);
            if (lane == 0) bulk_commit();
        }
    }
    // A box whose last rows are behind the group.
    __device__ __forceinline__ void store_rows_of(const MathTile& tile, const uint8_t* box, int first,
                                                  int column) const {
        constexpr int kPieces = kStageRowBytes / 16;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x) % 32; i < kBoxRows * kPieces; i += 32) {
            const int row = i / kPieces, piece = i % kPieces, col = column + 8 * piece;
            if (first + row < tile.rows && col < p.n)
                store_vector(
                    reinterpret_cast<uint4*>(static_cast<Bf16*>(p.d) + (tile.d_row + first + row) * p.n +
                                             col),
                    *reinterpret_cast<const uint4*>(box + row * kStageRowBytes + (piece ^ (row % 8)) * 16));
        }
    }
};

}  // namespace fp8flow::hopper
