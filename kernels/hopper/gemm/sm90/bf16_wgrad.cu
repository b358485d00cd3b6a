// SPDX-License-Identifier: MIT
// BF16 weight gradients (contraction grouped, D FP32), on Hopper's warpgroup instructions; D leaves, and is
// added to, through shared memory and TMA, behind products. Group sizes are read on the device.
// Read next: pipeline.h (tiles), wgrad.h (the way of D), fp8_wgrad.cu (the FP8 ones), docs/worklogs/gemm.md.
//
// Floor at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 2.45 ms at the 785 TFLOP/s of a dense product; D
// is 3.76 GB, 0.87 ms to write and 1.90 ms to read and write in these tiles; operands are 0.74 GB. So the two
// must overlap.
//
// One CTA: four loading warps and two computing warpgroups, on every SM, walking tiles of 128 x
// 256 of D in a fixed order. Each warpgroup owns 128 x 128 of a tile as two blocks of 64 rows: 128 sums a
// thread. A stage is 32 of the contraction, 256 cycles of products a warpgroup; the next stage's are under
// way before the last one's are waited for, so that one warpgroup alone keeps the tensor cores busy while the
// other does something else. B (each its own 128 columns) has a ring for each warpgroup, and a loading thread
// for each; A (the 128 rows of both) one ring. A or B is common to the pair of CTAs of a cluster. A group's
// operands (23 MB at the shape above) are read from memory once and stay in L2: tiles are walked in bands of
// 4096 rows. Tiles of groups without rows never come to the warpgroups: a loading warp clears them.
//
// D: a warp owns 16 rows of a block, and a slab of shared memory for them, so it waits for nobody else. At a
// tile's end block 0's sums go to the slab while block 1's last products run, and block 1's into 64 registers
// of their own; then the next tile's products overwrite both. Block 1 follows block 0 through the slab in two
// halves, each behind a stage of products. Where D is added to, TMA has brought the block's part
// of it into the slab before (kFetchSecond, kFetchFirst): all of D is read and written once, nothing is added
// in memory, which runs at 1.4 TB/s.
//
// Cycles of a tile of 1024 rows, on one SM:
//   products                         16,384
//   D written (128 KiB at 19 bytes)   6,900, at most 32 bytes a cycle: 4,096
//   D read and written               14,000
//   a warpgroup's pause at the end      600-800: sums through the slab (200-400, of which 256-512 behind its
//   own products), 64 moves, the refilled
//                                            pipeline; kLead stages (1,536 cycles of both) keep the two
//                                            warpgroups' pauses apart
//   a slab's way (32 KiB a warpgroup) 1,000-1,700 out, about as long in; the four ways of a tile have
//   3,000-6,000 each
//
// Operands lie across the contraction: a side of a stage is two panels of 64 outputs x 32 contraction rows,
// 128-byte swizzled (8 KiB). Rows of the contraction beyond the group are overwritten by zeros in shared
// memory: each warpgroup clears its B and A, A therefore twice, by the same zeros. Shared memory: 8 stages of
// A and 2 x 6 of B (160 KiB); slabs of 8 KiB a warp (64 KiB); the ring of tiles; barriers. Barriers:
// a_full[s], b_full[w][s] one arrival + 8 KiB of copies, waited for by the warps that read the stage;
// a_empty[s], b_empty[w][s] one arrival a warp, of either CTA, that reads such a stage, after its last
// product from it, waited for by the loading thread that writes there; tile_full[r] one arrival of A's
// loader, tile_empty[r] one a computing thread that has read the tile; d_full[warp] one arrival + 8 KiB of D.
// Lane 0 of a warp starts its copies to and from D, and waits until the slab may be written again. Named
// barriers: at kBegin the first warpgroup tells the second, once, that it is kLead stages into its first
// tile; 3 and 4: the threads of one warpgroup have cleared. The CTAs of a cluster meet before the first copy
// and before they leave. Deterministic: an element of D is one thread's sum over ascending k, added to its
// old value once, whatever the other groups hold.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/wgrad.h"

namespace fp8flow::hopper {

namespace {

constexpr int kDepth = 32;  // contraction elements of a stage
constexpr int kPanel = 64;  // outputs of a panel
constexpr int kPanelBytes = kDepth * kStageRowBytes;
constexpr int kSidePanels = 2;  // 128 outputs: the rows of a tile, or a warpgroup's columns
constexpr uint32_t kSideBytes = kSidePanels * kPanelBytes;
constexpr int kStagesA = 256 / kDepth, kStagesB = 192 / kDepth;
constexpr int kLead = 96 / kDepth;     // stages by which the first warpgroup begins earlier
constexpr int kRound = 1024 / kDepth;  // stages over which a tile's accesses to D are spread, or all of them
static_assert(kTileRows == kSidePanels * kPanel && kColumns == kSidePanels * kPanel);

struct WgradShared {
    alignas(1024) uint8_t a[kStagesA][kSideBytes];
    alignas(1024) uint8_t b[kMathWarpgroups][kStagesB][kSideBytes];
    alignas(1024) Slab slabs[kMathWarps];
    MathTile tiles[kRing];
    Mbarrier a_full[kStagesA], a_empty[kStagesA];
    Mbarrier b_full[kMathWarpgroups][kStagesB], b_empty[kMathWarpgroups][kStagesB];
    Mbarrier tile_full[kRing], tile_empty[kRing];
    Mbarrier d_full[kMathWarps];
};
constexpr size_t kWgradBytes = sizeof(WgradShared) + 1024;
static_assert(kWgradBytes <= 232448);

// ---- loading: one thread for A and the ring of tiles (of groups with rows), one for each warpgroup's B
// ---------------------------------- Two at least, so that a tile's first step and its last are never the
// same; the second of a short one is cleared like all that is beyond the group.
__device__ __forceinline__ int steps_of(const MathTile& tile) { return tile.steps == 1 ? 2 : tile.steps; }

// One operand's part of a stage, from contraction row k and output `first` on; half of it, for both CTAs,
// where it is common.
__device__ __forceinline__ void load_side(bool common, const CUtensorMap* map, Mbarrier* full, uint8_t* to,
                                          int64_t k, int64_t first) {
    const int x = static_cast<int>(first), y = static_cast<int>(k);
    load_operand<kSidePanels>(common ? Load::common : Load::own, static_cast<int>(cluster_rank()), map, full,
                              to, kPanelBytes, [&](int i) { return make_int2(x + i * kPanel, y); });
}

__device__ void load_a(const DeviceProduct& p, WgradShared& shared, const CUtensorMap* map) {
    RingPosition<kStagesA> stage;
    RingPosition<kRing> ring;
    walk_tiles<kDepth>(p, [&](const MathTile& tile) {
        if (tile.steps == 0 && !tile.past_end) return;
        mbarrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        mbarrier_arrive(&shared.tile_full[ring.index]);
        ring.advance();
#pragma unroll 1
        for (int step = 0; step < steps_of(tile); ++step) {
            Mbarrier* full = &shared.a_full[stage.index];
            mbarrier_wait(&shared.a_empty[stage.index], stage.parity ^ 1);  // in both CTAs
            mbarrier_arrive_expect_tx(full, kSideBytes);
            load_side(tile.common == Common::a, map, full, shared.a[stage.index], tile.a_k + step * kDepth,
                      tile.a_output);
            stage.advance();
        }
    });
}

__device__ void load_b(const DeviceProduct& p, WgradShared& shared, const CUtensorMap* map, int warpgroup) {
    RingPosition<kStagesB> stage;
    walk_tiles<kDepth>(p, [&](const MathTile& tile) {
#pragma unroll 1
        for (int step = 0; step < steps_of(tile); ++step) {
            Mbarrier* full = &shared.b_full[warpgroup][stage.index];
            mbarrier_wait(&shared.b_empty[warpgroup][stage.index], stage.parity ^ 1);  // in both CTAs
            mbarrier_arrive_expect_tx(full, kSideBytes);
            load_side(tile.common == Common::b, map, full, shared.b[warpgroup][stage.index],
                      tile.b_k + step * kDepth, tile.b_output + warpgroup * kColumns);
            stage.advance();
        }
    });
}

// ---- computing: one warpgroup
// Where in a tile, in sixteenths of its first kRound steps: D of block 1 of the tile before is fetched; that
// block leaves, the second half one sixteenth later; D of block 0 is fetched.
constexpr int kFetchSecond = 3, kLeaveSecond = 7, kFetchFirst = 10;
constexpr int kBegin = 1;  // named barrier; clear_rows has 3 and 4

// The stage's contraction rows from `first` on become zero in all panels of both sides. Each thread has seen
// the copies arrive.
__device__ void clear_rows(uint8_t* a, uint8_t* b, int first, int warpgroup) {
    const int words = (kDepth - first) * kStageRowBytes / 16;  // of a panel
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < 2 * kSidePanels * words; i += kWarpgroup) {
        const int panel = i / words;
        uint8_t* const side = panel < kSidePanels ? a : b;
        *reinterpret_cast<uint4*>(side + panel % kSidePanels * kPanelBytes + first * kStageRowBytes +
                                  i % words * 16) = uint4{};
    }
    fence_async_shared();
    named_barrier_sync(3 + warpgroup, kWarpgroup);
}

// Between two stages of products stand a release and two waits. The accesses to D stand between loops of
// stages, not in them. The compiler keeps products under way over all of this as long as it can count them:
// sums are read in straight line behind their products.
template <Gradient kMode>
__device__ void multiply_tiles(WgradShared& shared, const CUtensorMap* map_d, int64_t rows, int warpgroup) {
    constexpr bool kAdds = kMode == Gradient::accumulate;
    constexpr Leave kLeave = kAdds ? Leave::add_boxes : Leave::store;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32) - kWarpgroup / 32;
    Slab& slab = shared.slabs[warp];
    Mbarrier* const d_full = &shared.d_full[warp];
    RingPosition<kStagesA> a_stage;
    RingPosition<kStagesB> b_stage;
    RingPosition<kRing> ring;
    int steps = 0, depth = 0;
    // of block 0, and of the block 1 that is in `waiting`, at first of none
    Place place{}, second{0, static_cast<int>(rows), 0};
    uint32_t d_parity = 0;
    float sum[2][64], waiting[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) waiting[i] = 0.0f;

    const auto take_tile = [&] {
        MathTile tile;
        if (!next_tile(shared, ring, tile)) return false;
        steps = steps_of(tile);
        depth = warp_uniform(tile.depth);
        place = {static_cast<int>(tile.b_output) + warpgroup * kColumns,
                 static_cast<int>(tile.a_output) + warp % 4 * kWarpRows, static_cast<int>(tile.group)};
        return true;
    };
    // operands of the stage that is multiplied next
    uint64_t a = mn_major_descriptor<kDepth>(shared.a[0]),
             b = mn_major_descriptor<kDepth>(shared.b[warpgroup][0]);
    const auto wait_for_stage = [&] {
        mbarrier_wait(&shared.a_full[a_stage.index], a_stage.parity);
        mbarrier_wait(&shared.b_full[warpgroup][b_stage.index], b_stage.parity);
    };
    const auto next_stage = [&] {
        a_stage.advance();
        b_stage.advance();
        a = advance_descriptor(a, static_cast<int>(kSideBytes) * (a_stage.index == 0 ? 1 - kStagesA : 1));
        b = advance_descriptor(b, static_cast<int>(kSideBytes) * (b_stage.index == 0 ? 1 - kStagesB : 1));
    };
    const auto release_last_stage = [&] {
        const int last_a = (a_stage.index == 0 ? kStagesA : a_stage.index) - 1,
                  last_b = (b_stage.index == 0 ? kStagesB : b_stage.index) - 1;
        release_stages(&shared.a_empty[last_a], &shared.b_empty[warpgroup][last_b]);
    };
    const auto clear_behind = [&](int step) {  // of a tile's last stage, what is beyond the group
        if (const int rest = depth - step * kDepth; rest < kDepth)
            clear_rows(shared.a[a_stage.index], shared.b[warpgroup][b_stage.index], max(rest, 0), warpgroup);
    };
    // a block's products of 16 of the contraction
    const auto multiply = [&](int block, int k, int add) {
        constexpr int kBytes = 16 * kStageRowBytes;
        wgmma_bf16<1, 1>(sum[block], advance_descriptor(a, block * kPanelBytes + k * kBytes),
                         advance_descriptor(b, k * kBytes), add);
    };
    const auto start_block = [&](int block) {
        wgmma_fence();
        wgmma_fence_operand(sum[block]);
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) multiply(block, k, 1);
        wgmma_commit();
    };
    const auto start_both = [&]<bool kOver>() {
        wgmma_fence();
        wgmma_fence_operand(sum[0]);
        wgmma_fence_operand(sum[1]);
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
            multiply(0, k, !kOver || k > 0);
            multiply(1, k, !kOver || k > 0);
        }
        wgmma_commit();
    };
    const auto first_step = [&] {  // overwrites what the tile before has left in the sums
        wait_for_stage();
        clear_behind(0);
        start_both.template operator()<true>();
        next_stage();
    };
    const auto step_between = [&] {
        wait_for_stage();
        start_both.template operator()<false>();
        wgmma_wait<1>();
        release_last_stage();
        next_stage();
    };
    const auto last_step = [&] {  // block 0's products are done before block 1's
        wait_for_stage();
        clear_behind(steps - 1);
        start_block(0);
        start_block(1);
        wgmma_wait<2>();
        release_last_stage();
        next_stage();
    };
    const auto fetch_block = [&](const Place& of) {
        if (lane == 0) fetch(map_d, slab, d_full, of);
        __syncwarp();
    };
    const auto wait_for_block = [&] {
        mbarrier_wait(d_full, d_parity);
        d_parity ^= 1;
    };
    const auto leave_second = [&](int half) {
        leave_half<kLeave, Order::as_stored>(map_d, slab, second, waiting, half);
        __syncwarp();  // products are issued by whole warps
    };
    const auto leave_first = [&] {
        leave<kLeave>(map_d, slab, place, sum[0]);
        __syncwarp();
        second = {place.column, place.row + 64, place.group};
    };

    if (!take_tile()) return;
    if (warpgroup == 1) named_barrier_sync(kBegin, kMathThreads);
    for (bool first = true, more = true; more; first = false) {
        first_step();
        int step = 1;
        const auto go_on_to = [&](int end) {
#pragma unroll 1
            for (; step < end; ++step) step_between();
        };
        const auto sixteenths = [&](int count) { return min(min(steps, kRound) * count / 16, steps - 1); };
        if (first && warpgroup == 0) {
            go_on_to(min(kLead, steps - 1));
            named_barrier_arrive(kBegin, kMathThreads);
        }
        if (kAdds) {
            go_on_to(sixteenths(kFetchSecond));
            fetch_block(second);
        }
        go_on_to(sixteenths(kLeaveSecond));
        if (kAdds) wait_for_block();
        leave_second(0);
        go_on_to(sixteenths(kLeaveSecond + 1));
        leave_second(1);
        if (kAdds) {
            go_on_to(sixteenths(kFetchFirst));
            fetch_block(place);
        }
        go_on_to(steps - 1);
        last_step();

        if (kAdds) wait_for_block();
        wgmma_wait<1>();
        wgmma_fence_operand(sum[0]);
        leave_first();
        wgmma_wait<0>();
        wgmma_fence_operand(sum[1]);
        release_last_stage();
        set_aside(sum[1], waiting);
        more = take_tile();
    }
    if (kAdds) {
        fetch_block(second);
        wait_for_block();
    }
    leave_second(0);
    leave_second(1);
    if (lane == 0) bulk_wait_all();
}

// ---- the CTA
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    wgrad_kernel(const __grid_constant__ DeviceProduct product, const __grid_constant__ CUtensorMap map_a,
                 const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_d) {
    WgradShared& shared = prepare_shared<WgradShared>([](WgradShared& s) {
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
            if (product.mode == Gradient::overwrite) clear_tiles<kDepth>(product);
            return;
        }
        if (threadIdx.x % 32 != 0) return;
        if (warp == 0)
            load_a(product, shared, &map_a);
        else
            load_b(product, shared, &map_b, warp - 1);
        cluster_sync_unaligned();
    } else {
        acquire_registers<kMathRegisters>();
        if (product.mode == Gradient::accumulate)
            multiply_tiles<Gradient::accumulate>(shared, &map_d, product.m, role - 1);
        else
            multiply_tiles<Gradient::overwrite>(shared, &map_d, product.m, role - 1);
        cluster_sync();  // nobody leaves while the other CTA may write here
    }
}

}  // namespace

void launch_wgmma_bf16_wgrad(const DeviceProduct& p, const StoredShape& a, const StoredShape& b,
                             const Launch& launch) {
    const CUtensorMap map_a = tensor_map(p.a.data, p.a.dtype, a.rows, a.cols, kDepth),
                      map_b = tensor_map(p.b.data, p.b.dtype, b.rows, b.cols, kDepth),
                      map_d = tensor_map_f32(p.d, p.groups.num_groups, p.m, p.n, kWarpRows);
    launch_wgmma_kernel(wgrad_kernel, p, launch, kWgradBytes, map_a, map_b, map_d);
}

}  // namespace fp8flow::hopper
