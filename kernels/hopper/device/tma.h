// SPDX-License-Identifier: MIT
// The tensor memory accelerator (TMA): bulk copies between global and shared memory, described by tensor maps
// or contiguous, which complete on an mbarrier (loads) or as a bulk group (stores); prefetches into L2; the
// fences of the async proxy. Source: PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor",
// "cp.reduce.async.bulk.tensor".
#pragma once

#include "kernels/hopper/device/mbarrier.h"

#include <cuda.h>

#include <cstdint>

namespace fp8flow::hopper {

// One box of a 2-D tensor to shared memory; c0 counts elements along the contiguous dimension, c1 rows.
// Outside the tensor: zeros.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, Mbarrier* barrier, void* to, int c0,
                                         int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
        : "memory");
}
// The same box to the same place, and the same barrier, of several CTAs of the cluster: those with a bit set
// in `ctas`.
__device__ __forceinline__ void tma_load_multicast(uint16_t ctas, const CUtensorMap* map, Mbarrier* barrier,
                                                   void* to, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, "
        "%4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(ctas)
        : "memory");
}
// `bytes` contiguous bytes (a multiple of 16; both addresses 16-byte aligned).
__device__ __forceinline__ void bulk_load(const void* from, Mbarrier* barrier, void* to, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(shared_address(barrier)), "r"(bytes)
        : "memory");
}

// One box of a 2-D tensor from shared memory; elements outside the tensor are not written. Part of the
// thread's current bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(shared_address(from)), "r"(c0), "r"(c1)
                 : "memory");
}

// Prefetches contiguous bytes (as above) into L2, ahead of their loads. It returns no data: a kernel may
// prefetch what the kernel before it may still be writing (before pdl_wait), since those writes go to L2 too.
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// The same for the 128 bytes around an address.
__device__ __forceinline__ void prefetch_line_to_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// ---- boxes of a 3-D tensor, loads and stores; evict-first in L2: the data is used once
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// One box to shared memory; outside the tensor: zeros.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, Mbarrier* barrier, void* to, int c0, int c1,
                                         int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
        "l"(evict_first_policy())
        : "memory");
}
// One box from shared memory; elements outside the tensor are not written. Part of the thread's current bulk
// group.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], "
        "%5;" ::"l"(reinterpret_cast<uint64_t>(map)),
        "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "l"(evict_first_policy())
        : "memory");
}
// The same as a reduce-add. Deterministic where each element has one writer.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, const void* from, int c0, int c1,
                                               int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], "
        "[%1], %5;" ::"l"(reinterpret_cast<uint64_t>(map)),
        "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "l"(evict_first_policy())
        : "memory");
}
// `bytes` contiguous bytes from shared memory (a multiple of 16; both addresses 16-byte aligned). Part of the
// thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// The same, evict-first in L2.
__device__ __forceinline__ void bulk_store_evict_first(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes), "l"(evict_first_policy())
                 : "memory");
}
// Commits the thread's current bulk group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of the thread's bulk groups except the last kPending have read their shared memory.
template <int kPending> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all of them except the last kPending are complete.
template <int kPending> __device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Makes a thread's ordinary writes to shared memory visible to the async proxy: to TMA and wgmma issued
// afterwards.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory: ordinary writes that the thread has observed are visible to TMA that it issues
// afterwards.
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace fp8flow::hopper
