// SPDX-License-Identifier: MIT
// Step 3: tensor cores, by warps. Operands stay FP8 and go to shared memory with cp.async, a stage ahead of
// the products; mma.sync multiplies 16 x 8 x 32 at a time. Its sums of 128 k are scaled and added in FP32
// ("promotion"), since the scales change every 128 k and the tensor cores add with 14 bits.
//   nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a examples/gemm_steps/step3_mma.cu -o step3 &&
//   ./step3
#include "harness.h"

constexpr int kTile = 128, kStep = 128, kThreads = 256, kStages = 3;
constexpr int kOperand = kTile * kStep, kStage = 2 * kOperand;  // bytes

__device__ uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Where 16 bytes of a row lie: chunks are permuted by the row, so that eight rows of a column meet no bank
// twice.
__device__ int place(int row, int chunk) { return row * kStep + (chunk ^ (row & 7)) * 16; }

__device__ void load(const uint8_t* from, int k, uint8_t* to) {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * 8; i += kThreads) {
        const uint8_t* chunk = from + int64_t(i / 8) * k + i % 8 * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to + place(i / 8, i % 8))),
                     "l"(chunk));
    }
}

// Four 8 x 16-byte matrices: lane l names a row, and gets four bytes of row l / 4 of each.
__device__ void load_matrices(uint32_t (&to)[4], const uint8_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address(row)));
}

__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight warps, 2 x 4; a warp has 64 x 32 elements of D as 4 x 4 tiles of 16 x 8.
__global__ __launch_bounds__(kThreads) void mma(Problem p) {
    extern __shared__ __align__(128) uint8_t stages[];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int blocks = p.k / 128, m0 = static_cast<int>(blockIdx.x) * kTile,
              n0 = static_cast<int>(blockIdx.y) * kTile;
    const int expert = m0 / p.rows, warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
    const uint8_t* from_a = p.a + int64_t(m0) * p.k;
    const uint8_t* from_b = p.b + (int64_t(expert) * p.n + n0) * p.k;
    const float* b_scales = p.b_scales + (int64_t(expert) * (p.n / 128) + n0 / 128) * blocks;
    const auto load_step = [&](int kb) {
        if (kb < blocks) {
            uint8_t* stage = stages + kb % kStages * kStage;
            load(from_a + kb * kStep, p.k, stage);
            load(from_b + kb * kStep, p.k, stage + kOperand);
        }
        asm volatile("cp.async.commit_group;");
    };
    float sums[4][4][4] = {};
    load_step(0);
    load_step(1);
    for (int kb = 0; kb < blocks; ++kb) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();  // step kb is here, and all are done with the stage that the next copies fill
        load_step(kb + 2);
        const uint8_t *a = stages + kb % kStages * kStage, *b = a + kOperand;
        float parts[4][4][4] = {};
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            uint32_t of_a[4][4], of_b[2][4];
            for (int i = 0; i < 4; ++i)  // rows 0-7, 8-15 of the first 16 bytes, then of the second
                load_matrices(of_a[i], a + place(warp_m + i * 16 + lane % 16, 2 * kk + lane / 16));
            for (int j = 0; j < 2; ++j)  // both halves of k of rows 0-7, then of 8-15
                load_matrices(of_b[j],
                              b + place(warp_n + j * 16 + lane % 8 + lane / 16 * 8, 2 * kk + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply(parts[i][j], of_a[i], of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* a_scales = p.a_scales + int64_t(kb) * p.m() + m0 + warp_m + i * 16 + lane / 4;
            const float scales[2] = {a_scales[0] * b_scales[kb], a_scales[8] * b_scales[kb]};
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][j][e] += parts[i][j][e] * scales[e / 2];
        }
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            for (int half = 0; half < 2; ++half) {
                const int64_t row = m0 + warp_m + i * 16 + lane / 4 + half * 8;
                *reinterpret_cast<__nv_bfloat162*>(p.d + row * p.n + n0 + warp_n + j * 8 + lane % 4 * 2) =
                    __floats2bfloat162_rn(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
            }
}

int main(int argc, char** argv) {
    cudaFuncSetAttribute(mma, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kStage);
    return run("3 mma.sync", argc, argv, [](const Problem& p) {
        mma<<<dim3(p.m() / kTile, p.n / kTile), kThreads, kStages * kStage>>>(p);
    });
}
