// SPDX-License-Identifier: MIT
// Step 2: a CTA, a tile of 128 x 128. Operands are read once per tile, decoded and scaled on the way to
// shared memory; each of 256 threads sums 8 x 8 elements in registers, 64 FMAs for 16 values read. The FP32
// units are the limit now, 67 TFLOP/s on an H200.
//   nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a examples/gemm_steps/step2_shared_memory.cu -o
//   step2 && ./step2
#include "harness.h"

constexpr int kTile = 128, kStep = 32, kThreads = 256;

// [kStep][kTile + 4]: a row is one k, so that a thread's eight values are neighbours.
using Operand = float[kStep][kTile + 4];

// A thread loads 16 bytes of one row.
__device__ void load(const uint8_t* from, float scale, Operand& to, int row, int k) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 16; ++j)
        to[k + j][row] = e4m3_to_float(static_cast<uint8_t>(words[j / 4] >> (j % 4 * 8))) * scale;
}

__global__ __launch_bounds__(kThreads) void shared_memory(Problem p) {
    __shared__ Operand a, b;
    const int thread = static_cast<int>(threadIdx.x), blocks = p.k / 128;
    const int row0 = static_cast<int>(blockIdx.x) * kTile, n0 = static_cast<int>(blockIdx.y) * kTile;
    const int expert = row0 / p.rows, line = thread / 2, part = thread % 2 * 16;
    const uint8_t* from_a = p.a + int64_t(row0 + line) * p.k + part;
    const uint8_t* from_b = p.b + (int64_t(expert) * p.n + n0 + line) * p.k + part;
    const float* b_scales = p.b_scales + (int64_t(expert) * (p.n / 128) + n0 / 128) * blocks;
    const int my_row = thread / 16 * 8, my_n = thread % 16 * 8;
    float sums[8][8] = {};
    for (int k = 0; k < p.k; k += kStep) {
        load(from_a + k, p.a_scales[int64_t(k / 128) * p.m() + row0 + line], a, line, part);
        load(from_b + k, b_scales[k / 128], b, line, part);
        __syncthreads();
#pragma unroll 4
        for (int kk = 0; kk < kStep; ++kk) {
            float x[8], y[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = a[kk][my_row + j], y[j] = b[kk][my_n + j];
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] += x[i] * y[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j)
            p.d[int64_t(row0 + my_row + i) * p.n + n0 + my_n + j] = __float2bfloat16_rn(sums[i][j]);
}

int main(int argc, char** argv) {
    return run("2 shared memory", argc, argv,
               [](const Problem& p) { shared_memory<<<dim3(p.m() / kTile, p.n / kTile), kThreads>>>(p); });
}
