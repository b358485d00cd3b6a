// SPDX-License-Identifier: MIT
// Roles of warpgroups in a CTA: named barriers between them, and their shares of the register file.
// Source: PTX ISA, "barrier", "setmaxnreg".
#pragma once

#include <cuda_runtime.h>

namespace fp8flow::hopper {

// Named barriers (0 is __syncthreads) between warpgroups: synchronise, or only arrive.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Register shares of the warpgroups of a CTA: a producer warpgroup releases registers that consumer
// warpgroups acquire. Executed by whole warpgroups.
template <int kCount> __device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount> __device__ __forceinline__ void acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace fp8flow::hopper
