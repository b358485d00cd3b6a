// SPDX-License-Identifier: MIT
// Programmatic dependent launch, device side. A kernel that is launched with launch_pdl (runtime/launch.h)
// calls pdl_wait() in all threads before it accesses memory that other kernels write or read (prefetches into
// L2 may come earlier). After pdl_wait() the kernel before it in the stream has ended, and what it wrote is
// in L2 (read it with __ldcg).
#pragma once

namespace fp8flow::hopper {

#ifdef __CUDACC__
// Allows CTAs of the next kernel of the stream to become resident. Orders no memory accesses.
__device__ __forceinline__ void pdl_launch_dependents() { cudaTriggerProgrammaticLaunchCompletion(); }
__device__ __forceinline__ void pdl_wait() { cudaGridDependencySynchronize(); }
#endif

}  // namespace fp8flow::hopper
