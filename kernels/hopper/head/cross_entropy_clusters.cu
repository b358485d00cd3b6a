// SPDX-License-Identifier: MIT
// Cross-entropy of rows that a cluster of CTAs holds in shared memory, bit-equal to the reference. Read
// first: cross_entropy.h.
#include "kernels/hopper/head/cross_entropy.h"

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::head {

namespace {

constexpr int kWorkers = 16;  // warps that process blocks; one more, the row warp, gathers rows
constexpr int kClusterThreads = (kWorkers + 1) * kWarpSize;
constexpr int kStages = 3;             // blocks in shared memory per warp: loading, or waiting for their row
constexpr int kMostLag = kStages - 1;  // steps from a block's exponentials to its gradient, at most
constexpr int kMostCtas = 8;           // of a cluster
constexpr int kOwnBlocks = kMostLag * kWorkers;      // of a row in a CTA, at most
constexpr int kMostBlocks = kMostCtas * kOwnBlocks;  // of a row
constexpr int kMostSlots = 64;            // rows in progress: from the first block's sum to the last gradient
constexpr int kPlaces = 8 * kMostBlocks;  // for blocks of rows in progress

struct alignas(128) Shared {
    float stages[kWorkers][kStages][kBlockColumns];
    float2 blocks[kPlaces];  // [slot][block of the row]: its largest and sum, sent by the whole cluster
    float factors[8 * kOwnBlocks];  // [slot][block of this CTA]: gradient = exponential * factor
    int labels[kMostSlots];
    Mbarrier loaded[kWorkers][kStages], complete[kMostSlots], ready[kMostSlots];
};
static_assert(sizeof(Shared) <= 227 << 10);

struct Split {
    int ctas;    // of a cluster
    int blocks;  // of a row
    int slots;   // a power of two
    // The first blocks % ctas CTAs have one more.
    __host__ __device__ int own(int rank) const { return blocks / ctas + (rank < blocks % ctas ? 1 : 0); }
    __device__ uint32_t row_bytes() const {  // received for a row
        return static_cast<uint32_t>(blocks) * static_cast<uint32_t>(sizeof(float2));
    }
    __device__ int first(int rank) const { return rank * (blocks / ctas) + min(rank, blocks % ctas); }
};
// The number of steps from a block's exponentials to its gradient: in that step, at the latest, all blocks of
// the row have been processed.
__host__ __device__ inline int lag_of(int own) { return own <= kWorkers + 1 ? 1 : kMostLag; }

// The work of a CTA: its blocks of all rows of its cluster as one sequence, row by row.
struct Part {
    int rank, lane, warp;
    int first_block, own;        // of each row
    int step_rows, step_blocks;  // the advance of a worker: kWorkers blocks
    int64_t first_token, clusters;
    int rows;
};

// A worker's position in that sequence; it takes every kWorkers-th block.
struct Place {
    int row, block;
    __device__ explicit Place(const Part& part) : row(part.warp / part.own), block(part.warp % part.own) {}
    __device__ void advance(const Part& part) {
        row += part.step_rows;
        block += part.step_blocks;
        if (block >= part.own) block -= part.own, ++row;
    }
};
// A row's slot, and the parity of the slot's phase for that row.
struct Slot {
    int at;
    uint32_t parity;
    __device__ Slot(int row, int slots) : at(row & (slots - 1)), parity((row & slots) != 0 ? 1u : 0u) {}
};
__device__ __forceinline__ void read_stage(const float* stage, Columns& x) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
        const float4 word = *reinterpret_cast<const float4*>(stage + j * 4 * kWarpSize);
        x[j][0] = word.x, x[j][1] = word.y, x[j][2] = word.z, x[j][3] = word.w;
    }
}
__device__ __forceinline__ void write_stage(float* stage, const Columns& x) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
        *reinterpret_cast<float4*>(stage + j * 4 * kWarpSize) = float4{x[j][0], x[j][1], x[j][2], x[j][3]};
}
__device__ __forceinline__ void store4(uint16_t* to, const float (&p)[4]) {
    *reinterpret_cast<uint2*>(to) = uint2{pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3])};
}
__device__ __forceinline__ void store4(float* to, const float (&p)[4]) {
    *reinterpret_cast<float4*>(to) = float4{p[0], p[1], p[2], p[3]};
}
// Stores columns [0, columns) of a block, those from `known` on as 0. `to` is this lane's address.
template <class Out>
__device__ __forceinline__ void store_block(Out* to, Columns& p, int columns, int known, int lane) {
    if (known >= kBlockColumns) {
#pragma unroll
        for (int j = 0; j < kQuads; ++j) store4(to + j * 4 * kWarpSize, p[j]);
        return;
    }
    set_columns_from(p, known, lane, 0.0f);
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
        if (j * 4 * kWarpSize + lane * 4 < columns) store4(to + j * 4 * kWarpSize, p[j]);
}

// Sends a block's largest and sum to every CTA of the cluster, where they complete the row's barrier. A
// cluster of one uses ordinary stores and arrivals: st.async, which counts its own bytes, needs two CTAs or
// more.
__device__ __forceinline__ void send(Shared& shared, const Split& split, int slot, int block, float2 value,
                                     int lane) {
    float2* const place = &shared.blocks[slot * split.blocks + block];
    Mbarrier* const barrier = &shared.complete[slot];
    __syncwarp();  // all lanes have read the factors of earlier rows
    if (split.ctas == 1) {
        if (lane != 0) return;
        *place = value;
        mbarrier_arrive(barrier);
    } else if (lane < split.ctas) {
        const auto to = static_cast<uint32_t>(lane);
        store_remote(cluster_address(place, to), value, cluster_address(barrier, to));
    }
}

template <class Out>
__device__ __forceinline__ void work_on_blocks(Shared& shared, const CrossEntropyArgs& args,
                                               const Split& split, const Part& part) {
    const int own = part.own, lane = part.lane;
    const int steps = max(0, (part.rows * own - part.warp + kWorkers - 1) / kWorkers), lag = lag_of(own);
    const int64_t row_step = part.clusters * args.columns,
                  first = part.first_token * args.columns + part.first_block * kBlockColumns;
    // from the CTA's first column on
    const int columns = static_cast<int>(args.columns) - part.first_block * kBlockColumns,
              vocab = static_cast<int>(args.vocab) - part.first_block * kBlockColumns;
    float(*const stages)[kBlockColumns] = shared.stages[part.warp];
    Mbarrier* const loaded = shared.loaded[part.warp];
    Place loading(part), working(part), finishing(part);
    const auto load = [&](int stage) {
        if (lane == 0) {
            const int column = loading.block * kBlockColumns;
            const uint32_t bytes = static_cast<uint32_t>(min(kBlockColumns, columns - column)) * 4u;
            mbarrier_arrive_expect_tx(&loaded[stage], bytes);
            bulk_load(args.logits + first + loading.row * row_step + column, &loaded[stage], stages[stage],
                      bytes);
        }
        loading.advance(part);
    };
    for (int stage = 0; stage < min(kStages, steps); ++stage) load(stage);
    RingPosition<kStages> fresh, held;
    for (int step = 0; step < steps + lag; ++step) {
        if (step < steps) {
            float* const stage = stages[fresh.index] + lane * 4;
            mbarrier_wait(&loaded[fresh.index], fresh.parity);
            fresh.advance();
            Columns x;
            read_stage(stage, x);
            const float largest = block_exponentials(x, vocab - working.block * kBlockColumns, lane);
            send(shared, split, Slot(working.row, split.slots).at, part.first_block + working.block,
                 float2{largest, block_sum(x)}, lane);
            write_stage(stage, x);
            working.advance(part);
        }
        if (step < lag) continue;
        const Slot slot(finishing.row, split.slots);
        mbarrier_wait(&shared.ready[slot.at], slot.parity);
        const int label = shared.labels[slot.at], column = finishing.block * kBlockColumns;
        const float factor = shared.factors[slot.at * own + finishing.block];
        Columns p;
        read_stage(stages[held.index] + lane * 4, p);
        if (step < steps + lag - kStages) {  // the stage is empty
            fence_async_shared();
            __syncwarp();
            load(held.index);
        }
        held.advance();
        Out* const to =
            static_cast<Out*>(args.dlogits) + first + finishing.row * row_step + column + lane * 4;
        finishing.advance(part);
        if (args.dlogits == nullptr) continue;
#pragma unroll
        for (int j = 0; j < kQuads; ++j)
#pragma unroll
            for (int n = 0; n < 4; ++n) p[j][n] *= factor;
        const int label_here = label - part.first_block * kBlockColumns - column;
        if (label >= 0 && static_cast<unsigned>(label_here) < static_cast<unsigned>(kBlockColumns)) {
#pragma unroll
            for (int j = 0; j < kQuads; ++j)
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (label_here == j * 4 * kWarpSize + lane * 4 + n) p[j][n] -= args.grad_scale;
        }
        store_block(to, p, columns - column, label < 0 ? 0 : vocab - column, lane);
    }
}

// A lane's blocks of a row (every kWarpSize-th), in groups of four; blocks past the row contribute nothing.
struct LaneBlocks {
    static constexpr int kGroups = 2, kGroup = kMostBlocks / kWarpSize / kGroups;
    float largest[kGroups][kGroup], sum[kGroups][kGroup];

    __device__ __forceinline__ float read(const float2* blocks, int count, int lane) {
        float of_lane = -FLT_MAX;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            if (g * kGroup * kWarpSize >= count) break;
#pragma unroll
            for (int k = 0; k < kGroup; ++k) {
                const int b = (g * kGroup + k) * kWarpSize + lane;
                const float2 block = b < count ? blocks[b] : float2{-FLT_MAX, 0.0f};
                largest[g][k] = block.x, sum[g][k] = block.y;
                of_lane = fmaxf(of_lane, block.x);
            }
        }
        return of_lane;
    }
    // Replaces each largest by its weight relative to the row's largest; returns the lane's sum.
    __device__ __forceinline__ float weigh(float row_largest, int count, int lane) {
        float total = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            if (g * kGroup * kWarpSize >= count) break;
            uint32_t farthest = 0;  // as in block_exponentials
#pragma unroll
            for (int k = 0; k < kGroup; ++k) {
                const bool counts = (g * kGroup + k) * kWarpSize + lane < count;
                largest[g][k] = counts ? row_largest - largest[g][k] : 0.0f;
                farthest = max(farthest, float_bits(largest[g][k]));
            }
            if (farthest <= float_bits(kNear)) {
#pragma unroll
                for (int k = 0; k < kGroup; ++k) largest[g][k] = exp_near(-largest[g][k]);
            } else {
#pragma unroll 1
                for (int k = 0; k < kGroup; ++k) {
                    largest[g][0] = exp_float(-largest[g][0]);
                    rotate(largest[g]);
                }
            }
#pragma unroll
            for (int k = 0; k < kGroup; ++k) total = fma_float(sum[g][k], largest[g][k], total);
        }
        return total;
    }
    // Writes the factors of the own blocks, which start at `first`.
    __device__ __forceinline__ void write(float* factors, float scale, int first, int own, int count,
                                          int lane) const {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            if (g * kGroup * kWarpSize >= count) break;
#pragma unroll
            for (int k = 0; k < kGroup; ++k) {
                const int b = (g * kGroup + k) * kWarpSize + lane - first;
                if (static_cast<unsigned>(b) < static_cast<unsigned>(own)) factors[b] = largest[g][k] * scale;
            }
        }
    }
};

// The row warp: sum, loss, and a factor for each own block, for every row of the cluster.
__device__ __forceinline__ void gather_rows(Shared& shared, const CrossEntropyArgs& args, const Split& split,
                                            const Part& part) {
    const int lane = part.lane;
    int next_label = args.labels[part.first_token];
    for (int row = 0; row < part.rows; ++row) {
        const int64_t token = part.first_token + row * part.clusters;
        const int label = next_label;
        if (row + 1 < part.rows) next_label = args.labels[token + part.clusters];
        const bool in_vocabulary = label < args.vocab, writes_loss = part.rank == 0 && lane == 0;
        float at_label = 0.0f;
        if (writes_loss && label >= 0 && in_vocabulary) at_label = args.logits[token * args.columns + label];
        const Slot slot(row, split.slots);
        mbarrier_wait_cluster(&shared.complete[slot.at], slot.parity);
        if (split.ctas > 1 && lane == 0 && row + split.slots < part.rows)
            mbarrier_arrive_expect_tx(&shared.complete[slot.at], split.row_bytes());
        LaneBlocks blocks;
        const float largest =
            warp_largest(blocks.read(&shared.blocks[slot.at * split.blocks], split.blocks, lane));
        float sum = warp_sum(blocks.weigh(largest, split.blocks, lane));
        if (!in_vocabulary) sum = bits_float(kNanBits);
        blocks.write(&shared.factors[slot.at * part.own], div_float(args.grad_scale, sum), part.first_block,
                     part.own, split.blocks, lane);
        if (lane == 0) shared.labels[slot.at] = max(label, -1);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.ready[slot.at]);
        if (writes_loss) args.loss[token] = label < 0 ? 0.0f : log_float(sum) + (largest - at_label);
    }
}

// Loss and gradient with every logit read once: a cluster of up to eight CTAs (one per SM) holds a row in
// shared memory from its exponentials to its gradient.
//
// Lower bound: logits once, dlogits once (V=129280, bf16: 776 KB per token, 190 us for 1024 tokens). About 26
// instructions per element, 13 of them for exp: 130 us of issue on 120 SMs.
//
// Roles: 16 worker warps and one row warp. A CTA's blocks of 1024 columns of all its rows are one sequence,
// and each worker takes every 16th, so that no warp idles, whatever the vocabulary; the contract allows
// blocks in any order of arrival. A step of a worker: (1) the next block: its largest, its exponentials in
// place, their sum; largest and sum go to every CTA of the cluster; (2) the gradient of the block `lag` steps
// earlier, and its stage is loaded again. The row warp gathers a row: largest and sum over its blocks, a
// factor for each block of the CTA, the loss; meanwhile the workers process another step.
//
// Shared memory and barriers:
//   stages    3 blocks of 4 KB per worker, filled by its own bulk copies
//   loaded    a stage; the bytes of its copy; used by one warp
//   complete  a slot of rows; the bytes of the blocks of all CTAs (st.async). The row warp arms it for the
//             slot's next row after the phase before; bytes that arrive earlier leave the count negative.
//             Cluster of one: an arrival per block.
//   ready     a slot of rows; one arrival of the row warp, when factors and label are written
//
// No deadlock: the last block of a row in a CTA is at most `lag` steps after the first, and a worker
// processes a block before it waits. No slot is overwritten early: a warp that sends row r has finished
// everything of `lag` + 1 steps earlier, which is up to row r - d, where d is the number of rows that 16 (lag
// + 1) blocks span; so the workers of every CTA had sent those rows, and were done with row r - 2d, and so
// were their row warps: 2d slots. The same holds for factors and labels, which the row warp writes when all
// blocks of rows up to r have arrived. cluster_sync before the first remote store and before any CTA exits.
//
// Deterministic: fixed order of every sum.
template <class Out>  // of a gradient
__global__ __launch_bounds__(kClusterThreads, 1) void row_cluster_kernel(const CrossEntropyArgs args,
                                                                         const Split split) {
    extern __shared__ __align__(128) uint8_t shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int thread = static_cast<int>(threadIdx.x), rank = static_cast<int>(cluster_rank()),
              own = split.own(rank);
    const int64_t clusters = gridDim.x / split.ctas, first_token = blockIdx.x / split.ctas;
    const Part part{.rank = rank,
                    .lane = thread % kWarpSize,
                    .warp = thread / kWarpSize,
                    .first_block = split.first(rank),
                    .own = own,
                    .step_rows = kWorkers / own,
                    .step_blocks = kWorkers % own,
                    .first_token = first_token,
                    .clusters = clusters,
                    .rows = static_cast<int>((args.tokens - first_token + clusters - 1) / clusters)};
    if (thread < kWorkers)
        for (int stage = 0; stage < kStages; ++stage) mbarrier_init(&shared.loaded[thread][stage], 1);
    if (thread < split.slots) {
        const bool alone = split.ctas == 1;
        mbarrier_init(&shared.complete[thread], alone ? static_cast<uint32_t>(split.blocks) : 1);
        mbarrier_init(&shared.ready[thread], 1);
        if (!alone && thread < part.rows)
            mbarrier_arrive_expect_tx(&shared.complete[thread], split.row_bytes());
    }
    fence_mbarrier_init();
    __syncwarp();
    cluster_sync();
    if (part.warp < kWorkers)
        work_on_blocks<Out>(shared, args, split, part);
    else
        gather_rows(shared, args, split, part);
    __syncwarp();
    cluster_sync();
}

// The smallest cluster in which a worker has at most one block of a row, or the largest. Slots: twice the
// rows that a warp's lag spans.
Split split_of(int64_t columns) {
    Split split{.ctas = 1, .blocks = static_cast<int>(ceil_div(columns, op::kLossBlock)), .slots = 2};
    while (split.ctas < kMostCtas && split.blocks > kWorkers * split.ctas) split.ctas *= 2;
    const int span = kWorkers * (lag_of(split.own(0)) + 1), fewest = split.own(split.ctas - 1);
    while (split.slots < 2 * ((span + fewest - 1) / fewest)) split.slots *= 2;
    return split;
}

template <class Out> void launch_as(const CrossEntropyArgs& args, const Launch& launch) {
    const Split split = split_of(args.columns);
    const auto kernel = row_cluster_kernel<Out>;
    allow_shared_memory(kernel, sizeof(Shared), "cross_entropy");
    const unsigned ctas = static_cast<unsigned>(split.ctas);
    cudaLaunchAttribute cluster = cluster_attribute(ctas);
    const cudaLaunchConfig_t config =
        launch_config(std::span(&cluster, 1), ctas, dim3(kClusterThreads), sizeof(Shared), launch);
    int clusters = 0;  // resident at a time; GPCs have different numbers of SMs
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cross_entropy");
    if (launch.sm_limit > 0) clusters = std::min(clusters, launch.sm_limit / split.ctas);
    clusters = static_cast<int>(std::min<int64_t>(std::max(1, clusters), args.tokens));
    launch_with(cluster, kernel, static_cast<unsigned>(clusters) * ctas, dim3(kClusterThreads),
                sizeof(Shared), launch, "cross_entropy", args, split);
}

}  // namespace

bool fits_clusters(const CrossEntropyArgs& args) {
    constexpr int64_t kWord = 16 / sizeof(uint16_t);  // elements of a gradient
    return args.columns <= int64_t{kMostBlocks} * kBlockColumns && args.columns % kWord == 0 &&
           is_aligned(args.logits) && is_aligned(args.dlogits);
}

void launch_clusters(const CrossEntropyArgs& args, const Launch& launch) {
    if (args.dlogits != nullptr && args.dlogits_dtype == DType::f32)
        launch_as<float>(args, launch);
    else
        launch_as<uint16_t>(args, launch);
}

}  // namespace fp8flow::hopper::head
