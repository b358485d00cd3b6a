// SPDX-License-Identifier: MIT
// Maxima of the columns of each group: the first of two passes, for shapes that no one-read kernel supports.
// Contract: kernels/ops/quantize.h.
#include "kernels/hopper/device/packed.h"
#include "kernels/hopper/device/tiles.h"
#include "kernels/hopper/quantize/column_fp8.h"
#include "kernels/hopper/quantize/quantize_tiles.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::quantize {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTileRows = static_cast<int>(kBlock);
constexpr int kAmaxCols = 32 * kUnit;  // per CTA
constexpr int kAmaxRows = kTileRows / kWarps;
constexpr int kAmaxLoads = 8;  // 16-byte loads of a thread in flight
constexpr int kAmaxCtas = 5;   // per SM: 160 KB in flight

// Column maxima of BF16 rows: amax[group][column] = max(amax[group][column], |x|) as bits.
// Lower bound: reads 2 bytes per value.
// Grid-stride over tiles of 128 rows x 256 columns, 16 rows per warp, 8 columns per thread. Two
// __syncthreads per tile: after the first the maxima of all warps are in shared memory, after the second
// they have been read.
// Deterministic: the order of integer atomic maxima does not matter.
__global__ void __launch_bounds__(kThreads, kAmaxCtas)
    column_amax_kernel(const RowView src, const DeviceGroups groups, int64_t extent, int chunks,
                       uint32_t* amax) {
    __shared__ uint4 parts[kWarps * 32];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, cols = src.cols;
    const int64_t src_base = src.base();
    TileWalker walker(groups, extent, 1);
    RowTile tile;
    for (int work = static_cast<int>(blockIdx.x); walker.seek(work / chunks, tile);
         work += static_cast<int>(gridDim.x)) {
        const int col0 = work % chunks * kAmaxCols, col = col0 + lane * kUnit, first = warp * kAmaxRows;
        const uint16_t* in =
            static_cast<const uint16_t*>(src.data) + (src_base + tile.row + first) * cols + col;
        uint32_t largest[4] = {};
        for (int r = 0; r < kAmaxRows; r += kAmaxLoads) {
            uint4 words[kAmaxLoads];
#pragma unroll
            for (int i = 0; i < kAmaxLoads; ++i) {
                words[i] = uint4{0, 0, 0, 0};
                if (col < cols && first + r + i < tile.count)
                    words[i] = *reinterpret_cast<const uint4*>(in + static_cast<int64_t>(r + i) * cols);
            }
#pragma unroll
            for (int i = 0; i < kAmaxLoads; ++i) update_magnitudes(largest, words[i]);
        }
        parts[thread] = uint4{largest[0], largest[1], largest[2], largest[3]};
        __syncthreads();
        if (thread < kAmaxCols / 2 && col0 + 2 * thread < cols) {
            uint32_t pair = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w)
                pair =
                    max_bf16x2(pair, reinterpret_cast<const uint32_t*>(parts)[w * (kAmaxCols / 2) + thread]);
            uint32_t* to = amax + tile.group * cols + col0 + 2 * thread;
            atomicMax(to, low_magnitude(pair));
            atomicMax(to + 1, high_magnitude(pair));
        }
        __syncthreads();
    }
}

}  // namespace

bool launch_column_amax(const TileSource& source, const TileShape& shape, uint32_t* amax,
                        const Launch& launch) {
    if (source.values.dtype != DType::bf16 || !source.values.vector || shape.batches != 1 ||
        source.block_scales != nullptr || source.rstd != nullptr)
        return false;
    const int64_t chunks = ceil_div(shape.cols, kAmaxCols),
                  row_tiles = ceil_div(shape.capacity, kTileRows) + shape.groups.num_groups;
    launch_kernel(column_amax_kernel, grid_for(row_tiles * chunks, launch, kAmaxCtas), kThreads, launch,
                  "column_amax", source.values, shape.groups, shape.extent, chunks, amax);
    return true;
}

}  // namespace fp8flow::hopper::quantize
