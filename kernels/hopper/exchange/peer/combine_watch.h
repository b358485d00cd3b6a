// SPDX-License-Identifier: MIT
// How combine_sums.cu signals. The rows that a rank returns to an owner are divided into chunks, in the order
// of the owner's tokens. A CTA that sends stores its progress at every owner: the chunks in which it has
// nothing left to store. An owner adds its tokens up to the first one with a row that has not arrived. Here:
// what the warps of a CTA share, the table of this rank's own rows, and the watcher warp that sends and
// receives progress. The protocol is described in combine_sums.cu.
#pragma once

#include "kernels/hopper/device/clock.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/combine.h"

namespace fp8flow::hopper::peer {

constexpr int kWorkers = 15, kWatcher = kWorkers;  // warps of a CTA; the number of the watcher
constexpr int kCombineThreads = (kWorkers + 1) * kWarpSize;
constexpr int kWordBits = 32;
// Chunks of the rows that a rank returns to an owner: one for so many slots, the same number on all ranks,
// whatever the routing; some may be empty. A watcher that is in the middle of a fence signals several at once
// afterwards, so that small ones cost nothing.
constexpr int kMostCombineChunks = 63, kChunkSlots = 16;
static_assert(kMostCombineSenders == kWarpSize, "a lane watches the CTA of its number");

struct CombineSumsArgs {
    CombineArgs combine;
    GroupBarrier barrier;
    CombineWords* words;
    int64_t progress;   // in a region: of all members' CTAs that send
    int chunks;         // of the rows that a rank returns to an owner
    int units, pieces;  // of a row
    int drawn, draws;   // pieces per work item, work items per row

    // Rows of a chunk, if a rank returns `rows` rows.
    __device__ int chunk_rows(int64_t rows) const { return (static_cast<int>(rows) + chunks - 1) / chunks; }
    __device__ uint64_t* progress_of(int region, int writer, int cta) const {
        return reinterpret_cast<uint64_t*>(combine.group.regions[region] + progress) +
               writer * kMostCombineSenders + cta;
    }
};

// What the warps of a CTA share while they run.
struct CombineShared {
    uint8_t* buffer[PeerMemory::kMaxRanks];
    int begin[PeerMemory::kMaxRanks + 1];   // of the received rows of an owner
    int chunk_rows[PeerMemory::kMaxRanks];  // rows of a chunk that this rank returns to an owner
    int chunk_draws;                        // work items of a chunk, to all owners
    int senders;                            // CTAs of this rank that send, those of the lowest numbers
    int lost;                               // at the start
    // by atomics only
    int progress[kWorkers];  // of a warp that sends: chunks in which it has nothing left to store
    int arrived;             // this rank's tokens before this one have arrived from all members
};
__device__ __forceinline__ int read_atomic(int* word) { return atomicAdd(word, 0); }

// Which received rows are those of this rank's own tokens, in shared memory.
struct OwnRows {
    uint32_t* has_row;  // a bit for every own token: this rank hosts some of its experts
    int* first;         // per 32 tokens: their first row; unset where none has a row

    __host__ __device__ static int64_t words(const CombineSumsArgs& args) {
        return ceil_div(args.combine.slots, kWordBits);
    }
    __device__ OwnRows(int* memory, const CombineSumsArgs& args)
        : has_row(reinterpret_cast<uint32_t*>(memory)), first(memory + words(args)) {}

    // Number of the token's received row; -1: it has none.
    __device__ __forceinline__ int row_of(int token) const {
        const uint32_t bits = has_row[token / kWordBits], bit = 1u << token % kWordBits;
        return (bits & bit) == 0 ? -1 : first[token / kWordBits] + __popc(bits & (bit - 1));
    }
    // Fills the table, by the whole CTA: reads the source of every own row, 16 KB for 4096 tokens. Barriers
    // inside and at the end.
    __device__ __forceinline__ void fill(const CombineSumsArgs& args, int begin, int end) const {
        constexpr int kRun = 8;  // rows of a thread; loads in flight
        const int thread = static_cast<int>(threadIdx.x),
                  base = args.combine.group.rank * static_cast<int>(args.combine.slots);
        const int32_t* const source = args.combine.received.source;
        for (int i = thread; i < words(args); i += kCombineThreads) has_row[i] = 0;
        __syncthreads();
        for (int i = begin + thread * kRun; i < end; i += kCombineThreads * kRun) {
            int token[kRun], word = i > begin ? (source[i - 1] - base) / kWordBits : -1;
            uint32_t bits = 0;  // of `word`
#pragma unroll
            for (int e = 0; e < kRun; ++e) token[e] = i + e < end ? source[i + e] - base : -1;
#pragma unroll
            for (int e = 0; e < kRun; ++e) {
                if (token[e] < 0) break;
                if (token[e] / kWordBits != word) {
                    if (bits != 0) atomicOr(has_row + word, bits);
                    word = token[e] / kWordBits;
                    bits = 0;
                    first[word] = i + e;
                }
                bits |= 1u << token[e] % kWordBits;
            }
            if (bits != 0) atomicOr(has_row + word, bits);
        }
        __syncthreads();
    }
};

// ---- the watcher warp

class ProgressWatcher {
public:
    __device__ ProgressWatcher(const CombineSumsArgs& args, CombineShared& shared, uint64_t epoch)
        : args_(args),
          group_(args.combine.group),
          shared_(shared),
          cta_(static_cast<int>(blockIdx.x)),
          epoch_(epoch),
          lane_(static_cast<int>(threadIdx.x) % kWarpSize),
          is_member_(lane_ < group_.size && lane_ != group_.rank),
          rows_(is_member_ ? static_cast<int>(args.combine.send_counts[lane_]) : 0),
          done_(is_member_ ? 0 : args.chunks) {}

    // Runs until this CTA has sent everything and everything of the others has arrived, or until nothing has
    // arrived for `limit` nanoseconds after it has sent. (Sending waits for nobody.)
    __device__ __forceinline__ void watch() {
        constexpr unsigned kNap = 100;  // nanoseconds
        if (cta_ == 0) signal_idle_ctas();
        publish_arrived();
        uint64_t since = global_nanoseconds();
        for (bool sends = cta_ < shared_.senders, open = true; sends || open;) {
            // polled only after that: a poll would hold up what this CTA signals
            const bool signalled = sends && signal_progress(), changed = !sends && poll_members();
            sends = sends && signalled_ < args_.chunks;
            open = __any_sync(kFullMask, done_ < args_.chunks);
            if (signalled || changed) {
                since = global_nanoseconds();
            } else if (!sends && __any_sync(kFullMask, global_nanoseconds() - since > args_.barrier.limit)) {
                report_lost(args_.barrier, __ballot_sync(kFullMask, done_ < args_.chunks), epoch_);
                // the workers end; their sums are not used
                if (lane_ == 0) atomicExch(&shared_.arrived, static_cast<int>(args_.combine.tokens));
                return;
            } else {
                __nanosleep(kNap);
            }
        }
    }

private:
    // A progress word of call `epoch`: the chunks done; words of earlier calls are smaller.
    static constexpr uint64_t kStep = kMostCombineChunks + 1;
    __device__ uint64_t word_of(int done) const { return epoch_ * kStep + static_cast<unsigned>(done); }

    // CTAs that send nothing are done. Orders what the stream has done before, too.
    __device__ __forceinline__ void signal_idle_ctas() const {
        fence_system();
        if (lane_ < shared_.senders) return;
        for (int member = 0; member < group_.size; ++member)
            if (member != group_.rank)
                store_relaxed_system(args_.progress_of(member, group_.rank, lane_), word_of(args_.chunks));
    }
    // False if there was nothing new. The fence orders the workers' stores before the progress.
    __device__ __forceinline__ bool signal_progress() {
        const int warps = lane_ < kWorkers ? read_atomic(shared_.progress + lane_) : args_.chunks,
                  done = __reduce_min_sync(kFullMask, warps);
        if (done == signalled_) return false;
        signalled_ = done;
        __threadfence_block();  // what a lane has read is ordered before what the others store
        __syncwarp();
        fence_system();
        if (is_member_) store_relaxed_system(args_.progress_of(lane_, group_.rank, cta_), word_of(done));
        return true;
    }
    // Reads the progress of all members' CTAs; false if nothing new has arrived.
    __device__ __forceinline__ bool poll_members() {
        constexpr int kBatch = 8;  // loads in flight
        bool changed = false;
#pragma unroll 1
        for (int first = 0; first < group_.size; first += kBatch) {
            uint64_t word[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int member = first + j;
                word[j] = word_of(args_.chunks);
                if (member < group_.size && member != group_.rank)
                    word[j] = load_relaxed_system(args_.progress_of(group_.rank, member, lane_));
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const uint64_t clamped = min(max(word[j], word_of(0)), word_of(args_.chunks));
                const int member = first + j,
                          done = __reduce_min_sync(kFullMask, static_cast<int>(clamped - word_of(0)));
                if (member >= group_.size || done == __shfl_sync(kFullMask, done_, member)) continue;
                load_acquire_system(args_.progress_of(group_.rank, member, lane_));
                if (lane_ == member) done_ = done;
                changed = true;
            }
        }
        if (changed) publish_arrived();
        return changed;
    }
    // Tokens before that of the first row that some member has not signalled have arrived.
    __device__ __forceinline__ void publish_arrived() const {
        const int rows = min(done_ * args_.chunk_rows(rows_), rows_),
                  tokens = static_cast<int>(args_.combine.tokens);
        int arrived = tokens;
        if (is_member_ && rows < rows_)
            arrived = args_.combine.send_tokens[lane_ * args_.combine.slots + rows];
        arrived = __reduce_min_sync(kFullMask, arrived);
        __syncwarp();  // what all lanes have read is ordered before what lane 0 publishes
        __threadfence_block();
        if (lane_ == 0) atomicExch(&shared_.arrived, arrived);
    }

    const CombineSumsArgs& args_;
    const PeerGroup& group_;
    CombineShared& shared_;
    const int cta_;
    const uint64_t epoch_;
    const int lane_;
    const bool is_member_;  // the lane's number is that of a member to wait for
    const int rows_;        // that it returns
    int done_;              // its chunks that have arrived
    int signalled_ = 0;     // this CTA's progress
};

}  // namespace fp8flow::hopper::peer
