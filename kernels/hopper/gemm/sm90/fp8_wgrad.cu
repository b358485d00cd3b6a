// SPDX-License-Identifier: MIT
// Grouped FP8 weight gradients (wgmma): dW [group, M, N] FP32 or BF16 (+)= dY^T X over the rows of each
// group, from transposed copies, with a scale per 128 of the contraction, for tiles (tile128) or for rows and
// columns (vec128). Group sizes are read on the device. Sets::two: a tile's steps are those of the first set
// of operands, then those of the second; the producers choose tensor map, index and scales by the step. Read
// first: pipeline.h, fp8_scales.h, wgrad.h.
//
// Floor at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 1.4 ms at the 1400 TFLOP/s that the power limit
// leaves; D is 3.76 GB, 0.87 ms to write and 1.90 ms to read and write in these tiles; operands are 0.37 GB.
// The two must overlap: one after the other they take 2.3 ms (overwrite) and 3.3 ms (accumulate).
//
// Grid, roles: persistent, one CTA an SM, tiles of 128 x 256, clusters of two CTAs with B multicast: 16 KiB
// from L2 for every 512 cycles of MMA (7.5 GB). Four producer warps: one thread for A and the tile ring, one
// for the B of each consumer warpgroup; the fourth warp zeroes the tiles of groups without rows, which the
// consumers never see. A consumer warpgroup owns 128 x 128: two blocks of 64 rows, 128 sums and 64 partial
// sums a thread. Raster: bands of 4096 rows, so that a group's operands (11 MB) are read from memory once and
// stay in L2, and D is touched once.
//
// Epilogue: a warp owns 16 rows of a block and its own staging boxes, so it waits for no other warp. The sums
// of one block go to the staging boxes during wgmma of the other, and TMA stores them. An SM writes at most
// 32 bytes a clock to L2, all together 19 each, so the boxes are not yet free when the second block needs
// them. Therefore a tile's first two steps, and its last two where D is overwritten, run together, first
// block first: the first block is stored during the last wgmma batches of the second, the second during the
// first two batches of the next tile, a half in each. Direct stores from registers would make a warpgroup
// wait as long. Accumulating: the old values of both blocks are loaded through the staging boxes during the
// mainloop: the second block's are added to its sums at once (kFetchStep, kAddStep), then the first block's,
// when it is stored. Reduce-add in memory runs at 1.4 TB/s, load and store at 3.9.
// D in BF16: half the bytes, boxes for both blocks, so all old values are loaded at kFetchStep, and each
// block is added to them and rounded when it is stored.
//
// Squares (Squares::sum): each store adds the squares of what it writes, a word of sums a thread from a
// tile's end to the next one's begin, where the lanes add theirs. A short tile's second block is then loaded
// and stored like the first: the sums of a reduce-add in memory are known there only.
//
// Shared memory: stages of [128 rows x 128 bytes], 128-byte swizzled: 4 of A and 2 x 3 of B (160 KiB); with
// row and column scales 3 + 2 x 3 and these scales; 8 KiB of staging boxes a warp (64 KiB); tile ring;
// barriers.
//
//   barrier                    arrivals of a phase                            waited for by
//   a_full[s], b_full[w][s]    1 producer + 16 KiB (+ 512 bytes of scales)    warps that read the stage
//   a_empty[s], b_empty[w][s]  1 a warp, of both CTAs, that reads the stage   producer that writes there
//   tile_full[r]               1 A's producer                                 consumer threads
//   tile_empty[r]              1 a consumer thread                            A's producer
//   d_full[warp]               1 lane 0 + 8 KiB of old D                      the warp
//
// Lane 0 of a warp issues its copies from and to D and waits until the boxes may be written again.
// cluster_sync before the first copy and before exit.
//
// Deterministic: an element of D is one thread's sum over ascending k; its old value is added once, at a step
// that depends only on its place and on the rows of its group, whatever the other groups hold.
//
// Measured (bursts): 1.79 and 2.50 ms in the program, 1.82 and 2.30 stand-alone on another machine, where
// step 10's kernel took 1.94 and 2.65 (docs/worklogs/gemm.md, step 12; bounds: steps 9 and 13).
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/fp8_scales.h"
#include "kernels/hopper/gemm/sm90/wgrad.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kStageOutputs = 128;  // rows of A, or columns of B, in a stage
constexpr uint32_t kOperandStageBytes = kStageOutputs * kStageRowBytes;
constexpr uint32_t kScaleBytes = kStageOutputs * sizeof(float);
constexpr int kOperandBoxRows = kStageOutputs / 2;  // of one TMA load of an operand
constexpr int kStagesB = 3;
// Accumulate: the steps after which the second block's old values are loaded into the staging boxes, which
// have been stored by then, and after which they are added to its sums; the first block's are loaded next.
// Tiles of fewer steps than kLongSteps reduce-add the second block in memory.
constexpr int kFetchStep = 2, kAddStep = 5, kLongSteps = kFetchStep + 3;
static_assert(kTileRows == kStageOutputs && kWarpgroupCols == kStageOutputs);

// Tile scales of a warpgroup, one a step: address of step 0, extrapolated for the second set.
template <Sets kSets> struct TileScales {
    const float *a[kNumSets<kSets>], *b[kNumSets<kSets>];
    int first_steps, steps;
};

template <ScaleMode kScaleMode, Sets kSets> struct WgradStorage {
    static constexpr int kStagesA = kScaleMode == ScaleMode::tiles ? 4 : 3;
    alignas(1024) uint8_t a[kStagesA][kOperandStageBytes];
    alignas(1024) uint8_t b[kConsumerWarpgroups][kStagesB][kOperandStageBytes];
    alignas(1024) Staging staging[kConsumerWarps];
    // of the stages; tile scales are not staged in shared memory
    alignas(16) float row_scales[kStagesA][has_row_scales(kScaleMode) ? kStageOutputs : 1];
    alignas(16) float col_scales[kConsumerWarpgroups][kStagesB]
                                [has_column_scales(kScaleMode) ? kStageOutputs : 1];
    WgradTile<kSets> tiles[kTileSlots];
    Mbarrier a_full[kStagesA], a_empty[kStagesA];
    Mbarrier b_full[kConsumerWarpgroups][kStagesB], b_empty[kConsumerWarpgroups][kStagesB];
    Mbarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    Mbarrier d_full[kConsumerWarps];
    TileScales<kSets> tile_scales[kConsumerWarps];
};
template <ScaleMode kScaleMode, Sets kSets>
constexpr size_t kWgradStorageBytes = sizeof(WgradStorage<kScaleMode, kSets>) + 1024;
static_assert(kWgradStorageBytes<ScaleMode::tiles, Sets::two> <= kMaxSharedBytes &&
              kWgradStorageBytes<ScaleMode::rows_columns, Sets::two> <= kMaxSharedBytes);

// Tensor maps of the operands of each set, and of D.
template <Sets kSets> struct WgradMaps { CUtensorMap a[kNumSets<kSets>], b[kNumSets<kSets>], d; };

// ---- producers: one thread for A and the tile ring (groups with rows only), one for the B of each consumer
// warpgroup
//
// Scales at contraction index k; both sets have the same stride.
__device__ __forceinline__ const float* scales_at(const OperandScale& s, const void* scales, int64_t k,
                                                  int64_t output) {
    return static_cast<const float*>(scales) + k / kFp8StageK * s.block_stride + output;
}

// Where the operand of a step is loaded from.
struct StepSource {
    const CUtensorMap* map;
    const void* scales;
    int64_t k;
};
template <Sets kSets>
__device__ __forceinline__ StepSource step_source_a(const GemmProblem& p, const WgradMaps<kSets>& maps,
                                                    const WgradTile<kSets>& tile, int step) {
    if constexpr (kSets == Sets::two)
        if (step >= tile.first_steps)
            return {&maps.a[1], p.second.a.scale.scales, tile.second_a_k + step * kFp8StageK};
    return {&maps.a[0], p.a.scale.scales, tile.a_k + step * kFp8StageK};
}
template <Sets kSets>
__device__ __forceinline__ StepSource step_source_b(const GemmProblem& p, const WgradMaps<kSets>& maps,
                                                    const WgradTile<kSets>& tile, int step) {
    if constexpr (kSets == Sets::two)
        if (step >= tile.first_steps)
            return {&maps.b[1], p.second.b.scale.scales, tile.second_b_k + step * kFp8StageK};
    return {&maps.b[0], p.b.scale.scales, tile.b_k + step * kFp8StageK};
}

// Loads one operand of a stage, from contraction index k and output index `first` on; multicast: half of it,
// for both CTAs.
__device__ __forceinline__ void load_operand_stage(bool multicast, const CUtensorMap* map, Mbarrier* full,
                                                   uint8_t* to, int64_t k, int64_t first) {
    const int x = static_cast<int>(k), y = static_cast<int>(first);
    load_operand<2>(multicast ? Load::multicast : Load::own, static_cast<int>(cluster_rank()), map, full, to,
                    kOperandBoxRows * kStageRowBytes,
                    [&](int i) { return make_int2(x, y + i * kOperandBoxRows); });
}

template <ScaleMode kScaleMode, Sets kSets>
__device__ void produce_a(const GemmProblem& p, WgradStorage<kScaleMode, kSets>& shared,
                          const WgradMaps<kSets>& maps) {
    RingPosition<WgradStorage<kScaleMode, kSets>::kStagesA> stage;
    RingPosition<kTileSlots> ring;
    for_each_tile<kFp8StageK, kSets>(p, [&](const WgradTile<kSets>& tile) {
        if (tile.steps == 0 && !tile.past_end) return;
        mbarrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        mbarrier_arrive(&shared.tile_full[ring.index]);
        ring.advance();
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Mbarrier* full = &shared.a_full[stage.index];
            const StepSource from = step_source_a<kSets>(p, maps, tile, step);
            mbarrier_wait(&shared.a_empty[stage.index], stage.parity ^ 1);  // consumers of both CTAs
            mbarrier_arrive_expect_tx(full,
                                      kOperandStageBytes + (has_row_scales(kScaleMode) ? kScaleBytes : 0));
            load_operand_stage(tile.multicast == Multicast::a, from.map, full, shared.a[stage.index], from.k,
                               tile.a_output);
            if (has_row_scales(kScaleMode))
                bulk_load(scales_at(p.a.scale, from.scales, from.k, tile.a_output), full,
                          shared.row_scales[stage.index], kScaleBytes);
            stage.advance();
        }
    });
}

template <ScaleMode kScaleMode, Sets kSets>
__device__ void produce_b(const GemmProblem& p, WgradStorage<kScaleMode, kSets>& shared,
                          const WgradMaps<kSets>& maps, int warpgroup) {
    RingPosition<kStagesB> stage;
    for_each_tile<kFp8StageK, kSets>(p, [&](const WgradTile<kSets>& tile) {
        const int64_t col = tile.b_output + warpgroup * kWarpgroupCols;
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Mbarrier* full = &shared.b_full[warpgroup][stage.index];
            const StepSource from = step_source_b<kSets>(p, maps, tile, step);
            mbarrier_wait(&shared.b_empty[warpgroup][stage.index],
                          stage.parity ^ 1);  // consumers of both CTAs
            mbarrier_arrive_expect_tx(full,
                                      kOperandStageBytes + (has_column_scales(kScaleMode) ? kScaleBytes : 0));
            load_operand_stage(tile.multicast == Multicast::b, from.map, full,
                               shared.b[warpgroup][stage.index], from.k, col);
            if (has_column_scales(kScaleMode))  // columns past the last are not stored: any scale will do
                bulk_load(scales_at(p.b.scale, from.scales, from.k, min(col, p.n - kWarpgroupCols)), full,
                          shared.col_scales[warpgroup][stage.index], kScaleBytes);
            stage.advance();
        }
    });
}

// One consumer warpgroup. During the first wgmma batch of a step: release of the stage before, factors of
// this step. During the second: wait for the next stage. The epilogue is spread over the mainloop as the head
// of the file says; a tile's first and last two steps are separate code, so that the steps between them are a
// short loop. Between the end of one batch and the issue of the next only the 64 promotions of a thread
// remain. The last stage of all is never released: no producer waits for it. A step reads the scales of its
// stage before it issues the next batch.
template <class Wgmma, Gradient kMode, DType kOutput, ScaleMode kScaleMode, Sets kSets, Squares kSquares>
__device__ void mainloop(const GemmProblem& p, WgradStorage<kScaleMode, kSets>& shared,
                         const CUtensorMap* map_d, int warpgroup) {
    using Shared = WgradStorage<kScaleMode, kSets>;
    constexpr int kStagesA = Shared::kStagesA;
    constexpr bool kRowScales = has_row_scales(kScaleMode), kAdds = kMode == Gradient::accumulate,
                   kBf16 = kOutput == DType::bf16;
    constexpr int kRows = kRowScales ? 4 : 1;
    // steps that edge_steps runs together at the end; of two, the first block would be stored before its old
    // values in FP32 have arrived
    constexpr int kLastSteps = kAdds && !kBf16 ? 1 : 2;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * kWarpRows + lane / 4;  // this thread's rows: row0 + {0, 8} of each 64
    const int warp = warp_uniform(warpgroup * 4 + thread / 32);
    Staging& staging = shared.staging[warp];
    const uint32_t other = cluster_rank() ^ 1, other_a = cluster_address(shared.a_empty, other),
                   other_b = cluster_address(shared.b_empty[warpgroup], other);
    RingPosition<kStagesA> a_stage;
    RingPosition<kStagesB> b_stage;
    RingPosition<kTileSlots> ring;
    WgradTile<kSets> tile{};
    int steps = 0;
    // of block 0; `previous`: of the tile whose block 1 has not been stored yet, at first of none
    BlockOrigin origin{}, previous{0, kNoRow, 0};
    PatchSquares<kSquares> squares;
    TileScales<kSets>& tile_scales = shared.tile_scales[warp];
    uint32_t d_parity = 0;
    bool first = true, more = true, previous_short = false;
    float sum[2][64];
    // tile scales: lane l holds those of step l of every 32 steps, read long before they are used
    float scales = 0.0f, next_a = 0.0f, next_b = 0.0f;
    const auto read_scales = [&](int step) {
        if (kRowScales) return;
        // without a branch: after one, descriptors would not stay in uniform registers
        step = min(step, steps - 1);
        const int set = kSets == Sets::two && step >= tile_scales.first_steps ? 1 : 0;
        next_a = tile_scales.a[set][step * p.a.scale.block_stride];
        next_b = tile_scales.b[set][step * p.b.scale.block_stride];
    };
    const auto next_work = [&] {
        if (!next_tile(shared, ring, tile)) return false;
        steps = tile.steps;
        const int64_t col = tile.b_output + warpgroup * kWarpgroupCols;
        origin = {static_cast<int>(col), static_cast<int>(tile.a_output) + warp % 4 * kWarpRows,
                  static_cast<int>(tile.group)};
        if (!kRowScales) {
            if (lane == 0) {
                const int64_t tile_a = tile.a_output / kTileRows * p.a.scale.output_stride,
                              tile_b = min(col, p.n - 1) / kWarpgroupCols * p.b.scale.output_stride;
                tile_scales.a[0] = scales_at(p.a.scale, p.a.scale.scales, tile.a_k, tile_a);
                tile_scales.b[0] = scales_at(p.b.scale, p.b.scale.scales, tile.b_k, tile_b);
                if constexpr (kSets == Sets::two) {
                    tile_scales.a[1] = scales_at(p.a.scale, p.second.a.scale.scales, tile.second_a_k, tile_a);
                    tile_scales.b[1] = scales_at(p.b.scale, p.second.b.scale.scales, tile.second_b_k, tile_b);
                    tile_scales.first_steps = tile.first_steps;
                }
            }
            __syncwarp();
        }
        read_scales(lane);
        return true;
    };
    // descriptors of the current stage, advanced during wgmma
    uint64_t a = k_major_descriptor(shared.a[0]), b = k_major_descriptor(shared.b[warpgroup][0]);
    const auto next_stage = [&] {
        a_stage.advance();
        b_stage.advance();
        a = advance_descriptor(
            a, static_cast<int>(kOperandStageBytes) * (a_stage.index == 0 ? 1 - kStagesA : 1));
        b = advance_descriptor(
            b, static_cast<int>(kOperandStageBytes) * (b_stage.index == 0 ? 1 - kStagesB : 1));
    };
    const auto wait_for_stage = [&] {
        mbarrier_wait(&shared.a_full[a_stage.index], a_stage.parity);
        mbarrier_wait(&shared.b_full[warpgroup][b_stage.index], b_stage.parity);
    };
    const auto release_previous_stage = [&] {
        __syncwarp();
        const int last_a = (a_stage.index == 0 ? kStagesA : a_stage.index) - 1,
                  last_b = (b_stage.index == 0 ? kStagesB : b_stage.index) - 1;
        if (lane == 0) {
            mbarrier_arrive(&shared.a_empty[last_a]);
            mbarrier_arrive(&shared.b_empty[warpgroup][last_b]);
        }
        if (lane == 1) {
            mbarrier_arrive_remote(other_a + last_a * sizeof(Mbarrier));
            mbarrier_arrive_remote(other_b + last_b * sizeof(Mbarrier));
        }
    };
    const auto clear = [](float(&sums)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
    };
    // old values: in FP32 of one block, in BF16 of both
    const auto fetch_block = [&](int block) {
        if (lane == 0) {
            if constexpr (kBf16)
                fetch_both_bf16(map_d, staging, &shared.d_full[warp], origin);
            else
                fetch_d(map_d, staging, &shared.d_full[warp],
                        {origin.column, origin.row + 64 * block, origin.group});
        }
        __syncwarp();
    };
    const auto wait_for_block = [&] {
        mbarrier_wait(&shared.d_full[warp], d_parity);
        d_parity ^= 1;
    };
    const auto store_second = [&](int half) {
        const BlockOrigin second{previous.column, previous.row + 64, previous.group};
        if constexpr (kBf16)
            store_half_bf16<kMode, Order::fragment>(p, map_d, staging, second, sum[1], 1, half, squares);
        else if (kSquares == Squares::none || !kAdds || !previous_short)
            store_half<StoreD::overwrite, Order::fragment>(map_d, staging, second, sum[1], half, squares,
                                                           kAdds && previous_short);
        else {  // the sums of a reduce-add in memory are known there only
            if (half == 0) {
                if (lane == 0) fetch_d(map_d, staging, &shared.d_full[warp], second);
                __syncwarp();
                wait_for_block();
            }
            store_half<StoreD::add_pairs, Order::fragment>(map_d, staging, second, sum[1], half, squares);
        }
        if (half == 1) clear(sum[1]);
    };
    const auto store_first = [&] {
        if (kAdds) {
            if (steps < kLongSteps) fetch_block(0);
            wait_for_block();
        }
        if constexpr (kBf16) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_half_bf16<kMode, Order::fragment>(p, map_d, staging, origin, sum[0], 0, half, squares);
        } else {
            store_block<kAdds ? StoreD::add_pairs : StoreD::overwrite>(map_d, staging, origin, sum[0],
                                                                       squares);
        }
        clear(sum[0]);
        previous = origin;
        if (kAdds) previous_short = steps < kLongSteps;
    };
    const auto wait_and_promote = [](float(&partial)[64], float(&sums)[64], float above, float below,
                                     const float2* columns) {
        wait_mma(partial);
        if (has_column_scales(kScaleMode))
            promote(partial, sums, above, below, columns);
        else
            promote(partial, sums, above, below);
    };
    const auto read_factors = [&](int step, float(&factor)[kRows]) {
        if (step % 32 == 0) {
            scales = next_a * next_b;
            read_scales(step + 32 + lane);
        }
        factor[0] = __shfl_sync(kFullMask, scales, step % 32);
        if (kRowScales) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                factor[i] = shared.row_scales[a_stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)];
        }
        return reinterpret_cast<const float2*>(shared.col_scales[warpgroup][b_stage.index] + 2 * (lane % 4));
    };
    // A tile's first steps or its last, two where there are as many: wgmma of the first block, then of the
    // second.
    const auto edge_steps = [&](int step, bool two, bool begins, bool ends) {
        float partial[64], factor[2][kRows];
        const float2* columns[2];
        start_mma<Wgmma>(partial, a, b);
        if (!first) release_previous_stage();
        if (begins) {
            store_second(0);
            if (!two) store_second(1);
        }
        columns[0] = read_factors(step, factor[0]);
        const uint64_t first_a = advance_descriptor(a, 64 * kStageRowBytes), first_b = b;
        if (two) {
            next_stage();
            wait_for_stage();
        }
        wait_and_promote(partial, sum[0], factor[0][0], factor[0][kRows > 1 ? 1 : 0], columns[0]);
        first = false;
        if (two) {
            start_mma<Wgmma>(partial, a, b);
            if (begins) store_second(1);
            columns[1] = read_factors(step + 1, factor[1]);
            wait_and_promote(partial, sum[0], factor[1][0], factor[1][kRows > 1 ? 1 : 0], columns[1]);
        }
        const auto advance = [&] {
            next_stage();
            if (ends) more = next_work();
            if (!ends || more) wait_for_stage();
        };
        start_mma<Wgmma>(partial, first_a, first_b);
        if (begins) squares.finish(p, previous);
        if (ends) store_first();
        if (!two) advance();
        wait_and_promote(partial, sum[1], factor[0][kRows / 2], factor[0][kRows - 1], columns[0]);
        if (two) {
            start_mma<Wgmma>(partial, advance_descriptor(a, 64 * kStageRowBytes), b);
            release_previous_stage();
            advance();
            wait_and_promote(partial, sum[1], factor[1][kRows / 2], factor[1][kRows - 1], columns[1]);
        }
    };
    // A step between them.
    const auto middle_step = [&]<bool kAdding>(int step) {
        float partial[64], factor[kRows];
        start_mma<Wgmma>(partial, a, b);
        release_previous_stage();
        const float2* columns = read_factors(step, factor);
        wait_and_promote(partial, sum[0], factor[0], factor[kRows > 1 ? 1 : 0], columns);
        start_mma<Wgmma>(partial, advance_descriptor(a, 64 * kStageRowBytes), b);
        if (kAdds && !kAdding && step == kFetchStep && steps >= kLongSteps) fetch_block(1);
        if (kAdding) {
            wait_for_block();
            add_staged(staging, sum[1]);
            __syncwarp();
            fetch_block(0);
        }
        next_stage();
        wait_for_stage();
        wait_and_promote(partial, sum[1], factor[kRows / 2], factor[kRows - 1], columns);
    };

    if (!next_work()) return;
    clear(sum[0]);
    clear(sum[1]);
    wait_for_stage();
    while (more) {
        const int count = steps, last = max(count - kLastSteps, 2);
        edge_steps(0, count > 1, true, count <= 2);
        if (count <= 2) continue;
        int step = 2;
        if (kAdds && !kBf16 && count >= kLongSteps) {
            for (const int add_step = min(kAddStep, last - 1); step < add_step; ++step)
                middle_step.template operator()<false>(step);
            middle_step.template operator()<true>(step++);
        }
        for (; step < last; ++step) middle_step.template operator()<false>(step);
        edge_steps(last, kLastSteps == 2 && count > 3, false, true);
    }
    store_second(0);
    store_second(1);
    squares.finish(p, previous);
    if (lane == 0) bulk_wait_all();
}

// ---- the CTA
template <class Wgmma, DType kOutput, ScaleMode kScaleMode, Sets kSets, Squares kSquares>
__global__ void __launch_bounds__(kCtaThreads, 1)
    wgrad_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ WgradMaps<kSets> maps) {
    using Shared = WgradStorage<kScaleMode, kSets>;
    Shared& shared = prepare_shared<Shared>([&](Shared& s) {
        init_ring(s.a_full, s.a_empty, kConsumerWarps * kClusterCtas);
        for (int w = 0; w < kConsumerWarpgroups; ++w)
            init_ring(s.b_full[w], s.b_empty[w], kConsumerWarps / kConsumerWarpgroups * kClusterCtas);
        init_ring(s.tile_full, s.tile_empty, kConsumerThreads);
        for (Mbarrier& full : s.d_full) mbarrier_init(&full, 1);
    });
    const int role = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        release_registers<kProducerRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp > kConsumerWarpgroups) {
            if (problem.mode == Gradient::overwrite) clear_tiles<kFp8StageK, kSets, kSquares>(problem);
            return;
        }
        if (threadIdx.x % 32 != 0) return;
        if (warp == 0)
            produce_a(problem, shared, maps);
        else
            produce_b(problem, shared, maps, warp - 1);
        cluster_sync_unaligned();
    } else {
        acquire_registers<kConsumerRegisters>();
        if (problem.mode == Gradient::accumulate)
            mainloop<Wgmma, Gradient::accumulate, kOutput, kScaleMode, kSets, kSquares>(problem, shared,
                                                                                        &maps.d, role - 1);
        else
            mainloop<Wgmma, Gradient::overwrite, kOutput, kScaleMode, kSets, kSquares>(problem, shared,
                                                                                       &maps.d, role - 1);
        cluster_sync();  // no CTA exits while the other may still write to it
    }
}

template <class Wgmma, ScaleMode kScaleMode, Sets kSets>
void launch(const GemmProblem& p, const Launch& how, const WgradMaps<kSets>& maps) {
    const auto run = [&]<Squares kSquares>() {
        const auto kernel = p.d_dtype == DType::bf16
                                ? wgrad_kernel<Wgmma, DType::bf16, kScaleMode, kSets, kSquares>
                                : wgrad_kernel<Wgmma, DType::f32, kScaleMode, kSets, kSquares>;
        launch_persistent(kernel, p, how, kWgradStorageBytes<kScaleMode, kSets>, maps);
    };
    p.squares != nullptr ? run.template operator()<Squares::sum>() : run.template operator()<Squares::none>();
}

template <Sets kSets>
void launch_sets(const GemmProblem& p, const Launch& how, const WgradMaps<kSets>& maps) {
    const bool columns = p.b.scale.outputs_per_scale == 1, e5m2 = p.a.dtype == DType::e5m2;
    const auto run = columns ? (e5m2 ? launch<WgmmaE5m2, ScaleMode::rows_columns, kSets>
                                     : launch<WgmmaE4m3, ScaleMode::rows_columns, kSets>)
                             : (e5m2 ? launch<WgmmaE5m2, ScaleMode::tiles, kSets>
                                     : launch<WgmmaE4m3, ScaleMode::tiles, kSets>);
    run(p, how, maps);
}

CUtensorMap operand_map(const GemmOperand& operand, const StoredShape& shape) {
    return tensor_map(operand.data, operand.dtype, shape.rows, shape.cols, kOperandBoxRows);
}
CUtensorMap gradient_map(const GemmProblem& p) {
    return tensor_map_of_groups(p.d, p.d_dtype, p.groups.num_groups, p.m, p.n, kWarpRows);
}

}  // namespace

void launch_wgmma_fp8_wgrad(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                            const Launch& how) {
    launch_sets<Sets::one>(p, how, {{operand_map(p.a, a)}, {operand_map(p.b, b)}, gradient_map(p)});
}

void launch_wgmma_fp8_wgrad_two(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                                const StoredShape& second_a, const StoredShape& second_b, const Launch& how) {
    launch_sets<Sets::two>(p, how,
                           {{operand_map(p.a, a), operand_map(p.second.a, second_a)},
                            {operand_map(p.b, b), operand_map(p.second.b, second_b)},
                            gradient_map(p)});
}

}  // namespace fp8flow::hopper::gemm
