// SPDX-License-Identifier: MIT
// The router's products of many experts on warpgroup instructions: logits, dx and dweight of BF16 operands.
// What logits.cu launches where shapes and alignment allow it; few experts and the rest:
// gemm/fallback/mma.cu. Stages, barriers, pairs of CTAs: gemm/sm90/pipeline.h.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/memory.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"
#include "kernels/hopper/router/gemm.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper {

namespace {

constexpr int kDepth = 64;  // contraction elements of a stage
constexpr int kPanel = 64,
              kPanelBytes = kDepth * kStageRowBytes;    // outputs across the contraction, and 64 rows of it
constexpr int kSideBytes = kTileRows * kStageRowBytes;  // 128 rows x 64 elements

// ---- logits
// sums[part, t, e] = the part's x W^T. Parts are cut by hidden alone, so that a token's logits depend on that
// token only.
struct LogitTiles {
    int64_t tokens, experts, hidden;
    int64_t col_tiles, pairs;  // pairs of row tiles x column tiles x parts
    int steps, part_steps, parts;
    float* sums;

    struct Place {
        int64_t row, col, part;
        int first_step, steps;
    };
    __device__ Place place(int64_t pair, int rank) const {
        const int64_t part = pair % parts, tile = pair / parts;
        const int first = static_cast<int>(part) * part_steps;
        return {(tile / col_tiles * kPair + rank) * kTileRows, tile % col_tiles * kTileCols, part, first,
                min(part_steps, steps - first)};
    }
};

// One warpgroup: 64 rows by 256 columns, 128 sums a thread; the next stage's products start before the last
// one's are waited for.
__device__ void multiply_logits(const LogitTiles& job, WgmmaShared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, quad = thread % 4;
    const int row0 = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int rank = static_cast<int>(cluster_rank());
    RingPosition<kStages> stage;
    for (int64_t pair = blockIdx.x / kPair; pair < job.pairs; pair += gridDim.x / kPair) {
        const LogitTiles::Place at = job.place(pair, rank);
        float sum[128];
        int before = 0;  // stage whose products may still be under way
        for (int step = 0; step < at.steps; ++step) {
            mbarrier_wait(&shared.full[stage.index], stage.parity);
            const uint8_t *a = shared.stages[stage.index], *b = a + kSideBytes;
            const uint64_t at_a = k_major_descriptor(a + warpgroup * 64 * kStageRowBytes),
                           at_b = k_major_descriptor(b);
            wgmma_fence();
            wgmma_fence_operand(sum);
#pragma unroll
            for (int k = 0; k < kDepth / 16; ++k)
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
        float* const to = job.sums + (at.part * job.tokens + at.row + row0) * job.experts + at.col + first;
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

// Work at T=4096, H=7168, E=256: 15 GFLOP (20 us at 770 TFLOP/s); x 58.7 MB from memory (14 us); sums 16.8 MB
// out. A CTA owns 128 x 256 outputs over a quarter of the contraction, 128 CTAs; W is common to the pair of a
// cluster, so the L2 delivers 115 MB (19 us at 6 TB/s; tiles of 64 x 128 over the whole contraction made it
// deliver 352 MB: 83 us). add_blocks adds the parts (16.8 MB from L2). Barriers: gemm/sm90/pipeline.h.
// Deterministic: a sum is one thread's, over ascending h, written once.
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    logits_kernel(const __grid_constant__ LogitTiles job, const __grid_constant__ CUtensorMap map_x,
                  const __grid_constant__ CUtensorMap map_w) {
    const auto load = [&](WgmmaShared& shared) {
        const int rank = static_cast<int>(cluster_rank());
        RingPosition<kStages> stage;
        for (int64_t pair = blockIdx.x / kPair; pair < job.pairs; pair += gridDim.x / kPair) {
            const LogitTiles::Place at = job.place(pair, rank);
            const int row = static_cast<int>(at.row), col = static_cast<int>(at.col);
            for (int step = 0; step < at.steps; ++step) {
                const int k = (at.first_step + step) * kDepth;
                Mbarrier* const full = &shared.full[stage.index];
                mbarrier_wait(&shared.empty[stage.index], stage.parity ^ 1);  // in both CTAs
                mbarrier_arrive_expect_tx(full, kStageBytes);
                uint8_t *a = shared.stages[stage.index], *b = a + kSideBytes;
                load_operand<2>(Load::own, rank, &map_x, full, a, kSideBytes / 2,
                                [&](int i) { return make_int2(k, row + i * kTileRows / 2); });
                load_operand<2>(Load::common, rank, &map_w, full, b, kTileCols / 2 * kStageRowBytes,
                                [&](int i) { return make_int2(k, col + i * kTileCols / 2); });
                stage.advance();
            }
        }
    };
    run_roles(load, [&](WgmmaShared& shared, int warpgroup) { multiply_logits(job, shared, warpgroup); });
}

// ---- dx
constexpr int kInputStages = 3, kMostSteps = 4;  // of the contraction over the experts
constexpr int kInputStageBytes = kTileCols / kPanel * kPanelBytes;
constexpr int kInHalves = 2;  // dx_in of a tile comes in stages of 128 columns
static_assert(kInputStageBytes == kTileCols / kInHalves / kPanel * kSideBytes);
static_assert(kMostSteps * kDepth == kMostInputExperts);

struct InputShared {
    alignas(1024) uint8_t dlogits[2][kMostSteps][kSideBytes];
    alignas(1024) uint8_t stages[kInputStages][kInputStageBytes];
    Mbarrier dlogits_full[1], dlogits_empty[1], full[kInputStages], empty[kInputStages];
};
constexpr size_t kInputShared = sizeof(InputShared) + 1024;
static_assert(kInputShared <= 232448);

// A row tile by a chunk of its column tiles.
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

__device__ void load_input_tiles(const InputTiles& job, InputShared& shared, const CUtensorMap* map_dlogits,
                                 const CUtensorMap* map_w, const CUtensorMap* map_in) {
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
        mbarrier_arrive_expect_tx(&shared.dlogits_full[0], static_cast<uint32_t>(2 * job.steps * kSideBytes));
        for (int part = 0; part < 2; ++part)
            for (int step = 0; step < job.steps; ++step)
                tma_load(map_dlogits, &shared.dlogits_full[0], shared.dlogits[part][step],
                         part * job.pitch + step * kDepth, row);
        rows.advance();
        for (int64_t tile = at.first; tile < at.last; ++tile) {
            const int col = static_cast<int>(tile * kTileCols);
            for (int step = 0; step < job.steps; ++step)
                next_stage([&](Mbarrier* full, uint8_t* to) {
#pragma unroll
                    for (int i = 0; i < kTileCols / kPanel; ++i)
                        tma_load(map_w, full, to + i * kPanelBytes, col + i * kPanel, step * kDepth);
                });
            if (!job.has_addend) continue;
            for (int half = 0; half < kInHalves; ++half)
                next_stage([&](Mbarrier* full, uint8_t* to) {
                    const int first = col + half * kTileCols / kInHalves;
#pragma unroll
                    for (int i = 0; i < kInputStageBytes / kSideBytes; ++i)
                        tma_load(map_in, full, to + i * kSideBytes, first + i * kPanel, row);
                });
        }
    }
}

// A computing warp is done with what the barrier guards, in all its lanes.
__device__ __forceinline__ void release(Mbarrier* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// A finished tile's part of a thread, rounded: word 2 * j + r holds two columns of chunk j (of 8) of its row
// r (of two, 8 apart).
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

// One warpgroup: 64 rows by 256 columns. A finished tile is stored behind the next one's first products.
__device__ void multiply_input_tiles(const InputTiles& job, InputShared& shared, int warpgroup) {
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
            int before = 0;  // stage whose products may still be under way
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
                for (int k = 0; k < kDepth / 16; ++k) {
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
                if (step > 0) release(&shared.empty[before]);
                before = stage.index;
                stage.advance();
            }
            wgmma_wait<0>();
            wgmma_fence_operand(sum);
            release(&shared.empty[before]);
            if (job.has_addend) {
#pragma unroll
                for (int half = 0; half < kInHalves; ++half) {
                    constexpr int kChunks = kTileCols / kInHalves / 8;
                    mbarrier_wait(&shared.full[stage.index], stage.parity);
                    const uint8_t* const in = shared.stages[stage.index] + row0 * kStageRowBytes + quad * 4;
#pragma unroll
                    for (int j = 0; j < kChunks; ++j) {
                        // 16-byte chunks of a row of 128 bytes lie swizzled by the row's last three bits
                        const uint8_t* const chunk = in + j / 8 * kSideBytes + ((j % 8) ^ (row0 % 8)) * 16;
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const uint32_t two =
                                *reinterpret_cast<const uint32_t*>(chunk + 8 * r * kStageRowBytes);
                            float* const v = sum + 4 * (half * kChunks + j) + 2 * r;
                            v[0] += __uint_as_float(two << 16);
                            v[1] += __uint_as_float(two & 0xFFFF0000u);
                        }
                    }
                    release(&shared.empty[stage.index]);
                    stage.advance();
                }
            }
#pragma unroll
            for (int i = 0; i < 64; ++i) finished.words[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
            finished.row = at.row + row0;
            finished.col = tile * kTileCols;
            unstored = true;
        }
        release(&shared.dlogits_empty[0]);
    }
    if (unstored) store_finished(job, finished);
}

// Work at T=4096, H=7168, E=256: two parts of 15 GFLOP (40 us at 770 TFLOP/s); dx_in and dx 117 MB (29 us). A
// CTA keeps both parts of 128 tokens' dlogits in shared memory (128 KiB) and walks a quarter of the columns,
// 128 CTAs: W is read once for both parts, 115 MB from L2, and dx_in arrives in stages of the same ring
// behind a tile's W, so nobody waits for memory (64 x 128 tiles loaded 470 MB from L2). Shared memory:
// dlogits; three stages of 32 KiB; barriers. Barriers: full[s] one arrival + 32 KiB; empty[s] one arrival a
// computing warp, after its last product from the stage or its last read of dx_in; dlogits_full one arrival +
// all boxes; dlogits_empty one arrival a computing warp after the item's last product. dx may be dx_in: a CTA
// stores a tile after it has read it, and tiles are apart. Deterministic: an element of dx is one thread's
// sum over ascending e, written once.
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    input_kernel(const __grid_constant__ InputTiles job, const __grid_constant__ CUtensorMap map_dlogits,
                 const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_in) {
    InputShared& shared = prepare_shared<InputShared>([](InputShared& s) {
        init_ring(s.dlogits_full, s.dlogits_empty, kMathWarps);
        init_ring(s.full, s.empty, kMathWarps);
    });
    const int role = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        release_registers<kLoaderRegisters>();
        if (threadIdx.x == 0) load_input_tiles(job, shared, &map_dlogits, &map_w, &map_in);
    } else {
        acquire_registers<kMathRegisters>();
        multiply_input_tiles(job, shared, role - 1);
    }
}

// ---- dweight
// dweight (+)= over the blocks of tokens, ascending, the larger part's product + the smaller part's. Moves:
// the products once, from L2 where they fit (14.7 MB a block at H=7168, E=256), dweight once. A thread takes
// four neighbours; one writer an element: deterministic.
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

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

bool wgmma_takes_logits(const LogitProduct& job) {
    return job.experts > kNarrowExperts && job.experts % 8 == 0 && job.tokens > 0 && is_aligned(job.logits);
}

int64_t logit_parts(int64_t hidden) {
    constexpr int64_t kParts = 4, kFewestSteps = op::kRouterBlock / kDepth,
                      kMostSteps = op::kRouterPart / kDepth;
    const int64_t steps = ceil_div(hidden, kDepth);
    return ceil_div(steps, std::clamp(ceil_div(steps, kParts), kFewestSteps, kMostSteps));
}

void launch_wgmma_logits(const LogitProduct& job, float* sums, const Launch& on) {
    constexpr const char* kOp = "router_logits";
    const int64_t steps = ceil_div(job.hidden, kDepth), parts = logit_parts(job.hidden);
    const int64_t col_tiles = ceil_div(job.experts, kTileCols);
    const LogitTiles tiles{.tokens = job.tokens,
                           .experts = job.experts,
                           .hidden = job.hidden,
                           .col_tiles = col_tiles,
                           .pairs = ceil_div(job.tokens, kPair * kTileRows) * col_tiles * parts,
                           .steps = static_cast<int>(steps),
                           .part_steps = static_cast<int>(ceil_div(steps, parts)),
                           .parts = static_cast<int>(parts),
                           .sums = sums};
    const CUtensorMap map_x = tensor_map(job.x, DType::bf16, job.tokens, job.hidden, kTileRows / 2),
                      map_w = tensor_map(job.weight, DType::bf16, job.experts, job.hidden, kTileCols / 2);
    allow_shared_memory(logits_kernel, kSharedBytes, kOp);
    launch_wgmma_pairs(logits_kernel, grid_for(tiles.pairs * kPair, on, 1), kSharedBytes, on, kOp, tiles,
                       map_x, map_w);
}

bool wgmma_takes_input_gradient(const InputGradient& job) {
    return job.dlogits.experts <= kMostInputExperts && job.dlogits.tokens > 0;
}

void launch_wgmma_input_gradient(const InputGradient& job, const Launch& on) {
    constexpr const char* kOp = "router_logits_backward: dx";
    const GradientParts& parts = job.dlogits;
    const int64_t pitch = GradientParts::pitch_of(parts.experts);
    const int64_t row_tiles = ceil_div(parts.tokens, kTileRows), col_tiles = ceil_div(job.hidden, kTileCols);
    // Row tiles are cut into chunks of columns until they fill the chip; where they do so by themselves, so
    // that the last wave is short.
    constexpr int64_t kFew = 4;
    const int64_t sms = grid_for(kNumSms, on, 1), fill = sms / row_tiles;
    const int64_t chunks = std::min(col_tiles, fill >= 2 ? fill : kFew);
    const InputTiles tiles{.tokens = parts.tokens,
                           .hidden = job.hidden,
                           .col_tiles = col_tiles,
                           .chunks = chunks,
                           .items = row_tiles * chunks,
                           .steps = static_cast<int>(ceil_div(parts.experts, kDepth)),
                           .pitch = static_cast<int>(pitch),
                           .has_addend = job.dx_in != nullptr,
                           .dx = static_cast<Bf16*>(job.dx)};
    const CUtensorMap map_dlogits = tensor_map(parts.data, DType::bf16, parts.tokens, 2 * pitch, kTileRows),
                      map_w = tensor_map(job.weight, DType::bf16, parts.experts, job.hidden, kDepth),
                      map_in = tensor_map(job.dx_in != nullptr ? job.dx_in : job.dx, DType::bf16,
                                          parts.tokens, job.hidden, kTileRows);
    allow_shared_memory(input_kernel, kInputShared, kOp);
    launch_pdl(input_kernel, grid_for(tiles.items, on, 1), dim3(kWgmmaThreads), kInputShared, on, kOp, tiles,
               map_dlogits, map_w, map_in);
}

bool wgmma_takes_weight_gradient(const WeightGradient& job) {
    return job.dlogits.experts > kNarrowExperts && job.dlogits.tokens > 0 && is_aligned(job.dweight);
}

TokenBlocks token_blocks(int64_t tokens, int64_t hidden, int64_t experts) {
    constexpr int64_t kShortest = 512;
    const int64_t tiles =
        ceil_div(2 * GradientParts::pitch_of(experts), kTileRows) * ceil_div(hidden, kTileCols);
    const int64_t filling = std::min(ceil_div(tokens, kShortest), kNumSms / std::max<int64_t>(1, tiles));
    const int64_t blocks = std::max<int64_t>({1, ceil_div(tokens, op::kRouterPart), filling});
    const int64_t length = std::max<int64_t>(1, ceil_div(ceil_div(tokens, blocks), kDepth)) * kDepth;
    return {length, ceil_div(tokens, length)};
}

void launch_wgmma_weight_gradient(const WeightGradient& job, const WeightSums& sums, const Launch& on) {
    const GradientParts& parts = job.dlogits;
    const int64_t pitch = GradientParts::pitch_of(parts.experts);
    for (int64_t first = 0; first < parts.blocks.count; first += sums.blocks) {
        const int64_t blocks = std::min(sums.blocks, parts.blocks.count - first);
        DeviceProduct product{};
        product.grouped = Grouped::contraction;
        product.groups = {blocks, parts.block_tokens + first, parts.block_offsets + first, parts.tokens};
        product.m = 2 * pitch;
        product.n = job.hidden;
        product.k = parts.tokens;
        product.a.data = parts.data;
        product.a.dtype = DType::bf16;
        product.b.data = job.x;
        product.b.dtype = DType::bf16;
        product.d = sums.data;
        launch_wgmma_bf16_wgrad(product, {parts.tokens, 2 * pitch}, {parts.tokens, job.hidden}, on);
        const int64_t count = parts.experts * job.hidden / 4;
        launch_pdl(add_weight_parts_kernel, grid_for(ceil_div(count, kAddThreads), on), kAddThreads, on,
                   "router_logits_backward: dweight", reinterpret_cast<const float4*>(sums.data), blocks,
                   pitch * job.hidden / 4, count, first == 0 ? job.mode : Gradient::accumulate,
                   reinterpret_cast<float4*>(job.dweight));
    }
}

}  // namespace fp8flow::hopper
