// SPDX-License-Identifier: MIT
// The clock that all SMs share, for delays and deadlines; and which SM this is.
#pragma once

#include <cstdint>

namespace fp8flow::hopper {

// Nanoseconds; the same rate on all SMs.
__device__ __forceinline__ uint64_t global_nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
// Below the number of SMs. Their counters of cycles (clock64) have nothing to do with each other.
__device__ __forceinline__ unsigned sm_id() {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

}  // namespace fp8flow::hopper
