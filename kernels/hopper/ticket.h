// How the CTAs of a kernel find the one that finishes last, so that it can do what would otherwise be a launch of its own.
#pragma once

namespace fp8flow::hopper {

// True in all threads of the last CTA of the grid that calls this, which then sees everything that the others wrote before (to be read with
// __ldcg: past the L1). `ticket` is 0 before the launch and 0 again afterwards. One-dimensional CTAs; all threads call it, once. An integer
// counter: which CTA is last depends on chance, so what the last one computes must not depend on which it is.
__device__ __forceinline__ bool is_last_cta(unsigned int* ticket) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();  // all threads' writes are visible to the chip
    if (threadIdx.x == 0) {
        is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        if (is_last) *ticket = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

}  // namespace fp8flow::hopper
