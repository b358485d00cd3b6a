// SPDX-License-Identifier: MIT
// Flags between the GPUs of one host: stores and loads with system-scope order, and a wait with a deadline.
// Source of the orders: PTX ISA, "Memory Consistency Model": when an acquire reads what a release wrote,
// everything before the release, on any GPU of the host, is visible after the acquire. Read next:
// kernels/hopper/exchange/peer/peer_exchange.h.
#pragma once

#include "kernels/hopper/device/clock.h"

#include <cstdint>

namespace fp8flow::hopper {

__device__ __forceinline__ void store_release_system(uint64_t* word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Orders what this thread wrote, or has seen of others' writes after a barrier or an atomic, before what it
// writes afterwards.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// After fence_system(), equivalent to a release.
__device__ __forceinline__ void store_relaxed_system(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// For polling: an acquire of the same word has to follow.
__device__ __forceinline__ uint64_t load_relaxed_system(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// Waits until *word >= value; false if that took longer than `limit` nanoseconds.
__device__ __forceinline__ bool wait_until_reached(const uint64_t* word, uint64_t value, uint64_t limit) {
    constexpr unsigned kNap = 40;  // nanoseconds between polls: short compared with the 1-2 us of a barrier
    const uint64_t start = global_nanoseconds();
    while (load_acquire_system(word) < value) {
        if (global_nanoseconds() - start > limit) return false;
        __nanosleep(kNap);
    }
    return true;
}

}  // namespace fp8flow::hopper
