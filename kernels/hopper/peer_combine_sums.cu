// combine over peer memory, order `rank`, BF16 in whole vectors: one kernel sends this rank's sums to the tokens' owners and adds, while it
// sends, what has come for its own tokens. The bits are those of the reference exchange.
//
// Floor, a layer of DeepSeek-V3 (T = 4096 tokens a rank, E = 256, K = 8, H = 7168), MB a GPU, with two ranks; with four: wire 58; 159. Memory:
// M-rows in 470; 470, peers' sums in and out of L2 117; 318, residual and y 117; 117. So 162 us of wire (361 GB/s of stores) and 168 of
// memory (4.2 TB/s) that have to overlap; 449 and 215. When own sums went through the box as well, and were added behind the meeting, it
// was 822 and 1011 MB. With few multiprocessors instructions bound it: 17 for 16 bytes of an M-row, and what a draw takes.
//
// Protocol. An owner's tokens stand in chunks. The working warps of all CTAs draw what is to be sent, chunk by chunk, from one counter;
// sending waits for nobody. A warp of every CTA watches: it fences, adds what the CTA has stored of each chunk to the chunk's counter on
// this GPU, and whoever completes a chunk writes the meeting's number into the chunk's word at every owner. The same warp looks at the
// words that the other ranks write here: up to the chunk where all of them have come, this rank's tokens may be added. All words of a member
// together are its arrival at the meeting: they stand for everything that its stream has done before, and every CTA waits for them from
// every member, tokens or not. Fences take microseconds, and a warp that sends must not stand in one.
// Sums of this rank's own tokens go straight from its M-rows into y, rounded to BF16 on the way as if they had been in a box.
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/peer_combine_watch.h"

namespace fp8flow::hopper {

namespace {

constexpr int kWatcher = kCombineWarps - 1;  // this warp watches, all others work
constexpr int kSenders =
    6;  // of the workers: these add when everything is sent, the others whenever they can
constexpr int kWorkers = kCombineWarps - 1, kAdders = kWorkers - kSenders;
constexpr int kLaneUnits = 4;                        // 16-byte units of a lane in a piece
constexpr int kPieceUnits = kLaneUnits * kPeerWarp;  // a piece: 1024 columns of a row
constexpr int kSentRows = 4, kOwnRows = 2;           // M-rows whose pieces a warp has under way
constexpr int kChunkBits = 7;       // chunks of 128 tokens, longer ones where there are many tokens
constexpr bool kAddersSend = true;  // while nothing has come
constexpr unsigned kFewCtas =
    40;  // up to here a warp draws whole rows: instructions are dear, the last row's time is not

int chunk_bits_for(int64_t slots) {
    int bits = kChunkBits;
    while (slots > int64_t{kMostCombineChunks} << bits) ++bits;
    return bits;
}

// ---- the working warps ---------------------------------------------------------------------------------------------------------------------

// Some pieces of a token's sum. `row` in lane k: the k-th of its M-rows here, or -1.
struct Draw {
    int token, first, row;  // the first piece
    int chunk, owner;       // of what is sent; token -1: there is none after all
    uint32_t host_bit;      // of what is added, in lane k: the rank of its k-th expert
};

class Worker {
public:
    __device__ Worker(const CombineSumsArgs& args, const ChunkTables& tables, CombineShared& shared)
        : args_(args),
          combine_(args.combine),
          tables_(tables),
          shared_(shared),
          src_(static_cast<const uint4*>(combine_.src.data) + combine_.src.base() * args.units),
          lane_(static_cast<int>(threadIdx.x) % kPeerWarp),
          adds_first_(static_cast<int>(threadIdx.x) / kPeerWarp >= kSenders) {
        const int warp = static_cast<int>(threadIdx.x) / kPeerWarp, cta = static_cast<int>(blockIdx.x);
        if (adds_first_) {
            next_own_ = cta * kAdders + warp - kSenders;
            sends_left_ = kAddersSend;
        } else {
            next_sent_ = cta * kSenders + warp;
            sends_left_ = true;
        }
    }

    // Everything that falls to this warp.
    __device__ __forceinline__ void work() {
        constexpr unsigned kNap = 50;  // nanoseconds
        for (Own state = Own::later; state != Own::none || sends_left_;) {
            if (sends_left_ && !(adds_first_ && can_add())) send_some();
            state = add_some();
            if (!sends_left_ && state == Own::later) __nanosleep(kNap);
        }
    }

private:
    enum class Own { now, later, none };
    static constexpr int kNotDrawn = -1;

    // The first draws of the warps that prefer a kind of work are given, further ones come from the kind's counter. In lane 0.
    __device__ __forceinline__ int draw(unsigned* counter, int given) const {
        return static_cast<int>(atomicAdd(counter, 1u)) + given * static_cast<int>(gridDim.x);
    }

    // ---- sending, in the order of chunks, rows of a chunk, owners, pieces of a row
    __device__ __forceinline__ bool draw_sent(Draw& drawn) {
        if (!sends_left_) return false;
        int number = next_sent_;
        if (lane_ == 0) {
            unsigned* counter = &args_.words->next_sent;
            // A warp that sends to the end draws one ahead, unless this one is the last: what is under way when the CTA ends would be counted in
            // the next call. One that may leave must not: what nobody sends holds its chunk back.
            if (adds_first_)
                number = draw(counter, kSenders);
            else if (number < tables_.first[args_.chunks])
                next_sent_ = draw(counter, kSenders);
        }
        number = __shfl_sync(0xFFFFFFFFu, number, 0);
        if (number >= tables_.first[args_.chunks]) return sends_left_ = false;
        while (number >= tables_.first[chunk_ + 1]) ++chunk_;
        const int size = combine_.group.size, place = number - tables_.first[chunk_],
                  turn = place / args_.draws;
        drawn.first = place % args_.draws * args_.drawn;
        drawn.chunk = chunk_;
        drawn.owner = (combine_.group.rank + 1 + turn % (size - 1)) % size;
        drawn.token = drawn.row = -1;
        const int i = tables_.from(drawn.owner, chunk_) + turn / (size - 1);
        if (i < tables_.from(drawn.owner, chunk_ + 1)) {
            drawn.token = combine_.received.source[i] - drawn.owner * static_cast<int>(combine_.slots);
            drawn.row = row_in_lane(i);
        }
        return true;
    }
    // Until nothing is left to be sent, or something has come for a warp that adds first.
    __device__ __forceinline__ void send_some() {
        Draw drawn{};
        bool more = draw_sent(drawn);
#pragma unroll 1
        while (more) {
            Draw next{};  // its loads are under way while the other is sent
            more = !(adds_first_ && can_add()) && draw_sent(next);
            if (drawn.token >= 0) {
                uint4* to = reinterpret_cast<uint4*>(shared_.box[drawn.owner]) +
                            (combine_.group.rank * combine_.slots + drawn.token) * args_.units;
                for_pieces(drawn, [&](int piece) {
                    uint4 sum[kLaneUnits];
                    sum_rows<kSentRows>(drawn, piece, sum);
                    for_units(piece, [&](int j, int at) { to[at] = sum[j]; });
                });
            }
            __syncwarp();
            if (lane_ == 0) {
                __threadfence_block();
                atomicAdd(tables_.stored + drawn.chunk, 1);
            }
            drawn = next;
        }
        // not before its last draw is counted: a watcher leaves when nobody sends and all chunks have come
        if (!sends_left_ && lane_ == 0) atomicAdd(&shared_.senders, -1);
    }

    // ---- adding, tokens in ascending order
    __device__ __forceinline__ int own_draws() const {
        return static_cast<int>(combine_.tokens) * args_.draws;
    }
    // In lane 0, of its next draw.
    __device__ __forceinline__ bool has_come() const {
        return next_own_ / args_.draws >> args_.chunk_bits < look_at(&shared_.arrived);
    }
    __device__ __forceinline__ bool can_add() const {
        const bool can = lane_ == 0 && next_own_ < own_draws() && has_come();
        return __shfl_sync(0xFFFFFFFFu, can ? 1 : 0, 0) != 0;
    }
    __device__ __forceinline__ Own draw_own(Draw& drawn) {
        constexpr int kLater = -1, kNone = -2;
        int number = kNone;
        if (lane_ == 0 && look_at(&shared_.lost) == 0) {
            unsigned* counter = &args_.words->next_own;
            if (next_own_ == kNotDrawn) next_own_ = draw(counter, kAdders);
            if (next_own_ < own_draws()) {
                number = has_come() ? next_own_ : kLater;
                if (number != kLater) next_own_ = draw(counter, kAdders);
            }
        }
        number = __shfl_sync(0xFFFFFFFFu, number, 0);
        if (number < 0) return number == kLater ? Own::later : Own::none;
        __threadfence_block();  // behind the watcher's look at the words
        const int rank = combine_.group.rank, token = number / args_.draws, chunk = token >> args_.chunk_bits,
                  word = token / kWordBits;
        drawn.token = token;
        drawn.first = number % args_.draws * args_.drawn;
        drawn.row = -1;
        drawn.host_bit = 0;
        const int local_experts = static_cast<int>(combine_.local_experts);
        if (lane_ < combine_.topk) {
            const int id = combine_.all_ids[(rank * combine_.slots + token) * combine_.topk + lane_];
            if (id >= 0 && id < combine_.group.size * local_experts)
                drawn.host_bit = 1u << id / local_experts;
        }
        const uint32_t bits = tables_.has_rows[word], bit = 1u << token % kWordBits;
        if ((bits & bit) != 0) {
            int i = tables_.from(rank, chunk) + __popc(bits & (bit - 1));
            for (int w = (chunk << args_.chunk_bits) / kWordBits; w < word; ++w)
                i += __popc(tables_.has_rows[w]);
            drawn.row = row_in_lane(i);
        }
        return Own::now;
    }
    __device__ __forceinline__ Own add_some() {
        Draw drawn{};
        Own state = draw_own(drawn);
#pragma unroll 1
        while (state == Own::now) {
            Draw next{};
            state = draw_own(next);
            const uint32_t hosts = __reduce_or_sync(0xFFFFFFFFu, drawn.host_bit);
            for_pieces(drawn, [&](int piece) { add(drawn, hosts, piece); });
            drawn = next;
        }
        return state;
    }
    __device__ __forceinline__ void add(const Draw& drawn, uint32_t hosts, int piece) const {
        const int rank = combine_.group.rank;
        const int64_t row = int64_t{drawn.token} * args_.units;
        const uint4* residual = static_cast<const uint4*>(combine_.residual.data) + row;
        uint4* y = static_cast<uint4*>(combine_.y.data) + row;
        uint4 own[kLaneUnits], kept[kLaneUnits] = {};
        sum_rows<kOwnRows>(drawn, piece, own);
        const bool has_residual = combine_.residual.data != nullptr;
        if (has_residual) for_units(piece, [&](int j, int at) { kept[j] = __ldcs(residual + at); });
        float sum[kLaneUnits][kUnit] = {};
#pragma unroll 1
        for (uint32_t left = hosts; left != 0; left &= left - 1) {
            const int from = __ffs(static_cast<int>(left)) - 1;
            const uint4* sums = reinterpret_cast<const uint4*>(shared_.box[rank]) +
                                (from * combine_.slots + drawn.token) * args_.units;
            uint4 raw[kLaneUnits] = {};
            for_units(piece, [&](int j, int at) { raw[j] = from == rank ? own[j] : __ldcg(sums + at); });
            for_units(piece, [&](int j, int) { add_unit(sum[j], raw[j]); });
        }
        for_units(piece, [&](int j, int at) {
            if (has_residual) add_unit(sum[j], kept[j]);
            __stcs(y + at, round_unit(sum[j]));
        });
    }

    // ---- both
    __device__ __forceinline__ int row_in_lane(int64_t i) const {
        return lane_ < combine_.topk ? combine_.recv_rows[i * combine_.topk + lane_] : -1;
    }
    template <class Visit> __device__ __forceinline__ void for_pieces(const Draw& drawn, Visit visit) const {
        const int end = min(args_.pieces, drawn.first + args_.drawn);
#pragma unroll 1
        for (int piece = drawn.first; piece < end; ++piece) visit(piece);
    }
    template <class Visit> __device__ __forceinline__ void for_units(int piece, Visit visit) const {
        const int first = piece * kPieceUnits + lane_;
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j)
            if (first + j * kPeerWarp < args_.units) visit(j, first + j * kPeerWarp);
    }
    static __device__ __forceinline__ void add_unit(float (&sum)[kUnit], uint4 raw) {
        float values[kUnit];
        unpack_unit(raw, DType::bf16, values);
#pragma unroll
        for (int e = 0; e < kUnit; ++e) sum[e] += values[e];
    }
    static __device__ __forceinline__ uint4 round_unit(const float (&v)[kUnit]) {
        return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
    }
    // The sum of the piece's M-rows, one after the other in fp32, rounded once. kRows of them are under way at a time; they start as zeros, or
    // registers would be kept for them where nothing is under way.
    template <int kRows>
    __device__ __forceinline__ void sum_rows(const Draw& drawn, int piece,
                                             uint4 (&rounded)[kLaneUnits]) const {
        const int count = __popc(__ballot_sync(0xFFFFFFFFu, drawn.row >= 0));
        float sum[kLaneUnits][kUnit] = {};
#pragma unroll 1
        for (int first = 0; first < count; first += kRows) {
            uint4 raw[kRows][kLaneUnits] = {};
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int64_t row = __shfl_sync(0xFFFFFFFFu, drawn.row, first + r);
                if (first + r < count)
                    for_units(piece,
                              [&](int j, int at) { raw[r][j] = __ldcg(src_ + row * args_.units + at); });
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                if (first + r < count) for_units(piece, [&](int j, int) { add_unit(sum[j], raw[r][j]); });
        }
#pragma unroll
        for (int j = 0; j < kLaneUnits; ++j) rounded[j] = round_unit(sum[j]);
    }

    const CombineSumsArgs& args_;
    const CombineArgs& combine_;
    const ChunkTables& tables_;
    CombineShared& shared_;
    const uint4* const src_;
    const int lane_;
    const bool adds_first_;
    bool sends_left_;
    int chunk_ = 0;                                     // of the latest draw to send
    int next_sent_ = kNotDrawn, next_own_ = kNotDrawn;  // in lane 0
};

// Moves per GPU: the M-rows in once; sums of peers' tokens out over NVLink; peers' sums and the residual in and y out. Every CTA has to get its
// place on the GPU before the deadline; in which order does not matter. Barriers at the start and the end. One writer a byte.
__global__ __launch_bounds__(kCombineThreads, 1) void combine_sums_kernel(const CombineSumsArgs args) {
    extern __shared__ int memory[];
    __shared__ CombineShared shared;
    const PeerGroup& group = args.combine.group;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        shared.senders = kAddersSend ? kWorkers : kSenders;
        shared.arrived = 0;
        shared.lost = group.lost() ? 1 : 0;
    }
    if (thread < group.size) shared.box[thread] = group.next_box(thread);
    const uint64_t epoch = group.epoch() + 1;
    __syncthreads();
    if (shared.lost != 0) return;
    const ChunkTables tables(memory, group.size, args);
    find_rows(args, tables);
    if (thread / kPeerWarp == kWatcher)
        ChunkWatcher(args, tables, shared, epoch).watch();
    else
        Worker(args, tables, shared).work();
    __syncthreads();
    // The CTA that ends last: nobody draws any more, and all have read the epoch.
    if (thread == 0 && atomicInc(&args.words->ended, gridDim.x - 1) == gridDim.x - 1) {
        args.words->next_sent = args.words->next_own = 0;
        group.words->epochs[group.index] = epoch;
        count_sums(args.combine);
    }
}

}  // namespace

void launch_combine_sums(const CombineArgs& args, const PeerMeeting& meeting, CombineWords* words,
                         int64_t steps, const Launch& launch) {
    const int chunk_bits = chunk_bits_for(args.slots), units = static_cast<int>(args.hidden / kUnit),
              pieces = static_cast<int>(ceil_div(units, kPieceUnits));
    const unsigned grid = grid_for(ceil_div(args.slots * pieces, kWorkers), launch, 1);
    const int drawn = grid <= kFewCtas ? pieces : 1;
    const CombineSumsArgs kernel_args{
        .combine = args,
        .meeting = meeting,
        .words = words,
        .steps = steps,
        .chunk_bits = chunk_bits,
        .chunks = static_cast<int>(std::max<int64_t>(1, ceil_div(args.slots, int64_t{1} << chunk_bits))),
        .units = units,
        .pieces = pieces,
        .drawn = drawn,
        .draws = static_cast<int>(ceil_div(pieces, drawn))};
    const int64_t shared =
        ChunkTables::words(args.group.size, kernel_args) * static_cast<int64_t>(sizeof(int));
    check_cuda(cudaFuncSetAttribute(combine_sums_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)),
               "shared memory of combine");
    combine_sums_kernel<<<grid, kCombineThreads, static_cast<std::size_t>(shared), stream_of(launch)>>>(
        kernel_args);
    check_launch("combine");
}

}  // namespace fp8flow::hopper
