// SPDX-License-Identifier: MIT
// combine over peer memory, order `rank`, BF16 in whole vectors, in one kernel. It stores this rank's sums
// into the receive buffers of the tokens' owners. In parallel it adds the sums that arrive for this rank's
// tokens. The bits are those of the reference exchange.
//
// Lower bound, a layer of DeepSeek-V3 (T = 4096 tokens per rank, E = 256, K = 8, H = 7168), MB per GPU:
//
// | | 2 ranks | 4 ranks |
// |---|---|---|
// | NVLink | 58 | 159 |
// | memory: rows of the experts in | 470 | 470 |
// | memory: sums of other ranks, in and out of L2 | 117 | 318 |
// | memory: residual and y | 117 | 117 |
// | time of NVLink at 361 GB/s of stores, us | 162 | 449 |
// | time of memory at 4.2 TB/s, us | 168 | 215 |
//
// NVLink and memory have to work in parallel. Some CTAs send and the others add: the stores of an SM drain in
// order, so local stores would wait for stores to peers.
//
// Work. The rows that a rank returns to an owner are divided into chunks. A work item is one or more pieces
// (1024 columns) of the sum of one token. Warps claim items from a counter, chunk by chunk. Sending waits for
// no other rank. A sending CTA that has nothing left to send adds. Sums of this rank's own tokens go directly
// from the rows of its experts to y. They are rounded to BF16 on the way, as if they had passed through a
// receive buffer.
//
// Progress. The last warp of every CTA, the progress warp, signals and polls, because a fence takes
// microseconds and a warp that sends must not wait for it. In a CTA that sends, it fences when all warps have
// finished a chunk, and stores the CTA's progress at every owner. When its CTA has sent everything, it polls
// the progress of other ranks' CTAs. Tokens are added up to the first one with a row that has not arrived.
// Meanwhile this rank's own rows of later tokens are added. A rank has 32 progress words at every owner, and
// CTA 0 stores those of CTAs that do not send. Together they are the rank's arrival at the group barrier:
// they order all earlier work of its stream, and every CTA waits for them from every rank, with or without
// tokens.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/combine_progress.h"
#include "kernels/hopper/exchange/peer/combine_ring.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::peer {

namespace {

// More CTAs that add take memory bandwidth from those that send. 64 CTAs took 11 % longer with two ranks, 132
// CTAs 8 % (7168 columns).
constexpr unsigned kMostCtas = 80;

// Pieces of a work item. One piece balances the warps best at the end. Larger items need fewer instructions:
// a whole row on few CTAs, two pieces with two ranks (7 % less time for rows of 7 pieces).
int pieces_per_item(int pieces, unsigned ctas, int ranks) {
    constexpr unsigned kFewCtas = 40;
    if (ctas <= kFewCtas) return pieces;
    return ranks == 2 && pieces > 2 ? 2 : 1;
}

// ---- the worker warps

enum class Work { send, add };

// A warp that computes sums of one kind of work until none is left. It holds three items: one is being added,
// of one the rows are being loaded (often the same item), and of one the list of rows. It also holds the
// number of a fourth.
template <Work kWork> class Worker {
public:
    // How the items of a kind of work are divided among warps. The first `assigned` and the last `reserved`
    // items belong to one warp each. Warps claim the others from a counter.
    struct Split {
        int first;  // this warp's first item; negative: it claims one
        int assigned;
        int reserved, last;  // this warp has number `last` of the reserved items
    };
    __device__ Worker(const CombineSumsArgs& args, const OwnRows& own, CombineShared& shared, uint4* ring,
                      const Split& split)
        : args_(args),
          combine_(args.combine),
          own_(own),
          shared_(shared),
          lane_(static_cast<int>(threadIdx.x) % kWarpSize),
          src_(static_cast<const uint4*>(combine_.src.data) + combine_.src.base() * args.units),
          assigned_(split.assigned),
          items_(kWork == Work::send ? args.chunks * shared.chunk_items
                                     : static_cast<int>(combine_.tokens) * args.row_items),
          claimable_(max(0, items_ - split.reserved)),
          reserved_(split.reserved > 0 ? claimable_ + split.last : items_),
          ring_(ring, args.units) {
        if (split.first >= 0)
            claimed_ = split.first;
        else if (lane_ == 0)
            claimed_ = claim();
        prefetch_item();
    }

    __device__ __forceinline__ void work() {
        while (begin()) {
            const Item item = issued_;
            issued_ahead_ = false;
            if constexpr (kWork == Work::send) {
                finish_chunks_before(item.chunk);
                send(item);
            } else {
                add(item);
            }
        }
        if constexpr (kWork == Work::send) finish_chunks_before(args_.chunks);
    }

private:
    // A work item: pieces [piece, end) of the sum of one token. To send: chunk, owner. To add: returned.
    struct Item {
        int token, piece, end;
        int row, rows;  // in lane k: the token's k-th row at the experts of this rank; number of these rows
        int chunk, owner;
        uint32_t returned;  // bit r: rank r has rows of the token
    };
    // The item after it. Its loads are in flight until the item begins.
    struct NextItem {
        bool exists;
        int chunk, owner, piece;  // chunk, owner: to send
        int source;               // to send: source of the received row, -1: no row; to add: the token
        int row, id;              // in lane k: as Item::row; to add: the token's k-th expert
    };

    // ---- claiming work
    __device__ __forceinline__ int claim() const {
        unsigned* counter = kWork == Work::send ? &args_.words->next_to_send : &args_.words->next_to_add;
        return static_cast<int>(atomicAdd(counter, 1u)) + assigned_;
    }
    __device__ __forceinline__ int row_in_lane(int64_t i) const {
        return lane_ < combine_.topk ? combine_.recv_rows[i * combine_.topk + lane_] : -1;
    }
    // Claims another number unless the one it holds is past the end, so that all numbers are used and no
    // claim is in flight when the CTA ends.
    __device__ __forceinline__ void prefetch_item() {
        int number = __shfl_sync(kFullMask, claimed_, 0);
        if (number < claimable_) {
            if (lane_ == 0) claimed_ = claim();
        } else {
            number = reserved_;
            reserved_ = items_;
        }
        next_.exists = number < items_;
        if (!next_.exists) return;
        if constexpr (kWork == Work::send)
            prefetch_sent(number);
        else
            prefetch_own(number);
    }
    // Order of items: chunks, rows of a chunk, owners, pieces of a row.
    __device__ __forceinline__ void prefetch_sent(int number) {
        while (number >= (next_.chunk + 1) * shared_.chunk_items) ++next_.chunk;
        const int size = combine_.group.size, in_chunk = number - next_.chunk * shared_.chunk_items,
                  send = in_chunk / args_.row_items, row = send / (size - 1),
                  owner = (combine_.group.rank + 1 + send % (size - 1)) % size,
                  rows = shared_.chunk_rows[owner], i = shared_.begin[owner] + next_.chunk * rows + row;
        next_.owner = owner;
        next_.piece = in_chunk % args_.row_items * args_.item_pieces;
        next_.source = next_.row = -1;
        if (row < rows && i < shared_.begin[owner + 1]) {
            next_.source = combine_.received.source[i];
            next_.row = row_in_lane(i);
        }
    }
    // Order of items: tokens, pieces of a row.
    __device__ __forceinline__ void prefetch_own(int number) {
        const int token = number / args_.row_items, i = own_.row_of(token);
        next_.piece = number % args_.row_items * args_.item_pieces;
        next_.source = token;
        next_.id = -1;
        if (lane_ < combine_.topk)
            next_.id =
                combine_.all_ids[(combine_.group.rank * combine_.slots + token) * combine_.topk + lane_];
        next_.row = i < 0 ? -1 : row_in_lane(i);
    }
    // Starts to load the rows of the next item. False: there is none.
    __device__ __forceinline__ bool begin() {
        if (issued_ahead_) return true;
        if (!next_.exists) return false;
        issued_ = {.token = next_.source,
                   .piece = next_.piece,
                   .end = min(args_.pieces, next_.piece + args_.item_pieces),
                   .row = next_.row,
                   .rows = __popc(__ballot_sync(kFullMask, next_.row >= 0)),
                   .chunk = next_.chunk,
                   .owner = next_.owner,
                   .returned = 0};
        sources_ = issued_.rows;
        if constexpr (kWork == Work::send) {
            issued_.token -= issued_.owner * static_cast<int>(combine_.slots);
            if (next_.source < 0) issued_.end = issued_.piece;
        } else {
            const int id = next_.id, local_experts = static_cast<int>(combine_.local_experts);
            const bool exists = id >= 0 && id < combine_.group.size * local_experts;
            issued_.returned = __reduce_or_sync(kFullMask, exists ? 1u << id / local_experts : 0u);
            sources_ += __popc(returned_by_others()) + (combine_.residual.data != nullptr ? 1 : 0);
        }
        prefetch_item();
        piece_ = issued_.piece;
        end_ = sources_ > 0 ? issued_.end : piece_;
        begin_piece();
        return issued_ahead_ = true;
    }

    // ---- issue loads, in the order in which add() and send() consume them
    __device__ __forceinline__ uint32_t returned_by_others() const {
        return issued_.returned & ~(1u << combine_.group.rank);
    }
    __device__ __forceinline__ void begin_piece() {
        source_ = 0;
        others_left_ = returned_by_others();
    }
    // The next row of the piece: of an expert, of the receive buffer, or the residual.
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
    // Whether the rows that other ranks return for the token have arrived.
    __device__ __forceinline__ bool has_arrived(int token) {
        if (token < arrived_) return true;
        int arrived = 0;
        if (lane_ == 0) {
            arrived = read_atomic(&shared_.arrived);
            __threadfence_block();  // orders what the progress warp has read before the loads of all lanes
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
        constexpr unsigned kPollNanoseconds = 50;
        while (true) {
            while (ring_.has_free_stage() && issue()) {
            }
            if (kWork == Work::send || !ring_.is_empty()) break;
            __nanosleep(kPollNanoseconds);
        }
        ring_.consume(piece, sum);
    }

    // Publishes that the warp stores nothing more of chunks before this one.
    __device__ __forceinline__ void finish_chunks_before(int chunk) {
        if (chunk == finished_) return;
        finished_ = chunk;
        __syncwarp();
        if (lane_ != 0) return;
        __threadfence_block();
        atomicExch(shared_.progress + threadIdx.x / kWarpSize, chunk);
    }

    // ---- sums: one row after the other in fp32, rounded once
    __device__ __forceinline__ void send(const Item& item) {
        uint4* to = reinterpret_cast<uint4*>(shared_.buffer[item.owner]) +
                    (combine_.group.rank * combine_.slots + item.token) * args_.units;
#pragma unroll 1
        for (int piece = item.piece; piece < item.end; ++piece) {
            PieceSum sum;
#pragma unroll 1
            for (int r = 0; r < item.rows; ++r) consume(piece, sum);
            ring_.for_units(piece, [&](int j, int at) { to[at] = sum.rounded(j); });
        }
    }
    __device__ __forceinline__ void add(const Item& item) {
        uint4* y = static_cast<uint4*>(combine_.y.data) + int64_t{item.token} * args_.units;
#pragma unroll 1
        for (int piece = item.piece; piece < item.end; ++piece) {
            PieceSum own, sum;
#pragma unroll 1
            for (int r = 0; r < item.rows; ++r) consume(piece, own);
            uint4 own_rounded[kLaneUnits];
#pragma unroll
            for (int j = 0; j < kLaneUnits; ++j) own_rounded[j] = own.rounded(j);
#pragma unroll 1
            for (uint32_t left = item.returned; left != 0; left &= left - 1) {
                if (__ffs(static_cast<int>(left)) - 1 != combine_.group.rank) {
                    consume(piece, sum);
                } else {
#pragma unroll
                    for (int j = 0; j < kLaneUnits; ++j) sum.add(j, own_rounded[j]);
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
    const int assigned_, items_, claimable_;
    int reserved_;  // this warp's reserved item; items_: none, or already taken
    PieceRing ring_;
    int claimed_ = 0;   // in lane 0: number of the item after next_
    int finished_ = 0;  // chunks before this one are stored
    int arrived_ = 0;   // tokens known to have arrived
    NextItem next_{};
    Item issued_{};
    bool issued_ahead_ = false;     // loads of issued_ have begun, adding has not
    int piece_ = 0, end_ = 0;       // next piece of issued_ to load
    int source_ = 0, sources_ = 0;  // next row of the piece; number of rows
    uint32_t others_left_ = 0;      // other ranks with rows of the piece that are not yet issued
};

// Number of CTAs that send: in proportion to the rows read and written for sending, at most
// kMostCombineSenders (more do not send faster) and two thirds of all. `sent`, `returned`: rows to and from
// other ranks. Called by one thread.
__device__ __forceinline__ int sending_ctas(const CombineSumsArgs& args, int sent, int returned) {
    const CombineArgs& combine = args.combine;
    const int ctas = static_cast<int>(gridDim.x), tokens = static_cast<int>(combine.tokens);
    if (sent == 0) return 0;
    const auto received = static_cast<float>(combine.received.offsets[combine.group.size]);
    // Experts' rows per received row, if all ranks have equally many (fewer in the hierarchical exchange)
    const float summed = static_cast<float>(combine.slots * combine.topk) / received,
                to_send = static_cast<float>(sent) * (summed + 1),
                to_add = (received - static_cast<float>(sent)) * summed +
                         static_cast<float>(returned + (combine.residual.data != nullptr ? 2 : 1) * tokens);
    const int share = static_cast<int>(static_cast<float>(ctas) * to_send / (to_send + to_add) + 0.5f);
    return max(1, min(share, min(kMostCombineSenders, ctas * 2 / 3)));
}

// The first warp fills what the warps of the CTA share. No barrier at the end.
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
        shared.chunk_items = longest * (group.size - 1) * args.row_items;
        shared.senders = sending_ctas(args, all_sent, all_returned);
        shared.arrived = 0;
        shared.lost = group.lost() ? 1 : 0;
    }
}

// Traffic per GPU: reads the experts' rows once; sends the sums of other ranks' tokens over NVLink; reads the
// received sums and the residual; writes y. Grid: at most kMostCtas CTAs of 15 worker warps and one progress
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
    if (warp == kProgressWarp) {
        ProgressWarp(args, shared, epoch).run();
    } else {
        uint4* ring = memory + warp * kRingUnits;
        const int senders = shared.senders, adders = ctas - senders;
        const bool sends = cta < senders;
        if (sends)
            Worker<Work::send>(args, own, shared, ring, {warp * senders + cta, kWorkers * senders, 0, 0})
                .work();
        // Every warp has one reserved item, so that all warps add when the last rows have arrived.
        Worker<Work::add>(args, own, shared, ring,
                          {sends ? -1 : warp * adders + cta - senders, kWorkers * adders, kWorkers * ctas,
                           warp * ctas + cta})
            .work();
    }
    __syncthreads();
    // The last CTA to finish: no warp claims work any more, and all have read the epoch.
    if (thread == 0 && atomicInc(&args.words->finished_ctas, gridDim.x - 1) == gridDim.x - 1) {
        args.words->next_to_send = args.words->next_to_add = 0;
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
    const int item_pieces = pieces_per_item(pieces, grid, args.group.size);
    const CombineSumsArgs kernel_args{
        .combine = args,
        .barrier = barrier,
        .words = words,
        .progress = progress,
        .chunks = static_cast<int>(std::clamp<int64_t>(args.slots / kChunkSlots, 1, kMostCombineChunks)),
        .units = units,
        .pieces = pieces,
        .item_pieces = item_pieces,
        .row_items = static_cast<int>(ceil_div(pieces, item_pieces))};
    const std::size_t shared = static_cast<std::size_t>(
        kWorkers * PieceRing::kBytes + 2 * OwnRows::words(kernel_args) * static_cast<int64_t>(sizeof(int)));
    launch_kernel(combine_sums_kernel, grid, kCombineThreads, shared, launch, "combine", kernel_args);
}

}  // namespace fp8flow::hopper::peer
