// plan_dispatch on the GPU, without the host: from all ranks' routing to the expert-sorted, padded row order of this rank and the lists of
// what travels. Histograms per block of tokens, a scan over the blocks, then every block places its rows: slots are stable, integers are
// exact, so the plan has the bytes of the reference's on every rank.
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kBlockTokens =
    128;  // tokens of one block, one thread each; a block lies within one rank's tokens
constexpr int kMaskWords = kBlockTokens / 32;
constexpr int64_t kSharedBytes = 48 << 10;  // what a CTA gets without asking

struct PlanArgs {
    const int32_t* ids;
    const float* probs;
    int ranks, slots, topk, rank, groups;
    int64_t first_expert;
    int blocks_per_rank, blocks;
    int* starts;  // [blocks, columns]: counts of each block, then the counts of all earlier blocks
    int64_t alignment, row_capacity;
    const int64_t* row_base;
    DeviceView row_source, row_prob;
    int64_t *counts, *offsets, *recv_offsets, *send_counts, *next_row_base;
    int32_t *recv_rows, *recv_source, *send_tokens, *overflow;

    // Columns of starts: rows of each local expert, received rows, rows sent to each rank (of this rank's own tokens).
    __host__ __device__ int received_column() const { return groups; }
    __host__ __device__ int send_column(int rank_to) const { return groups + 1 + rank_to; }
    __host__ __device__ int columns() const { return groups + 1 + ranks; }

    // -1: absent or on another rank
    __device__ int local_expert(int32_t id) const {
        const int64_t expert = id - first_expert;
        return expert >= 0 && expert < groups ? static_cast<int>(expert) : -1;
    }
};

// One bit a token of the block in every column that it counts for: masks[column][word]. Bits are set by atomic or, whose order does not
// matter. Ends with a barrier; all threads of the CTA call it.
__device__ __forceinline__ void mark_tokens(const PlanArgs& args, int source_rank, int token,
                                            uint32_t* masks) {
    for (int i = static_cast<int>(threadIdx.x); i < args.columns() * kMaskWords; i += kBlockTokens)
        masks[i] = 0;
    __syncthreads();
    if (token < args.slots) {
        const int32_t* ids = args.ids + (static_cast<int64_t>(source_rank) * args.slots + token) * args.topk;
        const int word = static_cast<int>(threadIdx.x) / 32;
        const uint32_t bit = 1u << threadIdx.x % 32;
        for (int k = 0; k < args.topk; ++k) {
            const int32_t id = ids[k];
            if (id < 0) continue;
            if (const int group = args.local_expert(id); group >= 0) {
                atomicOr(&masks[group * kMaskWords + word], bit);
                atomicOr(&masks[args.received_column() * kMaskWords + word], bit);
            }
            const int to = id / args.groups;
            if (source_rank == args.rank && to < args.ranks)
                atomicOr(&masks[args.send_column(to) * kMaskWords + word], bit);
        }
    }
    __syncthreads();
}

// Bits of a column before this thread's token, or of all tokens.
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

// Moves: the ids once; one count a block and column out. A CTA takes a block of 128 tokens, one a thread.
__global__ __launch_bounds__(kBlockTokens) void count_kernel(const PlanArgs args) {
    extern __shared__ uint32_t masks[];
    for (int block = static_cast<int>(blockIdx.x); block < args.blocks;
         block += static_cast<int>(gridDim.x)) {
        const int token = block % args.blocks_per_rank * kBlockTokens + static_cast<int>(threadIdx.x);
        mark_tokens(args, block / args.blocks_per_rank, token, masks);
        for (int column = static_cast<int>(threadIdx.x); column < args.columns(); column += kBlockTokens)
            args.starts[static_cast<int64_t>(block) * args.columns() + column] = marked(masks, column);
        __syncthreads();  // the masks belong to the next block now
    }
}

// Moves: the block counts in and out. One CTA: a thread scans a column (16 loads in flight) and leaves its totals in shared memory; then one
// warp places the groups, saturating at the rows that there are, by warp scans over 32 groups. Barriers between the two halves only.
constexpr int kScanThreads = 1024;
__global__ __launch_bounds__(kScanThreads) void scan_kernel(const PlanArgs args) {
    extern __shared__ int totals[];  // [columns]
    const int columns = args.columns();
    for (int column = static_cast<int>(threadIdx.x); column < columns; column += kScanThreads) {
        constexpr int kInFlight = 16;
        int total = 0;
        for (int first = 0; first < args.blocks; first += kInFlight) {
            int values[kInFlight];
#pragma unroll
            for (int j = 0; j < kInFlight; ++j)
                values[j] = first + j < args.blocks
                                ? args.starts[static_cast<int64_t>(first + j) * columns + column]
                                : 0;
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                if (first + j < args.blocks)
                    args.starts[static_cast<int64_t>(first + j) * columns + column] = total;
                total += values[j];
            }
        }
        totals[column] = total;
    }
    __syncthreads();
    for (int r = static_cast<int>(threadIdx.x); r <= args.ranks; r += kScanThreads) {
        const int64_t block = static_cast<int64_t>(r) * args.blocks_per_rank;
        args.recv_offsets[r] = r < args.ranks && args.blocks > 0
                                   ? args.starts[block * columns + args.received_column()]
                                   : totals[args.received_column()];
        if (r < args.ranks) args.send_counts[r] = totals[args.send_column(r)];
    }
    if (threadIdx.x >= 32) return;

    // Rows of this layer that M-tensors can hold, in whole alignment units: row_capacity, and what the buffers hold past their base.
    int64_t available = args.row_capacity;
    available = min(available, args.row_source.dims[0] - args.row_source.base());
    available = min(available, args.row_prob.dims[0] - args.row_prob.base());
    const int64_t units = (available > 0 ? available : 0) / args.alignment;
    const int lane = static_cast<int>(threadIdx.x);
    int64_t before = 0;  // units that all earlier groups want
    bool cut = false;
    for (int first = 0; first < args.groups; first += 32) {
        const int group = first + lane;
        const int64_t wanted = group < args.groups ? totals[group] : 0;
        int64_t sum = (wanted + args.alignment - 1) / args.alignment;
        const int64_t own = sum;
        for (int step = 1; step < 32; step *= 2) {
            const int64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
            if (lane >= step) sum += other;
        }
        const int64_t start = min(before + sum - own, units);
        const int64_t fitting = min(wanted, (units - start) * args.alignment);
        if (group < args.groups) {
            args.counts[group] = fitting;
            args.offsets[group] = start * args.alignment;
            cut = cut || fitting < wanted;
        }
        before += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    const int64_t total_rows = min(before, units) * args.alignment;
    if (__any_sync(0xFFFFFFFFu, cut) && lane == 0) *args.overflow = 1;
    if (lane != 0) return;
    args.offsets[args.groups] = total_rows;
    if (args.next_row_base != nullptr) {
        const int64_t base = args.row_base != nullptr ? *args.row_base : 0;
        *args.next_row_base = (base + total_rows + kBlock - 1) / kBlock * kBlock;
    }
}

// Moves: ids and probs once, every list once. A CTA takes a block of 128 tokens, one a thread: a token's slot in a group is the block's start
// plus the earlier tokens of the block with that expert, counted from bit masks; its experts are visited in ascending order. Then all CTAs
// fill what no token fills: pads, and the ends of the lists. One writer a word; barriers around the masks, outside of any branch.
__global__ __launch_bounds__(kBlockTokens) void place_kernel(const PlanArgs args) {
    extern __shared__ uint32_t masks[];
    const int columns = args.columns(), thread = static_cast<int>(threadIdx.x);
    int32_t* row_source = static_cast<int32_t*>(args.row_source.data) + args.row_source.base();
    float* row_prob = static_cast<float*>(args.row_prob.data) + args.row_prob.base();
    for (int block = static_cast<int>(blockIdx.x); block < args.blocks;
         block += static_cast<int>(gridDim.x)) {
        const int source_rank = block / args.blocks_per_rank;
        const int token = block % args.blocks_per_rank * kBlockTokens + thread;
        mark_tokens(args, source_rank, token, masks);
        const int* starts = args.starts + static_cast<int64_t>(block) * columns;
        const int word = thread / 32;
        const uint32_t bit = 1u << thread % 32;
        if (token < args.slots) {
            const int64_t source = static_cast<int64_t>(source_rank) * args.slots + token;
            const int32_t* ids = args.ids + source * args.topk;
            if ((masks[args.received_column() * kMaskWords + word] & bit) != 0) {
                const int64_t received =
                    starts[args.received_column()] + marked_before(masks, args.received_column());
                args.recv_source[received] = static_cast<int32_t>(source);
                int32_t* rows = args.recv_rows + received * args.topk;
                int listed = 0;
                for (int last = -1;;) {  // the token's next local expert above the last
                    int group = args.groups, chosen = 0;
                    for (int k = 0; k < args.topk; ++k) {
                        const int candidate = args.local_expert(ids[k]);
                        if (candidate > last && candidate < group) group = candidate, chosen = k;
                    }
                    if (group == args.groups) break;
                    last = group;
                    const int64_t place = starts[group] + marked_before(masks, group);
                    if (place >= args.counts[group]) continue;  // cut by overflow
                    const int64_t row = args.offsets[group] + place;
                    row_source[row] = static_cast<int32_t>(received);
                    row_prob[row] = args.probs[source * args.topk + chosen];
                    rows[listed++] = static_cast<int32_t>(row);
                }
                for (; listed < args.topk; ++listed) rows[listed] = -1;
            }
            if (source_rank == args.rank) {
                for (int to = 0; to < args.ranks; ++to) {
                    const int column = args.send_column(to);
                    if ((masks[column * kMaskWords + word] & bit) == 0) continue;
                    args.send_tokens[static_cast<int64_t>(to) * args.slots + starts[column] +
                                     marked_before(masks, column)] = token;
                }
            }
        }
        __syncthreads();  // the masks belong to the next block now
    }
    for (int group = static_cast<int>(blockIdx.x); group < args.groups;
         group += static_cast<int>(gridDim.x)) {
        for (int64_t row = args.offsets[group] + args.counts[group] + thread; row < args.offsets[group + 1];
             row += kBlockTokens) {
            row_source[row] = -1;
            row_prob[row] = 0.0f;
        }
    }
    const int64_t sources = static_cast<int64_t>(args.ranks) * args.slots;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockTokens + thread;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kBlockTokens;
    const int64_t received = args.recv_offsets[args.ranks];
    for (int64_t i = received + first; i < sources; i += threads) args.recv_source[i] = -1;
    for (int64_t i = received * args.topk + first; i < sources * args.topk; i += threads)
        args.recv_rows[i] = -1;
    for (int64_t i = first; i < sources; i += threads)
        if (i % args.slots >= args.send_counts[i / args.slots]) args.send_tokens[i] = -1;
}

}  // namespace

void HopperOps::do_plan_dispatch(const op::PlanDispatch& args, const Launch& launch) {
    const int64_t ranks = args.all_ids.dim(0), slots = args.all_ids.dim(1), topk = args.all_ids.dim(2);
    const int64_t blocks_per_rank = ceil_div(slots, kBlockTokens), blocks = ranks * blocks_per_rank;
    PlanArgs plan{.ids = args.all_ids.as<int32_t>(),
                  .probs = args.all_probs.as<float>(),
                  .ranks = static_cast<int>(ranks),
                  .slots = static_cast<int>(slots),
                  .topk = static_cast<int>(topk),
                  .rank = static_cast<int>(args.rank),
                  .groups = static_cast<int>(args.num_local_experts),
                  .first_expert = args.first_expert,
                  .blocks_per_rank = static_cast<int>(blocks_per_rank),
                  .blocks = static_cast<int>(blocks),
                  .starts = nullptr,
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
                  .recv_rows = args.recv_rows.as<int32_t>(),
                  .recv_source = args.recv_source.as<int32_t>(),
                  .send_tokens = args.send_tokens.as<int32_t>(),
                  .overflow = args.overflow.as<int32_t>()};
    const int64_t columns = plan.columns();
    const std::size_t mask_bytes = static_cast<std::size_t>(columns) * kMaskWords * sizeof(uint32_t);
    FP8FLOW_CHECK(mask_bytes <= kSharedBytes,
                  "{} local experts and {} ranks: plan_dispatch holds {} of both in shared memory",
                  args.num_local_experts, ranks, kSharedBytes / (kMaskWords * sizeof(uint32_t)));
    plan.starts = workspace_->partials_for<int>(blocks * columns);
    const cudaStream_t stream = stream_of(launch);
    if (blocks > 0) count_kernel<<<grid_for(blocks, launch, 4), kBlockTokens, mask_bytes, stream>>>(plan);
    scan_kernel<<<1, kScanThreads, static_cast<std::size_t>(columns) * sizeof(int), stream>>>(plan);
    if (blocks > 0) place_kernel<<<grid_for(blocks, launch, 4), kBlockTokens, mask_bytes, stream>>>(plan);
    check_launch("plan_dispatch");
}

}  // namespace fp8flow
