// SPDX-License-Identifier: MIT
// CTAs of one cluster: rank, barrier, and stores into the shared memory of another CTA (distributed shared
// memory). Source: PTX ISA, "barrier.cluster", "mapa", "st.async".
#pragma once

#include "kernels/hopper/device/mbarrier.h"

#include <cstdint>

namespace fp8flow::hopper {

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Barrier over all threads of the cluster's CTAs that have not exited, whole warps: diverged lanes reconverge
// first.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// The same in two steps: independent work may be placed between them.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// cluster_sync from a part of a warp.
__device__ __forceinline__ void cluster_sync_unaligned() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The address of the same location in the shared memory of CTA `rank` of the cluster, for
// mbarrier_arrive_remote.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(shared_address(pointer)), "r"(rank));
    return there;
}
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores a word at an address of cluster_address; an mbarrier of the same CTA counts its bytes when it has
// arrived.
__device__ __forceinline__ void store_remote(uint32_t to, float value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}
// Stores two words to the shared memory of a CTA of the cluster; the mbarrier there counts eight bytes when
// they have arrived. Both addresses from cluster_address, `to` 8-byte aligned.
__device__ __forceinline__ void store_remote(uint32_t to, float2 value, uint32_t barrier) {
    const uint64_t words = static_cast<uint64_t>(__float_as_uint(value.y)) << 32 | __float_as_uint(value.x);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(words), "r"(barrier)
                 : "memory");
}

}  // namespace fp8flow::hopper
