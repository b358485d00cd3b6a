// The clock that all multiprocessors share, for delays and deadlines; and which multiprocessor this is.
#pragma once

namespace fp8flow::hopper {

__device__ __forceinline__ unsigned long long global_nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
// Below the number of multiprocessors. Their counters of cycles (clock64) have nothing to do with each other.
__device__ __forceinline__ unsigned multiprocessor() {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

}  // namespace fp8flow::hopper
