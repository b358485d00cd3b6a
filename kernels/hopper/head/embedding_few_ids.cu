// SPDX-License-Identifier: MIT
// The gradient of an embedding with many tokens per id (bytes of a text): a warp adds up all rows of one id.
#include "kernels/core/error.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/head/embedding.h"
#include "kernels/hopper/runtime/launch.h"

#include <cuda_pipeline.h>

namespace fp8flow::hopper::head {

namespace {

constexpr int kColumns = kWarpSize;  // of a warp's item: 64 bytes of a row, a column per lane
constexpr int kStageRows = 32, kStages = 6, kWarps = 4;
constexpr int kAhead = 4;   // stages between the load of a position and the copy of its row
constexpr int kVector = 8;  // BF16 values of one 16-byte copy
constexpr int kRowLanes = kColumns / kVector;        // lanes that copy one row
constexpr int kRowsPerCopy = kWarpSize / kRowLanes;  // rows that a warp copies with one instruction
constexpr int kCopies = kStageRows / kRowsPerCopy;   // per lane and stage

// The first place with an id of at least `id` in sorted ids: a warp compares 32 places at once.
__device__ int64_t first_place(const int32_t* sorted_ids, int64_t tokens, int64_t id, int lane) {
    int64_t low = 0, high = tokens;
    while (low < high) {
        const int64_t step = (high - low + kWarpSize - 1) / kWarpSize, at = low + lane * step;
        const int below = __popc(__ballot_sync(kFullMask, at < high && sorted_ids[at] < id));
        if (below == 0) return low;
        high = min(low + below * step, high);
        low += (below - 1) * step + 1;
    }
    return low;
}

// dtable[id] (+)= the gradient rows of its tokens in ascending order.
//
// Lower bound: dy read once (67 MB at T=32768, H=1024: 20 us). An id with n tokens takes n dependent
// additions per column: 15 us at n=6500.
//
// CTA: four warps without barriers. A warp takes one id and 32 columns, so that an id with many tokens is
// divided over H/32 warps. It finds the id's places by search and copies rows through its own ring in shared
// memory: six stages of 32 rows (2 KB), five of them in flight while one is added up. 48 KB per CTA.
//
// Deterministic: one writer per element, the reference's order.
__global__ __launch_bounds__(kWarps* kWarpSize) void few_ids_kernel(const int32_t* sorted_ids,
                                                                    const int32_t* order, const uint16_t* dy,
                                                                    int64_t tokens, int64_t hidden,
                                                                    Gradient mode, float* dtable,
                                                                    int64_t vocab) {
    __shared__ __align__(16) uint16_t ring[kWarps][kStages][kStageRows][kColumns];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int64_t slabs = (hidden + kColumns - 1) / kColumns;
    pdl_wait();  // the sort
    for (int64_t item = int64_t{blockIdx.x} * kWarps + warp; item < vocab * slabs;
         item += int64_t{gridDim.x} * kWarps) {
        const int64_t id = item / slabs, first_column = item % slabs * kColumns;
        const int64_t begin = first_place(sorted_ids, tokens, id, lane),
                      end = first_place(sorted_ids, tokens, id + 1, lane);
        if (begin == end && mode == Gradient::accumulate) continue;
        const int64_t copied_column = first_column + lane % kRowLanes * kVector;
        int32_t positions[kAhead];  // of this lane's row in the next stages
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int64_t place = begin + i * kStageRows + lane;
            positions[i] = place < end ? order[place] : 0;
        }
        const auto copy_stage = [&](int stage, int64_t first) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int row = i * kRowsPerCopy + lane / kRowLanes;
                const int64_t from = __shfl_sync(kFullMask, positions[0], row);
                if (first + row < end && copied_column < hidden)
                    __pipeline_memcpy_async(&ring[warp][stage][row][lane % kRowLanes * kVector],
                                            dy + from * hidden + copied_column, kVector * sizeof(uint16_t));
            }
            __pipeline_commit();
#pragma unroll
            for (int i = 1; i < kAhead; ++i) positions[i - 1] = positions[i];
            const int64_t next = first + kAhead * kStageRows + lane;
            positions[kAhead - 1] = next < end ? order[next] : 0;
        };
#pragma unroll
        for (int stage = 0; stage < kStages - 1; ++stage) copy_stage(stage, begin + stage * kStageRows);

        const int64_t column = first_column + lane, at = id * hidden + column;
        float sum = mode == Gradient::accumulate && column < hidden ? dtable[at] : 0.0f;
        int stage = 0;
        for (int64_t first = begin; first < end; first += kStageRows) {
            __pipeline_wait_prior(kStages - 2);
            __syncwarp();  // this stage is there for all lanes, and all have read the stage before it
            copy_stage(stage == 0 ? kStages - 1 : stage - 1, first + (kStages - 1) * kStageRows);
            const int rows = static_cast<int>(min(end - first, int64_t{kStageRows}));
#pragma unroll
            for (int row = 0; row < kStageRows; ++row) {
                const float value = __uint_as_float(uint32_t{ring[warp][stage][row][lane]} << 16);
                if (row < rows) sum += value;
            }
            stage = stage == kStages - 1 ? 0 : stage + 1;
        }
        if (column < hidden) dtable[at] = sum;
        __syncwarp();  // the next item's copies come after these reads
    }
}

}  // namespace

void embedding_backward_few_ids(const EmbeddingRows& job, const Launch& launch) {
    const int64_t items = ceil_div(job.vocab * ceil_div(job.hidden, kColumns), kWarps);
    launch_pdl(few_ids_kernel, grid_of_items(items, launch, 4), kWarps * kWarpSize, launch,
               "embedding_backward", job.sorted_ids, job.order, job.dy, job.tokens, job.hidden, job.mode,
               job.dtable, job.vocab);
}

}  // namespace fp8flow::hopper::head
