// SPDX-License-Identifier: MIT
// The clock that all SMs share, for delays and deadlines; and the number of this SM.
#pragma once

#include <cstdint>

namespace fp8flow::hopper {

// Nanoseconds; the same rate on all SMs.
__device__ __forceinline__ uint64_t global_nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
// Below the number of SMs. The cycle counters (clock64) of two SMs are not related.
__device__ __forceinline__ unsigned sm_id() {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

}  // namespace fp8flow::hopper
