// SPDX-License-Identifier: MIT
// Derives the plans of the hierarchical exchange on the GPU, without a wait on the host, in two launches.
// mark_kernel finds the tokens of each list and numbers them. place_kernel adds up the lengths of earlier
// lists and writes both plans. The bytes are those of kernels/comm/levels/level_plans.cpp, which also
// explains the terms: integers, one writer per word.
//
// Each list has the tokens of one source rank, so that all lists are marked at once:
//   arriving [rail index]: tokens of that rank with an expert on this host
//   leaving [host]: tokens of this rank with an expert on that host
//   forwarded [local rank, host]: tokens of this rail's rank on that host, with an expert on that local rank
//     of this host
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
    // the LevelMap
    const int32_t *rank_at, *rail_index_of;
    int hosts, ranks_per_host, rank, host, local_rank;
    // between the kernels: a token's number in its list or -1, and how many each list has
    int32_t *arriving, *forwarded;                // [G, S] by rail index, [P, N, S]
    int32_t *arriving_counts, *forwarded_counts;  // [G], [P, N]
    // the plans
    int32_t *rail_ids, *rail_rows, *rail_prob_rows, *rail_source, *rail_send;
    int64_t *rail_offsets, *rail_send_counts;
    int32_t *inside_ids, *inside_rows, *inside_source, *inside_send, *inside_row_source, *inside_row_of;
    int64_t *inside_offsets, *inside_send_counts, *received_count, *received_offsets;

    __device__ int own_rail_index(int of_host) const { return local_rank * hosts + of_host; }
    __device__ int64_t rail_capacity() const { return static_cast<int64_t>(hosts) * slots; }  // at most
    __device__ const int32_t* ids_of(int rank_there, int64_t token) const {
        return ids + (static_cast<int64_t>(rank_there) * slots + token) * topk;
    }
    // The rail index of an expert's rank; -1 without an expert.
    __device__ int rail_index_of_id(int32_t id) const {
        return id >= 0 && id < ranks * local_experts ? rail_index_of[id / local_experts] : -1;
    }
    __device__ bool is_here(int rail_index) const { return rail_index >= 0 && rail_index % hosts == host; }
    __device__ int32_t id_on_host(int rail_index, int32_t id) const {
        return rail_index / hosts * local_experts + id % local_experts;
    }
};

// The number of threads of the CTA before this one with `flag`; total: of all threads. All threads call it.
// Two barriers: the first one protects the shared words of the previous call.
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

// Numbers the tokens of every list. Traffic: reads the ids of each list's rank once (G ranks, this rank N
// times, this rail P times, mostly from L2), writes one word per token and list. One CTA per list, 1024
// tokens per iteration, one per thread. Barriers: those of the scan.
__global__ __launch_bounds__(kMarkThreads) void mark_kernel(const LevelArgs args) {
    __shared__ int of_warp[kMarkThreads / kWarpSize];
    enum { kArriving, kLeaving, kForwarded } kind = kArriving;
    int list = static_cast<int>(blockIdx.x);
    if (list >= args.ranks + args.hosts) {
        kind = kForwarded;
        list -= args.ranks + args.hosts;
    } else if (list >= args.ranks) {
        kind = kLeaving;
        list -= args.ranks;
    }
    const int source = kind == kArriving  ? args.rank_at[list]
                       : kind == kLeaving ? args.rank
                                          : args.rank_at[args.own_rail_index(list % args.hosts)];
    const int items = kind == kLeaving ? args.tokens : args.slots;
    const auto takes = [&](int rail_index) {
        if (kind == kArriving) return args.is_here(rail_index);
        if (kind == kLeaving) return rail_index >= 0 && rail_index % args.hosts == list;
        return rail_index == list / args.hosts * args.hosts + args.host;
    };
    int before = 0;  // of all earlier iterations
    for (int first = 0; first < items; first += kMarkThreads) {
        const int token = first + static_cast<int>(threadIdx.x);
        bool taken = false;
        if (token < items) {
            const int32_t* ids = args.ids_of(source, token);
            for (int k = 0; k < args.topk; ++k) taken = taken || takes(args.rail_index_of_id(ids[k]));
        }
        int total = 0;
        const int number = before + scan_flag(taken, total, of_warp);
        before += total;
        const int64_t at = static_cast<int64_t>(list) * args.slots;
        if (kind == kLeaving) {
            if (taken) args.rail_send[at + number] = token;
        } else if (token < items) {
            (kind == kArriving ? args.arriving : args.forwarded)[at + token] = taken ? number : -1;
        }
    }
    if (threadIdx.x != 0) return;
    if (kind == kLeaving)
        args.rail_send_counts[list] = before;
    else
        (kind == kArriving ? args.arriving_counts : args.forwarded_counts)[list] = before;
}

// Where each list begins. Arriving and forwarded lists follow each other by host for each local rank,
// received rows by rail index.
struct Starts {
    int *arriving, *forwarded, *received;  // [P, N]
    int* earlier;                          // [P]: received rows of lower local ranks

    static int64_t words(int64_t ranks, int64_t ranks_per_host) { return 3 * ranks + ranks_per_host; }
    __device__ Starts(int* memory, const LevelArgs& args)
        : arriving(memory),
          forwarded(arriving + args.ranks),
          received(forwarded + args.ranks),
          earlier(received + args.ranks) {}

    // By all threads of the CTA, with barriers inside and at the end. CTA 0 publishes the offsets.
    __device__ void fill(const LevelArgs& args) const {
        const bool publishes = blockIdx.x == 0;
        for (int local_rank = static_cast<int>(threadIdx.x); local_rank < args.ranks_per_host;
             local_rank += static_cast<int>(blockDim.x)) {
            int arrived = 0, sent = 0, received_here = 0;
            for (int host = 0; host < args.hosts; ++host) {
                const int rail_index = local_rank * args.hosts + host, rank = args.rank_at[rail_index];
                arriving[rail_index] = arrived;
                forwarded[rail_index] = sent;
                received[rail_index] = received_here;
                if (publishes && local_rank == args.local_rank) args.rail_offsets[host] = arrived;
                arrived += args.arriving_counts[rail_index];
                sent += args.forwarded_counts[rail_index];
                received_here += static_cast<int>(args.recv_offsets[rank + 1] - args.recv_offsets[rank]);
            }
            earlier[local_rank] = received_here;
            if (!publishes) continue;
            args.inside_send_counts[local_rank] = sent;
            if (local_rank == args.local_rank) args.rail_offsets[args.hosts] = arrived;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int before = 0;
            for (int local_rank = 0; local_rank < args.ranks_per_host; ++local_rank) {
                const int here = earlier[local_rank];
                earlier[local_rank] = before;
                if (publishes) args.inside_offsets[local_rank] = before;
                before += here;
            }
            if (publishes) {
                args.inside_offsets[args.ranks_per_host] = before;
                args.received_count[0] = args.received_offsets[1] = before;
            }
        }
        __syncthreads();
    }
};

// For a token that arrives on this host: writes its experts on this host. If it arrives on this rank, also
// writes the entries by which the rail returns its sum.
__device__ __forceinline__ void receive_row(const LevelArgs& args, int rail_index, int64_t token,
                                            int64_t row) {
    const int local_rank = rail_index / args.hosts;
    const int32_t* ids = args.ids_of(args.rank_at[rail_index], token);
    int32_t* to = args.inside_ids + (local_rank * args.rail_capacity() + row) * args.topk;
    const bool own = local_rank == args.local_rank;
    if (own) {
        args.rail_source[row] = static_cast<int32_t>(rail_index % args.hosts * args.slots + token);
        args.rail_rows[row * args.topk] = static_cast<int32_t>(row);
    }
    for (int k = 0; k < args.topk; ++k) {
        const int32_t id = ids[k];
        const int at = args.rail_index_of_id(id);
        if (!args.is_here(at)) continue;
        to[k] = args.id_on_host(at, id);
        if (!own) continue;
        int below = 0;  // of the token's experts here
        for (int other = 0; other < args.topk; ++other)
            below += ids[other] < id && args.is_here(args.rail_index_of_id(ids[other]));
        args.rail_prob_rows[row * args.topk + below] = static_cast<int32_t>(row * args.topk + k);
    }
}

// Writes both plans. The caller fills the lists with -1. Traffic: reads the ids of all ranks once and those
// of this rail twice, reads the marks, reads and writes the lists of received rows and row_source. A CTA
// fills Starts, then each thread takes one item at a time: a token, a received row, or a row of the experts.
// Barriers: those of Starts.
__global__ __launch_bounds__(kPlaceThreads) void place_kernel(const LevelArgs args) {
    extern __shared__ int memory[];
    const Starts starts(memory, args);
    starts.fill(args);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x,
                  threads = static_cast<int64_t>(gridDim.x) * kPlaceThreads,
                  rail_capacity = args.rail_capacity(),
                  tokens = static_cast<int64_t>(args.ranks) * args.slots;
    const auto rail_row_of = [&](int rail_index, int64_t token) {
        return int64_t{starts.arriving[rail_index]} +
               args.arriving[rail_index * static_cast<int64_t>(args.slots) + token];
    };
    for (int64_t item = first; item < tokens; item += threads) {
        const int rail_index = static_cast<int>(item / args.slots), local_rank = rail_index / args.hosts,
                  host = rail_index % args.hosts;
        const int64_t token = item % args.slots;
        if (args.arriving[item] >= 0) receive_row(args, rail_index, token, rail_row_of(rail_index, token));
        if (const int32_t number = args.forwarded[item]; number >= 0)
            args.inside_send[local_rank * rail_capacity + starts.forwarded[rail_index] + number] =
                static_cast<int32_t>(rail_row_of(args.own_rail_index(host), token));
        if (local_rank != args.local_rank) continue;
        const int32_t* ids = args.ids_of(args.rank_at[rail_index], token);
        for (int k = 0; k < args.topk; ++k)
            if (const int at = args.rail_index_of_id(ids[k]); at >= 0)
                args.rail_ids[(host * static_cast<int64_t>(args.slots) + token) * args.topk + k] =
                    at % args.hosts * args.ranks_per_host * args.local_experts + args.id_on_host(at, ids[k]);
    }
    // The row of the intra-host plan for a received row of the one-level plan.
    const auto inside_row_at = [&](int64_t row, int rail_index, int rank) {
        return starts.earlier[rail_index / args.hosts] + starts.received[rail_index] + row -
               args.recv_offsets[rank];
    };
    for (int64_t i = first; i < args.recv_offsets[args.ranks]; i += threads) {
        const int rank = args.recv_source[i] / args.slots, rail_index = args.rail_index_of[rank];
        const int64_t row = inside_row_at(i, rail_index, rank);
        args.inside_row_of[i] = static_cast<int32_t>(row);
        args.inside_source[row] =
            static_cast<int32_t>(rail_index / args.hosts * rail_capacity +
                                 rail_row_of(rail_index, args.recv_source[i] % args.slots));
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
        args.inside_row_source[row] = static_cast<int32_t>(inside_row_at(i, args.rail_index_of[rank], rank));
    }
}

}  // namespace

}  // namespace fp8flow::hopper::levels

namespace fp8flow::hopper {

void derive_level_plans(const DispatchPlan& plan, const LevelMap& map, const LevelPlans& levels,
                        Arena& scratch, const Launch& launch) {
    using namespace hopper::levels;
    const int64_t ranks = map.hosts * map.ranks_per_host, slots = plan.all_ids.dim(1);
    const TensorView arriving = scratch.tensor(DType::i32, {ranks, slots}, "exchange"),
                     forwarded = scratch.tensor(DType::i32, {ranks, slots}, "exchange"),
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
                         .rail_index_of = map.rail_index.as<int32_t>(),
                         .hosts = static_cast<int>(map.hosts),
                         .ranks_per_host = static_cast<int>(map.ranks_per_host),
                         .rank = static_cast<int>(map.rank),
                         .host = static_cast<int>(map.host),
                         .local_rank = static_cast<int>(map.local_rank),
                         .arriving = arriving.as<int32_t>(),
                         .forwarded = forwarded.as<int32_t>(),
                         .arriving_counts = counts.as<int32_t>(),
                         .forwarded_counts = counts.as<int32_t>() + ranks,
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
                         .inside_row_of = levels.inside_row_of.as<int32_t>(),
                         .inside_offsets = inside.recv_offsets.as<int64_t>(),
                         .inside_send_counts = inside.send_counts.as<int64_t>(),
                         .received_count = levels.received.counts.as<int64_t>(),
                         .received_offsets = levels.received.offsets.as<int64_t>()};
    const std::size_t shared =
        static_cast<std::size_t>(Starts::words(ranks, map.ranks_per_host)) * sizeof(int);
    FP8FLOW_CHECK(static_cast<int64_t>(shared) <= kSharedBytes,
                  "{} ranks need {} bytes of shared memory for their lists, a CTA has {}", ranks, shared,
                  kSharedBytes);
    const cudaStream_t stream = stream_of(launch);
    check_cuda(
        cudaMemsetAsync(levels.lists.data, 0xFF, static_cast<std::size_t>(levels.lists.bytes()), stream),
        "clearing the lists of the hierarchical exchange");
    check_cuda(cudaMemsetAsync(levels.sizes.data, 0, static_cast<std::size_t>(levels.sizes.bytes()), stream),
               "clearing the sizes of the hierarchical exchange");
    launch_kernel(mark_kernel, static_cast<unsigned>(2 * ranks + map.hosts), kMarkThreads, launch,
                  "marking the tokens of the hierarchical exchange", args);
    const int64_t items = std::max(ranks * slots, plan.groups.row_capacity);
    launch_kernel(place_kernel, grid_for(ceil_div(items, kPlaceThreads), launch), kPlaceThreads, shared,
                  launch, "placing the rows of the hierarchical exchange", args);
}

}  // namespace fp8flow::hopper
