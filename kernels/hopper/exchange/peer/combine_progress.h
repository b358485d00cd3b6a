// SPDX-License-Identifier: MIT
// The progress protocol of combine_sums.cu, which describes it: what the warps of a CTA share, the table of
// this rank's own rows, and the progress warp. The rows that a rank returns to an owner are divided into
// chunks, in the order of the owner's tokens. The progress of a CTA is the number of chunks in which it has
// stored all of its items.
#pragma once

#include "kernels/hopper/device/clock.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/combine.h"

namespace fp8flow::hopper::peer {

constexpr int kWorkers = 15, kProgressWarp = kWorkers;  // worker warps of a CTA; index of the progress warp
constexpr int kCombineThreads = (kWorkers + 1) * kWarpSize;
constexpr int kWordBits = 32;
// Chunks of the rows that a rank returns to an owner: one per 16 slots, so the number does not depend on
// routing, and some chunks may be empty. Small chunks are cheap: after a fence the progress warp signals all
// chunks that were finished meanwhile at once.
constexpr int kMostCombineChunks = 63, kChunkSlots = 16;
static_assert(kMostCombineSenders == kWarpSize, "lane n polls CTA n");

struct CombineSumsArgs {
    CombineArgs combine;
    GroupBarrier barrier;
    CombineWords* words;
    int64_t progress;            // offset in a region of the progress words
    int chunks;                  // of the rows that a rank returns to an owner
    int units, pieces;           // of a row
    int item_pieces, row_items;  // pieces per work item, work items per row

    // Rows per chunk if a rank returns `rows` rows.
    __device__ int chunk_rows(int64_t rows) const { return (static_cast<int>(rows) + chunks - 1) / chunks; }
    __device__ uint64_t* progress_of(int region, int writer, int cta) const {
        return reinterpret_cast<uint64_t*>(combine.group.regions[region] + progress) +
               writer * kMostCombineSenders + cta;
    }
};

// What the warps of a CTA share while they run.
struct CombineShared {
    uint8_t* buffer[PeerMemory::kMaxRanks];
    int begin[PeerMemory::kMaxRanks + 1];   // first received row of each owner
    int chunk_rows[PeerMemory::kMaxRanks];  // rows per chunk to each owner
    int chunk_items;                        // work items per chunk, to all owners
    int senders;                            // number of CTAs that send: the first ones
    int lost;                               // a peer was lost before this call
    // accessed by atomics only
    int progress[kWorkers];  // chunks that each warp has finished
    int arrived;             // all rows of this rank's tokens before this one have arrived
};
__device__ __forceinline__ int read_atomic(int* word) { return atomicAdd(word, 0); }

// Which received rows are those of this rank's own tokens, in shared memory.
struct OwnRows {
    uint32_t* has_row;  // one bit per own token: this rank hosts one of its experts
    int* first;         // per 32 tokens: their first row; not set if none has a row

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
    // The whole CTA fills the table. It reads the source of every own row, 16 KB for 4096 tokens. Barriers
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

// ---- the progress warp

class ProgressWarp {
public:
    __device__ ProgressWarp(const CombineSumsArgs& args, CombineShared& shared, uint64_t epoch)
        : args_(args),
          group_(args.combine.group),
          shared_(shared),
          cta_(static_cast<int>(blockIdx.x)),
          epoch_(epoch),
          lane_(static_cast<int>(threadIdx.x) % kWarpSize),
          is_member_(lane_ < group_.size && lane_ != group_.rank),
          rows_(is_member_ ? static_cast<int>(args.combine.send_counts[lane_]) : 0),
          done_(is_member_ ? 0 : args.chunks) {}

    // Runs until this CTA has sent everything and all rows of other ranks have arrived. Reports lost peers
    // if, after sending, nothing arrives for `limit` nanoseconds.
    __device__ __forceinline__ void run() {
        constexpr unsigned kPollNanoseconds = 100;
        if (cta_ == 0) signal_idle_ctas();
        publish_arrived();
        uint64_t since = global_nanoseconds();
        for (bool sends = cta_ < shared_.senders, receiving = true; sends || receiving;) {
            // polls only after sending, because a poll would delay the signals
            const bool signalled = sends && signal_progress(), changed = !sends && poll_members();
            sends = sends && signalled_ < args_.chunks;
            receiving = __any_sync(kFullMask, done_ < args_.chunks);
            if (signalled || changed) {
                since = global_nanoseconds();
            } else if (!sends && __any_sync(kFullMask, global_nanoseconds() - since > args_.barrier.limit)) {
                report_lost(args_.barrier, __ballot_sync(kFullMask, done_ < args_.chunks), epoch_);
                // lets the workers end; nobody uses their sums
                if (lane_ == 0) atomicExch(&shared_.arrived, static_cast<int>(args_.combine.tokens));
                return;
            } else {
                __nanosleep(kPollNanoseconds);
            }
        }
    }

private:
    // The progress word of call `epoch` with `done` chunks. Words of earlier calls are smaller.
    static constexpr uint64_t kStep = kMostCombineChunks + 1;
    __device__ uint64_t word_of(int done) const { return epoch_ * kStep + static_cast<unsigned>(done); }

    // Stores the words of CTAs that do not send. The fence also orders earlier work of the stream.
    __device__ __forceinline__ void signal_idle_ctas() const {
        fence_system();
        if (lane_ < shared_.senders) return;
        for (int member = 0; member < group_.size; ++member)
            if (member != group_.rank)
                store_relaxed_system(args_.progress_of(member, group_.rank, lane_), word_of(args_.chunks));
    }
    // False if nothing has changed. The fence orders the stores of the workers before the progress word.
    __device__ __forceinline__ bool signal_progress() {
        const int warps = lane_ < kWorkers ? read_atomic(shared_.progress + lane_) : args_.chunks,
                  done = __reduce_min_sync(kFullMask, warps);
        if (done == signalled_) return false;
        signalled_ = done;
        __threadfence_block();  // orders what each lane has read before the stores of all lanes
        __syncwarp();
        fence_system();
        if (is_member_) store_relaxed_system(args_.progress_of(lane_, group_.rank, cta_), word_of(done));
        return true;
    }
    // Reads the progress of all members' CTAs. False if nothing has changed.
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
    // Publishes the first token with a row that has not arrived.
    __device__ __forceinline__ void publish_arrived() const {
        const int rows = min(done_ * args_.chunk_rows(rows_), rows_),
                  tokens = static_cast<int>(args_.combine.tokens);
        int arrived = tokens;
        if (is_member_ && rows < rows_)
            arrived = args_.combine.send_tokens[lane_ * args_.combine.slots + rows];
        arrived = __reduce_min_sync(kFullMask, arrived);
        __syncwarp();  // orders what all lanes have read before lane 0 publishes
        __threadfence_block();
        if (lane_ == 0) atomicExch(&shared_.arrived, arrived);
    }

    const CombineSumsArgs& args_;
    const PeerGroup& group_;
    CombineShared& shared_;
    const int cta_;
    const uint64_t epoch_;
    const int lane_;
    const bool is_member_;  // lane n waits for member n
    const int rows_;        // rows that the member returns
    int done_;              // chunks of it that have arrived
    int signalled_ = 0;     // this CTA's progress
};

}  // namespace fp8flow::hopper::peer
