// SPDX-License-Identifier: MIT
// Programmatic dependent launch, device side. A kernel that is launched with launch_pdl (runtime/launch.h)
// calls pdl_wait() in all threads before it accesses memory that other kernels write or read (prefetches into
// L2 may come earlier). After pdl_wait() the kernel before it in the stream has ended; what it wrote is seen
// by ordinary loads and by __ldcg, but not by non-coherent ones (__ldg, const __restrict__).
#pragma once

#include "kernels/core/stream.h"

namespace fp8flow::hopper {

// Whether a kernel's work comes after all of the kernel before it, or runs in parallel with it
// (Launch::independent).
enum class PdlOrder : bool { after, parallel };
inline PdlOrder pdl_order(const Launch& launch) {
    return launch.independent ? PdlOrder::parallel : PdlOrder::after;
}

#ifdef __CUDACC__
// Allows CTAs of the next kernel of the stream to become resident. Orders no memory accesses.
__device__ __forceinline__ void pdl_launch_dependents() { cudaTriggerProgrammaticLaunchCompletion(); }
__device__ __forceinline__ void pdl_wait() { cudaGridDependencySynchronize(); }

// The first and the last statement of a kernel that may run in parallel with the one before it, in all
// threads. The next kernel may be one that does not wait, so it starts only after this one has waited; and no
// kernel ends before the one before it has. So a wait for the last kernel is a wait for all.
__device__ __forceinline__ void pdl_begin(PdlOrder order) {
    if (order == PdlOrder::after) pdl_wait();
    pdl_launch_dependents();
}
__device__ __forceinline__ void pdl_end(PdlOrder order) {
    if (order == PdlOrder::parallel) pdl_wait();
}
#endif

}  // namespace fp8flow::hopper
