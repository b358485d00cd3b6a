// SPDX-License-Identifier: MIT
// FP8 weight gradients with a scale per 128 of the contraction (contraction grouped, D FP32), on Hopper's
// warpgroup instructions; D leaves, and is added to, through shared memory and TMA. Group sizes
// are read on the device. Read next: pipeline.h (tiles), fp8_scales.h (products of a stage),
// docs/worklogs/gemm.md (what was tried and measured).
//
// Floor at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 1.4 ms at the 1400 TFLOP/s that the power limit
// leaves; D is 3.76 GB, 0.87 ms to write and 1.90 ms to read and write in these tiles; operands are 0.37 GB.
// So the two must overlap: one after the other they take 2.3 and 3.3 ms. Measured (bursts): 1.79 and 2.50 ms
// in the program, 1.82 and 2.30 stand-alone on another machine, where step 10's kernel took 1.94 and 2.65
// (worklog, step 12; bounds: steps 9 and 13).
// Sets::two: a tile's steps are those of the first set and those of the second: the loading threads choose
// map, index and scales by the step.
//
// One CTA: four loading warps and two computing warpgroups, on every SM, walking tiles of 128 x
// 256 of D in a fixed order; each warpgroup owns 128 x 128 of a tile: two blocks of 64 rows, 128 sums and 64
// partial sums a thread. B (each its own 128 columns) has a ring for each warpgroup, and a loading thread for
// each; A (the 128 rows of both) one ring. B is common to the pair of CTAs of a cluster, which makes 16 KiB
// from L2 for every 512 cycles of products (7.5 GB). Tiles of a group are walked in bands of 4096 rows: then
// one group's operands (11 MB) are read from memory once and stay in L2, and D is touched once. Tiles of
// groups without rows never come to the warpgroups: a loading warp clears them.
//
// D: a warp owns 16 rows of a block, and a slab of shared memory for them, so it waits for nobody else. A
// block's sums go to the slab behind products of the other block, and TMA takes them to D. A
// SM writes at most 32 bytes a clock to L2, all together 19 each, so the slab of the first block
// is not free for the second as soon as that is wanted. Hence a tile's first two steps, and where D is
// overwritten its last two, are multiplied together, first block first: the first block leaves behind the
// products of the second that end the tile, the second behind the first two of the next tile, a half behind
// each. From registers a warpgroup would wait for as long as the slab does. Where D is added to, both blocks
// of it come through the slab while the tile is multiplied: the second's to be added to its sums at once
// (kFetchStep, kAddStep), then the first's, to be added when it leaves. Additions in memory run at 1.4 TB/s,
// load and store at 3.9.
//
// Shared memory: 4 stages of A and 2 x 3 of B, [128 rows x 128 bytes] each, 128-byte swizzled (160 KiB); with
// a scale a row and a column 3 + 2 x 3 and their scales; slabs of 8 KiB a warp (64 KiB); the ring of tiles;
// barriers. Barriers: a_full[s], b_full[w][s] one arrival + 16 KiB of copies (+ 512 bytes of scales), waited
// for by the warps that read the stage; a_empty[s], b_empty[w][s] one arrival a warp, of either CTA, that
// reads such a stage, after its last product from it, waited for by the loading thread that writes there;
// tile_full[r] one arrival of A's loader, tile_empty[r] one a computing thread that has read the tile;
// d_full[warp] one arrival + 8 KiB of D. Lane 0 of a warp starts its copies to and from D, and waits until
// the slab may be written again. The CTAs of a cluster meet before the first copy and before they leave.
// Deterministic: an element of D is one thread's sum over ascending k, its old value added once and at a step
// that follows from its place and the rows of its group, whatever the other groups hold.
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

namespace fp8flow::hopper {

namespace {

constexpr int kStageSide = 128;  // rows of A, or columns of B, in a stage
constexpr uint32_t kSideBytes = kStageSide * kStageRowBytes;
constexpr uint32_t kScaleBytes = kStageSide * sizeof(float);
constexpr int kBoxRows = kStageSide / 2;  // of a copy of operands
constexpr int kStagesB = 3;
// Where D is added to: the steps behind which the second block's old values come to the slab, which the tile
// before has left by then, and are added to its sums, when the first block's follow. Tiles of fewer steps
// than kLongSteps leave the second block's addition to the memory.
constexpr int kFetchStep = 2, kAddStep = 5, kLongSteps = kFetchStep + 3;
static_assert(kTileRows == kStageSide && kColumns == kStageSide);

// Where a warpgroup's scales of whole tiles are, one a step: those of step 0, in the second set as if all
// steps were of it.
template <Sets kSets> struct TileScales {
    const float *a[kNumSets<kSets>], *b[kNumSets<kSets>];
    int first_steps, steps;
};

template <Scales kScales, Sets kSets> struct WgradShared {
    static constexpr int kStagesA = kScales == Scales::tiles ? 4 : 3;
    alignas(1024) uint8_t a[kStagesA][kSideBytes];
    alignas(1024) uint8_t b[kMathWarpgroups][kStagesB][kSideBytes];
    alignas(1024) Slab slabs[kMathWarps];
    // of the stages; scales of whole tiles are not kept here
    alignas(16) float row_scales[kStagesA][has_row_scales(kScales) ? kStageSide : 1];
    alignas(16) float col_scales[kMathWarpgroups][kStagesB][has_column_scales(kScales) ? kStageSide : 1];
    GradientTile<kSets> tiles[kRing];
    Mbarrier a_full[kStagesA], a_empty[kStagesA];
    Mbarrier b_full[kMathWarpgroups][kStagesB], b_empty[kMathWarpgroups][kStagesB];
    Mbarrier tile_full[kRing], tile_empty[kRing];
    Mbarrier d_full[kMathWarps];
    TileScales<kSets> tile_scales[kMathWarps];
};
template <Scales kScales, Sets kSets>
constexpr size_t kWgradBytes = sizeof(WgradShared<kScales, kSets>) + 1024;
static_assert(kWgradBytes<Scales::tiles, Sets::two> <= 232448 &&
              kWgradBytes<Scales::rows_columns, Sets::two> <= 232448);

// The operands of each set, and D, as TMA sees them.
template <Sets kSets> struct WgradMaps { CUtensorMap a[kNumSets<kSets>], b[kNumSets<kSets>], d; };

// ---- loading: one thread for A and the ring of tiles (of groups with rows), one for each warpgroup's B
// ---------------------------------- Of contraction index k; both sets have the same stride.
__device__ __forceinline__ const float* scales_at(const DeviceScale& s, const void* scales, int64_t k,
                                                  int64_t output) {
    return static_cast<const float*>(scales) + k / kFp8Depth * s.block_stride + output;
}

// Where one operand of a step is.
struct Source {
    const CUtensorMap* map;
    const void* scales;
    int64_t k;
};
template <Sets kSets>
__device__ __forceinline__ Source source_a(const DeviceProduct& p, const WgradMaps<kSets>& maps,
                                           const GradientTile<kSets>& tile, int step) {
    if constexpr (kSets == Sets::two)
        if (step >= tile.first_steps)
            return {&maps.a[1], p.second.a.scale.scales, tile.second_a_k + step * kFp8Depth};
    return {&maps.a[0], p.a.scale.scales, tile.a_k + step * kFp8Depth};
}
template <Sets kSets>
__device__ __forceinline__ Source source_b(const DeviceProduct& p, const WgradMaps<kSets>& maps,
                                           const GradientTile<kSets>& tile, int step) {
    if constexpr (kSets == Sets::two)
        if (step >= tile.first_steps)
            return {&maps.b[1], p.second.b.scale.scales, tile.second_b_k + step * kFp8Depth};
    return {&maps.b[0], p.b.scale.scales, tile.b_k + step * kFp8Depth};
}

// One operand's part of a stage, from contraction index k and output index `first` on; half of it, for both
// CTAs, where it is common.
__device__ __forceinline__ void load_side(bool common, const CUtensorMap* map, Mbarrier* full, uint8_t* to,
                                          int64_t k, int64_t first) {
    const int x = static_cast<int>(k), y = static_cast<int>(first);
    load_operand<2>(common ? Load::common : Load::own, static_cast<int>(cluster_rank()), map, full, to,
                    kBoxRows * kStageRowBytes, [&](int i) { return make_int2(x, y + i * kBoxRows); });
}

template <Scales kScales, Sets kSets>
__device__ void load_a(const DeviceProduct& p, WgradShared<kScales, kSets>& shared,
                       const WgradMaps<kSets>& maps) {
    RingPosition<WgradShared<kScales, kSets>::kStagesA> stage;
    RingPosition<kRing> ring;
    walk_tiles<kFp8Depth, kSets>(p, [&](const GradientTile<kSets>& tile) {
        if (tile.steps == 0 && !tile.past_end) return;
        mbarrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        mbarrier_arrive(&shared.tile_full[ring.index]);
        ring.advance();
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Mbarrier* full = &shared.a_full[stage.index];
            const Source from = source_a<kSets>(p, maps, tile, step);
            mbarrier_wait(&shared.a_empty[stage.index], stage.parity ^ 1);  // in both CTAs
            mbarrier_arrive_expect_tx(full, kSideBytes + (has_row_scales(kScales) ? kScaleBytes : 0));
            load_side(tile.common == Common::a, from.map, full, shared.a[stage.index], from.k, tile.a_output);
            if (has_row_scales(kScales))
                bulk_load(scales_at(p.a.scale, from.scales, from.k, tile.a_output), full,
                          shared.row_scales[stage.index], kScaleBytes);
            stage.advance();
        }
    });
}

template <Scales kScales, Sets kSets>
__device__ void load_b(const DeviceProduct& p, WgradShared<kScales, kSets>& shared,
                       const WgradMaps<kSets>& maps, int warpgroup) {
    RingPosition<kStagesB> stage;
    walk_tiles<kFp8Depth, kSets>(p, [&](const GradientTile<kSets>& tile) {
        const int64_t col = tile.b_output + warpgroup * kColumns;
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Mbarrier* full = &shared.b_full[warpgroup][stage.index];
            const Source from = source_b<kSets>(p, maps, tile, step);
            mbarrier_wait(&shared.b_empty[warpgroup][stage.index], stage.parity ^ 1);  // in both CTAs
            mbarrier_arrive_expect_tx(full, kSideBytes + (has_column_scales(kScales) ? kScaleBytes : 0));
            load_side(tile.common == Common::b, from.map, full, shared.b[warpgroup][stage.index], from.k,
                      col);
            if (has_column_scales(kScales))  // columns past the last are not stored: any scales will do
                bulk_load(scales_at(p.b.scale, from.scales, from.k, min(col, p.n - kColumns)), full,
                          shared.col_scales[warpgroup][stage.index], kScaleBytes);
            stage.advance();
        }
    });
}

// ---- computing: one warpgroup
// Behind the first product of a step: the release of the stage before, and this step's factors; behind the
// second: the wait for the next stage. A tile's blocks leave as the head of the file says; its first and last
// two steps are code of their own, so that the steps between them are a short loop. Between the end of one
// product and the start of the next only the 64 additions of a thread remain. The last stage of all is never
// released: nobody waits for it. What a step reads of a stage's scales it has read before it starts the next.
template <class Wgmma, Gradient kMode, Scales kScales, Sets kSets>
__device__ void multiply_tiles(const DeviceProduct& p, WgradShared<kScales, kSets>& shared,
                               const CUtensorMap* map_d, int warpgroup) {
    using Shared = WgradShared<kScales, kSets>;
    constexpr int kStagesA = Shared::kStagesA;
    constexpr bool kRowScales = has_row_scales(kScales), kAdds = kMode == Gradient::accumulate;
    constexpr int kRows = kRowScales ? 4 : 1;
    // that multiply_end takes together; of two, the first block would leave before what is added to it has
    // come
    constexpr int kLastSteps = kAdds ? 1 : 2;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * kWarpRows + lane / 4;  // this thread's rows: row0 + {0, 8} of each 64
    const int warp = warp_uniform(warpgroup * 4 + thread / 32);
    Slab& slab = shared.slabs[warp];
    const uint32_t other = cluster_rank() ^ 1, other_a = cluster_address(shared.a_empty, other),
                   other_b = cluster_address(shared.b_empty[warpgroup], other);
    RingPosition<kStagesA> a_stage;
    RingPosition<kStagesB> b_stage;
    RingPosition<kRing> ring;
    GradientTile<kSets> tile{};
    int steps = 0;
    // of block 0; `done`: of the tile whose block 1 has not left yet, at first of none
    Place place{}, done{0, static_cast<int>(p.m), 0};
    TileScales<kSets>& places = shared.tile_scales[warp];
    uint32_t d_parity = 0;
    bool first = true, more = true, done_short = false;
    float sum[2][64];
    // scales of whole tiles: lane l holds those of step l of every 32 steps, read long before they are
    // multiplied
    float scales = 0.0f, next_a = 0.0f, next_b = 0.0f;
    const auto read_scales = [&](int step) {
        if (kRowScales) return;
        // without a branch: behind one, descriptors would not stay in uniform registers
        step = min(step, steps - 1);
        const int set = kSets == Sets::two && step >= places.first_steps ? 1 : 0;
        next_a = places.a[set][step * p.a.scale.block_stride];
        next_b = places.b[set][step * p.b.scale.block_stride];
    };
    const auto take_tile = [&] {
        if (!next_tile(shared, ring, tile)) return false;
        steps = tile.steps;
        const int64_t col = tile.b_output + warpgroup * kColumns;
        place = {static_cast<int>(col), static_cast<int>(tile.a_output) + warp % 4 * kWarpRows,
                 static_cast<int>(tile.group)};
        if (!kRowScales) {
            if (lane == 0) {
                const int64_t tile_a = tile.a_output / kTileRows * p.a.scale.output_stride,
                              tile_b = min(col, p.n - 1) / kColumns * p.b.scale.output_stride;
                places.a[0] = scales_at(p.a.scale, p.a.scale.scales, tile.a_k, tile_a);
                places.b[0] = scales_at(p.b.scale, p.b.scale.scales, tile.b_k, tile_b);
                if constexpr (kSets == Sets::two) {
                    places.a[1] = scales_at(p.a.scale, p.second.a.scale.scales, tile.second_a_k, tile_a);
                    places.b[1] = scales_at(p.b.scale, p.second.b.scale.scales, tile.second_b_k, tile_b);
                    places.first_steps = tile.first_steps;
                }
            }
            __syncwarp();
        }
        read_scales(lane);
        return true;
    };
    // operands of the stage that is multiplied next; moved on behind products
    uint64_t a = k_major_descriptor(shared.a[0]), b = k_major_descriptor(shared.b[warpgroup][0]);
    const auto next_stage = [&] {
        a_stage.advance();
        b_stage.advance();
        a = advance_descriptor(a, static_cast<int>(kSideBytes) * (a_stage.index == 0 ? 1 - kStagesA : 1));
        b = advance_descriptor(b, static_cast<int>(kSideBytes) * (b_stage.index == 0 ? 1 - kStagesB : 1));
    };
    const auto wait_for_stage = [&] {
        mbarrier_wait(&shared.a_full[a_stage.index], a_stage.parity);
        mbarrier_wait(&shared.b_full[warpgroup][b_stage.index], b_stage.parity);
    };
    const auto release_last_stage = [&] {
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
    const auto take_place = [&](int block) {
        if (lane == 0)
            fetch(map_d, slab, &shared.d_full[warp], {place.column, place.row + 64 * block, place.group});
        __syncwarp();
    };
    const auto wait_for_place = [&] {
        mbarrier_wait(&shared.d_full[warp], d_parity);
        d_parity ^= 1;
    };
    const auto leave_second = [&](int half) {
        const Place second{done.column, done.row + 64, done.group};
        leave_half<Leave::store, Order::as_summed>(map_d, slab, second, sum[1], half, kAdds && done_short);
        if (half == 1) clear(sum[1]);
    };
    const auto leave_first = [&] {
        if (kAdds) {
            if (steps < kLongSteps) take_place(0);
            wait_for_place();
        }
        leave<kAdds ? Leave::add_here : Leave::store>(map_d, slab, place, sum[0]);
        clear(sum[0]);
        done = place;
        if (kAdds) done_short = steps < kLongSteps;
    };
    const auto finish = [](float(&partial)[64], float(&sums)[64], float above, float below,
                           const float2* columns) {
        wait_for_products(partial);
        if (has_column_scales(kScales))
            add_scaled(partial, sums, above, below, columns);
        else
            add_scaled(partial, sums, above, below);
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
    // A tile's first steps or its last, two where there are as many: the first block's products, then the
    // second's.
    const auto multiply_end = [&](int step, bool two, bool begins, bool ends) {
        float partial[64], factor[2][kRows];
        const float2* columns[2];
        start_products<Wgmma>(partial, a, b);
        if (!first) release_last_stage();
        if (begins) {
            leave_second(0);
            if (!two) leave_second(1);
        }
        columns[0] = read_factors(step, factor[0]);
        const uint64_t first_a = advance_descriptor(a, 64 * kStageRowBytes), first_b = b;
        if (two) {
            next_stage();
            wait_for_stage();
        }
        finish(partial, sum[0], factor[0][0], factor[0][kRows > 1 ? 1 : 0], columns[0]);
        first = false;
        if (two) {
            start_products<Wgmma>(partial, a, b);
            if (begins) leave_second(1);
            columns[1] = read_factors(step + 1, factor[1]);
            finish(partial, sum[0], factor[1][0], factor[1][kRows > 1 ? 1 : 0], columns[1]);
        }
        const auto go_on = [&] {
            next_stage();
            if (ends) more = take_tile();
            if (!ends || more) wait_for_stage();
        };
        start_products<Wgmma>(partial, first_a, first_b);
        if (ends) leave_first();
        if (!two) go_on();
        finish(partial, sum[1], factor[0][kRows / 2], factor[0][kRows - 1], columns[0]);
        if (two) {
            start_products<Wgmma>(partial, advance_descriptor(a, 64 * kStageRowBytes), b);
            release_last_stage();
            go_on();
            finish(partial, sum[1], factor[1][kRows / 2], factor[1][kRows - 1], columns[1]);
        }
    };
    // A step between them.
    const auto multiply = [&]<bool kAdding>(int step) {
        float partial[64], factor[kRows];
        start_products<Wgmma>(partial, a, b);
        release_last_stage();
        const float2* columns = read_factors(step, factor);
        finish(partial, sum[0], factor[0], factor[kRows > 1 ? 1 : 0], columns);
        start_products<Wgmma>(partial, advance_descriptor(a, 64 * kStageRowBytes), b);
        if (kAdds && !kAdding && step == kFetchStep && steps >= kLongSteps) take_place(1);
        if (kAdding) {
            wait_for_place();
            add_held(slab, sum[1]);
            __syncwarp();
            take_place(0);
        }
        next_stage();
        wait_for_stage();
        finish(partial, sum[1], factor[kRows / 2], factor[kRows - 1], columns);
    };

    if (!take_tile()) return;
    clear(sum[0]);
    clear(sum[1]);
    wait_for_stage();
    while (more) {
        const int count = steps, last = max(count - kLastSteps, 2);
        multiply_end(0, count > 1, true, count <= 2);
        if (count <= 2) continue;
        int step = 2;
        if (kAdds && count >= kLongSteps) {
            for (const int add_step = min(kAddStep, last - 1); step < add_step; ++step)
                multiply.template operator()<false>(step);
            multiply.template operator()<true>(step++);
        }
        for (; step < last; ++step) multiply.template operator()<false>(step);
        multiply_end(last, kLastSteps == 2 && count > 3, false, true);
    }
    leave_second(0);
    leave_second(1);
    if (lane == 0) bulk_wait_all();
}

// ---- the CTA
template <class Wgmma, Scales kScales, Sets kSets>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    wgrad_kernel(const __grid_constant__ DeviceProduct product,
                 const __grid_constant__ WgradMaps<kSets> maps) {
    using Shared = WgradShared<kScales, kSets>;
    Shared& shared = prepare_shared<Shared>([&](Shared& s) {
        init_ring(s.a_full, s.a_empty, kMathWarps * kPair);
        for (int w = 0; w < kMathWarpgroups; ++w)
            init_ring(s.b_full[w], s.b_empty[w], kMathWarps / kMathWarpgroups * kPair);
        init_ring(s.tile_full, s.tile_empty, kMathThreads);
        for (Mbarrier& full : s.d_full) mbarrier_init(&full, 1);
    });
    const int role = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    if (role == 0) {
        release_registers<kLoaderRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp > kMathWarpgroups) {
            if (product.mode == Gradient::overwrite) clear_tiles<kFp8Depth, kSets>(product);
            return;
        }
        if (threadIdx.x % 32 != 0) return;
        if (warp == 0)
            load_a(product, shared, maps);
        else
            load_b(product, shared, maps, warp - 1);
        cluster_sync_unaligned();
    } else {
        acquire_registers<kMathRegisters>();
        if (product.mode == Gradient::accumulate)
            multiply_tiles<Wgmma, Gradient::accumulate>(product, shared, &maps.d, role - 1);
        else
            multiply_tiles<Wgmma, Gradient::overwrite>(product, shared, &maps.d, role - 1);
        cluster_sync();  // nobody leaves while the other CTA may write here
    }
}

template <class Wgmma, Scales kScales, Sets kSets>
void launch(const DeviceProduct& p, const Launch& how, const WgradMaps<kSets>& maps) {
    launch_wgmma_kernel(wgrad_kernel<Wgmma, kScales, kSets>, p, how, kWgradBytes<kScales, kSets>, maps);
}

template <Sets kSets>
void launch_sets(const DeviceProduct& p, const Launch& how, const WgradMaps<kSets>& maps) {
    const bool columns = p.b.scale.outputs_per_scale == 1, e5m2 = p.a.dtype == DType::e5m2;
    const auto run =
        columns ? (e5m2 ? launch<WgmmaE5m2, Scales::rows_columns, kSets>
                        : launch<WgmmaE4m3, Scales::rows_columns, kSets>)
                : (e5m2 ? launch<WgmmaE5m2, Scales::tiles, kSets> : launch<WgmmaE4m3, Scales::tiles, kSets>);
    run(p, how, maps);
}

CUtensorMap operand_map(const DeviceOperand& operand, const StoredShape& shape) {
    return tensor_map(operand.data, operand.dtype, shape.rows, shape.cols, kBoxRows);
}
CUtensorMap gradient_map(const DeviceProduct& p) {
    return tensor_map_f32(p.d, p.groups.num_groups, p.m, p.n, kWarpRows);
}

}  // namespace

void launch_wgmma_wgrad(const DeviceProduct& p, const StoredShape& a, const StoredShape& b,
                        const Launch& how) {
    launch_sets<Sets::one>(p, how, {{operand_map(p.a, a)}, {operand_map(p.b, b)}, gradient_map(p)});
}

void launch_wgmma_wgrad_two(const DeviceProduct& p, const StoredShape& a, const StoredShape& b,
                            const StoredShape& second_a, const StoredShape& second_b, const Launch& how) {
    launch_sets<Sets::two>(p, how,
                           {{operand_map(p.a, a), operand_map(p.second.a, second_a)},
                            {operand_map(p.b, b), operand_map(p.second.b, second_b)},
                            gradient_map(p)});
}

}  // namespace fp8flow::hopper
