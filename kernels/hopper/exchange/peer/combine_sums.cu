// SPDX-License-Identifier: MIT
// combine over peer memory, order `rank`, BF16 in whole vectors: one kernel stores this rank's sums into the
// receive buffers of the tokens' owners and, in parallel, adds what has arrived for its own tokens. The bits
// are those of the reference exchange.
//
// Lower bound, a layer of DeepSeek-V3 (T = 4096 tokens per rank, E = 256, K = 8, H = 7168), MB per GPU:
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
// after the other: 265 us for 24 sending SMs with four ranks, yet 24 take a fifth longer than 32.
//
// Work. The rows that a rank returns to an owner are divided into chunks. A work item ("draw") is some pieces
// of one token's sum; warps claim items from a counter, chunk by chunk. Some CTAs send, the others add:
// stores drain from an SM in order, so stores that NVLink holds up would hold up local ones. Sending waits
// for nobody; a sending CTA with nothing left to send adds. Sums of this rank's own tokens go straight from
// its M-rows into y, rounded to BF16 on the way as if they had passed through a receive buffer.
//
// Signals. One warp of every CTA is the watcher. In a CTA that sends it fences when all warps have left a
// chunk, and stores the CTA's progress at every owner. When its CTA has sent everything, it reads the
// progress of the other ranks' CTAs: tokens may be added up to the first one with a row that has not arrived,
// and this rank's own rows of later ones may be summed meanwhile. A member has 32 progress words; CTA 0
// stores those of numbers that do not send. All of them together are the member's arrival at the group
// barrier: they order everything that its stream has done before, and every CTA waits for them from every
// member, with or without tokens. The watcher exists because a fence takes microseconds, and a warp that
// sends must not execute one.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/combine_ring.h"
#include "kernels/hopper/exchange/peer/combine_watch.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::peer {

namespace {

// CTAs in all: those that add compete for memory with those that send. Two ranks took 11 % longer with 64 and
// 8 % longer with 132 than with 80 or 96 (7168 columns), four ranks as long with 64 as with 96.
constexpr unsigned kMostCtas = 80;

// Pieces of a work item. One, so that all warps share the tail, except where instructions are what takes
// time: a whole row on few CTAs, and two between two ranks, where less crosses the wire: rows of 7 pieces
// took 7 % less than with items of one. Four ranks took as long with either.
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
    // How the draws of a kind of work are divided: the first `assigned` and the last `reserved` go to warps
    // one by one, in advance; the others are claimed from a counter.
    struct Share {
        int first;  // of this warp; negative: it claims its first
        int assigned;
        int reserved, last;  // this warp's is number `last` of those
    };
    __device__ Worker(const CombineSumsArgs& args, const OwnRows& own, CombineShared& shared, uint4* ring,
                      const Share& share)
        : args_(args),
          combine_(args.combine),
          own_(own),
          shared_(shared),
          lane_(static_cast<int>(threadIdx.x) % kWarpSize),
          src_(static_cast<const uint4*>(combine_.src.data) + combine_.src.base() * args.units),
          assigned_(share.assigned),
          draws_(kWork == Work::send ? args.chunks * shared.chunk_draws
                                     : static_cast<int>(combine_.tokens) * args.draws),
          claimable_(max(0, draws_ - share.reserved)),
          last_(share.reserved > 0 ? claimable_ + share.last : draws_),
          ring_(ring, args.units) {
        if (share.first >= 0)
            number_ = share.first;
        else if (lane_ == 0)
            number_ = draw();
        prefetch_draw();
    }

    __device__ __forceinline__ void work() {
        while (begin()) {
            const Draw draw = issued_;
            issued_ahead_ = false;
            if constexpr (kWork == Work::send) {
                leave_chunks_before(draw.chunk);
                send(draw);
            } else {
                add(draw);
            }
        }
        if constexpr (kWork == Work::send) leave_chunks_before(args_.chunks);
    }

private:
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
        int chunk, owner, piece;  // chunk, owner: sent
        int source;               // sent: entry of the list of received rows, -1: no row; added: the token
        int row, id;              // in lane k: the k-th of its M-rows on this rank; added: its k-th expert
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
        int number = __shfl_sync(kFullMask, number_, 0);
        if (number < claimable_) {
            if (lane_ == 0) number_ = draw();
        } else {
            number = last_;
            last_ = draws_;
        }
        upcoming_.any = number < draws_;
        if (!upcoming_.any) return;
        if constexpr (kWork == Work::send)
            prefetch_sent(number);
        else
            prefetch_own(number);
    }
    // In the order of chunks, rows of a chunk, owners, pieces of a row.
    __device__ __forceinline__ void prefetch_sent(int number) {
        while (number >= (upcoming_.chunk + 1) * shared_.chunk_draws) ++upcoming_.chunk;
        const int size = combine_.group.size, place = number - upcoming_.chunk * shared_.chunk_draws,
                  turn = place / args_.draws, row = turn / (size - 1),
                  owner = (combine_.group.rank + 1 + turn % (size - 1)) % size,
                  rows = shared_.chunk_rows[owner], i = shared_.begin[owner] + upcoming_.chunk * rows + row;
        upcoming_.owner = owner;
        upcoming_.piece = place % args_.draws * args_.drawn;
        upcoming_.source = upcoming_.row = -1;
        if (row < rows && i < shared_.begin[owner + 1]) {
            upcoming_.source = combine_.received.source[i];
            upcoming_.row = row_in_lane(i);
        }
    }
    // Tokens in ascending order.
    __device__ __forceinline__ void prefetch_own(int number) {
        const int token = number / args_.draws, i = own_.row_of(token);
        upcoming_.piece = number % args_.draws * args_.drawn;
        upcoming_.source = token;
        upcoming_.id = -1;
        if (lane_ < combine_.topk)
            upcoming_.id =
                combine_.all_ids[(combine_.group.rank * combine_.slots + token) * combine_.topk + lane_];
        upcoming_.row = i < 0 ? -1 : row_in_lane(i);
    }
    // The next draw becomes the one whose rows are loaded; false: there is none.
    __device__ __forceinline__ bool begin() {
        if (issued_ahead_) return true;
        if (!upcoming_.any) return false;
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
        return issued_ahead_ = true;
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
    // Whether the rows that others return for the token are here.
    __device__ __forceinline__ bool has_arrived(int token) {
        if (token < arrived_) return true;
        int arrived = 0;
        if (lane_ == 0) {
            arrived = read_atomic(&shared_.arrived);
            __threadfence_block();  // what the watcher has seen is ordered before what the lanes load
        }
        __syncwarp();
        arrived_ = __shfl_sync(kFullMask, arrived, 0);
        return token < arrived_;
    }
    // False if there is nothing to load, or not yet.
    __device__ __forceinline__ bool issue() {
        if (piece_ == end_ && (issued_ahead_ || !begin() || piece_ == end_)) return false;
        if constexpr (kWork == Work::add)
            if (source_ >= issued_.rows && others_left_ != 0 && !has_arrived(issued_.token)) return false;
        ring_.issue(next_row(), piece_);
        if (++source_ == sources_) {
            ++piece_;
            begin_piece();
        }
        return true;
    }
    __device__ __forceinline__ void consume(int piece, PieceSum& sum) {
        constexpr unsigned kNap = 50;  // nanoseconds
        while (true) {
            while (ring_.has_room() && issue()) {
            }
            if (kWork == Work::send || !ring_.is_empty()) break;
            __nanosleep(kNap);
        }
        ring_.consume(piece, sum);
    }

    // What the warp has stored of earlier chunks is all that it stores of them.
    __device__ __forceinline__ void leave_chunks_before(int chunk) {
        if (chunk == left_) return;
        left_ = chunk;
        __syncwarp();
        if (lane_ != 0) return;
        __threadfence_block();
        atomicExch(shared_.progress + threadIdx.x / kWarpSize, chunk);
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
    const OwnRows& own_;
    CombineShared& shared_;
    const int lane_;
    const uint4* const src_;
    const int assigned_, draws_, claimable_;
    int last_;  // the draw that is reserved for this warp; draws_: none, or already taken
    PieceRing ring_;
    int number_ = 0;   // in lane 0: of the draw after the upcoming one
    int left_ = 0;     // chunks before this one are stored
    int arrived_ = 0;  // tokens known to have arrived
    Upcoming upcoming_{};
    Draw issued_{};
    bool issued_ahead_ = false;     // issued_ is not yet being computed
    int piece_ = 0, end_ = 0;       // of issued_: the next piece to load
    int source_ = 0, sources_ = 0;  // of the piece: rows
    uint32_t others_left_ = 0;      // and the ranks whose rows are not issued yet
};

// The number of CTAs that send: their share of the rows moved, at most what makes sending faster, and few
// enough that the others keep up with adding. `sent`, `returned`: rows to and from other ranks. One thread.
__device__ __forceinline__ int sending_ctas(const CombineSumsArgs& args, int sent, int returned) {
    const CombineArgs& combine = args.combine;
    const int ctas = static_cast<int>(gridDim.x), tokens = static_cast<int>(combine.tokens);
    if (sent == 0) return 0;
    const auto received = static_cast<float>(combine.received.offsets[combine.group.size]);
    // M-rows of a received row, if all ranks have as many (inside a host of several, fewer than stated);
    // summed into one, which is sent, or added
    const float summed = static_cast<float>(combine.slots * combine.topk) / received,
                to_send = static_cast<float>(sent) * (summed + 1),
                to_add = (received - static_cast<float>(sent)) * summed +
                         static_cast<float>(returned + (combine.residual.data != nullptr ? 2 : 1) * tokens);
    const int share = static_cast<int>(static_cast<float>(ctas) * to_send / (to_send + to_add) + 0.5f);
    return max(1, min(share, min(kMostCombineSenders, ctas * 2 / 3)));
}

// What the CTA's warps share, by the first warp, without a barrier at the end.
__device__ __forceinline__ void set_up(const CombineSumsArgs& args, CombineShared& shared) {
    const PeerGroup& group = args.combine.group;
    const int64_t* offsets = args.combine.received.offsets;
    const int lane = static_cast<int>(threadIdx.x);  // a rank
    if (lane >= kWarpSize) return;
    const bool exists = lane < group.size, other = exists && lane != group.rank;
    const int sent = other ? static_cast<int>(offsets[lane + 1] - offsets[lane]) : 0,
              returned = other ? static_cast<int>(args.combine.send_counts[lane]) : 0,
              rows = args.chunk_rows(sent), longest = __reduce_max_sync(kFullMask, rows),
              all_sent = __reduce_add_sync(kFullMask, sent),
              all_returned = __reduce_add_sync(kFullMask, returned);
    if (exists) {
        shared.buffer[lane] = group.next_buffer(lane);
        shared.chunk_rows[lane] = rows;
        shared.begin[lane + 1] = static_cast<int>(offsets[lane + 1]);
    }
    if (lane < kWorkers) shared.progress[lane] = 0;
    if (lane == 0) {
        shared.begin[0] = static_cast<int>(offsets[0]);
        shared.chunk_draws = longest * (group.size - 1) * args.draws;
        shared.senders = sending_ctas(args, all_sent, all_returned);
        shared.arrived = 0;
        shared.lost = group.lost() ? 1 : 0;
    }
}

// Traffic per GPU: reads the M rows once; sends the sums of other ranks' tokens over NVLink; reads the
// received sums and the residual; writes y. Grid: at most kMostCtas CTAs of 15 worker warps and one watcher
// warp. All CTAs must become resident before the deadline, in any order. Shared memory: a ring of pieces per
// worker, the table of own rows. Barriers: at the start and the end of the CTA. Deterministic: FP32 sums in a
// fixed order, one writer per byte.
__global__ __launch_bounds__(kCombineThreads, 1) void combine_sums_kernel(const CombineSumsArgs args) {
    extern __shared__ uint4 memory[];
    __shared__ CombineShared shared;
    const PeerGroup& group = args.combine.group;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize,
              cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    const uint64_t epoch = group.epoch() + 1;
    set_up(args, shared);
    __syncthreads();
    if (shared.lost != 0) return;
    constexpr int kRingUnits = static_cast<int>(PieceRing::kBytes / sizeof(uint4));
    const OwnRows own(reinterpret_cast<int*>(memory + kWorkers * kRingUnits), args);
    own.fill(args, shared.begin[group.rank], shared.begin[group.rank + 1]);
    if (warp == kWatcher) {
        ProgressWatcher(args, shared, epoch).watch();
    } else {
        uint4* ring = memory + warp * kRingUnits;
        const int senders = shared.senders, adders = ctas - senders;
        const bool sends = cta < senders;
        if (sends)
            Worker<Work::send>(args, own, shared, ring, {warp * senders + cta, kWorkers * senders, 0, 0})
                .work();
        // A draw is reserved for every warp, so that all add when the last rows have arrived.
        Worker<Work::add>(args, own, shared, ring,
                          {sends ? -1 : warp * adders + cta - senders, kWorkers * adders, kWorkers * ctas,
                           warp * ctas + cta})
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
                         int64_t progress, const Launch& launch) {
    const int units = static_cast<int>(args.hidden / kUnit),
              pieces = static_cast<int>(ceil_div(units, kPieceUnits));
    const unsigned grid = std::min(kMostCtas, grid_for(ceil_div(args.slots * pieces, kWorkers), launch, 1));
    const int drawn = drawn_of(pieces, grid, args.group.size);
    const CombineSumsArgs kernel_args{
        .combine = args,
        .barrier = barrier,
        .words = words,
        .progress = progress,
        .chunks = static_cast<int>(std::clamp<int64_t>(args.slots / kChunkSlots, 1, kMostCombineChunks)),
        .units = units,
        .pieces = pieces,
        .drawn = drawn,
        .draws = static_cast<int>(ceil_div(pieces, drawn))};
    const std::size_t shared = static_cast<std::size_t>(
        kWorkers * PieceRing::kBytes + 2 * OwnRows::words(kernel_args) * static_cast<int64_t>(sizeof(int)));
    allow_shared_memory(combine_sums_kernel, shared, "shared memory of combine");
    combine_sums_kernel<<<grid, kCombineThreads, shared, stream_of(launch)>>>(kernel_args);
    check_launch("combine");
}

}  // namespace fp8flow::hopper::peer
