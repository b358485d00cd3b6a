// The clock that all multiprocessors share, for delays and deadlines.
#pragma once

namespace fp8flow::hopper {

__device__ __forceinline__ unsigned long long global_nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

}  // namespace fp8flow::hopper
