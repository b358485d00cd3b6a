// SPDX-License-Identifier: MIT
// Programmatic dependent launch, device side. A kernel that is launched with launch_pdl (runtime/launch.h)
// calls pdl_wait() in all threads before it touches what others write or read (prefetches to L2 may come
// before): the kernel before it in the stream has ended then, and what it wrote is in L2 (__ldcg).
#pragma once

namespace fp8flow::hopper {

#ifdef __CUDACC__
// The next kernel of the stream may start to become resident. Says nothing about memory.
__device__ __forceinline__ void pdl_launch_dependents() { cudaTriggerProgrammaticLaunchCompletion(); }
__device__ __forceinline__ void pdl_wait() { cudaGridDependencySynchronize(); }
#endif

}  // namespace fp8flow::hopper
