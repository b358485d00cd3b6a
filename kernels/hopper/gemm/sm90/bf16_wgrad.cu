// SPDX-License-Identifier: MIT
// Grouped BF16 weight gradients (wgmma): dW [group, M, N] FP32 or BF16 (+)= dY^T X over the rows of each
// group, both operands as stored (MN-major). Group sizes are read on the device. Read first: pipeline.h,
// wgrad_roles.h (skeleton, barriers), wgrad_epilogue.h; what was tried: docs/design_notes.md.
//
// Lower bound at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP, 2.45 ms at the 785 TFLOP/s of a dense GEMM;
// D is 3.76 GB, 0.87 ms to write and 1.90 ms to read and write in these tiles; operands are 0.74 GB. The two
// must overlap.
//
// Grid, roles: wgrad_roles.h; A or B multicast. A consumer thread has 128 sums. A stage is 32 of the
// contraction, 256 cycles of MMA per warpgroup; the wgmma of the next stage are issued before the last ones
// are waited for, so that one warpgroup alone keeps the tensor cores busy while the other does something
// else. Contraction rows past the group are zeroed in shared memory: each warpgroup zeroes its B and A, A
// therefore twice.
//
// Epilogue: at a tile's end block 0's sums go to the staging boxes during block 1's last wgmma, and block 1's
// into 64 registers of their own; the next tile then overwrites both accumulators. Block 1 follows through
// the boxes in two halves, each during a stage of the next tile. Accumulating: TMA loads the block's old
// values into the boxes beforehand (kFetchSecond, kFetchFirst): D is read and written once.
//
//   cycles of a tile of 1024 rows, on one SM
//   MMA                             16,384
//   D written (128 KiB)              6,900 at 19 bytes per cycle; at most 32 bytes per cycle: 4,096
//   D read and written              14,000
//   pause of a warpgroup, tile end     600-800: sums to the boxes (200-400, of which 256-512 overlap with
//                                      its own wgmma), 64 moves, pipeline refill; kLead stages (1,536 cycles
//                                      of both) keep the pauses of the two warpgroups apart
//   boxes out (32 KiB per warpgroup) 1,000-1,700, about as long in; a tile's four passes have 3,000-6,000
//   each
//
// Shared memory: an operand of a stage is two panels of 64 outputs x 32 contraction rows, 128-byte swizzled
// (8 KiB); 8 stages of A and 2 x 6 of B (160 KiB); 8 KiB of staging boxes per warp (64 KiB); tile ring;
// barriers. Named barriers, besides those of wgrad_roles.h:
//
//   kBegin   once: warpgroup 0 is kLead stages into its first tile, warpgroup 1 starts
//   3, 4     all threads of one warpgroup have zeroed the group's tail
//
// Deterministic: an element of D is one thread's sum over ascending k, added to its old value once, whatever
// the other groups hold.
#include "kernels/hopper/gemm/sm90/wgrad_roles.h"

namespace fp8flow::hopper::gemm {

namespace {

constexpr int kStageK = 32;  // contraction elements of a stage
constexpr int kPanel = 64;   // outputs of an MN-major panel
constexpr int kPanelBytes = kStageK * kStageRowBytes;
constexpr int kOperandPanels = 2;             // 128 outputs: the rows of a tile, or a warpgroup's columns
constexpr int kLead = 96 / kStageK;           // stages by which warpgroup 0 is ahead
constexpr int kSpreadSteps = 1024 / kStageK;  // at most so many steps of a tile share its accesses to D
static_assert(kTileRows == kOperandPanels * kPanel && kWarpgroupCols == kOperandPanels * kPanel);

// Both operands as stored: a stage is two panels of each.
struct Bf16Policy {
    static constexpr int kSets = 1, kStageK = gemm::kStageK, kStagesA = 256 / kStageK,
                         kStagesB = 192 / kStageK;
    static constexpr uint32_t kOperandStageBytes = kOperandPanels * kPanelBytes;
    template <Multicast> static constexpr uint32_t kLoadBytes = kOperandStageBytes;
    struct Scales {};

    // At least two, so that a tile's first step and its last are never the same; the second of a short tile
    // is zeroed like everything past the group.
    static __device__ __forceinline__ int steps(const WorkTile& tile) {
        return tile.steps == 1 ? 2 : tile.steps;
    }
    static __device__ __forceinline__ uint64_t descriptor(const uint8_t* stage) {
        return mn_major_descriptor<kStageK>(stage);
    }
    static __device__ __forceinline__ void load(Load load, const StepSource& from, int64_t output,
                                                Mbarrier* full, uint8_t* to) {
        const int x = static_cast<int>(output), y = from.k;
        load_operand<kOperandPanels>(load, static_cast<int>(cluster_rank()), from.map, full, to, kPanelBytes,
                                     [&](int i) { return make_int2(x + i * kPanel, y); });
    }
    template <Multicast>
    static __device__ __forceinline__ void load_scales(const GemmProblem&, const StepSource&, int64_t,
                                                       Mbarrier*, Scales&, const StageOf&) {}
};

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
template <Gradient kMode, DType kOutput, Squares kSquares> class Consumer {
public:
    using Shared = WgradStorage<Bf16Policy>;

    __device__ __forceinline__ Consumer(const GemmProblem& p, Shared& shared, const CUtensorMap* map_d,
                                        int warpgroup)
        : shared_(shared),
          warpgroup_(warpgroup),
          warp_(consumer_warp()),
          d_{p, map_d, shared.staging[warp_], &shared.d_full[warp_]},
          stages_(shared, warpgroup) {
#pragma unroll
        for (int i = 0; i < 64; ++i) waiting_[i] = 0.0f;
    }

    __device__ __forceinline__ void run() {
        if (!next_work()) return;
        if (warpgroup_ == 1) named_barrier_sync(kBegin, kConsumerThreads);
        for (bool first = true, more = true; more; first = false) {
            first_step();
            step_ = 1;
            if (first && warpgroup_ == 0) {
                run_to(min(kLead, steps_ - 1));
                named_barrier_arrive(kBegin, kConsumerThreads);
            }
            finish_tile_before();
            if (kAdds) {
                run_to(sixteenths(kFetchFirst));
                d_.fetch(origin_);
            }
            run_to(steps_ - 1);
            last_step();
            take_sums();
            more = next_work();
        }
        if (kAdds && !kBf16) {
            d_.fetch(second_);
            d_.wait_for_fetched();
        }
        store_second(0);
        store_second(1);
        if (threadIdx.x % kWarpSize == 0) bulk_wait<0>();
    }

private:
    static constexpr bool kAdds = kMode == Gradient::accumulate, kBf16 = kOutput == DType::bf16;
    static constexpr StoreD kStore = kAdds ? StoreD::add_boxes : StoreD::overwrite;

    __device__ __forceinline__ bool next_work() {
        WorkTile tile;
        if (!next_tile(shared_, ring_, tile)) return false;
        steps_ = Bf16Policy::steps(tile);
        depth_ = warp_uniform(tile.depth);
        origin_ = first_block(tile, warpgroup_, warp_);
        return true;
    }

    // ---- wgmma
    //
    // Of a block over 16 of the contraction.
    __device__ __forceinline__ void mma(int block, int k, int add) {
        constexpr int kBytes = 16 * kStageRowBytes;
        wgmma_bf16<1, 1>(sum_[block], advance_descriptor(stages_.a, block * kPanelBytes + k * kBytes),
                         advance_descriptor(stages_.b, k * kBytes), add);
    }
    __device__ __forceinline__ void start_block(int block) {
        wgmma_fence();
        wgmma_fence_operand(sum_[block]);
#pragma unroll
        for (int k = 0; k < kStageK / 16; ++k) mma(block, k, 1);
        wgmma_commit();
    }
    template <bool kOver> __device__ __forceinline__ void start_both() {
        wgmma_fence();
        wgmma_fence_operand(sum_[0]);
        wgmma_fence_operand(sum_[1]);
#pragma unroll
        for (int k = 0; k < kStageK / 16; ++k) {
            mma(0, k, !kOver || k > 0);
            mma(1, k, !kOver || k > 0);
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void zero_k_tail(int step) {  // past the group, in a tile's last stage
        if (const int rest = depth_ - step * kStageK; rest < kStageK)
            zero_stage_rows(shared_.a[stages_.index_a()], shared_.b[warpgroup_][stages_.index_b()],
                            max(rest, 0), warpgroup_);
    }

    // ---- steps
    __device__ __forceinline__ void first_step() {  // overwrites the accumulators of the tile before
        stages_.wait();
        zero_k_tail(0);
        start_both<true>();
        stages_.next();
    }
    __device__ __forceinline__ void step_between() {
        stages_.wait();
        start_both<false>();
        wgmma_wait<1>();
        stages_.release_previous();
        stages_.next();
    }
    __device__ __forceinline__ void last_step() {  // block 0 completes before block 1
        stages_.wait();
        zero_k_tail(steps_ - 1);
        start_block(0);
        start_block(1);
        wgmma_wait<2>();
        stages_.release_previous();
        stages_.next();
    }
    __device__ __forceinline__ void run_to(int end) {
#pragma unroll 1
        for (; step_ < end; ++step_) step_between();
    }
    __device__ __forceinline__ int sixteenths(int count) const {
        return min(min(steps_, kSpreadSteps) * count / 16, steps_ - 1);
    }

    // ---- D
    __device__ __forceinline__ void store_second(int half) {
        d_.template store_second<kStore, Order::store>(second_, waiting_, half);
        if (half == 1) d_.squares.finish(d_.p, second_);
        __syncwarp();  // wgmma is issued by whole warps
    }
    // Block 1 of the tile before, during steps of this one.
    __device__ __forceinline__ void finish_tile_before() {
        if (kAdds && !kBf16) {
            run_to(sixteenths(kFetchSecond));
            d_.fetch(second_);
        }
        run_to(sixteenths(kStoreSecond));
        if (kAdds && !kBf16) d_.wait_for_fetched();
        store_second(0);
        run_to(sixteenths(kStoreSecond + 1));
        store_second(1);
    }
    // Block 0 of a finished tile goes to D, block 1 to registers of its own.
    __device__ __forceinline__ void take_sums() {
        if (kAdds) d_.wait_for_fetched();
        wgmma_wait<1>();
        wgmma_fence_operand(sum_[0]);
        d_.template store_first<kStore>(origin_, sum_[0]);
        __syncwarp();
        second_ = second_block(origin_);
        wgmma_wait<0>();
        wgmma_fence_operand(sum_[1]);
        stages_.release_previous();
        copy_in_store_order(sum_[1], waiting_);
    }

    Shared& shared_;
    const int warpgroup_, warp_;
    WarpGradient<kMode, kOutput, kSquares> d_;
    ConsumerStages<Bf16Policy> stages_;
    RingPosition<kTileSlots> ring_;
    int steps_ = 0, depth_ = 0, step_ = 0;
    // of block 0, and of the block 1 that is in `waiting_`, at first of none
    BlockOrigin origin_{}, second_{0, kNoRow, 0};
    float sum_[2][64], waiting_[64];
};

template <DType kOutput, Squares kSquares>
__global__ void __launch_bounds__(kCtaThreads, 1)
    wgrad_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ WgradMaps<1> maps) {
    run_wgrad_roles<Bf16Policy, kSquares>(
        problem, maps, [&]<Gradient kMode>(WgradStorage<Bf16Policy>& shared, int warpgroup) {
            Consumer<kMode, kOutput, kSquares>(problem, shared, &maps.d, warpgroup).run();
        });
}

}  // namespace

void launch_wgmma_bf16_wgrad(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                             const Launch& launch) {
    launch_wgrad<Bf16Policy>(
        p, launch, wgrad_maps<1>(p, {{{p.groups, p.a, p.b}, a, b}}, kStageK),
        [&]<DType kOutput, Squares kSquares>() { return wgrad_kernel<kOutput, kSquares>; });
}

}  // namespace fp8flow::hopper::gemm
