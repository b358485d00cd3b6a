// SPDX-License-Identifier: MIT
// combine over peer memory, order `rank`, BF16 in whole vectors: one kernel stores this rank's sums into the
// receive buffers of the tokens' owners and, in parallel, adds what has arrived for its own tokens. The bits
// are those of the reference exchange.
//
// Floor, a layer of DeepSeek-V3 (T = 4096 tokens a rank, E = 256, K = 8, H = 7168), MB a GPU:
//
// | | 2 ranks | 4 ranks |
// |---|---|---|
// | wire | 58 | 159 |
// | memory: M-rows in | 470 | 470 |
// | memory: peers' sums in and out of L2 | 117 | 318 |
// | memory: residual and y | 117 | 117 |
// | time of the wire at 361 GB/s of stores, us | 162 | 449 |
// | time of memory at 4.2 TB/s, us | 168 | 215 |
//
// Wire and memory have to overlap. When own sums went through the receive buffer as well, and were added
// after the group barrier, memory traffic was 822 and 1011 MB. An SM loads about 110 GB/s or stores 50, one
// after the other, so that 24 sending SMs need 416 us with four ranks.
//
// Work. An owner's tokens are divided into chunks. A work item ("draw") is some pieces of one token's sum;
// warps claim items from a counter, chunk by chunk. Some CTAs send, the others add: stores drain from an SM
// in order, so stores that NVLink holds up would hold up local ones. Sending waits for nobody; a sending CTA
// with nothing left to send adds. Sums of this rank's own tokens go straight from its M-rows into y, rounded
// to BF16 on the way as if they had passed through a receive buffer.
//
// Signals. One warp of every CTA is the watcher: it fences, adds the number of items that the CTA has stored
// of each chunk to the chunk's counter on this GPU, and whoever completes a chunk stores the epoch into the
// chunk's flag word at every owner. It also polls the flag words that the other ranks write here: this rank's
// tokens may be added up to, and without, the first chunk that some rank has not signalled. All flag words of
// a member together are its arrival at the group barrier: they order everything that its stream has done
// before, and every CTA waits for them from every member, with or without tokens. The watcher exists because
// a fence takes microseconds, and a warp that sends must not execute one.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/combine_ring.h"
#include "kernels/hopper/exchange/peer/combine_watch.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::peer {

namespace {

constexpr int kWatcher = kCombineWarps - 1;  // the watcher warp; all others are workers
constexpr int kWorkers = kCombineWarps - 1;
constexpr int kMostSenders = 32;  // CTAs
// CTAs in all: those that add compete for memory with those that send. Two ranks: 132 CTAs 264 to 276 us, 64
// CTAs 237; four ranks 500 and 506.
constexpr unsigned kMostCtas = 64;
// Chunks: at least so many tokens, and at least so many chunks where there are tokens for them. More chunks
// cost fences, fewer leave more to add after the last one has arrived.
constexpr int kLeastChunkBits = 7, kLeastChunks = 16;
static_assert(2 * kLeastChunks <= kMostCombineChunks);
int chunk_bits_for(int64_t slots) {
    int bits = kLeastChunkBits;
    while (slots >> (bits + 1) >= kLeastChunks) ++bits;
    return bits;
}

// Pieces of a work item. One, so that all warps share the tail, except where instructions are what takes
// time: a whole row on few CTAs, and two between two ranks, where less crosses the wire. Items of two pieces
// and of one: two ranks, rows of 7 pieces 238 and 258 us, of 2 pieces 106 and 98; four ranks 506 and 494, 191
// and 172.
int drawn_of(int pieces, unsigned ctas, int ranks) {
    constexpr unsigned kFewCtas = 40;
    if (ctas <= kFewCtas) return pieces;
    return ranks == 2 && pieces > 2 ? 2 : 1;
}

// ---- the worker warps

enum class Work { send, add };

// A warp that computes sums of one kind of work until none is left. It holds three draws (work items): one
// being computed, one whose rows are being loaded (often the same), one whose list of rows is being loaded;
// and the number of a fourth.
template <Work kWork> class Worker {
public:
    // The warp's first draw is number `given`, or claimed from the counter if that is negative; `assigned`:
    // how many were assigned to all warps in advance.
    __device__ Worker(const CombineSumsArgs& args, const ChunkTables& tables, CombineShared& shared,
                      uint4* ring, int given, int assigned)
        : args_(args),
          combine_(args.combine),
          tables_(tables),
          shared_(shared),
          lane_(static_cast<int>(threadIdx.x) % kWarpSize),
          src_(static_cast<const uint4*>(combine_.src.data) + combine_.src.base() * args.units),
          assigned_(assigned),
          draws_(kWork == Work::send ? tables.first[args.chunks]
                                     : static_cast<int>(combine_.tokens) * args.draws),
          ring_(ring, args.units) {
        if (given >= 0)
            number_ = given;
        else if (lane_ == 0)
            number_ = draw();
        prefetch_draw();
    }

    __device__ __forceinline__ void work() {
        constexpr unsigned kNap = 50;  // nanoseconds
        for (State state = begin(); state != State::done; state = begin()) {
            if (state == State::waiting) {
                __nanosleep(kNap);
                continue;
            }
            const Draw draw = issued_;
            issued_ahead_ = false;
            if constexpr (kWork == Work::send)
                send(draw);
            else
                add(draw);
        }
    }

private:
    enum class State { ready, waiting, done };
    // A work item: some pieces of a token's sum.
    struct Draw {
        int token, piece, end;
        int row, rows;      // in lane k: the k-th of its M-rows on this rank; their number
        int chunk, owner;   // sent
        uint32_t returned;  // added: ranks with rows of the token
    };
    // The draw after it; what is loaded here is not used before the draw begins.
    struct Upcoming {
        bool any;
        int chunk, owner, piece;
        int source;   // sent: entry of the list of received rows, -1: no row; added: the token
        int row, id;  // in lane k: the k-th of its M-rows on this rank; added: its k-th expert
    };

    // ---- claiming work
    __device__ __forceinline__ int draw() const {
        unsigned* counter = kWork == Work::send ? &args_.words->next_sent : &args_.words->next_own;
        return static_cast<int>(atomicAdd(counter, 1u)) + assigned_;
    }
    __device__ __forceinline__ int row_in_lane(int64_t i) const {
        return lane_ < combine_.topk ? combine_.recv_rows[i * combine_.topk + lane_] : -1;
    }
    // A warp claims a further number unless the one it holds is past the end: all numbers are used, and no
    // claim is in flight when the CTA ends.
    __device__ __forceinline__ void prefetch_draw() {
        const int number = __shfl_sync(kFullMask, number_, 0);
        upcoming_.any = number < draws_;
        if (!upcoming_.any) return;
        if (lane_ == 0) number_ = draw();
        if constexpr (kWork == Work::send)
            prefetch_sent(number);
        else
            prefetch_own(number);
    }
    // In the order of chunks, rows of a chunk, owners, pieces of a row.
    __device__ __forceinline__ void prefetch_sent(int number) {
        while (number >= tables_.first[chunk_ + 1]) ++chunk_;
        const int size = combine_.group.size, place = number - tables_.first[chunk_],
                  turn = place / args_.draws;
        upcoming_.chunk = chunk_;
        upcoming_.owner = (combine_.group.rank + 1 + turn % (size - 1)) % size;
        upcoming_.piece = place % args_.draws * args_.drawn;
        upcoming_.source = upcoming_.row = -1;
        const int i = tables_.from(upcoming_.owner, chunk_) + turn / (size - 1);
        if (i < tables_.from(upcoming_.owner, chunk_ + 1)) {
            upcoming_.source = combine_.received.source[i];
            upcoming_.row = row_in_lane(i);
        }
    }
    // Tokens in ascending order.
    __device__ __forceinline__ void prefetch_own(int number) {
        const int rank = combine_.group.rank, token = number / args_.draws, chunk = token >> args_.chunk_bits,
                  word = token / kWordBits;
        upcoming_.chunk = chunk;
        upcoming_.piece = number % args_.draws * args_.drawn;
        upcoming_.source = token;
        upcoming_.row = upcoming_.id = -1;
        if (lane_ < combine_.topk)
            upcoming_.id = combine_.all_ids[(rank * combine_.slots + token) * combine_.topk + lane_];
        const uint32_t bits = tables_.has_rows[word], bit = 1u << token % kWordBits;
        if ((bits & bit) != 0) {
            int i = tables_.from(rank, chunk) + __popc(bits & (bit - 1));
            for (int w = (chunk << args_.chunk_bits) / kWordBits; w < word; ++w)
                i += __popc(tables_.has_rows[w]);
            upcoming_.row = row_in_lane(i);
        }
    }
    __device__ __forceinline__ State state_of(int chunk) const {
        int state = 0;
        if (lane_ == 0 && read_atomic(&shared_.lost) != 0)
            state = static_cast<int>(State::done);
        else if (lane_ == 0 && chunk >= read_atomic(&shared_.arrived))
            state = static_cast<int>(State::waiting);
        state = __shfl_sync(kFullMask, state, 0);
        __threadfence_block();  // after the watcher's read of the flag words
        return static_cast<State>(state);
    }
    // The next draw becomes the one whose rows are loaded, if there is one and its chunk has arrived.
    __device__ __forceinline__ State begin() {
        if (issued_ahead_) return State::ready;
        if (!upcoming_.any) return State::done;
        if constexpr (kWork == Work::add)
            if (const State state = state_of(upcoming_.chunk); state != State::ready) return state;
        issued_ = {.token = upcoming_.source,
                   .piece = upcoming_.piece,
                   .end = min(args_.pieces, upcoming_.piece + args_.drawn),
                   .row = upcoming_.row,
                   .rows = __popc(__ballot_sync(kFullMask, upcoming_.row >= 0)),
                   .chunk = upcoming_.chunk,
                   .owner = upcoming_.owner,
                   .returned = 0};
        sources_ = issued_.rows;
        if constexpr (kWork == Work::send) {
            issued_.token -= issued_.owner * static_cast<int>(combine_.slots);
            if (upcoming_.source < 0) issued_.end = issued_.piece;
        } else {
            const int id = upcoming_.id, local_experts = static_cast<int>(combine_.local_experts);
            const bool exists = id >= 0 && id < combine_.group.size * local_experts;
            issued_.returned = __reduce_or_sync(kFullMask, exists ? 1u << id / local_experts : 0u);
            sources_ += __popc(returned_by_others()) + (combine_.residual.data != nullptr ? 1 : 0);
        }
        prefetch_draw();
        piece_ = issued_.piece;
        end_ = sources_ > 0 ? issued_.end : piece_;
        begin_piece();
        return issued_ahead_ = true, State::ready;
    }

    // ---- issuing loads, in the order in which add() and send() consume them
    __device__ __forceinline__ uint32_t returned_by_others() const {
        return issued_.returned & ~(1u << combine_.group.rank);
    }
    __device__ __forceinline__ void begin_piece() {
        source_ = 0;
        others_left_ = returned_by_others();
    }
    // The next row of the piece: an M-row, a row of this rank's receive buffer, or the residual.
    __device__ __forceinline__ const uint4* next_row() {
        if (source_ < issued_.rows)
            return src_ + int64_t{__shfl_sync(kFullMask, issued_.row, source_)} * args_.units;
        if (others_left_ == 0)
            return static_cast<const uint4*>(combine_.residual.data) + int64_t{issued_.token} * args_.units;
        const int from = __ffs(static_cast<int>(others_left_)) - 1;
        others_left_ &= others_left_ - 1;
        return reinterpret_cast<const uint4*>(shared_.buffer[combine_.group.rank]) +
               (from * combine_.slots + issued_.token) * args_.units;
    }
    // False if there is nothing to load, or not yet.
    __device__ __forceinline__ bool issue() {
        if (piece_ == end_ && (issued_ahead_ || begin() != State::ready || piece_ == end_)) return false;
        ring_.issue(next_row(), piece_);
        if (++source_ == sources_) {
            ++piece_;
            begin_piece();
        }
        return true;
    }
    __device__ __forceinline__ void consume(int piece, PieceSum& sum) {
        while (ring_.has_room() && issue()) {
        }
        ring_.consume(piece, sum);
    }

    // ---- sums: one row after the other in fp32, rounded once
    __device__ __forceinline__ void send(const Draw& draw) {
        uint4* to = reinterpret_cast<uint4*>(shared_.buffer[draw.owner]) +
                    (combine_.group.rank * combine_.slots + draw.token) * args_.units;
#pragma unroll 1
        for (int piece = draw.piece; piece < draw.end; ++piece) {
            PieceSum sum;
#pragma unroll 1
            for (int r = 0; r < draw.rows; ++r) consume(piece, sum);
            ring_.for_units(piece, [&](int j, int at) { to[at] = sum.rounded(j); });
        }
        __syncwarp();
        if (lane_ == 0) {
            __threadfence_block();
            atomicAdd(tables_.stored + draw.chunk, 1);
        }
    }
    __device__ __forceinline__ void add(const Draw& draw) {
        uint4* y = static_cast<uint4*>(combine_.y.data) + int64_t{draw.token} * args_.units;
#pragma unroll 1
        for (int piece = draw.piece; piece < draw.end; ++piece) {
            PieceSum own, sum;
#pragma unroll 1
            for (int r = 0; r < draw.rows; ++r) consume(piece, own);
            uint4 of_own[kLaneUnits];
#pragma unroll
            for (int j = 0; j < kLaneUnits; ++j) of_own[j] = own.rounded(j);
#pragma unroll 1
            for (uint32_t left = draw.returned; left != 0; left &= left - 1) {
                if (__ffs(static_cast<int>(left)) - 1 != combine_.group.rank) {
                    consume(piece, sum);
                } else {
#pragma unroll
                    for (int j = 0; j < kLaneUnits; ++j) sum.add(j, of_own[j]);
                }
            }
            if (combine_.residual.data != nullptr) consume(piece, sum);
            ring_.for_units(piece, [&](int j, int at) { __stcs(y + at, sum.rounded(j)); });
        }
    }

    const CombineSumsArgs& args_;
    const CombineArgs& combine_;
    const ChunkTables& tables_;
    CombineShared& shared_;
    const int lane_;
    const uint4* const src_;
    const int assigned_, draws_;
    PieceRing ring_;
    int number_ = 0;  // in lane 0: of the draw after the upcoming one
    int chunk_ = 0;   // of the latest draw to send
    Upcoming upcoming_{};
    Draw issued_{};
    bool issued_ahead_ = false;     // issued_ is not yet being computed
    int piece_ = 0, end_ = 0;       // of issued_: the next piece to load
    int source_ = 0, sources_ = 0;  // of the piece: rows
    uint32_t others_left_ = 0;      // and the ranks whose rows are not issued yet
};

// The number of CTAs that send: their share of the draws, at most what makes sending faster, and few enough
// that the others keep up with adding.
__device__ __forceinline__ int sending_ctas(const CombineSumsArgs& args, const ChunkTables& tables) {
    const int64_t ctas = gridDim.x, sent = tables.first[args.chunks],
                  added = args.combine.tokens * args.draws;
    if (sent == 0) return 0;
    const int64_t share = (sent * ctas + (sent + added) / 2) / (sent + added),
                  most = min(int64_t{kMostSenders}, ctas * 2 / 3);
    return static_cast<int>(max(int64_t{1}, min(share, most)));
}

// Moves per GPU: the M-rows in once; sums of peers' tokens out over NVLink; peers' sums and the residual in
// and y out. Grid: at most kMostCtas CTAs of 15 worker warps and one watcher warp. Every CTA has to become
// resident before the deadline; the order does not matter. Shared memory: a ring of pieces per worker, the
// chunk tables. Barriers: at the start and the end of the CTA. Deterministic: FP32 sums in a fixed order, one
// writer a byte.
__global__ __launch_bounds__(kCombineThreads, 1) void combine_sums_kernel(const CombineSumsArgs args) {
    extern __shared__ uint4 memory[];
    __shared__ CombineShared shared;
    const PeerGroup& group = args.combine.group;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize,
              cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    if (thread == 0) {
        shared.arrived = 0;
        shared.lost = group.lost() ? 1 : 0;
    }
    if (thread < group.size) shared.buffer[thread] = group.next_buffer(thread);
    const uint64_t epoch = group.epoch() + 1;
    __syncthreads();
    if (shared.lost != 0) return;
    constexpr int kRingUnits = static_cast<int>(PieceRing::kBytes / sizeof(uint4));
    const ChunkTables tables(reinterpret_cast<int*>(memory + kWorkers * kRingUnits), args);
    find_rows(args, tables);
    const int senders = sending_ctas(args, tables);
    const bool sends = cta < senders;
    if (thread == 0) shared.senders = sends ? kWorkers : 0;
    __syncthreads();
    if (warp == kWatcher) {
        ChunkWatcher(args, tables, shared, epoch).watch();
    } else {
        uint4* ring = memory + warp * kRingUnits;
        if (sends) {
            Worker<Work::send>(args, tables, shared, ring, warp * senders + cta, kWorkers * senders).work();
            // after the count of its last draw: a watcher exits when no warp sends and all chunks have
            // arrived
            __threadfence_block();
            if (thread % kWarpSize == 0) atomicAdd(&shared.senders, -1);
        }
        Worker<Work::add>(args, tables, shared, ring, sends ? -1 : warp * (ctas - senders) + cta - senders,
                          kWorkers * (ctas - senders))
            .work();
    }
    __syncthreads();
    // The last CTA to finish: no warp claims work any more, and all have read the epoch.
    if (thread == 0 && atomicInc(&args.words->ended, gridDim.x - 1) == gridDim.x - 1) {
        args.words->next_sent = args.words->next_own = 0;
        group.words->epochs[group.index] = epoch;
        count_sums(args.combine);
    }
}

}  // namespace

void launch_combine_sums(const CombineArgs& args, const GroupBarrier& barrier, CombineWords* words,
                         int64_t steps, const Launch& launch) {
    const int chunk_bits = chunk_bits_for(args.slots), units = static_cast<int>(args.hidden / kUnit),
              pieces = static_cast<int>(ceil_div(units, kPieceUnits));
    const unsigned grid = std::min(kMostCtas, grid_for(ceil_div(args.slots * pieces, kWorkers), launch, 1));
    const int drawn = drawn_of(pieces, grid, args.group.size);
    const CombineSumsArgs kernel_args{
        .combine = args,
        .barrier = barrier,
        .words = words,
        .steps = steps,
        .chunk_bits = chunk_bits,
        .chunks = static_cast<int>(std::max<int64_t>(1, ceil_div(args.slots, int64_t{1} << chunk_bits))),
        .units = units,
        .pieces = pieces,
        .drawn = drawn,
        .draws = static_cast<int>(ceil_div(pieces, drawn))};
    const std::size_t shared = static_cast<std::size_t>(
        kWorkers * PieceRing::kBytes + ChunkTables::words(kernel_args) * static_cast<int64_t>(sizeof(int)));
    allow_shared_memory(combine_sums_kernel, shared, "shared memory of combine");
    combine_sums_kernel<<<grid, kCombineThreads, shared, stream_of(launch)>>>(kernel_args);
    check_launch("combine");
}

}  // namespace fp8flow::hopper::peer
