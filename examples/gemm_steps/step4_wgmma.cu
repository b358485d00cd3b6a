// SPDX-License-Identifier: MIT
// Step 4: Hopper's way. One thread feeds a ring of stages with TMA; two warpgroups multiply straight from
// shared memory with wgmma, 64 x 128 x 32 an instruction, and promote as in step 3. Barriers in shared memory
// say when a stage is full and when it is free: no thread waits for all others.
//   nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a examples/gemm_steps/step4_wgmma.cu -o step4 &&
//   ./step4
#include "harness.h"

#include <cuda.h>  // CUtensorMap

constexpr int kTile = 128, kStep = 128, kThreads = 384, kStages = 6;
constexpr int kOperand = kTile * kStep, kStage = 2 * kOperand,
              kShared = kStages * (kStage + 16) + 1024;  // bytes

__device__ uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ void wait(const uint64_t* barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra "
        "again;\n}" ::"r"(address(barrier)),
        "r"(phase)
        : "memory");
}
__device__ void arrive(const uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
// A box of 128 rows x 128 bytes, its 16-byte chunks permuted within each row (128-byte swizzle).
__device__ void load_box(const CUtensorMap& map, int k, int row, uint8_t* to, const uint64_t* full) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(address(to)),
        "l"(&map), "r"(address(full)), "r"(k), "r"(row)
        : "memory");
}
// How wgmma finds an operand: address in 16 bytes, 1,024 bytes from eight rows to the next eight, the
// swizzle.
__device__ uint64_t descriptor(const uint8_t* operand) {
    return uint64_t(address(operand) >> 4 & 0x3fff) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
           uint64_t(1) << 62;
}

#define EIGHT(d, i)                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
// d (+)= a b^T of 32 k; asynchronous.
__device__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, %64, %65, add, 1, 1;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48),
          EIGHT(d, 56)
        : "l"(a), "l"(b), "r"(add));
}

__global__ __launch_bounds__(kThreads) void wgmma(Problem p, const __grid_constant__ CUtensorMap map_a,
                                                  const __grid_constant__ CUtensorMap map_b) {
    extern __shared__ uint8_t raw[];
    uint8_t* stages = raw + (1024 - address(raw) % 1024) % 1024;  // as the swizzle wants it
    auto* full = reinterpret_cast<uint64_t*>(stages + kStages * kStage);
    uint64_t* free = full + kStages;
    const int thread = static_cast<int>(threadIdx.x), blocks = p.k / 128;
    const int m0 = static_cast<int>(blockIdx.x) * kTile, n0 = static_cast<int>(blockIdx.y) * kTile,
              expert = m0 / p.rows;
    if (thread < 2 * kStages)  // full: the producer's arrival and the bytes; free: one thread a consumer
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(full + thread)),
                     "r"(thread < kStages ? 1 : 2));
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    if (thread < 128) {  // the producer: one thread of a warpgroup that gives its registers away
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (int kb = 0; thread == 0 && kb < blocks; ++kb) {
            const int s = kb % kStages;
            if (kb >= kStages) wait(free + s, kb / kStages % 2 ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(full + s)),
                         "r"(kStage)
                         : "memory");
            load_box(map_a, kb * kStep, m0, stages + s * kStage, full + s);
            load_box(map_b, kb * kStep, expert * p.n + n0, stages + s * kStage + kOperand, full + s);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int half = thread / 128 - 1, lane = thread % 32, warp = thread % 128 / 32;
    const int64_t row = m0 + half * 64 + warp * 16 + lane / 4;  // and row + 8
    const float* b_scales = p.b_scales + (int64_t(expert) * (p.n / 128) + n0 / 128) * blocks;
    float sums[64] = {}, parts[64];
    for (int kb = 0; kb < blocks; ++kb) {
        const int s = kb % kStages;
        const float* a_scales = p.a_scales + int64_t(kb) * p.m() + row;
        const float scales[2] = {a_scales[0] * b_scales[kb], a_scales[8] * b_scales[kb]};
        wait(full + s, kb / kStages % 2);
        const uint64_t a = descriptor(stages + s * kStage + half * 64 * kStep),
                       b = descriptor(stages + s * kStage + kOperand);
#pragma unroll
        for (float& part : parts) asm volatile("" : "+f"(part)::"memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) multiply(parts, a + kk * 2, b + kk * 2, kk > 0);  // 32 bytes further
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (float& part : parts) asm volatile("" : "+f"(part)::"memory");
        if (thread % 128 == 0) arrive(free + s);
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] += parts[i] * scales[i / 2 % 2];
    }
    for (int j = 0; j < 16; ++j)
        for (int lower = 0; lower < 2; ++lower)
            *reinterpret_cast<__nv_bfloat162*>(p.d + (row + lower * 8) * p.n + n0 + j * 8 + lane % 4 * 2) =
                __floats2bfloat162_rn(sums[j * 4 + lower * 2], sums[j * 4 + lower * 2 + 1]);
}

CUtensorMap map_of(const uint8_t* data, int64_t rows, int k) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
        "the driver");
    CUtensorMap map;
    const cuuint64_t sizes[] = {cuuint64_t(k), cuuint64_t(rows)}, stride[] = {cuuint64_t(k)};
    const cuuint32_t box[] = {kStep, kTile}, every[] = {1, 1};
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(data), sizes, stride, box, every,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
    return map;
}

int main(int argc, char** argv) {
    cudaFuncSetAttribute(wgmma, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    return run("4 wgmma", argc, argv, [](const Problem& p) {
        wgmma<<<dim3(p.m() / kTile, p.n / kTile), kThreads, kShared>>>(
            p, map_of(p.a, p.m(), p.k), map_of(p.b, int64_t(p.groups) * p.n, p.k));
    });
}
