// SPDX-License-Identifier: MIT
// Cross-entropy on the GPU: loss and gradient of rows of logits, bit-equal to the reference. A kernel cannot
// report a label: the data loader checks labels, and here one outside the vocabulary gives NaN (a step that
// is then skipped), never an address. This file has the dispatch and the fallback for any row; the default
// kernel is in cross_entropy_clusters.cu.
#include "kernels/hopper/head/cross_entropy.h"

#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::head {

namespace {

// Bytes: a row of logits read three times, a row of gradients written once. CTA: one token: the largest
// logit; the sum over blocks, 32 blocks an iteration; the gradient from recomputed exponentials. Barriers
// surround every use of shared memory and all threads reach them: loop bounds depend on the token only.
// Deterministic: fixed order.
constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
// How many columns of the block at `column` are inside the vocabulary.
__device__ __forceinline__ int counted(const CrossEntropyArgs& args, int64_t column) {
    return static_cast<int>(min(args.vocab - column, int64_t{kBlockColumns}));
}
__device__ __forceinline__ void load_block(const CrossEntropyArgs& args, const float* row, int64_t column,
                                           int lane, Columns& x) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int64_t i = column + j * 4 * kWarpSize + lane * 4 + n;
            x[j][n] = i < args.vocab ? row[i] : 0.0f;
        }
}
__global__ __launch_bounds__(kThreads) void row_kernel(const CrossEntropyArgs args) {
    __shared__ float of_warps[kWarps], largest_of[kWarpSize], sum_of[kWarpSize], row_sum;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
    const int64_t blocks = (args.vocab + kBlockColumns - 1) / kBlockColumns;
    for (int64_t t = blockIdx.x; t < args.tokens; t += gridDim.x) {
        const float* row = args.logits + t * args.columns;
        const int64_t label = args.labels[t];
        if (label < 0) {  // ignored; the same branch for all threads
            if (thread == 0) args.loss[t] = 0.0f;
            if (args.dlogits != nullptr)
                for (int64_t i = thread; i < args.columns; i += kThreads)
                    store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, 0.0f);
            continue;
        }
        float largest = -FLT_MAX;
        for (int64_t i = thread; i < args.vocab; i += kThreads) largest = fmaxf(largest, row[i]);
        largest = warp_largest(largest);
        if (lane == 0) of_warps[warp] = largest;
        __syncthreads();
        largest = warp_largest(of_warps[lane % kWarps]);

        float sum = 0.0f;  // in the first warp: one of the 32 partial sums per lane
        for (int64_t start = 0; start < blocks; start += kWarpSize) {
            for (int b = warp; b < kWarpSize && start + b < blocks; b += kWarps) {
                Columns x;
                load_block(args, row, (start + b) * kBlockColumns, lane, x);
                const float of_block =
                                block_exponentials(x, counted(args, (start + b) * kBlockColumns), lane),
                            sum_here = block_sum(x);
                if (lane == 0) largest_of[b] = of_block, sum_of[b] = sum_here;
            }
            __syncthreads();
            if (warp == 0 && start + lane < blocks)
                sum = fma_float(sum_of[lane], exp_float(largest_of[lane] - largest), sum);
            __syncthreads();
        }
        if (warp == 0) {
            sum = warp_sum(sum);
            if (lane == 0) {
                const bool in_vocabulary = label < args.vocab;
                row_sum = in_vocabulary ? sum : bits_float(kNanBits);
                args.loss[t] = in_vocabulary ? log_float(sum) + (largest - row[label]) : bits_float(kNanBits);
            }
        }
        __syncthreads();
        if (args.dlogits != nullptr) {
            const float scale = div_float(args.grad_scale, row_sum);
            for (int64_t column = warp * kBlockColumns; column < args.columns;
                 column += kWarps * kBlockColumns) {
                Columns x;
                load_block(args, row, column, lane, x);
                const float factor =
                    exp_float(block_exponentials(x, counted(args, column), lane) - largest) * scale;
#pragma unroll
                for (int j = 0; j < kQuads; ++j)
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const int64_t i = column + j * 4 * kWarpSize + lane * 4 + n;
                        if (i >= args.columns) continue;
                        float p = i < args.vocab ? x[j][n] * factor : 0.0f;
                        if (i == label) p -= args.grad_scale;
                        store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, p);
                    }
            }
        }
        __syncthreads();  // the next token overwrites of_warps and row_sum
    }
}

}  // namespace

}  // namespace fp8flow::hopper::head

namespace fp8flow {

using namespace hopper;
using namespace hopper::head;

void HopperOps::do_cross_entropy(const op::CrossEntropy& args, const Launch& launch) {
    const CrossEntropyArgs kernel_args{.logits = args.logits.as<float>(),
                                       .labels = args.labels.as<int32_t>(),
                                       .loss = args.loss.as<float>(),
                                       .dlogits = args.dlogits ? args.dlogits.data : nullptr,
                                       .dlogits_dtype = args.dlogits.dtype,
                                       .tokens = args.logits.dim(0),
                                       .columns = args.logits.dim(1),
                                       .vocab = args.vocab_size,
                                       .grad_scale = args.grad_scale};
    if (kernel_args.tokens == 0) return;
    if (fits_clusters(kernel_args)) return launch_clusters(kernel_args, launch);
    launch_kernel(row_kernel, grid_for(kernel_args.tokens, launch), kThreads, launch, "cross_entropy",
                  kernel_args);
}

}  // namespace fp8flow
