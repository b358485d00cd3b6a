// Copies from global into shared memory that a thread asks for and waits for itself.
// Source: PTX ISA, "cp.async". Read next: kernels/hopper/peer_combine_ring.h.
#pragma once

#include <cstdint>

namespace fp8flow::hopper {

// 16 bytes past L1; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
                 "l"(global)
                 : "memory");
}
__device__ __forceinline__ void copies_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most the kPending latest groups of this thread are under way.
template <int kPending> __device__ __forceinline__ void copies_async_wait_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fp8flow::hopper
