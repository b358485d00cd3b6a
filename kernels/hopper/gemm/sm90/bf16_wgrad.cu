// SPDX-License-Identifier: MIT
// Grouped BF16 weight gradients (wgmma): dW [group, M, N] FP32 or BF16 (+)= dY^T X over the rows of each
// group, both operands as stored (MN-major). Group sizes are read on the device. Read first: pipeline.h,
// wgrad.h (epilogue), fp8_wgrad.cu; what was tried: docs/worklogs/gemm.md.
//
// Floor at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 2.45 ms at the 785 TFLOP/s of a dense GEMM; D is
// 3.76 GB, 0.87 ms to write and 1.90 ms to read and write in these tiles; operands are 0.74 GB. The two must
// overlap.
//
// Grid, roles: persistent, one CTA an SM, tiles of 128 x 256, clusters of two CTAs with A or B multicast.
// Four producer warps: one thread for A and the tile ring, one for the B of each consumer warpgroup; the
// fourth warp zeroes the tiles of groups without rows, which the consumers never see. A consumer warpgroup
// owns 128 x 128 as two blocks of 64 rows: 128 sums a thread. A stage is 32 of the contraction, 256 cycles of
// MMA a warpgroup; the wgmma of the next stage are issued before the last ones are waited for, so that one
// warpgroup alone keeps the tensor cores busy while the other does something else. Raster: bands of 4096
// rows; a group's operands (23 MB at the shape above) are read from memory once and stay in L2. Contraction
// rows past the group are zeroed in shared memory: each warpgroup zeroes its B and A, A therefore twice.
//
// Epilogue: a warp owns 16 rows of a block and its own staging boxes, so it waits for no other warp. At a
// tile's end block 0's sums go to the boxes during block 1's last wgmma, and block 1's into 64 registers of
// their own; the next tile then overwrites both accumulators. Block 1 follows through the boxes in two
// halves, each during a stage of the next tile. Accumulating: TMA loads the block's old values into the boxes
// beforehand (kFetchSecond, kFetchFirst): D is read and written once, nothing is reduce-added in memory,
// which runs at 1.4 TB/s.
//
//   cycles of a tile of 1024 rows, on one SM
//   MMA                             16,384
//   D written (128 KiB)              6,900 at 19 bytes a cycle; at most 32 bytes a cycle: 4,096
//   D read and written              14,000
//   pause of a warpgroup, tile end     600-800: sums to the boxes (200-400, of which 256-512 overlap with
//                                      its own wgmma), 64 moves, pipeline refill; kLead stages (1,536 cycles
//                                      of both) keep the pauses of the two warpgroups apart
//   boxes out (32 KiB a warpgroup)   1,000-1,700, about as long in; a tile's four passes have 3,000-6,000
//   each
//
// Shared memory: an operand of a stage is two panels of 64 outputs x 32 contraction rows, 128-byte swizzled
// (8 KiB); 8 stages of A and 2 x 6 of B (160 KiB); 8 KiB of staging boxes a warp (64 KiB); tile ring;
// barriers.
//
//   barrier                    arrivals of a phase                            waited for by
//   a_full[s], b_full[w][s]    1 producer + 8 KiB                             warps that read the stage
//   a_empty[s], b_empty[w][s]  1 a warp, of both CTAs, that reads the stage   producer that writes there
//   tile_full[r]               1 A's producer                                 consumer threads
//   tile_empty[r]              1 a consumer thread                            A's producer
//   d_full[warp]               1 lane 0 + 8 KiB of old D                      the warp
//   named kBegin               once: warpgroup 0 is kLead stages into its first tile, warpgroup 1 starts
//   named 3, 4                 all threads of one warpgroup have zeroed the group's tail
//
// Lane 0 of a warp issues its copies from and to D and waits until the boxes may be written again.
// cluster_sync before the first copy and before exit.
//
// Deterministic: an element of D is one thread's sum over ascending k, added to its old value once, whatever
// the other groups hold.
#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/wgrad.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kStageK = 32;  // contraction elements of a stage
constexpr int kPanel = 64;   // outputs of an MN-major panel
constexpr int kPanelBytes = kStageK * kStageRowBytes;
constexpr int kOperandPanels = 2;  // 128 outputs: the rows of a tile, or a warpgroup's columns
constexpr uint32_t kOperandStageBytes = kOperandPanels * kPanelBytes;
constexpr int kStagesA = 256 / kStageK, kStagesB = 192 / kStageK;
constexpr int kLead = 96 / kStageK;           // stages by which warpgroup 0 is ahead
constexpr int kSpreadSteps = 1024 / kStageK;  // at most so many steps of a tile share its accesses to D
static_assert(kTileRows == kOperandPanels * kPanel && kWarpgroupCols == kOperandPanels * kPanel);

struct WgradStorage {
    alignas(1024) uint8_t a[kStagesA][kOperandStageBytes];
    alignas(1024) uint8_t b[kConsumerWarpgroups][kStagesB][kOperandStageBytes];
    alignas(1024) Staging staging[kConsumerWarps];
    WorkTile tiles[kTileSlots];
    Mbarrier a_full[kStagesA], a_empty[kStagesA];
    Mbarrier b_full[kConsumerWarpgroups][kStagesB], b_empty[kConsumerWarpgroups][kStagesB];
    Mbarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    Mbarrier d_full[kConsumerWarps];
};
constexpr size_t kWgradStorageBytes = sizeof(WgradStorage) + 1024;
static_assert(kWgradStorageBytes <= kMaxSharedBytes);

// ---- producers: one thread for A and the tile ring (groups with rows only), one for the B of each consumer
// warpgroup
//
// At least two steps, so that a tile's first step and its last are never the same; the second of a short tile
// is zeroed like everything past the group.
__device__ __forceinline__ int steps_of(const WorkTile& tile) { return tile.steps == 1 ? 2 : tile.steps; }

// Loads one operand of a stage, from contraction row k and output `first` on; multicast: half of it, for both
// CTAs.
__device__ __forceinline__ void load_operand_stage(bool multicast, const CUtensorMap* map, Mbarrier* full,
                                                   uint8_t* to, int64_t k, int64_t first) {
    const int x = static_cast<int>(first), y = static_cast<int>(k);
    load_operand<kOperandPanels>(multicast ? Load::multicast : Load::own, static_cast<int>(cluster_rank()),
                                 map, full, to, kPanelBytes,
                                 [&](int i) { return make_int2(x + i * kPanel, y); });
}

__device__ void produce_a(const GemmProblem& p, WgradStorage& shared, const CUtensorMap* map) {
    RingPosition<kStagesA> stage;
    RingPosition<kTileSlots> ring;
    for_each_tile<kStageK>(p, [&](const WorkTile& tile) {
        if (tile.steps == 0 && !tile.past_end) return;
        mbarrier_wait(&shared.tile_empty[ring.index], ring.parity ^ 1);
        shared.tiles[ring.index] = tile;
        mbarrier_arrive(&shared.tile_full[ring.index]);
        ring.advance();
#pragma unroll 1
        for (int step = 0; step < steps_of(tile); ++step) {
            Mbarrier* full = &shared.a_full[stage.index];
            mbarrier_wait(&shared.a_empty[stage.index], stage.parity ^ 1);  // consumers of both CTAs
            mbarrier_arrive_expect_tx(full, kOperandStageBytes);
            load_operand_stage(tile.multicast == Multicast::a, map, full, shared.a[stage.index],
                               tile.a_k + step * kStageK, tile.a_output);
            stage.advance();
        }
    });
}

__device__ void produce_b(const GemmProblem& p, WgradStorage& shared, const CUtensorMap* map, int warpgroup) {
    RingPosition<kStagesB> stage;
    for_each_tile<kStageK>(p, [&](const WorkTile& tile) {
#pragma unroll 1
        for (int step = 0; step < steps_of(tile); ++step) {
            Mbarrier* full = &shared.b_full[warpgroup][stage.index];
            mbarrier_wait(&shared.b_empty[warpgroup][stage.index],
                          stage.parity ^ 1);  // consumers of both CTAs
            mbarrier_arrive_expect_tx(full, kOperandStageBytes);
            load_operand_stage(tile.multicast == Multicast::b, map, full, shared.b[warpgroup][stage.index],
                               tile.b_k + step * kStageK, tile.b_output + warpgroup * kWarpgroupCols);
            stage.advance();
        }
    });
}

// ---- consumer: one warpgroup
//
// Where in a tile, in sixteenths of its first kSpreadSteps steps: old D of block 1 of the tile before is
// loaded; that block is stored, the second half one sixteenth later; old D of block 0 is loaded.
constexpr int kFetchSecond = 3, kStoreSecond = 7, kFetchFirst = 10;
constexpr int kBegin = 1;  // named barrier; zero_stage_rows has 3 and 4

// Zeros in the stage's contraction rows from `first` on, in all panels of both operands. Every thread has
// waited for the copies.
__device__ void zero_stage_rows(uint8_t* a, uint8_t* b, int first, int warpgroup) {
    const int words = (kStageK - first) * kStageRowBytes / 16;  // of a panel
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < 2 * kOperandPanels * words;
         i += kWarpgroup) {
        const int panel = i / words;
        uint8_t* const side = panel < kOperandPanels ? a : b;
        *reinterpret_cast<uint4*>(side + panel % kOperandPanels * kPanelBytes + first * kStageRowBytes +
                                  i % words * 16) = uint4{};
    }
    fence_async_shared();
    named_barrier_sync(3 + warpgroup, kWarpgroup);
}

// One consumer warpgroup. Between two stages: a release and two waits. The accesses to D are between loops of
// stages, not inside them. The compiler keeps wgmma in flight over all of this as long as it can count them:
// sums are read in straight-line code after their wgmma.
template <Gradient kMode, DType kOutput, Squares kSquares>
__device__ void mainloop(const GemmProblem& p, WgradStorage& shared, const CUtensorMap* map_d,
                         int warpgroup) {
    constexpr bool kAdds = kMode == Gradient::accumulate, kBf16 = kOutput == DType::bf16;
    constexpr StoreD kStore = kAdds ? StoreD::add_boxes : StoreD::overwrite;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32) - kWarpgroup / 32;
    Staging& staging = shared.staging[warp];
    Mbarrier* const d_full = &shared.d_full[warp];
    RingPosition<kStagesA> a_stage;
    RingPosition<kStagesB> b_stage;
    RingPosition<kTileSlots> ring;
    int steps = 0, depth = 0;
    // of block 0, and of the block 1 that is in `waiting`, at first of none
    BlockOrigin origin{}, second{0, kNoRow, 0};
    PatchSquares<kSquares> squares;
    uint32_t d_parity = 0;
    float sum[2][64], waiting[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) waiting[i] = 0.0f;

    const auto next_work = [&] {
        WorkTile tile;
        if (!next_tile(shared, ring, tile)) return false;
        steps = steps_of(tile);
        depth = warp_uniform(tile.depth);
        origin = {static_cast<int>(tile.b_output) + warpgroup * kWarpgroupCols,
                  static_cast<int>(tile.a_output) + warp % 4 * kWarpRows, static_cast<int>(tile.group)};
        return true;
    };
    // descriptors of the current stage
    uint64_t a = mn_major_descriptor<kStageK>(shared.a[0]),
             b = mn_major_descriptor<kStageK>(shared.b[warpgroup][0]);
    const auto wait_for_stage = [&] {
        mbarrier_wait(&shared.a_full[a_stage.index], a_stage.parity);
        mbarrier_wait(&shared.b_full[warpgroup][b_stage.index], b_stage.parity);
    };
    const auto next_stage = [&] {
        a_stage.advance();
        b_stage.advance();
        a = advance_descriptor(
            a, static_cast<int>(kOperandStageBytes) * (a_stage.index == 0 ? 1 - kStagesA : 1));
        b = advance_descriptor(
            b, static_cast<int>(kOperandStageBytes) * (b_stage.index == 0 ? 1 - kStagesB : 1));
    };
    const auto release_previous_stage = [&] {
        const int last_a = (a_stage.index == 0 ? kStagesA : a_stage.index) - 1,
                  last_b = (b_stage.index == 0 ? kStagesB : b_stage.index) - 1;
        release_stages(&shared.a_empty[last_a], &shared.b_empty[warpgroup][last_b]);
    };
    const auto zero_k_tail = [&](int step) {  // past the group, in a tile's last stage
        if (const int rest = depth - step * kStageK; rest < kStageK)
            zero_stage_rows(shared.a[a_stage.index], shared.b[warpgroup][b_stage.index], max(rest, 0),
                            warpgroup);
    };
    // wgmma of a block over 16 of the contraction
    const auto mma = [&](int block, int k, int add) {
        constexpr int kBytes = 16 * kStageRowBytes;
        wgmma_bf16<1, 1>(sum[block], advance_descriptor(a, block * kPanelBytes + k * kBytes),
                         advance_descriptor(b, k * kBytes), add);
    };
    const auto start_block = [&](int block) {
        wgmma_fence();
        wgmma_fence_operand(sum[block]);
#pragma unroll
        for (int k = 0; k < kStageK / 16; ++k) mma(block, k, 1);
        wgmma_commit();
    };
    const auto start_both = [&]<bool kOver>() {
        wgmma_fence();
        wgmma_fence_operand(sum[0]);
        wgmma_fence_operand(sum[1]);
#pragma unroll
        for (int k = 0; k < kStageK / 16; ++k) {
            mma(0, k, !kOver || k > 0);
            mma(1, k, !kOver || k > 0);
        }
        wgmma_commit();
    };
    const auto first_step = [&] {  // overwrites the accumulators of the tile before
        wait_for_stage();
        zero_k_tail(0);
        start_both.template operator()<true>();
        next_stage();
    };
    const auto step_between = [&] {
        wait_for_stage();
        start_both.template operator()<false>();
        wgmma_wait<1>();
        release_previous_stage();
        next_stage();
    };
    const auto last_step = [&] {  // block 0 completes before block 1
        wait_for_stage();
        zero_k_tail(steps - 1);
        start_block(0);
        start_block(1);
        wgmma_wait<2>();
        release_previous_stage();
        next_stage();
    };
    // old values: in FP32 of one block, in BF16 of both
    const auto fetch_block = [&](const BlockOrigin& of) {
        if (lane == 0) {
            if constexpr (kBf16)
                fetch_both_bf16(map_d, staging, d_full, of);
            else
                fetch_d(map_d, staging, d_full, of);
        }
        __syncwarp();
    };
    const auto wait_for_block = [&] {
        mbarrier_wait(d_full, d_parity);
        d_parity ^= 1;
    };
    const auto store_second = [&](int half) {
        if constexpr (kBf16)
            store_half_bf16<kMode, Order::store>(p, map_d, staging, second, waiting, 1, half, squares);
        else
            store_half<kStore, Order::store>(map_d, staging, second, waiting, half, squares);
        if (half == 1) squares.finish(p, second);
        __syncwarp();  // wgmma is issued by whole warps
    };
    const auto store_first = [&] {
        if constexpr (kBf16) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_half_bf16<kMode, Order::fragment>(p, map_d, staging, origin, sum[0], 0, half, squares);
        } else {
            store_block<kStore>(map_d, staging, origin, sum[0], squares);
        }
        __syncwarp();
        second = {origin.column, origin.row + 64, origin.group};
    };

    if (!next_work()) return;
    if (warpgroup == 1) named_barrier_sync(kBegin, kConsumerThreads);
    for (bool first = true, more = true; more; first = false) {
        first_step();
        int step = 1;
        const auto run_to = [&](int end) {
#pragma unroll 1
            for (; step < end; ++step) step_between();
        };
        const auto sixteenths = [&](int count) {
            return min(min(steps, kSpreadSteps) * count / 16, steps - 1);
        };
        if (first && warpgroup == 0) {
            run_to(min(kLead, steps - 1));
            named_barrier_arrive(kBegin, kConsumerThreads);
        }
        if (kAdds && !kBf16) {
            run_to(sixteenths(kFetchSecond));
            fetch_block(second);
        }
        run_to(sixteenths(kStoreSecond));
        if (kAdds && !kBf16) wait_for_block();
        store_second(0);
        run_to(sixteenths(kStoreSecond + 1));
        store_second(1);
        if (kAdds) {
            run_to(sixteenths(kFetchFirst));
            fetch_block(origin);
        }
        run_to(steps - 1);
        last_step();

        if (kAdds) wait_for_block();
        wgmma_wait<1>();
        wgmma_fence_operand(sum[0]);
        store_first();
        wgmma_wait<0>();
        wgmma_fence_operand(sum[1]);
        release_previous_stage();
        copy_in_store_order(sum[1], waiting);
        more = next_work();
    }
    if (kAdds && !kBf16) {
        fetch_block(second);
        wait_for_block();
    }
    store_second(0);
    store_second(1);
    if (lane == 0) bulk_wait_all();
}

// ---- the CTA
template <DType kOutput, Squares kSquares>
__global__ void __launch_bounds__(kCtaThreads, 1)
    wgrad_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
                 const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_d) {
    WgradStorage& shared = prepare_shared<WgradStorage>([](WgradStorage& s) {
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
            if (problem.mode == Gradient::overwrite) clear_tiles<kStageK, Sets::one, kSquares>(problem);
            return;
        }
        if (threadIdx.x % 32 != 0) return;
        if (warp == 0)
            produce_a(problem, shared, &map_a);
        else
            produce_b(problem, shared, &map_b, warp - 1);
        cluster_sync_unaligned();
    } else {
        acquire_registers<kConsumerRegisters>();
        if (problem.mode == Gradient::accumulate)
            mainloop<Gradient::accumulate, kOutput, kSquares>(problem, shared, &map_d, role - 1);
        else
            mainloop<Gradient::overwrite, kOutput, kSquares>(problem, shared, &map_d, role - 1);
        cluster_sync();  // no CTA exits while the other may still write to it
    }
}

}  // namespace

void launch_wgmma_bf16_wgrad(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                             const Launch& launch) {
    const CUtensorMap map_a = tensor_map(p.a.data, p.a.dtype, a.rows, a.cols, kStageK),
                      map_b = tensor_map(p.b.data, p.b.dtype, b.rows, b.cols, kStageK),
                      map_d = tensor_map_of_groups(p.d, p.d_dtype, p.groups.num_groups, p.m, p.n, kWarpRows);
    const auto run = [&]<Squares kSquares>() {
        const auto kernel = p.d_dtype == DType::bf16 ? wgrad_kernel<DType::bf16, kSquares>
                                                     : wgrad_kernel<DType::f32, kSquares>;
        launch_persistent(kernel, p, launch, kWgradStorageBytes, map_a, map_b, map_d);
    };
    p.squares != nullptr ? run.template operator()<Squares::sum>() : run.template operator()<Squares::none>();
}

}  // namespace fp8flow::hopper::gemm
