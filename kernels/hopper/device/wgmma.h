// SPDX-License-Identifier: MIT
// Warpgroup MMA (wgmma) of FP8 and BF16 operands in shared memory with FP32 accumulators in registers.
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions" (fragment layout of D, matrix
// descriptors).
#pragma once

#include "kernels/hopper/device/mbarrier.h"

namespace fp8flow::hopper {

// Describes rows of 128 bytes along the contraction (K-major), 128-byte swizzled as TMA writes them; 8 rows
// are 1024 bytes. Step along the contraction inside the 128 bytes by adding (bytes / 16) to the descriptor.
__device__ __forceinline__ uint64_t k_major_descriptor(const void* tile) {
    constexpr uint64_t kStride = 1024 / 16, kSwizzle128 = 1;
    return static_cast<uint64_t>((shared_address(tile) & 0x3FFFF) >> 4) | uint64_t{1} << 16 | kStride << 32 |
           kSwizzle128 << 62;
}

// The descriptor advanced by `bytes`. The address does not overflow its 32-bit word, so no carry is needed.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
    return (descriptor & 0xFFFFFFFF00000000u) | (static_cast<uint32_t>(descriptor) + bytes / 16);
}

// Describes MN-major 16-bit operands: consecutive panels of 64 outputs (128 bytes) x kRows contraction rows,
// 128-byte swizzled; 8 contraction rows are 1024 bytes. Step along the contraction by adding (rows * 128 /
// 16).
template <int kRows = 64> __device__ __forceinline__ uint64_t mn_major_descriptor(const void* panel) {
    constexpr uint64_t kPanel = kRows * 128 / 16, kStride = 1024 / 16, kSwizzle128 = 1;
    return static_cast<uint64_t>((shared_address(panel) & 0x3FFFF) >> 4) | kPanel << 16 | kStride << 32 |
           kSwizzle128 << 62;
}

// Before the first wgmma after registers or shared memory were written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads and writes of an accumulator across the fence.
template <int kCount> __device__ __forceinline__ void wgmma_fence_operand(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand lists of the instructions: the names of 64 accumulators, and 8 or 64 accumulators as operands that
// are read and written.
#define FP8FLOW_NAMES_0_63                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FP8FLOW_NAMES_64_127                                                                       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FP8FLOW_SUMS_8(d, i)                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define FP8FLOW_SUMS_64(d, i)                                                                             \
    FP8FLOW_SUMS_8(d, i), FP8FLOW_SUMS_8(d, i + 8), FP8FLOW_SUMS_8(d, i + 16), FP8FLOW_SUMS_8(d, i + 24), \
        FP8FLOW_SUMS_8(d, i + 32), FP8FLOW_SUMS_8(d, i + 40), FP8FLOW_SUMS_8(d, i + 48),                  \
        FP8FLOW_SUMS_8(d, i + 56)

// d [64, 128] = a [64, 32] b [128, 32]^T (+ d where add is not 0), by the 128 threads of a warpgroup; b is
// E4M3, a as the name says. Thread t of warp w holds of row 16 * w + t / 4 (d[4 * j], d[4 * j + 1]) and of
// the row 8 below (d[4 * j + 2], d[4 * j + 3]) the columns 8 * j + 2 * (t % 4) and the next.
#define FP8FLOW_WGMMA_FP8(Name, type)                                                                      \
    struct Name {                                                                                          \
        static __device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int add) { \
            asm volatile(                                                                                  \
                "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                           \
                "wgmma.mma_async.sync.aligned.m64n128k32.f32." type ".e4m3 {" FP8FLOW_NAMES_0_63           \
                "}, %64, %65, add, 1, 1;\n}"                                                               \
                : FP8FLOW_SUMS_64(d, 0)                                                                    \
                : "l"(a), "l"(b), "r"(add));                                                               \
        }                                                                                                  \
    };
FP8FLOW_WGMMA_FP8(WgmmaE4m3, "e4m3")
FP8FLOW_WGMMA_FP8(WgmmaE5m2, "e5m2")
#undef FP8FLOW_WGMMA_FP8

// d [64, 256] = a [64, 16] b [256, 16]^T (+ d where add is not 0), BF16. kAcrossA / kAcrossB: that operand is
// MN-major (mn_major_descriptor), otherwise K-major (k_major_descriptor). Fragments as above, j up to 31.
template <int kAcrossA, int kAcrossB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" FP8FLOW_NAMES_0_63 ", " FP8FLOW_NAMES_64_127
        "}, %128, %129, add, 1, 1, %131, %132;\n}"
        : FP8FLOW_SUMS_64(d, 0), FP8FLOW_SUMS_64(d, 64)
        : "l"(a), "l"(b), "r"(add), "n"(kAcrossA), "n"(kAcrossB));
}
// The same of 128 columns, j up to 15.
template <int kAcrossA, int kAcrossB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FP8FLOW_NAMES_0_63
        "}, %64, %65, add, 1, 1, %67, %68;\n}"
        : FP8FLOW_SUMS_64(d, 0)
        : "l"(a), "l"(b), "r"(add), "n"(kAcrossA), "n"(kAcrossB));
}
#undef FP8FLOW_NAMES_0_63
#undef FP8FLOW_NAMES_64_127
#undef FP8FLOW_SUMS_8
#undef FP8FLOW_SUMS_64

}  // namespace fp8flow::hopper
