// SPDX-License-Identifier: MIT
// Step 1: one thread, one element of D. Every operand comes from memory (mostly L2 and L1) for every product.
//   nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a examples/gemm_steps/step1_naive.cu -o step1 &&
//   ./step1
#include "harness.h"

__global__ void naive(Problem p) {
    const int n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int row = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y), expert = row / p.rows;
    const uint8_t* a = p.a + int64_t(row) * p.k;
    const uint8_t* b = p.b + (int64_t(expert) * p.n + n) * p.k;
    const int blocks = p.k / 128;
    float sum = 0;
    for (int kb = 0; kb < blocks; ++kb) {
        float part = 0;
        for (int k = 0; k < 128; ++k) part += e4m3_to_float(a[kb * 128 + k]) * e4m3_to_float(b[kb * 128 + k]);
        const float a_scale = p.a_scales[int64_t(kb) * p.m() + row];
        sum += part * (a_scale * p.b_scales[(int64_t(expert) * (p.n / 128) + n / 128) * blocks + kb]);
    }
    p.d[int64_t(row) * p.n + n] = __float2bfloat16_rn(sum);
}

int main(int argc, char** argv) {
    return run("1 naive", argc, argv,
               [](const Problem& p) { naive<<<dim3(p.n / 16, p.m() / 16), dim3(16, 16)>>>(p); });
}
