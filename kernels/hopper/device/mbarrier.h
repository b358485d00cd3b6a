// Barriers in shared memory that count arrivals and bytes (mbarrier), and the copy engine's tensor loads that complete on them (TMA).
// Source: PTX ISA, "mbarrier" and "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>
#include <cstdint>

namespace fp8flow::hopper {

using Barrier = uint64_t;  // in shared memory, 8-byte aligned

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(Barrier* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect_bytes(Barrier* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Arrives at the barrier of the same place in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(Barrier* barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
// Where the same place in the shared memory of CTA `rank` of the cluster is, for barrier_arrive_remote.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(shared_address(pointer)), "r"(rank));
    return there;
}
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores a word where cluster_address said, and counts its bytes there at a barrier of the same CTA when it has arrived.
__device__ __forceinline__ void store_remote(uint32_t to, float value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}
// Waits until the phase of this parity has completed.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, uint32_t parity) {
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

// The same where other CTAs of the cluster wrote what the phase stands for.
__device__ __forceinline__ void barrier_wait_cluster(Barrier* barrier, uint32_t parity) {
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
// Two words to the shared memory of a CTA of the cluster; the barrier there counts eight bytes when they stand. Both places as
// cluster_address gives them, `to` 8-byte aligned.
__device__ __forceinline__ void store_remote(uint32_t to, float2 value, uint32_t barrier) {
    const uint64_t words = static_cast<uint64_t>(__float_as_uint(value.y)) << 32 | __float_as_uint(value.x);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(words), "r"(barrier)
                 : "memory");
}
// A position in a ring of barriers and the parity of its current use.
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

// One box of a 2-D tensor to shared memory; c0 counts elements along the contiguous dimension, c1 rows. Outside the tensor: zeros.
__device__ __forceinline__ void tensor_load(const CUtensorMap* map, Barrier* barrier, void* to, int c0,
                                            int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
        : "memory");
}
// The same box to the same place, and the same barrier, of every CTA of the cluster whose bit is set in `ctas`.
__device__ __forceinline__ void tensor_load_to(uint16_t ctas, const CUtensorMap* map, Barrier* barrier,
                                               void* to, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, "
        "%4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(ctas)
        : "memory");
}
// `bytes` side by side (a multiple of 16; both ends 16-byte aligned).
__device__ __forceinline__ void bulk_load(const void* from, Barrier* barrier, void* to, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(shared_address(barrier)), "r"(bytes)
        : "memory");
}

// One box of a 2-D tensor from shared memory, what is outside the tensor left out. Part of the thread's current group of copies.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, const void* from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(shared_address(from)), "r"(c0), "r"(c1)
                 : "memory");
}

// Asks for bytes side by side (as above) to come to L2, in front of the loads that want them. It reads nothing: a kernel may ask for what the kernel
// before it may still be writing (wait_for_kernel_before), since what that one writes meets it in L2.
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// The same for the 128 bytes around an address.
__device__ __forceinline__ void prefetch_line_to_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// ---- the copy engine both ways: boxes of a 3-D tensor that passes once, and is the first to leave L2 --------------------------------------
__device__ __forceinline__ uint64_t passing_once() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// One box to shared memory; outside the tensor: zeros.
__device__ __forceinline__ void tensor_load(const CUtensorMap* map, Barrier* barrier, void* to, int c0,
                                            int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
        "l"(passing_once())
        : "memory");
}
// One box from shared memory, what is outside the tensor left out. Part of the thread's current group of copies.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, const void* from, int c0, int c1,
                                             int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], "
        "%5;" ::"l"(reinterpret_cast<uint64_t>(map)),
        "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "l"(passing_once())
        : "memory");
}
// The same, added to what is there. Deterministic where each element has one writer.
__device__ __forceinline__ void tensor_add(const CUtensorMap* map, const void* from, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], "
        "[%1], %5;" ::"l"(reinterpret_cast<uint64_t>(map)),
        "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "l"(passing_once())
        : "memory");
}
// `bytes` side by side out of shared memory (a multiple of 16; both ends 16-byte aligned). Part of the thread's current group of copies.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// The same for bytes that pass once, and are the first to leave L2.
__device__ __forceinline__ void bulk_store_passing(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes), "l"(passing_once())
                 : "memory");
}
// Ends the thread's current group of copies.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of the thread's groups of copies but the last kPending have read their shared memory.
template <int kPending> __device__ __forceinline__ void copies_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all of them but the last kPending are done.
template <int kPending> __device__ __forceinline__ void copies_wait_but() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits until all of the thread's groups of copies are done.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Makes a thread's ordinary writes to shared memory visible to copies and warpgroup products that are started afterwards.
__device__ __forceinline__ void fence_shared_for_engines() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for memory of the GPU: what the thread has seen of ordinary writes, copies that it starts afterwards see too.
__device__ __forceinline__ void fence_memory_for_engines() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Stores a word where cluster_address said; seen there behind the next meeting.
__device__ __forceinline__ void store_remote_word(uint32_t to, uint32_t word) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
// All threads of the cluster's CTAs that have not returned meet, whole warps: lanes that have parted join first.
__device__ __forceinline__ void cluster_meet() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// The same in two steps: others may come between them.
__device__ __forceinline__ void cluster_announce() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_await() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A meeting from a part of a warp.
__device__ __forceinline__ void cluster_meet_unaligned() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

}  // namespace fp8flow::hopper
