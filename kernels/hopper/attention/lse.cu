// SPDX-License-Identifier: MIT
// Copies log-sum-exps between [T, heads] and cuDNN's [sequences, heads, length].
#include "kernels/hopper/attention/lse.h"

#include "kernels/core/dtype.h"
#include "kernels/core/tensor.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::attention {

namespace {

constexpr int kThreads = 256;

// Bytes: 4 read and written per row and head; the strided side stays in L2. Grid-stride over the words of the
// packed tensor. No barriers. Deterministic: one writer per word.
__global__ void __launch_bounds__(kThreads)
    lse_kernel(float* lse, LsePart part, float* packed, LseCopy copy, int64_t words) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words; i += step) {
        const int64_t position = i % part.length, head = i / part.length % part.part_heads,
                      sequence = i / part.length / part.part_heads;
        const int64_t row = part.first_row + sequence * part.length + position;
        float* apart = lse + row * part.heads + part.first_head + head;
        if (copy == LseCopy::pack)
            packed[i] = *apart;
        else
            *apart = packed[i];
    }
}

}  // namespace

void copy_lse(float* lse, const LsePart& part, float* packed, LseCopy copy, const Launch& launch) {
    const int64_t words = part.sequences * part.part_heads * part.length;
    if (words == 0) return;
    launch_kernel(lse_kernel, grid_for(ceil_div(words, kThreads), launch), kThreads, launch,
                  "attention: log-sum-exps", lse, part, packed, copy, words);
}

}  // namespace fp8flow::hopper::attention
