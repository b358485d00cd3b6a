// SPDX-License-Identifier: MIT
// Barriers in shared memory that count arrivals and bytes (mbarrier), and the position in a ring of pipeline
// stages. Source: PTX ISA, "mbarrier".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp8flow::hopper {

using Mbarrier = uint64_t;  // in shared memory, 8-byte aligned

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers visible to TMA and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Arrives at the mbarrier at the same location in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cta(Mbarrier* barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// The same with acquire at cluster scope: other CTAs of the cluster wrote the data that the phase guards.
__device__ __forceinline__ void mbarrier_wait_cluster(Mbarrier* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// A stage of a ring of mbarriers and the parity of its current phase.
template <int kSize> struct RingPosition {
    int index = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++index == kSize) {
            index = 0;
            parity ^= 1;
        }
    }
};

}  // namespace fp8flow::hopper
