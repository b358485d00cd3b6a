// Counters by which the CTAs of one kernel tell each other how far they are. Source of the orders: PTX ISA, "Memory Consistency Model": when an acquire
// reads what releases added, all that came before these releases is visible behind it.
#pragma once

#include <cstdint>

namespace fp8flow::hopper {

__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

}  // namespace fp8flow::hopper
