// SPDX-License-Identifier: MIT
// The router's GEMMs with wgmma, for many experts: logits, dx and dweight of BF16 operands. logits.cu
// launches them if shapes and alignment allow; gemm_mma.cu is for everything else. Stages, barriers, roles
// and clusters come from gemm/sm90/pipeline.h; the kernel of dweight is gemm/sm90/bf16_wgrad.cu.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"
#include "kernels/hopper/router/gemm.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::router {

using namespace gemm;

namespace {

constexpr int kStageK = 64;  // contraction elements of a stage
constexpr int kPanel = 64,
              kPanelBytes = kStageK * kStageRowBytes;  // outputs across the contraction, and 64 rows of it
constexpr int kABytes = kTileRows * kStageRowBytes;    // 128 rows x 64 elements

// sums[split, t, e] = x W^T over the columns of the split. Splits depend on hidden only, so that the logits
// of a token do not depend on the other tokens.
struct LogitTiles {
    int64_t tokens, experts, hidden;
    int64_t col_tiles, pairs;  // pairs of row tiles x column tiles x splits
    int steps, split_steps, splits;
    float* sums;

    struct Place {
        int64_t row, col, split;
        int first_step, steps;
    };
    __device__ Place place(int64_t pair, int rank) const {
        const int64_t split = pair % splits, tile = pair / splits;
        const int first = static_cast<int>(split) * split_steps;
        return {(tile / col_tiles * kClusterCtas + rank) * kTileRows, tile % col_tiles * kTileCols, split,
                first, min(split_steps, steps - first)};
    }
};

// One consumer warpgroup: 64 rows by 256 columns, 128 sums per thread. Issues the wgmma of the next stage
// before it waits for the previous ones.
__device__ void logits_mainloop(const LogitTiles& job, SharedStorage& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, quad = thread % 4;
    const int row0 = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int rank = static_cast<int>(cluster_rank());
    RingPosition<kStages> stage;
    for (int64_t pair = blockIdx.x / kClusterCtas; pair < job.pairs; pair += gridDim.x / kClusterCtas) {
        const LogitTiles::Place at = job.place(pair, rank);
        float sum[128];
        int before = 0;  // stage whose wgmma may still be in flight
        for (int step = 0; step < at.steps; ++step) {
            mbarrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t *a = shared.stages[stage.index], *b = a + kABytes;
            const uint64_t at_a = k_major_descriptor(a + warpgroup * 64 * kStageRowBytes),
                           at_b = k_major_descriptor(b);
            wgmma_fence();
            wgmma_fence_operand(sum);
#pragma unroll
            for (int k = 0; k < kStageK / 16; ++k)
                wgmma_bf16<0, 0>(sum, at_a + 2 * k, at_b + 2 * k, step > 0 || k > 0);
            wgmma_commit();
            wgmma_fence_operand(sum);
            wgmma_wait<1>();
            if (step > 0) release_stage(shared, before);
            before = stage.index;
            stage.advance();
        }
        wgmma_wait<0>();
        wgmma_fence_operand(sum);
        release_stage(shared, before);
        // of every 16 columns a lane stores four: join_columns
        const int first = quad % 2 * 8 + quad / 2 * 4;
        float* const to = job.sums + (at.split * job.tokens + at.row + row0) * job.experts + at.col + first;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t columns = at.row + row0 + 8 * r < job.tokens ? job.experts - at.col - first : 0;
#pragma unroll
            for (int j = 0; j < kTileCols / 8; j += 2) {
                const float* const v = sum + 4 * j + 2 * r;
                const float4 four = join_columns({v[0], v[1]}, {v[4], v[5]});
                if (8 * j < columns)
                    store_vector(reinterpret_cast<float4*>(to + 8 * r * job.experts + 8 * j), four);
            }
        }
    }
}

// logits = x W^T, x [T, H] bf16, W [E, H] bf16, split along H. Lower bound at T=4096, H=7168, E=256: 15 GFLOP
// (20 us at 770 TFLOP/s); x 58.7 MB from memory (14 us); sums 16.8 MB out. CTA: 128 x 256 outputs over a
// quarter of the contraction, 128 CTAs. W is multicast in the cluster, so L2 delivers 115 MB (19 us at 6
// TB/s). add_blocks adds the splits (16.8 MB from L2). Barriers: gemm/sm90/pipeline.h. Deterministic: one
// thread computes a sum, over ascending h, and writes it once.
__global__ void __launch_bounds__(kCtaThreads, 1)
    logits_kernel(const __grid_constant__ LogitTiles job, const __grid_constant__ CUtensorMap map_x,
                  const __grid_constant__ CUtensorMap map_w) {
    const auto load = [&](SharedStorage& shared) {
        const int rank = static_cast<int>(cluster_rank());
        RingPosition<kStages> stage;
        for (int64_t pair = blockIdx.x / kClusterCtas; pair < job.pairs; pair += gridDim.x / kClusterCtas) {
            const LogitTiles::Place at = job.place(pair, rank);
            const int row = static_cast<int>(at.row), col = static_cast<int>(at.col);
            for (int step = 0; step < at.steps; ++step) {
                const int k = (at.first_step + step) * kStageK;
                Mbarrier* const full = &shared.full[stage.index];
                mbarrier_wait(&shared.empty[stage.index], stage.parity ^ 1);  // consumers of both CTAs
                mbarrier_arrive_expect_tx(full, kStageBytes);
                uint8_t *a = shared.stages[stage.index], *b = a + kABytes;
                load_operand<2>(Load::own, rank, &map_x, full, a, kABytes / 2,
                                [&](int i) { return make_int2(k, row + i * kTileRows / 2); });
                load_operand<2>(Load::multicast, rank, &map_w, full, b, kTileCols / 2 * kStageRowBytes,
                                [&](int i) { return make_int2(k, col + i * kTileCols / 2); });
                stage.advance();
            }
        }
    };
    run_roles(load, [&](SharedStorage& shared, int warpgroup) { logits_mainloop(job, shared, warpgroup); });
}

// ---- dx
constexpr int kInputStages = 3, kMaxInputSteps = 4;  // of the contraction over the experts
constexpr int kInputStageBytes = kTileCols / kPanel * kPanelBytes;
constexpr int kInHalves = 2;  // dx_in of a tile is loaded in stages of 128 columns
static_assert(kInputStageBytes == kTileCols / kInHalves / kPanel * kABytes);
static_assert(kMaxInputSteps * kStageK == kMaxInputExperts);

struct InputStorage {
    alignas(1024) uint8_t dlogits[2][kMaxInputSteps][kABytes];
    alignas(1024) uint8_t stages[kInputStages][kInputStageBytes];
    Mbarrier dlogits_full[1], dlogits_empty[1], full[kInputStages], empty[kInputStages];
};
constexpr size_t kInputStorageBytes = kSharedBytes<InputStorage>;
static_assert(kInputStorageBytes <= kMaxSharedBytes);

// Work items: a row tile by a chunk of its column tiles.
struct InputTiles {
    int64_t tokens, hidden;
    int64_t col_tiles, chunks, items;
    int steps, pitch;
    bool has_addend;
    Bf16* dx;

    struct Place {
        int64_t row, first, last;  // column tiles
    };
    __device__ Place place(int64_t item) const {
        const int64_t chunk = item % chunks;
        return {item / chunks * kTileRows, chunk * col_tiles / chunks, (chunk + 1) * col_tiles / chunks};
    }
};

__device__ void produce_input_tiles(const InputTiles& job, InputStorage& shared,
                                    const CUtensorMap* map_dlogits, const CUtensorMap* map_w,
                                    const CUtensorMap* map_in) {
    RingPosition<kInputStages> stage;
    RingPosition<1> rows;
    const auto next_stage = [&](auto start) {
        Mbarrier* const full = &shared.full[stage.index];
        mbarrier_wait(&shared.empty[stage.index], stage.parity ^ 1);
        mbarrier_arrive_expect_tx(full, kInputStageBytes);
        start(full, shared.stages[stage.index]);
        stage.advance();
    };
    for (int64_t item = blockIdx.x; item < job.items; item += gridDim.x) {
        const InputTiles::Place at = job.place(item);
        const int row = static_cast<int>(at.row);
        mbarrier_wait(&shared.dlogits_empty[0], rows.parity ^ 1);
        mbarrier_arrive_expect_tx(&shared.dlogits_full[0], static_cast<uint32_t>(2 * job.steps * kABytes));
        for (int part = 0; part < 2; ++part)
            for (int step = 0; step < job.steps; ++step)
                tma_load(map_dlogits, &shared.dlogits_full[0], shared.dlogits[part][step],
                         part * job.pitch + step * kStageK, row);
        rows.advance();
        for (int64_t tile = at.first; tile < at.last; ++tile) {
            const int col = static_cast<int>(tile * kTileCols);
            for (int step = 0; step < job.steps; ++step)
                next_stage([&](Mbarrier* full, uint8_t* to) {
#pragma unroll
                    for (int i = 0; i < kTileCols / kPanel; ++i)
                        tma_load(map_w, full, to + i * kPanelBytes, col + i * kPanel, step * kStageK);
                });
            if (!job.has_addend) continue;
            for (int half = 0; half < kInHalves; ++half)
                next_stage([&](Mbarrier* full, uint8_t* to) {
                    const int first = col + half * kTileCols / kInHalves;
#pragma unroll
                    for (int i = 0; i < kInputStageBytes / kABytes; ++i)
                        tma_load(map_in, full, to + i * kABytes, first + i * kPanel, row);
                });
        }
    }
}

// A consumer warp arrives at the barrier when all its lanes have finished (this CTA only).
__device__ __forceinline__ void release_one(Mbarrier* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// A thread's part of a finished tile, packed to BF16: word 2 * j + r holds two columns of chunk j (of 8) of
// its row r (of two, 8 apart).
struct FinishedInput {
    uint32_t words[64];
    int64_t row, col;  // of the thread's first row, of the tile
};
__device__ __forceinline__ void store_finished(const InputTiles& job, const FinishedInput& f) {
    const int quad = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        Bf16* const to = job.dx + (f.row + 8 * r) * job.hidden + f.col + 8 * quad;
        const int columns =
            f.row + 8 * r < job.tokens ? static_cast<int>(min(job.hidden - f.col, int64_t{kTileCols})) : 0;
#pragma unroll
        for (int j = 0; j < kTileCols / 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) words[c] = f.words[2 * (j + c) + r];
            const uint4 chunk = gather_chunk(words);
            if (8 * (j + quad) < columns) store_vector(reinterpret_cast<uint4*>(to + 8 * j), chunk);
        }
    }
}

// One consumer warpgroup: 64 rows by 256 columns. A finished tile is stored during the first wgmma of the
// next one.
__device__ void input_mainloop(const InputTiles& job, InputStorage& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, quad = thread % 4;
    const int row0 = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int store_at = min(1, job.steps - 1);
    RingPosition<kInputStages> stage;
    RingPosition<1> rows;
    FinishedInput finished;
    bool unstored = false;
    for (int64_t item = blockIdx.x; item < job.items; item += gridDim.x) {
        const InputTiles::Place at = job.place(item);
        mbarrier_wait(&shared.dlogits_full[0], rows.parity);
        rows.advance();
        for (int64_t tile = at.first; tile < at.last; ++tile) {
            float sum[128];
            int before = 0;  // stage whose wgmma may still be in flight
            for (int step = 0; step < job.steps; ++step) {
                mbarrier_wait(&shared.full[stage.index], stage.parity);
                const uint64_t large = k_major_descriptor(shared.dlogits[0][step] +
                                                          warpgroup * 64 * kStageRowBytes),
                               small = k_major_descriptor(shared.dlogits[1][step] +
                                                          warpgroup * 64 * kStageRowBytes),
                               w = mn_major_descriptor(shared.stages[stage.index]);
                wgmma_fence();
                wgmma_fence_operand(sum);
#pragma unroll
                for (int k = 0; k < kStageK / 16; ++k) {
                    constexpr int kStep = 16 * kStageRowBytes / 16;
                    wgmma_bf16<0, 1>(sum, small + 2 * k, w + kStep * k, step > 0 || k > 0);
                    wgmma_bf16<0, 1>(sum, large + 2 * k, w + kStep * k, 1);
                }
                wgmma_commit();
                wgmma_fence_operand(sum);
                if (unstored && step == store_at) {
                    store_finished(job, finished);
                    unstored = false;
                }
                wgmma_wait<1>();
                if (step > 0) release_one(&shared.empty[before]);
                before = stage.index;
                stage.advance();
            }
            wgmma_wait<0>();
            wgmma_fence_operand(sum);
            release_one(&shared.empty[before]);
            if (job.has_addend) {
#pragma unroll
                for (int half = 0; half < kInHalves; ++half) {
                    constexpr int kChunks = kTileCols / kInHalves / 8;
                    mbarrier_wait(&shared.full[stage.index], stage.parity);
                    const uint8_t* const in = shared.stages[stage.index] + row0 * kStageRowBytes + quad * 4;
#pragma unroll
                    for (int j = 0; j < kChunks; ++j) {
                        // 16-byte chunks of a row of 128 bytes lie swizzled by the row's last three bits
                        const uint8_t* const chunk = in + j / 8 * kABytes + ((j % 8) ^ (row0 % 8)) * 16;
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const uint32_t two =
                                *reinterpret_cast<const uint32_t*>(chunk + 8 * r * kStageRowBytes);
                            float* const v = sum + 4 * (half * kChunks + j) + 2 * r;
                            v[0] += __uint_as_float(two << 16);
                            v[1] += __uint_as_float(two & 0xFFFF0000u);
                        }
                    }
                    release_one(&shared.empty[stage.index]);
                    stage.advance();
                }
            }
#pragma unroll
            for (int i = 0; i < 64; ++i) finished.words[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
            finished.row = at.row + row0;
            finished.col = tile * kTileCols;
            unstored = true;
        }
        release_one(&shared.dlogits_empty[0]);
    }
    if (unstored) store_finished(job, finished);
}

// dx = dlogits W (+ dx_in), dlogits as two BF16 parts. Lower bound at T=4096, H=7168, E=256: two parts of 15
// GFLOP (40 us at 770 TFLOP/s); dx_in and dx 117 MB (29 us). CTA: both parts of 128 tokens' dlogits stay in
// shared memory (128 KiB) for a quarter of the columns, 128 CTAs: W is read once for both parts, 115 MB from
// L2. dx_in is loaded into stages of the same ring after a tile's W. Shared memory: dlogits; three stages of
// 32 KiB; barriers.
//
//   barrier         arrivals of a phase                        waited for by
//   full[s]         1 producer + 32 KiB                        consumer warps
//   empty[s]        1 a consumer warp, after its last wgmma    producer
//                   or its last read of dx_in from the stage
//   dlogits_full    1 producer + all boxes                     consumer warps
//   dlogits_empty   1 a consumer warp, after the item          producer
//
// dx may be dx_in: a CTA stores a tile after it has read it, and tiles are disjoint. Deterministic: one
// thread adds an element of dx, over ascending e, and writes it once.
__global__ void __launch_bounds__(kCtaThreads, 1)
    input_kernel(const __grid_constant__ InputTiles job, const __grid_constant__ CUtensorMap map_dlogits,
                 const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_in) {
    InputStorage& shared = prepare_shared<InputStorage>([](InputStorage& s) {
        init_ring(s.dlogits_full, s.dlogits_empty, kConsumerWarps);
        init_ring(s.full, s.empty, kConsumerWarps);
    });
    const int role = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        release_registers<kProducerRegisters>();
        if (threadIdx.x == 0) produce_input_tiles(job, shared, &map_dlogits, &map_w, &map_in);
    } else {
        acquire_registers<kConsumerRegisters>();
        input_mainloop(job, shared, role - 1);
    }
}

// dweight (+)= sum over the blocks of tokens, ascending, of the sums of the larger parts + those of the
// smaller parts. Traffic: reads the sums once, from L2 if they fit (14.7 MB per block at H=7168, E=256),
// writes dweight once. Four neighbours per thread. Deterministic: one writer per element.
constexpr int kAddThreads = 256;
__global__ __launch_bounds__(kAddThreads) void add_weight_parts_kernel(const float4* sums, int64_t blocks,
                                                                       int64_t part, int64_t count,
                                                                       Gradient mode, float4* dweight) {
    pdl_launch_dependents();
    pdl_wait();
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kAddThreads + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * kAddThreads) {
        float4 total{};
#pragma unroll 4
        for (int64_t block = 0; block < blocks; ++block) {
            const float4 large = sums[2 * block * part + i], small = sums[(2 * block + 1) * part + i];
            const float4 both{large.x + small.x, large.y + small.y, large.z + small.z, large.w + small.w};
            total = block == 0
                        ? both
                        : float4{total.x + both.x, total.y + both.y, total.z + both.z, total.w + both.w};
        }
        if (mode == Gradient::accumulate) {
            const float4 old = dweight[i];
            total = {old.x + total.x, old.y + total.y, old.z + total.z, old.w + total.w};
        }
        dweight[i] = total;
    }
}

}  // namespace

bool wgmma_supports_logits(const LogitsGemm& job) {
    return job.experts > kFewExperts && job.experts % 8 == 0 && job.tokens > 0 && is_aligned(job.logits);
}

int64_t logit_splits(int64_t hidden) {
    constexpr int64_t kSplits = 4, kMinSteps = op::kRouterBlock / kStageK,
                      kMaxSteps = op::kRouterPart / kStageK;
    const int64_t steps = ceil_div(hidden, kStageK);
    return ceil_div(steps, std::clamp(ceil_div(steps, kSplits), kMinSteps, kMaxSteps));
}

void launch_wgmma_logits(const LogitsGemm& job, float* sums, const Launch& on) {
    constexpr const char* kOp = "router_logits";
    const int64_t steps = ceil_div(job.hidden, kStageK), splits = logit_splits(job.hidden);
    const int64_t col_tiles = ceil_div(job.experts, kTileCols);
    const LogitTiles tiles{.tokens = job.tokens,
                           .experts = job.experts,
                           .hidden = job.hidden,
                           .col_tiles = col_tiles,
                           .pairs = ceil_div(job.tokens, kClusterCtas * kTileRows) * col_tiles * splits,
                           .steps = static_cast<int>(steps),
                           .split_steps = static_cast<int>(ceil_div(steps, splits)),
                           .splits = static_cast<int>(splits),
                           .sums = sums};
    const CUtensorMap map_x = tensor_map(job.x, DType::bf16, job.tokens, job.hidden, kTileRows / 2),
                      map_w = tensor_map(job.weight, DType::bf16, job.experts, job.hidden, kTileCols / 2);
    launch_clusters(logits_kernel, grid_for(tiles.pairs * kClusterCtas, on, 1), kSharedBytes<SharedStorage>,
                    on, kOp, tiles, map_x, map_w);
}

bool wgmma_supports_input_gradient(const InputGradient& job) {
    return job.dlogits.experts <= kMaxInputExperts && job.dlogits.tokens > 0;
}

void launch_wgmma_input_gradient(const InputGradient& job, const Launch& on) {
    constexpr const char* kOp = "router_logits_backward: dx";
    const SplitGradient& parts = job.dlogits;
    const int64_t pitch = SplitGradient::pitch_of(parts.experts);
    const int64_t row_tiles = ceil_div(parts.tokens, kTileRows), col_tiles = ceil_div(job.hidden, kTileCols);
    // Row tiles are cut into chunks of columns until they fill all SMs. If row tiles alone fill them, into
    // kFew chunks, so that the last wave is short.
    constexpr int64_t kFew = 4;
    const int64_t sms = grid_for(kNumSms, on, 1), fill = sms / row_tiles;
    const int64_t chunks = std::min(col_tiles, fill >= 2 ? fill : kFew);
    const InputTiles tiles{.tokens = parts.tokens,
                           .hidden = job.hidden,
                           .col_tiles = col_tiles,
                           .chunks = chunks,
                           .items = row_tiles * chunks,
                           .steps = static_cast<int>(ceil_div(parts.experts, kStageK)),
                           .pitch = static_cast<int>(pitch),
                           .has_addend = job.dx_in != nullptr,
                           .dx = static_cast<Bf16*>(job.dx)};
    const CUtensorMap map_dlogits = tensor_map(parts.data, DType::bf16, parts.tokens, 2 * pitch, kTileRows),
                      map_w = tensor_map(job.weight, DType::bf16, parts.experts, job.hidden, kStageK),
                      map_in = tensor_map(job.dx_in != nullptr ? job.dx_in : job.dx, DType::bf16,
                                          parts.tokens, job.hidden, kTileRows);
    launch_pdl(input_kernel, grid_for(tiles.items, on, 1), dim3(kCtaThreads), kInputStorageBytes, on, kOp,
               tiles, map_dlogits, map_w, map_in);
}

bool wgmma_supports_weight_gradient(const WeightGradient& job) {
    return job.dlogits.experts > kFewExperts && job.dlogits.tokens > 0 && is_aligned(job.dweight);
}

TokenBlocks token_blocks(int64_t tokens, int64_t hidden, int64_t experts) {
    constexpr int64_t kShortest = 512;
    const int64_t tiles =
        ceil_div(2 * SplitGradient::pitch_of(experts), kTileRows) * ceil_div(hidden, kTileCols);
    const int64_t filling = std::min(ceil_div(tokens, kShortest), kNumSms / std::max<int64_t>(1, tiles));
    const int64_t blocks = std::max<int64_t>({1, ceil_div(tokens, op::kRouterPart), filling});
    const int64_t length = std::max<int64_t>(1, ceil_div(ceil_div(tokens, blocks), kStageK)) * kStageK;
    return {length, ceil_div(tokens, length)};
}

void launch_wgmma_weight_gradient(const WeightGradient& job, const WeightSums& sums, const Launch& on) {
    const SplitGradient& parts = job.dlogits;
    const int64_t pitch = SplitGradient::pitch_of(parts.experts);
    for (int64_t first = 0; first < parts.blocks.count; first += sums.blocks) {
        const int64_t blocks = std::min(sums.blocks, parts.blocks.count - first);
        GemmProblem problem{};
        problem.grouped = Grouped::contraction;
        problem.groups = {blocks, parts.block_tokens + first, parts.block_offsets + first, parts.tokens};
        problem.m = 2 * pitch;
        problem.n = job.hidden;
        problem.k = parts.tokens;
        problem.a.data = parts.data;
        problem.a.dtype = DType::bf16;
        problem.b.data = job.x;
        problem.b.dtype = DType::bf16;
        problem.d = sums.data;
        launch_wgmma_bf16_wgrad(problem, {parts.tokens, 2 * pitch}, {parts.tokens, job.hidden}, on);
        const int64_t count = parts.experts * job.hidden / 4;
        launch_pdl(add_weight_parts_kernel, grid_for(ceil_div(count, kAddThreads), on), kAddThreads, on,
                   "router_logits_backward: dweight", reinterpret_cast<const float4*>(sums.data), blocks,
                   pitch * job.hidden / 4, count, first == 0 ? job.mode : Gradient::accumulate,
                   reinterpret_cast<float4*>(job.dweight));
    }
}

}  // namespace fp8flow::hopper::router
