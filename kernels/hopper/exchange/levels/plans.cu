// SPDX-License-Identifier: MIT
// The plans of two levels of exchange on the GPU, without a wait of the host, in two launches: mark_kernel
// finds which tokens each list takes and numbers them, place_kernel adds up the lists before and writes both
// plans. Integers with one writer a word: the bytes of the loops in kernels/comm/levels/level_plans.cpp.
//
// A list belongs to one source rank, so that all are marked at once:
//   landing [seat]: tokens of the rank at that seat (any host, any place) with an expert on this host
//   leaving [host]: this rank's tokens with an expert on that host
//   going [place, host]: tokens of this rail's rank on that host with an expert at that place of this host
#include "kernels/core/error.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/launch.h"

#include <algorithm>

namespace fp8flow::hopper::levels {

namespace {

constexpr int kMarkThreads = 1024, kPlaceThreads = 256;
constexpr int64_t kSharedBytes = 48 << 10;  // the default limit of a CTA

struct LevelArgs {
    // the plan of one level
    const int32_t *ids, *recv_rows, *recv_source;
    const int64_t *recv_offsets, *num_rows;  // num_rows: the end of the last group
    DeviceView row_source;
    int ranks, slots, topk, local_experts, tokens;
    // where ranks are
    const int32_t *rank_at, *seat_of;
    int hosts, places, rank, host, place;
    // between the kernels: a token's number in its list or -1, and how many each list has
    int32_t *landing, *going;                // [G, S] by seat, [P, N, S]
    int32_t *landing_counts, *going_counts;  // [G], [P, N]
    // the plans
    int32_t *rail_ids, *rail_rows, *rail_prob_rows, *rail_source, *rail_send;
    int64_t *rail_offsets, *rail_send_counts;
    int32_t *inside_ids, *inside_rows, *inside_source, *inside_send, *inside_row_source, *arrival;
    int64_t *inside_offsets, *inside_send_counts, *received_count, *received_offsets;

    __device__ int own_seat(int of_host) const { return place * hosts + of_host; }
    __device__ int64_t landed() const { return static_cast<int64_t>(hosts) * slots; }  // at most
    __device__ const int32_t* ids_of(int rank_there, int64_t token) const {
        return ids + (static_cast<int64_t>(rank_there) * slots + token) * topk;
    }
    // The seat of an expert's rank; -1 without an expert.
    __device__ int seat_of_id(int32_t id) const {
        return id >= 0 && id < ranks * local_experts ? seat_of[id / local_experts] : -1;
    }
    __device__ bool is_here(int seat) const { return seat >= 0 && seat % hosts == host; }
    __device__ int32_t id_on_host(int seat, int32_t id) const {
        return seat / hosts * local_experts + id % local_experts;
    }
};

// The number of earlier threads of the CTA with `flag`, and of all. All threads call it; two barriers, the
// first protects the shared words of the previous call.
__device__ __forceinline__ int scan_flag(bool flag, int& total, int* of_warp) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
              warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const unsigned flags = __ballot_sync(kFullMask, flag);
    __syncthreads();
    if (lane == 0) of_warp[warp] = __popc(flags);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < kMarkThreads / kWarpSize; ++w) {
        if (w < warp) before += of_warp[w];
        total += of_warp[w];
    }
    return before + __popc(flags & ((1u << lane) - 1u));
}

// Numbers the tokens of every list. Bytes: the ids of a list's rank read once (G ranks, this rank N times,
// this rail P times; mostly out of L2), one word a token and list written. CTA: a list, 1024 tokens an
// iteration, one a thread. Barriers: those of the scan.
__global__ __launch_bounds__(kMarkThreads) void mark_kernel(const LevelArgs args) {
    __shared__ int of_warp[kMarkThreads / kWarpSize];
    enum { kLanding, kLeaving, kGoing } kind = kLanding;
    int list = static_cast<int>(blockIdx.x);
    if (list >= args.ranks + args.hosts) {
        kind = kGoing;
        list -= args.ranks + args.hosts;
    } else if (list >= args.ranks) {
        kind = kLeaving;
        list -= args.ranks;
    }
    const int source = kind == kLanding   ? args.rank_at[list]
                       : kind == kLeaving ? args.rank
                                          : args.rank_at[args.own_seat(list % args.hosts)];
    const int items = kind == kLeaving ? args.tokens : args.slots;
    const auto takes = [&](int seat) {
        if (kind == kLanding) return args.is_here(seat);
        if (kind == kLeaving) return seat >= 0 && seat % args.hosts == list;
        return seat == list / args.hosts * args.hosts + args.host;
    };
    int before = 0;  // of all earlier iterations
    for (int first = 0; first < items; first += kMarkThreads) {
        const int token = first + static_cast<int>(threadIdx.x);
        bool taken = false;
        if (token < items) {
            const int32_t* ids = args.ids_of(source, token);
            for (int k = 0; k < args.topk; ++k) taken = taken || takes(args.seat_of_id(ids[k]));
        }
        int total = 0;
        const int number = before + scan_flag(taken, total, of_warp);
        before += total;
        const int64_t at = static_cast<int64_t>(list) * args.slots;
        if (kind == kLeaving) {
            if (taken) args.rail_send[at + number] = token;
        } else if (token < items) {
            (kind == kLanding ? args.landing : args.going)[at + token] = taken ? number : -1;
        }
    }
    if (threadIdx.x != 0) return;
    if (kind == kLeaving)
        args.rail_send_counts[list] = before;
    else
        (kind == kLanding ? args.landing_counts : args.going_counts)[list] = before;
}

// Where each list of a CTA's tables begins: landing and going lists by host at a place, received rows of one
// level by seat.
struct Starts {
    int *landing, *going, *received;  // [P, N]
    int* places;                      // [P]: received rows of earlier places

    static int64_t words(int64_t ranks, int64_t places) { return 3 * ranks + places; }
    __device__ Starts(int* memory, const LevelArgs& args)
        : landing(memory),
          going(landing + args.ranks),
          received(going + args.ranks),
          places(received + args.ranks) {}

    // By all threads of the CTA, with barriers inside and at the end. CTA 0 publishes the offsets.
    __device__ void fill(const LevelArgs& args) const {
        const bool publishes = blockIdx.x == 0;
        for (int place = static_cast<int>(threadIdx.x); place < args.places;
             place += static_cast<int>(blockDim.x)) {
            int lands = 0, goes = 0, receives = 0;
            for (int host = 0; host < args.hosts; ++host) {
                const int seat = place * args.hosts + host, rank = args.rank_at[seat];
                landing[seat] = lands;
                going[seat] = goes;
                received[seat] = receives;
                if (publishes && place == args.place) args.rail_offsets[host] = lands;
                lands += args.landing_counts[seat];
                goes += args.going_counts[seat];
                receives += static_cast<int>(args.recv_offsets[rank + 1] - args.recv_offsets[rank]);
            }
            places[place] = receives;
            if (!publishes) continue;
            args.inside_send_counts[place] = goes;
            if (place == args.place) args.rail_offsets[args.hosts] = lands;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int before = 0;
            for (int place = 0; place < args.places; ++place) {
                const int own = places[place];
                places[place] = before;
                if (publishes) args.inside_offsets[place] = before;
                before += own;
            }
            if (publishes) {
                args.inside_offsets[args.places] = before;
                args.received_count[0] = args.received_offsets[1] = before;
            }
        }
        __syncthreads();
    }
};

// For a token that arrives on this host: writes its choices here and, if it arrives on this rank, the entry
// by which the rail returns its sum.
__device__ __forceinline__ void land(const LevelArgs& args, int seat, int64_t token, int64_t row) {
    const int place = seat / args.hosts;
    const int32_t* ids = args.ids_of(args.rank_at[seat], token);
    int32_t* to = args.inside_ids + (place * args.landed() + row) * args.topk;
    const bool own = place == args.place;
    if (own) {
        args.rail_source[row] = static_cast<int32_t>(seat % args.hosts * args.slots + token);
        args.rail_rows[row * args.topk] = static_cast<int32_t>(row);
    }
    for (int k = 0; k < args.topk; ++k) {
        const int32_t id = ids[k];
        const int at = args.seat_of_id(id);
        if (!args.is_here(at)) continue;
        to[k] = args.id_on_host(at, id);
        if (!own) continue;
        int below = 0;  // of the token's experts here
        for (int other = 0; other < args.topk; ++other)
            below += ids[other] < id && args.is_here(args.seat_of_id(ids[other]));
        args.rail_prob_rows[row * args.topk + below] = static_cast<int32_t>(row * args.topk + k);
    }
}

// Writes both plans; lists are -1 before. Bytes: the ids of all ranks once and of this rail twice, the marks,
// the received rows' lists and row_source in and out. CTA: its tables, then one item a thread: a token of a
// list, a received row, an M-row. Barriers: those of the tables.
__global__ __launch_bounds__(kPlaceThreads) void place_kernel(const LevelArgs args) {
    extern __shared__ int memory[];
    const Starts starts(memory, args);
    starts.fill(args);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x,
                  threads = static_cast<int64_t>(gridDim.x) * kPlaceThreads, landed = args.landed(),
                  tokens = static_cast<int64_t>(args.ranks) * args.slots;
    const auto landing_row = [&](int seat, int64_t token) {
        return int64_t{starts.landing[seat]} + args.landing[seat * static_cast<int64_t>(args.slots) + token];
    };
    for (int64_t item = first; item < tokens; item += threads) {
        const int seat = static_cast<int>(item / args.slots), place = seat / args.hosts,
                  host = seat % args.hosts;
        const int64_t token = item % args.slots;
        if (args.landing[item] >= 0) land(args, seat, token, landing_row(seat, token));
        if (const int32_t number = args.going[item]; number >= 0)
            args.inside_send[place * landed + starts.going[seat] + number] =
                static_cast<int32_t>(landing_row(args.own_seat(host), token));
        if (place != args.place) continue;
        const int32_t* ids = args.ids_of(args.rank_at[seat], token);
        for (int k = 0; k < args.topk; ++k)
            if (const int at = args.seat_of_id(ids[k]); at >= 0)
                args.rail_ids[(host * static_cast<int64_t>(args.slots) + token) * args.topk + k] =
                    at % args.hosts * args.places * args.local_experts + args.id_on_host(at, ids[k]);
    }
    // Where a received row of one level comes inside.
    const auto arrival_of = [&](int64_t row, int seat, int rank) {
        return starts.places[seat / args.hosts] + starts.received[seat] + row - args.recv_offsets[rank];
    };
    for (int64_t i = first; i < args.recv_offsets[args.ranks]; i += threads) {
        const int rank = args.recv_source[i] / args.slots, seat = args.seat_of[rank];
        const int64_t row = arrival_of(i, seat, rank);
        args.arrival[i] = static_cast<int32_t>(row);
        args.inside_source[row] = static_cast<int32_t>(seat / args.hosts * landed +
                                                       landing_row(seat, args.recv_source[i] % args.slots));
        for (int k = 0; k < args.topk; ++k)
            args.inside_rows[row * args.topk + k] = args.recv_rows[i * args.topk + k];
    }
    const int32_t* row_source = static_cast<const int32_t*>(args.row_source.data) + args.row_source.base();
    for (int64_t row = first; row < *args.num_rows; row += threads) {
        const int32_t i = row_source[row];
        if (i < 0) {
            args.inside_row_source[row] = -1;
            continue;
        }
        const int rank = args.recv_source[i] / args.slots;
        args.inside_row_source[row] = static_cast<int32_t>(arrival_of(i, args.seat_of[rank], rank));
    }
}

}  // namespace

}  // namespace fp8flow::hopper::levels

namespace fp8flow::hopper {

void derive_level_plans(const DispatchPlan& plan, const LevelMap& map, const LevelPlans& levels,
                        Arena& scratch, const Launch& launch) {
    using namespace hopper::levels;
    const int64_t ranks = map.hosts * map.places, slots = plan.all_ids.dim(1);
    const TensorView landing = scratch.tensor(DType::i32, {ranks, slots}, "exchange"),
                     going = scratch.tensor(DType::i32, {ranks, slots}, "exchange"),
                     counts = scratch.tensor(DType::i32, {2, ranks}, "exchange");
    const DispatchPlan &rail = levels.rail, &inside = levels.inside;
    const LevelArgs args{.ids = plan.all_ids.as<int32_t>(),
                         .recv_rows = plan.recv_rows.as<int32_t>(),
                         .recv_source = plan.recv_source.as<int32_t>(),
                         .recv_offsets = plan.recv_offsets.as<int64_t>(),
                         .num_rows = plan.groups.offsets.as<int64_t>() + plan.groups.num_groups,
                         .row_source = device_view(plan.row_source),
                         .ranks = static_cast<int>(ranks),
                         .slots = static_cast<int>(slots),
                         .topk = static_cast<int>(plan.topk),
                         .local_experts = static_cast<int>(plan.num_local_experts),
                         .tokens = static_cast<int>(plan.num_tokens),
                         .rank_at = map.ranks.as<int32_t>(),
                         .seat_of = map.seats.as<int32_t>(),
                         .hosts = static_cast<int>(map.hosts),
                         .places = static_cast<int>(map.places),
                         .rank = static_cast<int>(map.rank),
                         .host = static_cast<int>(map.host),
                         .place = static_cast<int>(map.place),
                         .landing = landing.as<int32_t>(),
                         .going = going.as<int32_t>(),
                         .landing_counts = counts.as<int32_t>(),
                         .going_counts = counts.as<int32_t>() + ranks,
                         .rail_ids = rail.all_ids.as<int32_t>(),
                         .rail_rows = rail.recv_rows.as<int32_t>(),
                         .rail_prob_rows = rail.prob_rows.as<int32_t>(),
                         .rail_source = rail.recv_source.as<int32_t>(),
                         .rail_send = rail.send_tokens.as<int32_t>(),
                         .rail_offsets = rail.recv_offsets.as<int64_t>(),
                         .rail_send_counts = rail.send_counts.as<int64_t>(),
                         .inside_ids = inside.all_ids.as<int32_t>(),
                         .inside_rows = inside.recv_rows.as<int32_t>(),
                         .inside_source = inside.recv_source.as<int32_t>(),
                         .inside_send = inside.send_tokens.as<int32_t>(),
                         .inside_row_source = inside.row_source.as<int32_t>(),
                         .arrival = levels.arrival.as<int32_t>(),
                         .inside_offsets = inside.recv_offsets.as<int64_t>(),
                         .inside_send_counts = inside.send_counts.as<int64_t>(),
                         .received_count = levels.received.counts.as<int64_t>(),
                         .received_offsets = levels.received.offsets.as<int64_t>()};
    const std::size_t shared = static_cast<std::size_t>(Starts::words(ranks, map.places)) * sizeof(int);
    FP8FLOW_CHECK(static_cast<int64_t>(shared) <= kSharedBytes,
                  "{} ranks: their lists need {} bytes of shared memory, has {}", ranks, shared,
                  kSharedBytes);
    const cudaStream_t stream = stream_of(launch);
    check_cuda(
        cudaMemsetAsync(levels.lists.data, 0xFF, static_cast<std::size_t>(levels.lists.bytes()), stream),
        "clearing the lists of two levels");
    check_cuda(cudaMemsetAsync(levels.sizes.data, 0, static_cast<std::size_t>(levels.sizes.bytes()), stream),
               "clearing the sizes of two levels");
    mark_kernel<<<static_cast<unsigned>(2 * ranks + map.hosts), kMarkThreads, 0, stream>>>(args);
    check_launch("marking the tokens of two levels");
    const int64_t items = std::max(ranks * slots, plan.groups.row_capacity);
    place_kernel<<<grid_for(ceil_div(items, kPlaceThreads), launch), kPlaceThreads, shared, stream>>>(args);
    check_launch("placing the rows of two levels");
}

}  // namespace fp8flow::hopper
