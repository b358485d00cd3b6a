// SPDX-License-Identifier: MIT
// A chunk is a range of consecutive tokens of one owner, the unit in which combine_sums.cu signals. Here: the
// tables of a CTA (where the received rows of a chunk are) and its watcher warp, which signals stored chunks
// to their owners and polls which chunks have arrived. The protocol is described in combine_sums.cu.
#pragma once

#include "kernels/hopper/device/clock.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/combine.h"

namespace fp8flow::hopper::peer {

constexpr int kCombineWarps = 16, kCombineThreads = kCombineWarps * kWarpSize;
constexpr int kWordBits = 32;
static_assert(kMostCombineChunks <= kWarpSize, "a lane has a chunk");

struct CombineSumsArgs {
    CombineArgs combine;
    GroupBarrier barrier;
    CombineWords* words;
    int64_t steps;           // in a region: flag words of all members' chunks
    int chunk_bits, chunks;  // a chunk: 1 << chunk_bits tokens
    int units, pieces;       // of a row
    int drawn, draws;        // pieces per work item, work items per row

    __device__ uint64_t* step(int region, int writer, int chunk) const {
        return reinterpret_cast<uint64_t*>(combine.group.regions[region] + steps) +
               writer * kMostCombineChunks + chunk;
    }
};

// A CTA's tables of the received rows, in shared memory.
struct ChunkTables {
    int* begin;          // [G, chunks + 1]: first received row of an owner in or after a chunk
    int* first;          // [chunks + 1]: work items to send before a chunk
    int* stored;         // [chunks]: work items that this CTA has stored
    uint32_t* has_rows;  // a bit for every own token: this rank hosts some of its experts

    __host__ __device__ static int64_t words(const CombineSumsArgs& args) {
        return static_cast<int64_t>(args.combine.group.size + 2) * (args.chunks + 1) + bits(args);
    }
    __device__ ChunkTables(int* memory, const CombineSumsArgs& args)
        : begin(memory),
          first(begin + args.combine.group.size * (args.chunks + 1)),
          stored(first + args.chunks + 1),
          has_rows(reinterpret_cast<uint32_t*>(stored + args.chunks + 1)),
          stride_(args.chunks + 1) {}
    __device__ int& from(int owner, int chunk) const { return begin[owner * stride_ + chunk]; }

private:
    __host__ __device__ static int64_t bits(const CombineSumsArgs& args) {
        return (int64_t{args.chunks} << args.chunk_bits) / kWordBits;
    }
    int stride_;
};

// What the warps of a CTA share while they run, accessed by atomics only.
struct CombineShared {
    uint8_t* buffer[PeerMemory::kMaxRanks];
    int senders;  // warps that still send
    int arrived;  // chunks that have arrived from all members
    int lost;
};
__device__ __forceinline__ int read_atomic(int* word) { return atomicAdd(word, 0); }

// Fills the tables for the received rows of one owner: where its chunks begin and, for this rank's own rows,
// which tokens they are. `threads` threads share the work, this one is number `thread`.
__device__ __forceinline__ void find_rows_of(const CombineSumsArgs& args, const ChunkTables& tables,
                                             int owner, int thread, int threads) {
    constexpr int kBatch = 16, kNoToken = -1;  // loads in flight
    const CombineArgs& combine = args.combine;
    const int begin = static_cast<int>(combine.received.offsets[owner]),
              end = static_cast<int>(combine.received.offsets[owner + 1]),
              base = owner * static_cast<int>(combine.slots);
    for (int first = begin + thread; first <= end; first += kBatch * threads) {
        int32_t token[kBatch], before[kBatch];  // of neighbours in the list
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int i = first + j * threads;
            token[j] = i < end ? combine.received.source[i] - base : kNoToken;
            before[j] = i > begin && i <= end ? combine.received.source[i - 1] - base : kNoToken;
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int i = first + j * threads;
            if (i > end) continue;
            const int chunk = i < end ? token[j] >> args.chunk_bits : args.chunks;
#pragma unroll 1
            for (int k = i > begin ? (before[j] >> args.chunk_bits) + 1 : 0; k <= chunk; ++k)
                tables.from(owner, k) = i;
            if (owner != combine.group.rank || i == end) continue;
            const int word = token[j] / kWordBits;
            atomicOr(tables.has_rows + word, 1u << token[j] % kWordBits);
        }
    }
}

// Fills the tables, by the whole CTA: reads the source of every received row, 16 KB for 4096 tokens, half of
// it from L1. Barriers inside and at the end.
__device__ __forceinline__ void find_rows(const CombineSumsArgs& args, const ChunkTables& tables) {
    const int thread = static_cast<int>(threadIdx.x), size = args.combine.group.size,
              rank = args.combine.group.rank;
    const int words = static_cast<int>(ChunkTables::words(args));
    for (int i = thread; i < words; i += kCombineThreads) tables.begin[i] = 0;
    __syncthreads();
    // owners are distributed evenly over the warps, so that all loads are in flight together
    const int teams = min(size, kCombineWarps), warp = thread / kWarpSize, team = warp % teams,
              warps = (kCombineWarps - team + teams - 1) / teams;
#pragma unroll 1
    for (int owner = team; owner < size; owner += teams)
        find_rows_of(args, tables, owner, warp / teams * kWarpSize + thread % kWarpSize, warps * kWarpSize);
    __syncthreads();
    if (thread < kWarpSize) {  // first: prefix sums over the chunks, a lane each
        int longest = 0;
        for (int owner = 0; owner < size && thread < args.chunks; ++owner)
            if (owner != rank)
                longest = max(longest, tables.from(owner, thread + 1) - tables.from(owner, thread));
        int draws = longest * (size - 1) * args.draws;
        for (int step = 1; step < kWarpSize; step *= 2) {
            const int other = __shfl_up_sync(kFullMask, draws, step);
            if (thread >= step) draws += other;
        }
        if (thread < args.chunks) tables.first[thread + 1] = draws;
    }
    __syncthreads();
}

// ---- the watcher warp

class ChunkWatcher {
public:
    __device__ ChunkWatcher(const CombineSumsArgs& args, const ChunkTables& tables, CombineShared& shared,
                            uint64_t epoch)
        : args_(args),
          group_(args.combine.group),
          tables_(tables),
          shared_(shared),
          epoch_(epoch),
          lane_(static_cast<int>(threadIdx.x) % kWarpSize) {}

    // Runs until everything of this CTA is signalled and everything of the others has arrived, or until
    // nothing has changed for `limit` nanoseconds.
    __device__ __forceinline__ void watch() {
        constexpr unsigned kNap = 100;  // nanoseconds
        if (blockIdx.x == 0) signal_empty_chunks();
        uint64_t since = global_nanoseconds();
        for (bool sending = true; sending || arrived_ < args_.chunks;) {
            const bool may_store =
                __shfl_sync(kFullMask, lane_ == 0 ? read_atomic(&shared_.senders) : 0, 0) > 0;
            __syncwarp();
            const bool signalled = signal_stored(), arrived = poll_members();
            sending = may_store || signalled;
            if (signalled || arrived) {
                since = global_nanoseconds();
            } else if (__any_sync(kFullMask, global_nanoseconds() - since > args_.barrier.limit)) {
                const uint32_t late = __ballot_sync(kFullMask, !has_arrived(arrived_));
                if (late == 0) continue;
                report_lost(args_.barrier, late, epoch_);
                if (lane_ == 0) atomicExch(&shared_.lost, 1);
                return;
            } else {
                __nanosleep(kNap);
            }
        }
    }

private:
    __device__ __forceinline__ int draws_of(int chunk) const {
        return tables_.first[chunk + 1] - tables_.first[chunk];
    }
    // Call after a fence.
    __device__ __forceinline__ void signal(int chunk) const {
        for (int member = 0; member < group_.size; ++member)
            if (member != group_.rank) store_relaxed_system(args_.step(member, group_.rank, chunk), epoch_);
    }
    __device__ __forceinline__ void signal_empty_chunks() const {
        fence_system();
        if (lane_ < args_.chunks && draws_of(lane_) == 0) signal(lane_);
    }
    // False if there was nothing new. The first fence orders the workers' stores before this CTA's share of
    // the count, the second one all CTAs' shares before the flag word at the owners.
    __device__ __forceinline__ bool signal_stored() {
        const int chunk = lane_;
        const int fresh = chunk < args_.chunks ? read_atomic(tables_.stored + chunk) - counted_ : 0;
        counted_ += fresh;
        if (!__any_sync(kFullMask, fresh != 0)) return false;
        fence_system();
        const unsigned count = static_cast<unsigned>(fresh);
        const bool complete = fresh != 0 && atomicAdd(args_.words->stored + chunk, count) + count ==
                                                static_cast<unsigned>(draws_of(chunk));
        if (!__any_sync(kFullMask, complete)) return true;
        fence_system();
        if (!complete) return true;
        args_.words->stored[chunk] = 0;  // for the next call
        signal(chunk);
        return true;
    }
    // Whether the chunk has arrived from the member with this lane's number; true in lanes without a member
    // to wait for.
    __device__ __forceinline__ bool has_arrived(int chunk) const {
        return lane_ >= group_.size || lane_ == group_.rank || chunk >= args_.chunks ||
               load_acquire_system(args_.step(group_.rank, lane_, chunk)) >= epoch_;
    }
    __device__ __forceinline__ bool poll_members() {
        const int before = arrived_;
        while (arrived_ < args_.chunks && __all_sync(kFullMask, has_arrived(arrived_))) ++arrived_;
        if (arrived_ == before) return false;
        __syncwarp();  // what all lanes have read is ordered before what lane 0 publishes
        __threadfence_block();
        if (lane_ == 0) atomicExch(&shared_.arrived, arrived_);
        return true;
    }

    const CombineSumsArgs& args_;
    const PeerGroup& group_;
    const ChunkTables& tables_;
    CombineShared& shared_;
    const uint64_t epoch_;
    const int lane_;
    int counted_ = 0;  // of this lane's chunk: work items already counted
    int arrived_ = 0;  // chunks
};

}  // namespace fp8flow::hopper::peer
