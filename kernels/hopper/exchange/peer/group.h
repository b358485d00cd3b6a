// SPDX-License-Identifier: MIT
// Device-side view of a group of ranks: their regions, receive buffers, flags and the group barrier, for all
// kernels of the exchange over peer memory. Read next: peer_exchange.h (the protocol), then dispatch.cu,
// combine.cu, reduce.cu or routing.cu.
#pragma once

#include "kernels/hopper/device/peer.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/peer_memory.h"
#include "kernels/hopper/runtime/launch.h"

#include <cstdint>

namespace fp8flow::hopper::peer {

constexpr int kPeerThreads = 1024;  // one CTA per SM: a limit of SMs limits CTAs
constexpr int kPeerWarps = kPeerThreads / kWarpSize;
constexpr int64_t kPeerVector = 16;  // bytes per access
constexpr int64_t kPeerAlign = 256;  // alignment of offsets in a region

inline int64_t peer_aligned(int64_t bytes) { return round_up(bytes, kPeerAlign); }

// CTAs for `warps` warps of work, at most one per SM that the launch may use.
inline unsigned peer_grid(int64_t warps, const Launch& launch) {
    return grid_for(ceil_div(warps, kPeerWarps), launch, 1);
}

enum class PeerOperation : uint32_t { routing, dispatch, combine, all_reduce, reduce_scatter, all_gather };

// What a wait that passed its deadline reports to the host. Written once, by the first such wait.
struct LostPeers {
    uint32_t operation, group, members;  // members: bit r is rank r of the group
    uint64_t sequence;                   // epoch of the group
    uint32_t valid;                      // set last
};

// Device words of one rank, in its own region; no other rank reads them.
struct PeerWords {
    uint64_t epochs[4];  // group barriers so far
    uint64_t wire[3];    // bytes sent to other ranks: routing, dispatch, combine
    uint64_t deferred;   // epoch of the latest dispatch that deferred rows
    // of the current dispatch
    uint32_t claimed_bundles;  // bundles of rows that sender warps have claimed
    uint32_t scale_warps;      // warps that have sent their scales
    uint32_t finished_ctas;
    uint32_t lost;  // a wait passed its deadline: kernels no longer access peers or wait for them
};

// A group of ranks as a kernel sees it.
struct PeerGroup {
    uint8_t* const* regions;  // device table: every member's region
    PeerWords* words;
    int rank, size, index;
    int64_t flags;                  // offset in a region: one line per member, which that member writes
    int64_t buffers, buffer_bytes;  // offset in a region: two receive buffers, for even and odd epochs

    __device__ bool lost() const { return words->lost != 0; }
    __device__ uint64_t epoch() const { return words->epochs[index]; }
    // The receive buffer of the next epoch, which is written before the barrier, and of the current one,
    // which is read after it.
    __device__ uint8_t* next_buffer(int member) const { return buffer(member, epoch() + 1); }
    __device__ uint8_t* current_buffer(int member) const { return buffer(member, epoch()); }
    __device__ uint64_t* flag(int region, int writer) const {
        return reinterpret_cast<uint64_t*>(regions[region] + flags + writer * kFlagLine);
    }
    // The receive buffer of epoch `number`.
    __device__ uint8_t* buffer(int member, uint64_t number) const {
        return regions[member] + buffers + static_cast<int64_t>(number & 1) * buffer_bytes;
    }
    static constexpr int64_t kFlagLine = 128;
};

// A barrier over the members of a group: what a member wrote before it is visible to all members after it.
// `report` is host memory, `limit` is in nanoseconds.
struct GroupBarrier {
    PeerGroup group;
    LostPeers* report;
    uint64_t limit;
    PeerOperation operation;
};
void launch_group_barrier(const GroupBarrier& barrier, const Launch& launch);

#ifdef __CUDACC__
// Reports to the host which members missed the deadline, once, by the first wait that notices. Called by a
// whole warp.
__device__ __forceinline__ void report_lost(const GroupBarrier& barrier, uint32_t late_members,
                                            uint64_t epoch) {
    if (threadIdx.x % kWarpSize != 0 || atomicExch(&barrier.group.words->lost, 1u) != 0) return;
    volatile LostPeers* report = barrier.report;
    report->operation = static_cast<uint32_t>(barrier.operation);
    report->group = static_cast<uint32_t>(barrier.group.index);
    report->members = late_members;
    report->sequence = epoch;
    __threadfence_system();
    report->valid = 1;
    __threadfence_system();
}
#endif

// The received rows of a plan: those of a source rank are contiguous, in the order of its tokens.
struct ReceivedRows {
    const int64_t* offsets;  // [size + 1]
    const int32_t* source;   // rank * slots + token
    int64_t slots;

    // Calls visit(i, source rank, token) for each received row i, distributed over the warps of the grid.
    // Rows of all source ranks are interleaved, beginning with the successor of this rank.
    template <class Visit> __device__ __forceinline__ void for_each(int rank, int size, Visit visit) const {
        int64_t longest = 0;
        for (int r = 0; r < size; ++r) longest = max(longest, offsets[r + 1] - offsets[r]);
        const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarpSize,
                      items = longest * size;
        const auto owner = [&](int64_t item) { return (rank + 1 + static_cast<int>(item % size)) % size; };
        const auto fetch = [&](int64_t item) -> int32_t {  // -1: no row
            if (item >= items) return -1;
            const int from = owner(item);
            const int64_t i = offsets[from] + item / size;
            return i < offsets[from + 1] ? source[i] : -1;
        };
        int64_t item = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
        int32_t next = fetch(item);
        for (; item < items; item += warps) {
            const int32_t now = next;
            next = fetch(item + warps);  // in flight during the visit
            if (now < 0) continue;
            const int from = owner(item);
            visit(offsets[from] + item / size, from, now - from * slots);
        }
    }
};

// ---- pieces of kernels

// Copies contiguous bytes; called by thread `thread` of `threads`. 16 bytes at a time with four loads in
// flight if both sides are aligned.
__device__ __forceinline__ void copy_contiguous(uint8_t* to, const uint8_t* from, int64_t bytes,
                                                int64_t thread, int64_t threads) {
    int64_t done = 0;
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % kPeerVector == 0) {
        constexpr int kInFlight = 4;
        const int64_t count = bytes / kPeerVector;
        const uint4* in = reinterpret_cast<const uint4*>(from);
        uint4* out = reinterpret_cast<uint4*>(to);
        for (int64_t first = thread; first < count; first += kInFlight * threads) {
            uint4 piece[kInFlight] = {};
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
                if (first + j * threads < count) piece[j] = __ldcg(in + first + j * threads);
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
                if (first + j * threads < count) out[first + j * threads] = piece[j];
        }
        done = count * kPeerVector;
    } else if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % sizeof(uint32_t) ==
               0) {
        const int64_t count = bytes / static_cast<int64_t>(sizeof(uint32_t));
        for (int64_t i = thread; i < count; i += threads)
            reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
        done = count * static_cast<int64_t>(sizeof(uint32_t));
    }
    for (int64_t i = done + thread; i < bytes; i += threads) to[i] = from[i];
}

__device__ __forceinline__ int64_t grid_thread() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t grid_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Counts bytes sent; integers, so the order of additions does not matter.
__device__ __forceinline__ void count_wire(uint64_t* counter, int64_t bytes) {
    if (bytes > 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(bytes));
}

// The experts of a token: which ids exist, the rank that hosts each, and their positions in ascending order.
struct TokenChoices {
    const int32_t* ids;  // [topk]
    int64_t topk, experts, local_experts;

    __device__ bool exists(int64_t k) const { return ids[k] >= 0 && ids[k] < experts; }
    __device__ int host(int64_t k) const { return static_cast<int>(ids[k] / local_experts); }
    // Position of choice k among the existing experts of the token in ascending order: among all of them, or
    // among those that rank `on` hosts.
    __device__ int64_t position(int64_t k) const {
        int64_t below = 0;
        for (int64_t other = 0; other < topk; ++other) below += exists(other) && ids[other] < ids[k];
        return below;
    }
    __device__ int64_t position_on(int64_t k, int on) const {
        int64_t below = 0;
        for (int64_t other = 0; other < topk; ++other)
            below += exists(other) && host(other) == on && ids[other] < ids[k];
        return below;
    }
};

}  // namespace fp8flow::hopper::peer
