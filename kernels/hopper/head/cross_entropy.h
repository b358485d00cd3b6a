// SPDX-License-Identifier: MIT
// Cross-entropy on the GPU, the part that both kernels share: arguments, and a block of 1024 columns in a
// warp: its largest logit, exponentials and sum in the order of op::CrossEntropy. Read next:
// cross_entropy_clusters.cu.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/ops/token.h"

#include <cfloat>

namespace fp8flow::hopper::head {

constexpr int kBlockColumns = static_cast<int>(op::kLossBlock);
constexpr int kQuads = kBlockColumns / (4 * kWarpSize);  // a thread holds eight times four columns of a block
static_assert(op::kLossLanes == kWarpSize && kQuads == 8);
constexpr uint32_t kNanBits = 0x7FC00000u;

struct CrossEntropyArgs {
    const float* logits;
    const int32_t* labels;
    float* loss;
    void* dlogits;
    DType dlogits_dtype;
    int64_t tokens, columns, vocab;
    float grad_scale;
};

// Whether launch_clusters takes the rows: up to 262,144 columns, a multiple of eight, aligned to 16 bytes.
bool fits_clusters(const CrossEntropyArgs& args);
void launch_clusters(const CrossEntropyArgs& args, const Launch& launch);

#ifdef __CUDACC__
// x[j][n] is column 128 j + 4 lane + n of a block.
using Columns = float[kQuads][4];

// The bits of a float as an integer of the same order, and back.
__device__ __forceinline__ int ordered_bits(float x) {
    const int bits = __float_as_int(x);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
// No lane has NaN.
__device__ __forceinline__ float warp_largest(float largest) {
    const int bits = __reduce_max_sync(kFullMask, ordered_bits(largest));
    return __int_as_float(bits ^ (bits >> 31 & 0x7FFFFFFF));
}
__device__ __forceinline__ void set_columns_from(Columns& x, int count, int lane, float value) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (j * 4 * kWarpSize + lane * 4 + n >= count) x[j][n] = value;
}
// Returns the largest of the first `count` logits and replaces these by their exponentials relative to it;
// the others become 0. The maximum ignores NaN, exp does not. Columns past `count` are computed as the
// largest: as minus infinity they would take their warp, and with it the whole row, through the slow path of
// exp for far arguments.
__device__ __forceinline__ float block_exponentials(Columns& x, int count, int lane) {
    const bool whole = count >= kBlockColumns;
    if (!whole) set_columns_from(x, count, lane, -FLT_MAX);
    float largest = -FLT_MAX;
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
        largest = fmaxf(largest, fmaxf(fmaxf(x[j][0], x[j][1]), fmaxf(x[j][2], x[j][3])));
    largest = warp_largest(largest);
    if (!whole) set_columns_from(x, count, lane, largest);
    uint32_t farthest = 0;  // bits of the largest difference; NaN compares above all
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            x[j][n] = largest - x[j][n];
            farthest = max(farthest, float_bits(x[j][n]));
        }
    if (farthest <= float_bits(kNear)) {
#pragma unroll
        for (int j = 0; j < kQuads; ++j)
#pragma unroll
            for (int n = 0; n < 4; ++n) x[j][n] = exp_near(-x[j][n]);
    } else {
#pragma unroll
        for (int j = 0; j < kQuads; ++j)
#pragma unroll 1
            for (int n = 0; n < 4; ++n) {
                x[j][0] = exp_float(-x[j][0]);
                rotate(x[j]);
            }
    }
    if (!whole) set_columns_from(x, count, lane, 0.0f);
    return largest;
}
__device__ __forceinline__ float block_sum(const Columns& e) {
    float quads[kQuads];
#pragma unroll
    for (int j = 0; j < kQuads; ++j) quads[j] = (e[j][0] + e[j][1]) + (e[j][2] + e[j][3]);
    return warp_sum(((quads[0] + quads[1]) + (quads[2] + quads[3])) +
                    ((quads[4] + quads[5]) + (quads[6] + quads[7])));
}
#endif

}  // namespace fp8flow::hopper::head
