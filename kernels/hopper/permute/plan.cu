// SPDX-License-Identifier: MIT
// plan_dispatch on the GPU without host synchronisation: from all ranks' routing to the expert-sorted, padded
// row order of this rank and the send and receive lists, in two launches. count_kernel makes histograms per
// block of tokens; in place_kernel every block adds up the histograms before its own, and all of them, and
// places its rows. Slots are stable and integers exact, so the plan has the reference's bytes on every rank.
#include "kernels/core/error.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::permute {

namespace {

constexpr int kBlockTokens = 128;  // tokens of one block; a block lies within one rank
constexpr int kMaskWords = kBlockTokens / 32;
constexpr int kThreads = 512;
static_assert(kThreads >= kBlockTokens);
constexpr int64_t kSharedBytes = 48 << 10;  // the default limit of a CTA

struct PlanArgs {
    const int32_t* ids;
    const float* probs;
    int ranks, slots, topk, rank, local_experts, sources, groups;
    int64_t first_expert;
    int blocks_per_rank, blocks;
    int* block_counts;  // [blocks, columns]
    int64_t alignment, row_capacity;
    const int64_t* row_base;
    DeviceView row_source, row_prob;
    int64_t *counts, *offsets, *recv_offsets, *send_counts, *next_row_base, *rows_wanted;
    int32_t *recv_rows, *recv_source, *send_tokens, *overflow;

    // Columns of block_counts: rows of each group, received rows, rows sent to each rank (of this rank's own
    // tokens).
    __host__ __device__ int received_column() const { return groups; }
    __host__ __device__ int send_column(int rank_to) const { return groups + 1 + rank_to; }
    __host__ __device__ int columns() const { return groups + 1 + ranks; }

    // -1: absent or on another rank
    __device__ int group_of(int32_t id, int source_rank) const {
        const int64_t expert = id - first_expert;
        if (expert < 0 || expert >= local_experts) return -1;
        return static_cast<int>(expert) + (sources > 1 ? source_rank * local_experts : 0);
    }
};

// Sets one bit for a token of the block in every column that it counts for: masks[column][word]. Consecutive
// threads take consecutive ids. Bits are set by atomic or, which commutes. Ends with a barrier; all threads
// of the CTA call it.
__device__ __forceinline__ void mark_tokens(const PlanArgs& args, int source_rank, int first_token,
                                            uint32_t* masks) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < args.columns() * kMaskWords; i += kThreads) masks[i] = 0;
    __syncthreads();
    const int32_t* ids =
        args.ids + (static_cast<int64_t>(source_rank) * args.slots + first_token) * args.topk;
    const int count = min(kBlockTokens, args.slots - first_token) * args.topk;
    for (int i = thread; i < count; i += kThreads) {
        const int32_t id = ids[i];
        if (id < 0) continue;
        const int token = i / args.topk, word = token / 32;
        const uint32_t bit = 1u << token % 32;
        if (const int group = args.group_of(id, source_rank); group >= 0) {
            atomicOr(&masks[group * kMaskWords + word], bit);
            atomicOr(&masks[args.received_column() * kMaskWords + word], bit);
        }
        const int to = id / args.local_experts;
        if (source_rank == args.rank && to < args.ranks)
            atomicOr(&masks[args.send_column(to) * kMaskWords + word], bit);
    }
    __syncthreads();
}

// Bits of a column before this thread's token (threads below kBlockTokens), or of all tokens of the block.
__device__ __forceinline__ int marked_before(const uint32_t* masks, int column) {
    const int word = static_cast<int>(threadIdx.x) / 32;
    int count = __popc(masks[column * kMaskWords + word] & ((1u << threadIdx.x % 32) - 1u));
    for (int w = 0; w < word; ++w) count += __popc(masks[column * kMaskWords + w]);
    return count;
}
__device__ __forceinline__ int marked(const uint32_t* masks, int column) {
    int count = 0;
    for (int w = 0; w < kMaskWords; ++w) count += __popc(masks[column * kMaskWords + w]);
    return count;
}

// Histograms of the blocks. Bytes: the ids read once, one count per block and column written. CTA: a block of
// 128 tokens. PDL: waits for the kernel before it, then lets place_kernel start.
__global__ __launch_bounds__(kThreads) void count_kernel(const PlanArgs args) {
    extern __shared__ uint32_t masks[];
    pdl_wait();
    pdl_launch_dependents();
    for (int block = static_cast<int>(blockIdx.x); block < args.blocks;
         block += static_cast<int>(gridDim.x)) {
        mark_tokens(args, block / args.blocks_per_rank, block % args.blocks_per_rank * kBlockTokens, masks);
        for (int column = static_cast<int>(threadIdx.x); column < args.columns(); column += kThreads)
            args.block_counts[static_cast<int64_t>(block) * args.columns() + column] = marked(masks, column);
        __syncthreads();  // the next block overwrites the masks
    }
}

// Shared memory of place_kernel.
struct PlaceShared {
    int64_t *counts, *offsets;  // [groups], [groups + 1]
    int *starts, *totals;       // [columns]: counts of the blocks before this one, of all blocks
    int *before, *all;          // one word per thread or per column, whichever are more
    uint32_t* masks;

    static int64_t words(int64_t groups, int64_t columns) {
        return 2 * (2 * groups + 1) + 2 * columns + 2 * std::max<int64_t>(kThreads, columns) +
               columns * kMaskWords;
    }
    __device__ PlaceShared(int64_t* memory, int groups, int columns)
        : counts(memory),
          offsets(counts + groups),
          starts(reinterpret_cast<int*>(offsets + groups + 1)),
          totals(starts + columns),
          before(totals + columns),
          all(before + max(kThreads, columns)),
          masks(reinterpret_cast<uint32_t*>(all + max(kThreads, columns))) {}
};

// starts and totals of `block`. Consecutive threads take consecutive columns; where there are more threads
// than columns, each takes a segment of the blocks. 16 loads in flight. Barriers after the segments and at
// the end; all threads of the CTA call it.
__device__ __forceinline__ void add_blocks(const PlanArgs& args, int block, const PlaceShared& shared) {
    constexpr int kInFlight = 16;
    const int columns = args.columns(), segments = max(1, kThreads / columns);
    const int length = (args.blocks + segments - 1) / segments;
    for (int i = static_cast<int>(threadIdx.x); i < segments * columns; i += kThreads) {
        const int begin = i / columns * length, end = min(args.blocks, begin + length);
        const int* const counts = args.block_counts + i % columns;
        int before = 0, all = 0;
        for (int first = begin; first < end; first += kInFlight) {
            int values[kInFlight];
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
                values[j] = first + j < end ? counts[static_cast<int64_t>(first + j) * columns] : 0;
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                all += values[j];
                if (first + j < block) before += values[j];
            }
        }
        shared.before[i] = before;
        shared.all[i] = all;
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < columns; column += kThreads) {
        int before = 0, all = 0;
        for (int i = column; i < segments * columns; i += columns) {
            before += shared.before[i];
            all += shared.all[i];
        }
        shared.starts[column] = before;
        shared.totals[column] = all;
    }
    __syncthreads();
}

// By one warp: the offsets of the groups, clamped to the rows available, by warp scans over 32 groups.
// `publishes`: also writes them to the plan.
__device__ __forceinline__ void place_groups(const PlanArgs& args, const PlaceShared& shared,
                                             bool publishes) {
    // Rows that this layer's M-tensors can hold, in whole alignment units: row_capacity, and what the buffers
    // hold past their base.
    int64_t available = args.row_capacity;
    available = min(available, args.row_source.dims[0] - args.row_source.base());
    available = min(available, args.row_prob.dims[0] - args.row_prob.base());
    const int64_t units = (available > 0 ? available : 0) / args.alignment;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int64_t before = 0;  // units that all earlier groups need
    bool cut = false;
    for (int first = 0; first < args.groups; first += 32) {
        const int group = first + lane;
        const int64_t wanted = group < args.groups ? shared.totals[group] : 0;
        int64_t sum = (wanted + args.alignment - 1) / args.alignment;
        const int64_t own = sum;
        for (int step = 1; step < 32; step *= 2) {
            const int64_t other = __shfl_up_sync(kFullMask, sum, step);
            if (lane >= step) sum += other;
        }
        const int64_t start = min(before + sum - own, units);
        const int64_t fitting = min(wanted, (units - start) * args.alignment);
        if (group < args.groups) {
            shared.counts[group] = fitting;
            shared.offsets[group] = start * args.alignment;
            if (publishes) {
                args.counts[group] = fitting;
                args.offsets[group] = start * args.alignment;
            }
            cut = cut || fitting < wanted;
        }
        before += __shfl_sync(kFullMask, sum, 31);
    }
    const int64_t total_rows = min(before, units) * args.alignment;
    const bool overflow = __any_sync(kFullMask, cut);
    if (lane != 0) return;
    shared.offsets[args.groups] = total_rows;
    if (!publishes) return;
    if (overflow) *args.overflow = 1;
    if (args.rows_wanted != nullptr) *args.rows_wanted = max(*args.rows_wanted, before * args.alignment);
    args.offsets[args.groups] = total_rows;
    if (args.next_row_base != nullptr) {
        const int64_t base = args.row_base != nullptr ? *args.row_base : 0;
        *args.next_row_base = (base + total_rows + kBlock - 1) / kBlock * kBlock;
    }
}

// By one CTA: where the received rows of each rank begin, and how many rows go to each.
__device__ __forceinline__ void count_ranks(const PlanArgs& args, const PlaceShared& shared) {
    const int thread = static_cast<int>(threadIdx.x), columns = args.columns();
    for (int r = thread / 32; r <= args.ranks; r += kThreads / 32) {  // one warp per rank
        int received = 0;
        for (int block = thread % 32; block < r * args.blocks_per_rank; block += 32)
            received += args.block_counts[static_cast<int64_t>(block) * columns + args.received_column()];
        received = __reduce_add_sync(kFullMask, received);
        if (thread % 32 != 0) continue;
        args.recv_offsets[r] = received;
        if (r < args.ranks) args.send_counts[r] = shared.totals[args.send_column(r)];
    }
}

// The lists of rows, as a thread writes them.
struct RowLists {
    int32_t* row_source;
    float* row_prob;
};

// The rows of a received token, in ascending order of groups; `source`: its number among all tokens.
__device__ __forceinline__ void place_token(const PlanArgs& args, const PlaceShared& shared,
                                            const RowLists& lists, int64_t source, int source_rank) {
    const uint32_t* const masks = shared.masks;
    const int* const starts = shared.starts;
    const int32_t* ids = args.ids + source * args.topk;
    const int64_t received = starts[args.received_column()] + marked_before(masks, args.received_column());
    args.recv_source[received] = static_cast<int32_t>(source);
    int32_t* rows = args.recv_rows + received * args.topk;
    int listed = 0;
    for (int last = -1;;) {  // the token's next group above the last
        int group = args.groups, chosen = 0;
#pragma unroll 8
        for (int k = 0; k < args.topk; ++k) {
            const int candidate = args.group_of(ids[k], source_rank);
            if (candidate > last && candidate < group) group = candidate, chosen = k;
        }
        if (group == args.groups) break;
        last = group;
        const int64_t place = starts[group] + marked_before(masks, group);
        if (place >= shared.counts[group]) continue;  // cut by overflow
        const int64_t row = shared.offsets[group] + place;
        lists.row_source[row] = static_cast<int32_t>(received);
        lists.row_prob[row] = args.probs[source * args.topk + chosen];
        rows[listed++] = static_cast<int32_t>(row);
    }
    for (; listed < args.topk; ++listed) rows[listed] = -1;
}

// The tokens of a block, a thread each.
__device__ __forceinline__ void place_block(const PlanArgs& args, const PlaceShared& shared,
                                            const RowLists& lists, int block) {
    const int thread = static_cast<int>(threadIdx.x), word = thread / 32;
    const int source_rank = block / args.blocks_per_rank,
              token = block % args.blocks_per_rank * kBlockTokens + thread;
    const uint32_t bit = 1u << thread % 32;
    if (thread >= kBlockTokens || token >= args.slots) return;
    const auto is_marked = [&](int column) { return (shared.masks[column * kMaskWords + word] & bit) != 0; };
    if (is_marked(args.received_column()))
        place_token(args, shared, lists, static_cast<int64_t>(source_rank) * args.slots + token, source_rank);
    if (source_rank != args.rank) return;
    for (int to = 0; to < args.ranks; ++to) {
        const int column = args.send_column(to);
        if (!is_marked(column)) continue;
        args.send_tokens[static_cast<int64_t>(to) * args.slots + shared.starts[column] +
                         marked_before(shared.masks, column)] = token;
    }
}

// By all CTAs together: what no token fills, pads and the ends of the lists.
__device__ __forceinline__ void fill_rest(const PlanArgs& args, const PlaceShared& shared,
                                          const RowLists& lists) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int group = static_cast<int>(blockIdx.x); group < args.groups;
         group += static_cast<int>(gridDim.x)) {
        for (int64_t row = shared.offsets[group] + shared.counts[group] + thread;
             row < shared.offsets[group + 1]; row += kThreads) {
            lists.row_source[row] = -1;
            lists.row_prob[row] = 0.0f;
        }
    }
    const int64_t sources = static_cast<int64_t>(args.ranks) * args.slots;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + thread;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    const int64_t received = shared.totals[args.received_column()];
    for (int64_t i = received + first; i < sources; i += threads) args.recv_source[i] = -1;
    for (int64_t i = received * args.topk + first; i < sources * args.topk; i += threads)
        args.recv_rows[i] = -1;
    for (int64_t i = first; i < sources; i += threads)
        if (i % args.slots >= shared.totals[args.send_column(static_cast<int>(i / args.slots))])
            args.send_tokens[i] = -1;
}

// Places the rows of all groups and writes every list of the plan.
//
// Bytes: ids and probs read once, every list written once, and the block counts (4.2 KB at T=4096, 32 experts
// on one rank) read by every CTA in two rounds of loads; a launch of its own for their sums took longer.
//
// CTA: a block of 128 tokens. It adds up the blocks before it; its first warp places the groups (that of CTA
// 0 publishes them); one thread per token places rows: a token's slot in a group is the block's start plus
// the earlier tokens of the block with that expert, counted from bit masks, experts in ascending order. Then
// all CTAs fill what no token fills: pads, and the ends of the lists.
//
// Barriers: __syncthreads between these steps, outside of any branch. The masks of the CTA's first block are
// made before pdl_wait: count_kernel does not write the ids, and starts this kernel only after all kernels
// before it have ended.
//
// Deterministic: integers, one writer per word.
__global__ __launch_bounds__(kThreads) void place_kernel(const PlanArgs args) {
    extern __shared__ int64_t memory[];
    const PlaceShared shared(memory, args.groups, args.columns());
    const auto mark = [&](int block) {
        mark_tokens(args, block / args.blocks_per_rank, block % args.blocks_per_rank * kBlockTokens,
                    shared.masks);
    };
    if (static_cast<int>(blockIdx.x) < args.blocks) mark(static_cast<int>(blockIdx.x));
    pdl_wait();
    const RowLists lists = {static_cast<int32_t*>(args.row_source.data) + args.row_source.base(),
                            static_cast<float*>(args.row_prob.data) + args.row_prob.base()};
    add_blocks(args, static_cast<int>(blockIdx.x), shared);
    if (threadIdx.x < 32) place_groups(args, shared, blockIdx.x == 0);
    if (blockIdx.x == 0) count_ranks(args, shared);
    __syncthreads();  // offsets and counts of the groups are written
    for (int block = static_cast<int>(blockIdx.x); block < args.blocks;
         block += static_cast<int>(gridDim.x)) {
        if (block >= static_cast<int>(gridDim.x)) {  // not the first
            mark(block);
            add_blocks(args, block, shared);
        }
        place_block(args, shared, lists, block);
        __syncthreads();  // the next block overwrites masks and starts
    }
    fill_rest(args, shared, lists);
}

}  // namespace

}  // namespace fp8flow::hopper::permute

namespace fp8flow {

using namespace hopper;
using namespace hopper::permute;

void HopperOps::do_plan_dispatch(const op::PlanDispatch& args, const Launch& launch) {
    const int64_t ranks = args.all_ids.dim(0), slots = args.all_ids.dim(1), topk = args.all_ids.dim(2);
    const int64_t blocks_per_rank = ceil_div(slots, kBlockTokens), blocks = ranks * blocks_per_rank;
    PlanArgs plan{.ids = args.all_ids.as<int32_t>(),
                  .probs = args.all_probs.as<float>(),
                  .ranks = static_cast<int>(ranks),
                  .slots = static_cast<int>(slots),
                  .topk = static_cast<int>(topk),
                  .rank = static_cast<int>(args.rank),
                  .local_experts = static_cast<int>(args.num_local_experts),
                  .sources = static_cast<int>(args.num_sources),
                  .groups = static_cast<int>(args.groups.num_groups),
                  .first_expert = args.first_expert,
                  .blocks_per_rank = static_cast<int>(blocks_per_rank),
                  .blocks = static_cast<int>(blocks),
                  .block_counts = nullptr,
                  .alignment = args.groups.alignment,
                  .row_capacity = args.groups.row_capacity,
                  .row_base = args.row_base,
                  .row_source = device_view(args.row_source),
                  .row_prob = device_view(args.row_prob),
                  .counts = args.groups.counts.as<int64_t>(),
                  .offsets = args.groups.offsets.as<int64_t>(),
                  .recv_offsets = args.recv_offsets.as<int64_t>(),
                  .send_counts = args.send_counts.as<int64_t>(),
                  .next_row_base = args.next_row_base ? args.next_row_base.as<int64_t>() : nullptr,
                  .rows_wanted = args.rows_wanted ? args.rows_wanted.as<int64_t>() : nullptr,
                  .recv_rows = args.recv_rows.as<int32_t>(),
                  .recv_source = args.recv_source.as<int32_t>(),
                  .send_tokens = args.send_tokens.as<int32_t>(),
                  .overflow = args.overflow.as<int32_t>()};
    const int64_t columns = plan.columns();
    const std::size_t mask_bytes = static_cast<std::size_t>(columns) * kMaskWords * sizeof(uint32_t),
                      place_bytes =
                          static_cast<std::size_t>(PlaceShared::words(plan.groups, columns)) * sizeof(int);
    FP8FLOW_CHECK(place_bytes <= kSharedBytes,
                  "{} groups and {} ranks: plan_dispatch needs {} bytes of shared memory, has {}",
                  plan.groups, ranks, place_bytes, kSharedBytes);
    plan.block_counts = workspace(launch).partials_for<int>(blocks * columns);
    constexpr int kPerSm = 2;
    const unsigned grid = grid_for(blocks, launch, kPerSm);
    if (blocks > 0) launch_pdl(count_kernel, grid, kThreads, mask_bytes, launch, "plan_dispatch", plan);
    launch_pdl(place_kernel, grid, kThreads, place_bytes, launch, "plan_dispatch", plan);
}

}  // namespace fp8flow
