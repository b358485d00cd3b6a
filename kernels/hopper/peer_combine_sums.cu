// combine over peer memory, order `rank`, BF16 in whole vectors: one kernel sends this rank's sums to the tokens' owners and adds, while it
// sends, what has come for its own tokens. The bits are those of the reference exchange.
//
// NOTE
//
// Protocol. An owner's tokens stand in chunks. The grid sends all chunks in order, to all owners in turn, a piece of a row at a time; sending
// waits for nobody. A warp of every CTA watches: when all pieces of a chunk that are the CTA's have been stored, it fences and arrives at
// the chunk's counter on this GPU, and the last CTA to arrive raises this rank's flag at every owner by a step. The same warp looks at
// the flags of the other ranks here: up to where all of them have come, this rank's tokens may be added. The last chunk's step is the
// meeting: it stands for everything that a rank's stream has done before, and every CTA waits for it from every member, tokens or not.
// Fences take microseconds, and a warp that sends must not stand in one (a chunk of 128 tokens: 330 us instead of 190 on two GPUs).
// Sums of this rank's own tokens go straight from its M-rows into y, rounded to BF16 on the way as if they had been in a box.
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/peer_combine.h"

namespace fp8flow::hopper {

namespace {

constexpr int kWarps = 16, kThreads = kWarps * kPeerWarp;
constexpr int kWatcher = kWarps - 1;  // this warp watches, all others work
constexpr int kSenders =
    8;  // of the workers: these add when everything is sent, the others whenever they can
constexpr int kLaneUnits = 4;                        // 16-byte units of a lane in a piece
constexpr int kPieceUnits = kLaneUnits * kPeerWarp;  // a piece: 1024 columns of a row
constexpr int kSentRows = 4, kOwnRows = 2;           // M-rows whose pieces a warp has under way
constexpr int kChunkBits = 7;  // chunks of 128 tokens, longer ones where there are many tokens
constexpr int kWordBits = 32;

int chunk_bits_for(int64_t slots) {
    int bits = kChunkBits;
    while (slots > int64_t{kMostCombineChunks} << bits) ++bits;
    return bits;
}

struct SumsArgs {
    CombineArgs combine;
    PeerMeeting meeting;
    uint32_t* arrivals;      // [chunks + 1]: CTAs that have sent a chunk; CTAs that have ended
    int chunk_bits, chunks;  // a chunk: 1 << chunk_bits tokens
    int units, pieces;       // of a row
};

// A CTA's picture of the received rows, in shared memory.
struct Tables {
    int* begin;          // [G, chunks + 1]: first received row of an owner in a chunk or behind it
    int* first;          // [chunks + 1]: pieces to send before a chunk, over the whole grid
    int* sent;           // [chunks]: pieces of this CTA that are stored
    uint32_t* has_rows;  // a bit for every own token: this rank hosts some of its experts

    __host__ __device__ static int64_t words(int size, const SumsArgs& args) {
        return static_cast<int64_t>(size + 2) * (args.chunks + 1) + bits(args);
    }
    __device__ Tables(int* memory, int size, const SumsArgs& args)
        : begin(memory),
          first(begin + size * (args.chunks + 1)),
          sent(first + args.chunks + 1),
          has_rows(reinterpret_cast<uint32_t*>(sent + args.chunks + 1)),
          stride_(args.chunks + 1) {}
    __device__ int& from(int owner, int chunk) const { return begin[owner * stride_ + chunk]; }

private:
    __host__ __device__ static int64_t bits(const SumsArgs& args) {
        return (int64_t{args.chunks} << args.chunk_bits) / kWordBits;
    }
    int stride_;
};

// What the warps of a CTA tell each other while they run, by atomics only.
struct Shared {
    uint8_t* box[PeerMemory::kMaxRanks];
    int next_sent, next_own;  // the CTA's next pieces
    int arrived;              // chunks that have come from all members
    int lost;
};
__device__ __forceinline__ int look_at(int* word) { return atomicAdd(word, 0); }

// Fills the tables, by the whole CTA: a look at all received rows, 16 KB of 4096 tokens, half of it from L1. Barriers inside and at the end.
__device__ __forceinline__ void find_rows(const SumsArgs& args, const Tables& tables) {
    constexpr int kBatch = 8;  // loads under way
    const CombineArgs& combine = args.combine;
    const int thread = static_cast<int>(threadIdx.x), size = combine.group.size, rank = combine.group.rank,
              slots = static_cast<int>(combine.slots), keys = size * (args.chunks + 1),
              total = static_cast<int>(combine.received.offsets[size]);
    int32_t source[kBatch], before[kBatch];  // of neighbours in the list; past its ends a row of no owner
    const auto load = [&](int first) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int i = first + j * kThreads;
            source[j] = i < total ? combine.received.source[i] : size * slots;
            before[j] = i > 0 && i <= total ? combine.received.source[i - 1] : -1;
        }
    };
    const auto key_of = [&](int from) {
        if (from >= size * slots) return keys;
        const int owner = from / slots;
        return owner * (args.chunks + 1) + ((from - owner * slots) >> args.chunk_bits);
    };
    load(thread);
    const int words = static_cast<int>(Tables::words(size, args));
    for (int i = thread; i < words; i += kThreads) tables.begin[i] = 0;
    __syncthreads();
    for (int first = thread; first - thread <= total; first += kBatch * kThreads) {
        if (first != thread) load(first);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int i = first + j * kThreads;
            if (i > total) continue;
            const int key = key_of(source[j]);
            for (int k = before[j] < 0 ? 0 : key_of(before[j]) + 1; k < min(key + 1, keys); ++k)
                tables.begin[k] = i;
            if (const int token = source[j] - rank * slots; i < total && token >= 0 && token < slots)
                atomicOr(tables.has_rows + token / kWordBits, 1u << token % kWordBits);
        }
    }
    __syncthreads();
    if (thread < kPeerWarp) {  // first: sums over the chunks before
        int sum = 0;
        for (int c = thread; c - thread < args.chunks; c += kPeerWarp) {
            int longest = 0;
            for (int owner = 0; owner < size && c < args.chunks; ++owner)
                if (owner != rank) longest = max(longest, tables.from(owner, c + 1) - tables.from(owner, c));
            int pieces = longest * (size - 1) * args.pieces;
            for (int step = 1; step < kPeerWarp; step *= 2) {
                const int other = __shfl_up_sync(0xFFFFFFFFu, pieces, step);
                if (thread >= step) pieces += other;
            }
            if (c < args.chunks) tables.first[c + 1] = sum + pieces;
            sum += __shfl_sync(0xFFFFFFFFu, pieces, kPeerWarp - 1);
        }
    }
    __syncthreads();
}

// ---- the watching warp ---------------------------------------------------------------------------------------------------------------------

class Watcher {
public:
    __device__ Watcher(const SumsArgs& args, const Tables& tables, Shared& shared, uint64_t epoch)
        : args_(args),
          group_(args.combine.group),
          tables_(tables),
          shared_(shared),
          epoch_(epoch),
          steps_before_(PeerGroup::last_step(epoch) - args.chunks),
          lane_(static_cast<int>(threadIdx.x) % kPeerWarp) {}

    // Until everything of this CTA is sent and everything of the others has come, or nothing has happened for as long as the limit.
    __device__ __forceinline__ void watch() {
        constexpr unsigned kNap = 100;  // nanoseconds
        uint64_t since = device_nanoseconds();
        while (sent_ < args_.chunks || arrived_ < args_.chunks) {
            const bool moved = look_at_this_cta() | look_at_members();
            if (moved) {
                since = device_nanoseconds();
            } else if (__any_sync(0xFFFFFFFFu, device_nanoseconds() - since > args_.meeting.limit)) {
                const uint32_t late = __ballot_sync(0xFFFFFFFFu, chunks_from_member() <= arrived_);
                if (late == 0) continue;
                give_up(args_.meeting, late, epoch_);
                if (lane_ == 0) atomicExch(&shared_.lost, 1);
                return;
            } else {
                __nanosleep(kNap);
            }
        }
    }

private:
    // Pieces of this CTA before the grid's piece `number`: it has every gridDim.x-th one.
    __device__ __forceinline__ int of_this_cta(int number) const {
        const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
        return number <= cta ? 0 : (number - cta + ctas - 1) / ctas;
    }
    __device__ __forceinline__ bool is_sent(int chunk) const {
        return look_at(tables_.sent + chunk) ==
               of_this_cta(tables_.first[chunk + 1]) - of_this_cta(tables_.first[chunk]);
    }
    // Arrives for every chunk that this CTA has sent since the last look. The first fence orders the workers' stores before it, the second one
    // those of the other CTAs.
    __device__ __forceinline__ bool look_at_this_cta() {
        int sent = sent_;
        if (lane_ == 0)
            while (sent < args_.chunks && is_sent(sent)) ++sent;
        sent = __shfl_sync(0xFFFFFFFFu, sent, 0);
        if (sent == sent_) return false;
        __syncwarp();
        fence_system();
        int complete = -1;
        for (int chunk = sent_ + lane_; chunk < sent; chunk += kPeerWarp)
            if (atomicInc(args_.arrivals + chunk, gridDim.x - 1) == gridDim.x - 1) complete = chunk;
        sent_ = sent;
        complete = __reduce_max_sync(0xFFFFFFFFu, complete);
        if (complete < 0) return true;
        fence_system();
        if (lane_ < group_.size && lane_ != group_.rank)
            raise_release_system(group_.flag(lane_, group_.rank),
                                 steps_before_ + static_cast<uint64_t>(complete) + 1);
        return true;
    }
    // Of the member that is this lane; all chunks where there is no such member to wait for.
    __device__ __forceinline__ int chunks_from_member() const {
        if (lane_ >= group_.size || lane_ == group_.rank) return args_.chunks + 1;
        const uint64_t steps = load_acquire_system(group_.flag(group_.rank, lane_));
        return steps <= steps_before_ ? 0 : static_cast<int>(min(steps - steps_before_, uint64_t{1} << 30));
    }
    __device__ __forceinline__ bool look_at_members() {
        if (arrived_ == args_.chunks) return false;
        const int arrived = min(args_.chunks, __reduce_min_sync(0xFFFFFFFFu, chunks_from_member()));
        if (arrived == arrived_) return false;
        arrived_ = arrived;
        __threadfence_block();
        if (lane_ == 0) atomicExch(&shared_.arrived, arrived);
        return true;
    }

    const SumsArgs& args_;
    const PeerGroup& group_;
    const Tables& tables_;
    Shared& shared_;
    const uint64_t epoch_, steps_before_;
    const int lane_;
    int sent_ = 0, arrived_ = 0;  // chunks
};

// ---- the working warps ---------------------------------------------------------------------------------------------------------------------

// A piece of a token's sum. `row` in lane k: the k-th of its M-rows here, or -1.
struct Piece {
    int token, number, row;
    int chunk, owner;   // of a piece that is sent; token -1: there is none after all
    uint32_t host_bit;  // of a piece that is added, in lane k: the rank of its k-th expert
};

class Worker {
public:
    __device__ Worker(const SumsArgs& args, const Tables& tables, Shared& shared)
        : args_(args),
          combine_(args.combine),
          tables_(tables),
          shared_(shared),
          src_(static_cast<const uint4*>(combine_.src.data) + combine_.src.base() * args.units),
          lane_(static_cast<int>(threadIdx.x) % kPeerWarp),
          adds_first_(static_cast<int>(threadIdx.x) / kPeerWarp >= kSenders) {}

    // All pieces that fall to this warp.
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

    // ---- sending: every gridDim.x-th piece of the order chunk, row in the chunk, owner, piece of the row
    __device__ __forceinline__ bool draw_sent(Piece& piece) {
        if (!sends_left_) return false;
        const int number = draw_from(&shared_.next_sent);
        if (number >= tables_.first[args_.chunks]) return sends_left_ = false;
        while (number >= tables_.first[chunk_ + 1]) ++chunk_;
        const int size = combine_.group.size, place = number - tables_.first[chunk_],
                  turn = place / args_.pieces;
        piece.number = place % args_.pieces;
        piece.chunk = chunk_;
        piece.owner = (combine_.group.rank + 1 + turn % (size - 1)) % size;
        piece.token = piece.row = -1;
        const int i = tables_.from(piece.owner, chunk_) + turn / (size - 1);
        if (i < tables_.from(piece.owner, chunk_ + 1)) {
            piece.token = combine_.received.source[i] - piece.owner * static_cast<int>(combine_.slots);
            piece.row = row_in_lane(i);
        }
        return true;
    }
    // Until nothing is left to be sent, or something is there for a warp that adds first.
    __device__ __forceinline__ void send_some() {
        Piece piece{};
        bool more = draw_sent(piece);
#pragma unroll 1
        while (more) {
            Piece next{};  // its loads are under way while this one is sent
            more = !(adds_first_ && can_add()) && draw_sent(next);
            if (piece.token >= 0) {
                uint4 sum[kLaneUnits];
                sum_rows<kSentRows>(piece, sum);
                uint4* to = reinterpret_cast<uint4*>(shared_.box[piece.owner]) +
                            (combine_.group.rank * combine_.slots + piece.token) * args_.units;
                for_units(piece, [&](int j, int at) { to[at] = sum[j]; });
            }
            __syncwarp();
            if (lane_ == 0) {
                __threadfence_block();
                atomicAdd(tables_.sent + piece.chunk, 1);
            }
            piece = next;
        }
    }

    // ---- adding: every gridDim.x-th piece of this rank's tokens, in ascending order
    __device__ __forceinline__ bool has_arrived(int number) const {
        return number / args_.pieces >> args_.chunk_bits < look_at(&shared_.arrived);
    }
    __device__ __forceinline__ int own_pieces() const {
        return static_cast<int>(combine_.tokens) * args_.pieces;
    }
    __device__ __forceinline__ bool can_add() const {
        int yes = 0;
        if (lane_ == 0) {
            const int number = number_of(look_at(&shared_.next_own));
            yes = number < own_pieces() && has_arrived(number) ? 1 : 0;
        }
        return __shfl_sync(0xFFFFFFFFu, yes, 0) != 0;
    }
    __device__ __forceinline__ Own draw_own(Piece& piece) {
        constexpr int kLater = -1, kNone = -2;
        int number = kNone;
        if (lane_ == 0 && look_at(&shared_.lost) == 0) {
            const int turn = look_at(&shared_.next_own);
            if (const int wanted = number_of(turn); wanted < own_pieces())
                number = has_arrived(wanted) && atomicCAS(&shared_.next_own, turn, turn + 1) == turn ? wanted
                                                                                                     : kLater;
        }
        number = __shfl_sync(0xFFFFFFFFu, number, 0);
        if (number < 0) return number == kLater ? Own::later : Own::none;
        __threadfence_block();  // behind the watcher's look at the flags
        const int rank = combine_.group.rank;
        piece.token = number / args_.pieces;
        piece.number = number % args_.pieces;
        piece.row = -1;
        const TokenChoices choices = combine_.choices(rank, piece.token);
        piece.host_bit = lane_ < combine_.topk && choices.exists(lane_) ? 1u << choices.host(lane_) : 0;
        const int chunk = piece.token >> args_.chunk_bits, word = piece.token / kWordBits;
        const uint32_t bits = tables_.has_rows[word], bit = 1u << piece.token % kWordBits;
        if ((bits & bit) != 0) {
            int i = tables_.from(rank, chunk) + __popc(bits & (bit - 1));
            for (int w = (chunk << args_.chunk_bits) / kWordBits; w < word; ++w)
                i += __popc(tables_.has_rows[w]);
            piece.row = row_in_lane(i);
        }
        return Own::now;
    }
    __device__ __forceinline__ Own add_some() {
        const int rank = combine_.group.rank;
        const uint4* box = reinterpret_cast<const uint4*>(shared_.box[rank]);
        const uint4* residual = static_cast<const uint4*>(combine_.residual.data);
        uint4* y = static_cast<uint4*>(combine_.y.data);
        Piece piece{};
        Own state = draw_own(piece);
#pragma unroll 1
        while (state == Own::now) {
            Piece next{};
            state = draw_own(next);
            uint4 own[kLaneUnits], kept[kLaneUnits] = {};
            sum_rows<kOwnRows>(piece, own);
            const int64_t row = int64_t{piece.token} * args_.units;
            if (residual != nullptr)
                for_units(piece, [&](int j, int at) { kept[j] = __ldcs(residual + row + at); });
            float sum[kLaneUnits][kUnit] = {};
#pragma unroll 1
            for (uint32_t left = __reduce_or_sync(0xFFFFFFFFu, piece.host_bit); left != 0; left &= left - 1) {
                const int from = __ffs(static_cast<int>(left)) - 1;
                const uint4* sums = box + (from * combine_.slots + piece.token) * args_.units;
                uint4 raw[kLaneUnits] = {};
                for_units(piece, [&](int j, int at) { raw[j] = from == rank ? own[j] : __ldcg(sums + at); });
                for_units(piece, [&](int j, int) { add_unit(sum[j], raw[j]); });
            }
            for_units(piece, [&](int j, int at) {
                if (residual != nullptr) add_unit(sum[j], kept[j]);
                __stcs(y + row + at, round_unit(sum[j]));
            });
            piece = next;
        }
        return state;
    }

    // ---- both
    __device__ __forceinline__ int number_of(int turn) const {
        return static_cast<int>(blockIdx.x) + turn * static_cast<int>(gridDim.x);
    }
    __device__ __forceinline__ int draw_from(int* turns) const {
        int turn = 0;
        if (lane_ == 0) turn = atomicAdd(turns, 1);
        return number_of(__shfl_sync(0xFFFFFFFFu, turn, 0));
    }
    __device__ __forceinline__ int row_in_lane(int64_t i) const {
        return lane_ < combine_.topk ? combine_.recv_rows[i * combine_.topk + lane_] : -1;
    }
    template <class Visit> __device__ __forceinline__ void for_units(const Piece& piece, Visit visit) const {
        const int first = piece.number * kPieceUnits + lane_;
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
    __device__ __forceinline__ void sum_rows(const Piece& piece, uint4 (&rounded)[kLaneUnits]) const {
        const int count = __popc(__ballot_sync(0xFFFFFFFFu, piece.row >= 0));
        float sum[kLaneUnits][kUnit] = {};
#pragma unroll 1
        for (int first = 0; first < count; first += kRows) {
            uint4 raw[kRows][kLaneUnits] = {};
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int64_t row = __shfl_sync(0xFFFFFFFFu, piece.row, first + r);
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

    const SumsArgs& args_;
    const CombineArgs& combine_;
    const Tables& tables_;
    Shared& shared_;
    const uint4* const src_;
    const int lane_;
    const bool adds_first_;
    bool sends_left_ = true;
    int chunk_ = 0;  // of the latest piece to be sent
};

// Moves per GPU: the M-rows in once; sums of peers' tokens out over NVLink; peers' sums and the residual in and y out. Every CTA has to get its
// place on the GPU before the deadline; in which order does not matter. Barriers at the start and the end. One writer a byte.
__global__ __launch_bounds__(kThreads, 1) void combine_sums_kernel(const SumsArgs args) {
    extern __shared__ int memory[];
    __shared__ Shared shared;
    const PeerGroup& group = args.combine.group;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        shared.next_sent = shared.next_own = 0;
        shared.arrived = 0;
        shared.lost = group.lost() ? 1 : 0;
    }
    if (thread < group.size) shared.box[thread] = group.next_box(thread);
    const uint64_t epoch = group.epoch() + 1;
    __syncthreads();
    if (shared.lost != 0) return;
    const Tables tables(memory, group.size, args);
    find_rows(args, tables);
    if (thread / kPeerWarp == kWatcher)
        Watcher(args, tables, shared, epoch).watch();
    else
        Worker(args, tables, shared).work();
    __syncthreads();
    // The CTA that ends last: all have read the epoch.
    if (thread == 0 && atomicInc(args.arrivals + args.chunks, gridDim.x - 1) == gridDim.x - 1) {
        group.words->epochs[group.index] = epoch;
        count_sums(args.combine);
    }
}

}  // namespace

void launch_combine_sums(const CombineArgs& args, const PeerMeeting& meeting, uint32_t* arrivals,
                         const Launch& launch) {
    const int chunk_bits = chunk_bits_for(args.slots), units = static_cast<int>(args.hidden / kUnit),
              pieces = static_cast<int>(ceil_div(units, kPieceUnits));
    const SumsArgs kernel_args{
        .combine = args,
        .meeting = meeting,
        .arrivals = arrivals,
        .chunk_bits = chunk_bits,
        .chunks = static_cast<int>(std::max<int64_t>(1, ceil_div(args.slots, int64_t{1} << chunk_bits))),
        .units = units,
        .pieces = pieces};
    const int64_t shared = Tables::words(args.group.size, kernel_args) * static_cast<int64_t>(sizeof(int));
    const unsigned grid = grid_for(ceil_div(args.slots * pieces, kWarps), launch, 1);
    check_cuda(cudaFuncSetAttribute(combine_sums_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)),
               "shared memory of combine");
    combine_sums_kernel<<<grid, kThreads, static_cast<std::size_t>(shared), stream_of(launch)>>>(kernel_args);
    check_launch("combine");
}

}  // namespace fp8flow::hopper
