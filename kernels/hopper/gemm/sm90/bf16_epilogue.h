// SPDX-License-Identifier: MIT
// The epilogue that stores BF16 rows of D through shared memory and TMA: no warp waits for global memory, and
// other memory accesses of the SM do not queue after 64 KiB of stores. Used by fp8.cu with fp8_mainloop.h.
#pragma once

#include "kernels/hopper/device/mma.h"
#include "kernels/hopper/gemm/sm90/fp8_scales.h"

namespace fp8flow::hopper::gemm {

// Staging memory of a warp's part of a chain: 16 rows of 128 columns.
struct Bf16Staging {
    alignas(1024) uint8_t boxes[kBf16Boxes][kBoxBytes];
};
inline CUtensorMap staging_map(const GemmProblem& p) {
    constexpr int64_t kAnyRows =
        INT32_MAX;  // D's base is known on the device only; rows past a group are never stored
    return tensor_map(p.d, DType::bf16, kAnyRows, p.n, kWarpRows);
}

// Epilogue of overlapped_mainloop. A warpgroup owns all rows of its own 128 columns. The first chain is
// stored during the tile's last wgmma batch, the second during the second batch of the next tile: the copies
// of the staging boxes have two batches to complete.
struct StoreEpilogue {
    static constexpr Owned kOwned = Owned::columns;
    static constexpr bool kHoldsStage = false;
    const GemmProblem& p;
    const CUtensorMap* map;
    Bf16Staging& staging;  // of this warp
    int warpgroup;

    __device__ __forceinline__ void begin(const WorkTile& tile, float (&sums)[2][64]) const {
        store_block<0>(tile, sums[0]);
    }
    template <int kChain>
    __device__ __forceinline__ void overlap(const WorkTile& tile, float (&sums)[2][64], uint8_t*) const {
        if (kChain == 1) store_block<1>(tile, sums[1]);
    }
    __device__ __forceinline__ void wait_read() const {}
    // Stores in flight read this CTA's shared memory.
    __device__ __forceinline__ void end() const {
        if (threadIdx.x % 32 == 0) bulk_wait_all();
    }

private:
    template <int kChain>
    __device__ __forceinline__ void store_block(const WorkTile& tile, float (&sum)[64]) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
        const int first = 64 * kChain + kWarpRows * warp;  // row of the tile
        zero_pads(tile, first + lane / 4, sum);
        // stmatrix: address of this lane's row of the first four matrices, upper and lower rows alternating
        const int matrix = lane / 8, row = lane % 8;
        uint32_t to = shared_address(staging.boxes) + (8 * (matrix % 2) + row) * kStageRowBytes +
                      ((matrix / 2) ^ row) * 16;
        opaque(to);
#pragma unroll
        for (int box = 0; box < kBf16Boxes; ++box) {
            if (lane == 0) bulk_wait_read<kBf16Boxes - 1>();  // the store of this box, from the chain before
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
            const int column =
                static_cast<int>(tile.b_output) + warpgroup * kWarpgroupCols + box * kBf16BoxCols;
            if (first + kWarpRows > warp_uniform(tile.rows))
                store_partial_rows(tile, staging.boxes[box], first, column);
            else if (lane == 0)
                tma_store(map, staging.boxes[box], column, static_cast<int>(tile.d_row) + first);
            if (lane == 0) bulk_commit();
        }
    }
    __device__ __forceinline__ void store_partial_rows(const WorkTile& tile, const uint8_t* box, int first,
                                                       int column) const {
        for_box_pieces([&](int row, int piece) {
            const int col = column + 8 * piece;
            if (first + row < tile.rows && col < p.n)
                store_vector(reinterpret_cast<uint4*>(static_cast<Bf16*>(p.d) +
                                                      (tile.d_row + first + row) * p.n + col),
                             piece_of(box, row, piece));
        });
    }
};

}  // namespace fp8flow::hopper::gemm
