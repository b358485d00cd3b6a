// SPDX-License-Identifier: MIT
// Stores of whole vectors, and additions performed by the memory system (red).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp8flow::hopper {

// *to = value in one access; the compiler may split an assignment into four.
__device__ __forceinline__ void store_vector(uint4* to, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}
__device__ __forceinline__ void store_vector(float4* to, float4 value) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x), "f"(value.y),
                 "f"(value.z), "f"(value.w)
                 : "memory");
}
// Two bytes to an address of shared memory.
__device__ __forceinline__ void store_shared_u16(uint32_t to, uint16_t pair) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(pair) : "memory");
}
// *sum += value, performed at L2: the thread does not wait for the old value. Deterministic where each
// address has one writer.
__device__ __forceinline__ void reduce_add(float2* sum, float2 value) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(sum), "f"(value.x), "f"(value.y) : "memory");
}

}  // namespace fp8flow::hopper
