// Cross-entropy on the GPU: loss and gradient of a row of logits that is read once. Bit-equal to the reference. Labels cannot be reported from
// a kernel: the data loader checks them; here one outside the vocabulary becomes NaN (a step that is then skipped), never an address.
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/vector_io.h"

#include <cfloat>

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kWarpSize = 32;
constexpr int kBlockColumns =
    static_cast<int>(op::kLossBlock);                    // columns of a block; a warp works on one at a time
constexpr int kQuads = kBlockColumns / (4 * kWarpSize);  // a thread has eight times four columns of it
static_assert(op::kLossLanes == kWarpSize && kQuads == 8);
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr uint32_t kNanBits = 0x7FC00000u, kMinusInfinityBits = 0xFF800000u;

struct CrossEntropyArgs {
    const float* logits;
    const int32_t* labels;
    float* loss;
    void* dlogits;
    DType dlogits_dtype;
    int64_t tokens, columns, vocab;
    float grad_scale;
};

// ---- a block of 1024 columns in a warp: column 128 j + 4 lane + n of it stands in x[j][n] ------------------------------------------------
using Columns = float[kQuads][4];

__device__ __forceinline__ float warp_largest(float largest) {
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, mask));
    return largest;
}
__device__ __forceinline__ float warp_sum(float sum) {
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAll, sum, mask);
    return sum;
}
// What does not count (`count` columns do) becomes minus infinity: exponential 0.
__device__ __forceinline__ void drop_columns_from(Columns& x, int count, int lane) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (j * 4 * kWarpSize + lane * 4 + n >= count) x[j][n] = bits_float(kMinusInfinityBits);
}
// The largest of the block and its exponentials below that, which replace the logits. NaN is passed over by the maximum, but not by exp.
__device__ __forceinline__ float block_exponentials(Columns& x) {
    float largest = -FLT_MAX;
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
        largest = fmaxf(largest, fmaxf(fmaxf(x[j][0], x[j][1]), fmaxf(x[j][2], x[j][3])));
    largest = warp_largest(largest);
    uint32_t farthest = 0;  // the bits of the largest difference; NaN is above all
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            x[j][n] = largest - x[j][n];
            farthest = max(farthest, float_bits(x[j][n]));
        }
    if (farthest <= float_bits(kNear)) {
#pragma unroll
        for (int j = 0; j < kQuads; ++j)
#pragma unroll
            for (int n = 0; n < 4; ++n) x[j][n] = exp_near(-x[j][n]);
    } else {
#pragma unroll
        for (int j = 0; j < kQuads; ++j)
#pragma unroll 1
            for (int n = 0; n < 4; ++n) {
                x[j][0] = exp_float(-x[j][0]);
                rotate(x[j]);
            }
    }
    return largest;
}
__device__ __forceinline__ float block_sum(const Columns& e) {
    float quads[kQuads];
#pragma unroll
    for (int j = 0; j < kQuads; ++j) quads[j] = (e[j][0] + e[j][1]) + (e[j][2] + e[j][3]);
    return warp_sum(((quads[0] + quads[1]) + (quads[2] + quads[3])) +
                    ((quads[4] + quads[5]) + (quads[6] + quads[7])));
}
__device__ __forceinline__ void read_stage(const float* stage, Columns& x) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
        const float4 word = *reinterpret_cast<const float4*>(stage + j * 4 * kWarpSize);
        x[j][0] = word.x, x[j][1] = word.y, x[j][2] = word.z, x[j][3] = word.w;
    }
}
__device__ __forceinline__ void store4(uint16_t* to, const float (&p)[4]) {
    __stcs(reinterpret_cast<uint2*>(to), uint2{pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3])});
}
__device__ __forceinline__ void store4(float* to, const float (&p)[4]) {
    __stcs(reinterpret_cast<float4*>(to), float4{p[0], p[1], p[2], p[3]});
}

// ---- rows in 16-byte words -----------------------------------------------------------------------------------------------------------
constexpr int kWorkers = 16;  // warps that work on blocks; one more works on rows
constexpr int kClusterThreads = (kWorkers + 1) * kWarpSize;
constexpr int kStages = 3;               // blocks that a warp holds: loading, or waiting for their row
constexpr int kMostTurns = kStages - 1;  // blocks of a row that a warp takes
constexpr int kMostCtas = 8;             // of a cluster
constexpr int kOwnBlocks = kWorkers * kMostTurns;    // of a row in a CTA, at most
constexpr int kMostBlocks = kMostCtas * kOwnBlocks;  // of a row
constexpr int kSlots = 4;  // rows in work: from their first block's sum to their last gradient

struct alignas(128) Shared {
    float stages[kWorkers][kStages][kBlockColumns];
    float2 blocks[kSlots][kMostBlocks];  // largest and sum of every block of a row, sent by the whole cluster
    float factors[kSlots][kOwnBlocks];   // of this CTA's blocks: what turns exponentials into gradients
    int labels[kSlots];
    Barrier loaded[kWorkers][kStages], complete[kSlots], ready[kSlots];
};
static_assert(sizeof(Shared) <= 227 << 10);

struct Split {
    int ctas;        // of a cluster
    int blocks;      // of a row
    int cta_blocks;  // of a row in a CTA; the last has the rest, at least one
};

// A place in a ring of kCount, and the parity of the turn that it is in.
template <int kCount> struct Ring {
    int at = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++at == kCount) at = 0, parity ^= 1;
    }
};
// Where a warp stands in its sequence of blocks: all turns of a row, then the next row.
struct Cursor {
    Ring<kStages> stage;
    int turn = 0;
    int64_t offset = 0;  // of the row, in elements, from the first one's
    // True when a row ends.
    __device__ bool advance(int turns, int64_t row_step) {
        stage.advance();
        if (++turn < turns) return false;
        turn = 0;
        offset += row_step;
        return true;
    }
};

// Moves: logits once, dlogits once (V=129280, bf16: 776 KB a token, 190 us for 1024 tokens), and nothing twice: a cluster of up to eight CTAs
// (one an SM) holds a row in shared memory from its exponentials to its gradient. The contract lets every block of 1024 columns be worked
// on when it arrives. Each of 16 warps has blocks of its own and a ring of three stages for them (4 KB each), which it fills itself by
// bulk copies: one block (at V=129280) waits for its row, two are on their way: 128 KB an SM. A step of a warp: (1) the next block: its
// largest, exponentials in place, their sum; lanes send largest and sum to every CTA of the cluster; (2) the gradient of the block
// `turns` steps back, and its stage loads again. About 26 instructions an element, of which exp has 13: 130 us of issue on 120 SMs. The
// seventeenth warp gathers a row: largest and sum over its blocks (127) in lanes, loss, and a factor for each block of the CTA; the
// workers have a step of other work meanwhile.
// Barriers: loaded, of each stage: the bytes of its copy; a warp alone uses it. complete, of a slot of rows: the bytes of the blocks of
// all CTAs (asynchronous stores count themselves); armed by the row warp for the row kSlots on, once it has seen the phase before: what
// arrives earlier is counted below zero. ready, of a slot: one arrival of the row warp. No slot is written too early: a warp sends row
// r + 4 when it is through with row r + 2, to which every CTA's workers had sent; they were through with row r, so their row warp was too.
// A cluster meets before the first store to another CTA and before any of it leaves. Fixed order: deterministic.
template <class Out>  // of a gradient
__global__ __launch_bounds__(kClusterThreads, 1) void row_cluster_kernel(const CrossEntropyArgs args,
                                                                         const Split split) {
    extern __shared__ __align__(128) uint8_t shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
    const int rank = static_cast<int>(cluster_rank());
    const int first_block = rank * split.cta_blocks,
              own_blocks = min(split.blocks - first_block, split.cta_blocks);
    const int64_t clusters = gridDim.x / split.ctas, first_token = blockIdx.x / split.ctas;
    const int rows = static_cast<int>((args.tokens - first_token + clusters - 1) / clusters);
    const uint32_t row_bytes = static_cast<uint32_t>(split.blocks) * static_cast<uint32_t>(sizeof(float2));
    if (thread == 0) {
        for (int w = 0; w < kWorkers; ++w)
            for (int stage = 0; stage < kStages; ++stage) barrier_init(&shared.loaded[w][stage], 1);
        for (int slot = 0; slot < kSlots; ++slot) {
            barrier_init(&shared.complete[slot], 1);
            barrier_init(&shared.ready[slot], 1);
        }
        fence_barrier_init();
        for (int slot = 0; slot < min(kSlots, rows); ++slot)
            barrier_arrive_expect_bytes(&shared.complete[slot], row_bytes);
    }
    cluster_meet();

    if (warp < kWorkers) {
        const int turns = warp < own_blocks ? (own_blocks - warp + kWorkers - 1) / kWorkers : 0;
        const int steps = rows * turns, lag = turns;
        constexpr int kTurnColumns = kWorkers * kBlockColumns;
        const int first_column = (first_block + warp) * kBlockColumns;
        const int columns = static_cast<int>(args.columns) - first_column,
                  vocab = static_cast<int>(args.vocab) - first_column;  // from there on
        const int64_t row_step = clusters * args.columns;
        const float* const source = args.logits + first_token * args.columns + first_column;
        Out* const out =
            static_cast<Out*>(args.dlogits) + first_token * args.columns + first_column + lane * 4;
        float(*const stages)[kBlockColumns] = shared.stages[warp];
        Barrier* const loaded = shared.loaded[warp];
        const auto load = [&](const Cursor& to) {  // by one thread
            const int column = to.turn * kTurnColumns;
            const uint32_t bytes = static_cast<uint32_t>(min(kBlockColumns, columns - column)) * 4u;
            barrier_arrive_expect_bytes(&loaded[to.stage.at], bytes);
            bulk_load(source + to.offset + column, &loaded[to.stage.at], stages[to.stage.at], bytes);
        };
        uint32_t blocks_there = 0,
                 complete_there = 0;  // of CTA `lane` of the cluster: of this warp's first block
        if (lane < split.ctas) {
            blocks_there =
                cluster_address(&shared.blocks[0][first_block + warp], static_cast<uint32_t>(lane));
            complete_there = cluster_address(&shared.complete[0], static_cast<uint32_t>(lane));
        }
        Cursor loading, working, finishing;
        Ring<kSlots> sent, finished;
        for (int step = 0; step < min(kStages, steps); ++step) {
            if (lane == 0) load(loading);
            loading.advance(turns, row_step);
        }
        int label = 0;  // of the row that is being finished, from first_column on; none if it is ignored
        bool ignored = false;
        for (int step = 0; step < steps + lag; ++step) {
            if (step < steps) {
                float* const stage = stages[working.stage.at] + lane * 4;
                barrier_wait(&loaded[working.stage.at], working.stage.parity);
                Columns x;
                read_stage(stage, x);
                const int known = vocab - working.turn * kTurnColumns;
                if (known < kBlockColumns) drop_columns_from(x, known, lane);
                const float largest = block_exponentials(x);
#pragma unroll
                for (int j = 0; j < kQuads; ++j)
                    *reinterpret_cast<float4*>(stage + j * 4 * kWarpSize) =
                        float4{x[j][0], x[j][1], x[j][2], x[j][3]};
                const float sum = block_sum(x);
                if (lane < split.ctas)
                    store_remote(
                        blocks_there +
                            static_cast<uint32_t>((sent.at * kMostBlocks + working.turn * kWorkers) *
                                                  static_cast<int>(sizeof(float2))),
                        float2{largest, sum},
                        complete_there + static_cast<uint32_t>(sent.at * static_cast<int>(sizeof(Barrier))));
                if (working.advance(turns, 0)) sent.advance();
            }
            if (step < lag) continue;
            if (finishing.turn == 0) {
                barrier_wait(&shared.ready[finished.at], finished.parity);
                label = shared.labels[finished.at];
                ignored = label < 0;
                label -= first_column;
            }
            Columns p;
            read_stage(stages[finishing.stage.at] + lane * 4, p);
            const float factor = shared.factors[finished.at][warp + finishing.turn * kWorkers];
            if (step < steps + lag - kStages) {  // the stage is empty
                fence_shared_for_engines();
                __syncwarp();
                if (lane == 0) load(loading);
                loading.advance(turns, row_step);
            }
            const int column = finishing.turn * kTurnColumns, known = ignored ? 0 : vocab - column;
            Out* const to = out + finishing.offset + column;
            if (finishing.advance(turns, row_step)) finished.advance();
            if (args.dlogits == nullptr) continue;
#pragma unroll
            for (int j = 0; j < kQuads; ++j)
#pragma unroll
                for (int n = 0; n < 4; ++n) p[j][n] *= factor;
            const int label_here = label - column;
            if (static_cast<unsigned>(label_here) < static_cast<unsigned>(kBlockColumns)) {
#pragma unroll
                for (int j = 0; j < kQuads; ++j)
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        if (label_here == j * 4 * kWarpSize + lane * 4 + n) p[j][n] -= args.grad_scale;
            }
            if (known >= kBlockColumns) {
#pragma unroll
                for (int j = 0; j < kQuads; ++j) store4(to + j * 4 * kWarpSize, p[j]);
            } else {  // the end of the vocabulary, or an ignored row
#pragma unroll
                for (int j = 0; j < kQuads; ++j) {
                    const int at = j * 4 * kWarpSize + lane * 4;
                    if (column + at >= columns) continue;
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        if (at + n >= known) p[j][n] = 0.0f;
                    store4(to + j * 4 * kWarpSize, p[j]);
                }
            }
        }
    } else {
        Ring<kSlots> slot;
        for (int row = 0; row < rows; ++row, slot.advance()) {
            const int64_t token = first_token + row * clusters;
            const int label = args.labels[token];
            const bool in_vocabulary = label < args.vocab;
            const float at_label =
                label >= 0 && in_vocabulary ? args.logits[token * args.columns + label] : 0.0f;
            barrier_wait_cluster(&shared.complete[slot.at], slot.parity);
            if (lane == 0 && row + kSlots < rows)
                barrier_arrive_expect_bytes(&shared.complete[slot.at], row_bytes);
            const float2* const blocks = shared.blocks[slot.at];
            float largest = -FLT_MAX, sum = 0.0f;
            for (int b = lane; b < split.blocks; b += kWarpSize) largest = fmaxf(largest, blocks[b].x);
            largest = warp_largest(largest);
            for (int b = lane; b < split.blocks; b += kWarpSize)
                sum = fma_float(blocks[b].y, exp_float(blocks[b].x - largest), sum);
            sum = warp_sum(sum);
            if (!in_vocabulary) sum = bits_float(kNanBits);
            const float scale = div_float(args.grad_scale, sum);
            for (int b = lane; b < own_blocks; b += kWarpSize)
                shared.factors[slot.at][b] = exp_float(blocks[first_block + b].x - largest) * scale;
            if (lane == 0) {
                shared.labels[slot.at] = max(label, -1);
                if (rank == 0) args.loss[token] = label < 0 ? 0.0f : log_float(sum) + (largest - at_label);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.ready[slot.at]);
        }
    }
    cluster_meet();
}

// The smallest cluster whose warps take one block of a row each, or the largest.
Split split_of(int64_t columns) {
    const int64_t blocks = ceil_div(columns, op::kLossBlock);
    int ctas = 1;
    while (ctas < kMostCtas && blocks > int64_t{kWorkers} * ctas) ctas *= 2;
    return {.ctas = ctas,
            .blocks = static_cast<int>(blocks),
            .cta_blocks = static_cast<int>(ceil_div(blocks, int64_t{ctas}))};
}

template <class Out> void launch_clusters(const CrossEntropyArgs& args, const Launch& launch) {
    const Split split = split_of(args.columns);
    const auto kernel = row_cluster_kernel<Out>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(Shared))),
               "cross_entropy");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(split.ctas), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(split.ctas);
    config.blockDim = kClusterThreads;
    config.dynamicSmemBytes = sizeof(Shared);
    config.stream = stream_of(launch);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int clusters = 0;  // that the device holds at a time: its GPCs have different numbers of SMs
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cross_entropy");
    if (launch.sm_limit > 0) clusters = std::min(clusters, launch.sm_limit / split.ctas);
    clusters = static_cast<int>(std::min<int64_t>(std::max(1, clusters), args.tokens));
    config.gridDim = static_cast<unsigned>(clusters * split.ctas);
    check_cuda(cudaLaunchKernelEx(&config, kernel, args, split), "cross_entropy");
}

// ---- any row -------------------------------------------------------------------------------------------------------------------------
// Moves: a row of logits three times, a row of gradients once. One CTA a token: the largest logit; the sum over blocks, 32 blocks a turn; the
// gradient from recomputed exponentials. Barriers stand around every use of shared memory and all threads reach them: loop bounds
// depend on the token only. Fixed order: deterministic.
constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
__device__ __forceinline__ void load_block(const CrossEntropyArgs& args, const float* row, int64_t column,
                                           int lane, Columns& x) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int64_t i = column + j * 4 * kWarpSize + lane * 4 + n;
            x[j][n] = i < args.vocab ? row[i] : bits_float(kMinusInfinityBits);
        }
}
__global__ __launch_bounds__(kThreads) void row_kernel(const CrossEntropyArgs args) {
    __shared__ float of_warps[kWarps], largest_of[kWarpSize], sum_of[kWarpSize], row_sum;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
    const int64_t blocks = (args.vocab + kBlockColumns - 1) / kBlockColumns;
    for (int64_t t = blockIdx.x; t < args.tokens; t += gridDim.x) {
        const float* row = args.logits + t * args.columns;
        const int64_t label = args.labels[t];
        if (label < 0) {  // ignored; the same branch for all threads
            if (thread == 0) args.loss[t] = 0.0f;
            if (args.dlogits != nullptr)
                for (int64_t i = thread; i < args.columns; i += kThreads)
                    store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, 0.0f);
            continue;
        }
        float largest = -FLT_MAX;
        for (int64_t i = thread; i < args.vocab; i += kThreads) largest = fmaxf(largest, row[i]);
        largest = warp_largest(largest);
        if (lane == 0) of_warps[warp] = largest;
        __syncthreads();
        largest = warp_largest(of_warps[lane % kWarps]);

        float sum = 0.0f;  // a lane of the sum, in the threads of the first warp
        for (int64_t start = 0; start < blocks; start += kWarpSize) {
            for (int b = warp; b < kWarpSize && start + b < blocks; b += kWarps) {
                Columns x;
                load_block(args, row, (start + b) * kBlockColumns, lane, x);
                const float of_block = block_exponentials(x), sum_here = block_sum(x);
                if (lane == 0) largest_of[b] = of_block, sum_of[b] = sum_here;
            }
            __syncthreads();
            if (warp == 0 && start + lane < blocks)
                sum = fma_float(sum_of[lane], exp_float(largest_of[lane] - largest), sum);
            __syncthreads();
        }
        if (warp == 0) {
            sum = warp_sum(sum);
            if (lane == 0) {
                const bool in_vocabulary = label < args.vocab;
                row_sum = in_vocabulary ? sum : bits_float(kNanBits);
                args.loss[t] = in_vocabulary ? log_float(sum) + (largest - row[label]) : bits_float(kNanBits);
            }
        }
        __syncthreads();
        if (args.dlogits != nullptr) {
            const float scale = div_float(args.grad_scale, row_sum);
            for (int64_t column = warp * kBlockColumns; column < args.columns;
                 column += kWarps * kBlockColumns) {
                Columns x;
                load_block(args, row, column, lane, x);
                const float factor = exp_float(block_exponentials(x) - largest) * scale;
#pragma unroll
                for (int j = 0; j < kQuads; ++j)
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const int64_t i = column + j * 4 * kWarpSize + lane * 4 + n;
                        if (i >= args.columns) continue;
                        float p = i < args.vocab ? x[j][n] * factor : 0.0f;
                        if (i == label) p -= args.grad_scale;
                        store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, p);
                    }
            }
        }
        __syncthreads();  // of_warps and row_sum belong to the next token now
    }
}

}  // namespace

void HopperOps::do_cross_entropy(const op::CrossEntropy& args, const Launch& launch) {
    const CrossEntropyArgs kernel_args{.logits = args.logits.as<float>(),
                                       .labels = args.labels.as<int32_t>(),
                                       .loss = args.loss.as<float>(),
                                       .dlogits = args.dlogits ? args.dlogits.data : nullptr,
                                       .dlogits_dtype = args.dlogits.dtype,
                                       .tokens = args.logits.dim(0),
                                       .columns = args.logits.dim(1),
                                       .vocab = args.vocab_size,
                                       .grad_scale = args.grad_scale};
    if (kernel_args.tokens == 0) return;
    const int64_t columns = kernel_args.columns;
    if (columns <= int64_t{kMostBlocks} * kBlockColumns && is_vectorisable(args.logits.data, columns) &&
        (!args.dlogits || is_vectorisable(args.dlogits.data, columns))) {
        if (args.dlogits && args.dlogits.dtype == DType::f32)
            launch_clusters<float>(kernel_args, launch);
        else
            launch_clusters<uint16_t>(kernel_args, launch);
    } else {
        row_kernel<<<grid_for(kernel_args.tokens, launch), kThreads, 0, stream_of(launch)>>>(kernel_args);
        check_launch("cross_entropy");
    }
}

}  // namespace fp8flow
