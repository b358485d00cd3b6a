// SPDX-License-Identifier: MIT
// Grouped FP8 weight gradients: dW [group, M, N] FP32 or BF16 (+)= dY^T X over the rows of each group, from
// transposed copies. A scale per 128 of the contraction, for tiles (tile128) or for rows and columns
// (vec128). With several sets, a tile's steps are those of the first set, then those of the next. Read
// first: pipeline.h, wgrad_roles.h (tiles, roles, barriers), wgrad_epilogue.h, fp8_mainloop.h.
//
// Lower bound at 32 groups x 1024 rows, 4096 x 7168: 1.92 TFLOP take 1.4 ms at the 1400 TFLOP/s that the
// power limit allows. D is 3.76 GB: 0.87 ms to write, 1.90 ms to read and write in these tiles. Operands are
// 0.37 GB. MMA and D must overlap: in sequence they take 2.3 ms (overwrite) and 3.3 ms (accumulate). At 512
// rows the MMAs of a tile take 4,096 cycles; its operands and D are 256 KiB (accumulate: 384) between SM and
// L2, 7,900 cycles at the 33 bytes per cycle that long tiles reach.
//
// Grid, roles: wgrad_roles.h; B is multicast. L2 delivers 16 KiB per 512 cycles of MMA (7.5 GB). A consumer
// thread has 128 sums and 64 partial sums.
//
//   shared memory         size
//   stages of A, of B     4 + 2 x 3 (vec128: 3 + 2 x 3) of 128 rows x 128 bytes, 128-byte swizzled
//   scales (vec128)       512 bytes per stage and operand
//   staging boxes of D    8 KiB per warp (64 KiB)
//
// Epilogue: while wgmma computes one block, the sums of the other go to the staging boxes and TMA stores
// them. An SM writes at most 32 bytes per cycle to L2 (19 if all SMs write), so a tile's first two steps, and
// its last two if D is overwritten, run first block first: the first block is stored during the second
// block's last wgmma batches, the second block during the first two batches of the next tile. Accumulate,
// FP32: the boxes first receive the second block's old values (kFetchStep), which are added to its sums
// (kAddStep), then the first block's, which are added at its store. BF16 D has boxes for both blocks: all old
// values are loaded at kFetchStep. Squares: each store adds the squares of what it writes. A short tile's
// second block is then loaded and stored like the first, because a reduce-add in memory does not return its
// sums.
//
// Deterministic: one thread sums an element of D over ascending k and adds its old value once, at a step
// that depends only on its position and on the rows of its group.
//
// Measured (H200, bursts): 1.79 ms (overwrite), 2.50 ms (accumulate). What was tried: docs/design_notes.md.
#include "kernels/hopper/gemm/sm90/fp8_mainloop.h"
#include "kernels/hopper/gemm/sm90/wgrad_roles.h"

namespace fp8flow::hopper::gemm {

namespace {

// ---- scales of a step
//
// Where a warp's tile has its scales in those of a step: the group's table, elements from its scales on. In
// shared memory, because the consumers have no registers left.
struct TileScales {
    int32_t a, b, sets;
};

// The tile scales of a consumer warp: lane l holds those of step l of every 32 steps, read long before they
// are used. Does nothing if rows and columns have scales.
template <class Policy> class TileScaleReader {
public:
    __device__ __forceinline__ TileScaleReader(const GemmProblem& p, WgradStorage<Policy>& shared, int warp)
        : p_(p), shared_(shared), at_(shared.scales.tiles[warp]) {}

    __device__ __forceinline__ void begin(const WgradTile& tile, int64_t column) {
        if (Policy::kRowScales) return;
        if (lane() == 0)
            at_ = {static_cast<int>(tile.a_output / kTileRows * p_.a.scale.output_stride),
                   static_cast<int>(min(column, p_.n - 1) / kWarpgroupCols * p_.b.scale.output_stride),
                   tile.sets};
        __syncwarp();
        read(lane(), tile.steps);
    }
    // The product of both operands' scales; called once for every step, in order.
    __device__ __forceinline__ float of_step(int step, int steps) {
        if (step % 32 == 0) {
            scales_ = next_a_ * next_b_;
            read(step + 32 + lane(), steps);
        }
        return __shfl_sync(kFullMask, scales_, step % 32);
    }

private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
    __device__ __forceinline__ void read(int step, int steps) {
        // without a branch: after one, descriptors would not stay in uniform registers
        step = min(step, steps - 1);
        const auto& set = shared_.sets[at_.sets].set_of(step);
        next_a_ = set.scales_a[step * static_cast<int>(p_.a.scale.block_stride) + at_.a];
        next_b_ = set.scales_b[step * static_cast<int>(p_.b.scale.block_stride) + at_.b];
    }

    const GemmProblem& p_;
    WgradStorage<Policy>& shared_;
    TileScales& at_;
    float scales_ = 0.0f, next_a_ = 0.0f, next_b_ = 0.0f;
};

// The scales of a step: one per row of this thread (8 apart, both blocks) or one for all; and its columns'.
template <class Policy> struct StepFactors {
    static constexpr int kRows = Policy::kRowScales ? 4 : 1;
    float row[kRows];
    const float2* columns;
    __device__ __forceinline__ float above(int block) const { return row[kRows / 2 * block]; }
    __device__ __forceinline__ float below(int block) const {
        return row[kRows / 2 * block + (kRows > 1 ? 1 : 0)];
    }
};

// Accumulate: after kFetchStep, the second block's old values are loaded into the staging boxes. Their stores
// are complete by then. After kAddStep they are added to its sums, and the first block's old values are
// loaded. Tiles of fewer steps than kLongSteps reduce-add the second block in memory; with four steps they
// load the first block's old values after kFetchStep, with fewer at its store.
constexpr int kFetchStep = 2, kAddStep = 5, kLongSteps = kFetchStep + 3;

// One consumer warpgroup. During the first wgmma batch of a step, it releases the previous stage and reads
// this step's factors. During the second, it waits for the next stage. A tile's first and last two steps are
// separate code, so that the steps between them are a short loop. Between two batches only the 64 promotions
// of a thread remain. The very last stage is never released, because no producer waits for it. A step reads
// the scales of its stage before it issues the next batch.
template <class Policy, Gradient kMode, DType kOutput, Squares kSquares> class Fp8WgradConsumer {
public:
    using Shared = WgradStorage<Policy>;

    __device__ __forceinline__ Fp8WgradConsumer(const GemmProblem& p, Shared& shared,
                                                const WgradMaps<Policy::kSets>& maps, int warpgroup)
        : shared_(shared),
          warpgroup_(warpgroup),
          warp_(consumer_warp()),
          d_{p, &maps.d, shared.staging[warp_], &shared.d_full[warp_]},
          stages_(shared, warpgroup),
          tile_scales_(p, shared, warp_) {}

    __device__ __forceinline__ void run() {
        if (!next_work()) return;
        clear(sum_[0]);
        clear(sum_[1]);
        stages_.wait();
        while (more_) run_tile();
        store_second(0);
        store_second(1);
        d_.squares.finish(d_.p, previous_);
        if (lane() == 0) bulk_wait<0>();
    }

private:
    static constexpr bool kAdds = kMode == Gradient::accumulate, kBf16 = kOutput == DType::bf16;
    // Steps that edge_steps runs together at the end. With two, the first block would be stored before its
    // old FP32 values have arrived.
    static constexpr int kLastSteps = kAdds && !kBf16 ? 1 : 2;
    using Factors = StepFactors<Policy>;
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

    __device__ __forceinline__ bool next_work() {
        WgradTile tile;
        if (!next_tile(shared_, ring_, tile)) return false;
        steps_ = tile.steps;
        origin_ = first_block(tile, warpgroup_, warp_);
        tile_scales_.begin(tile, tile.b_output + warpgroup_ * kWarpgroupCols);
        return true;
    }

    // ---- wgmma and promotion of a block over a stage
    __device__ __forceinline__ void start_block(float (&partial)[64], int block) {
        start_mma<typename Policy::Wgmma>(
            partial, block == 0 ? stages_.a : advance_descriptor(stages_.a, 64 * kStageRowBytes), stages_.b);
    }
    __device__ __forceinline__ void wait_and_promote(float (&partial)[64], int block,
                                                     const Factors& factors) {
        wait_mma(partial);
        if constexpr (Policy::kColumnScales)
            promote(partial, sum_[block], factors.above(block), factors.below(block), factors.columns);
        else
            promote(partial, sum_[block], factors.above(block), factors.below(block));
    }
    __device__ __forceinline__ Factors read_factors(int step) {
        Factors factors;
        if constexpr (Policy::kRowScales) {
            const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * kWarpRows + lane() / 4;
#pragma unroll
            for (int i = 0; i < Factors::kRows; ++i)
                factors.row[i] = shared_.scales.rows[stages_.index_a()][row + 64 * (i / 2) + 8 * (i % 2)];
        } else {
            factors.row[0] = tile_scales_.of_step(step, steps_);
        }
        factors.columns = reinterpret_cast<const float2*>(
            shared_.scales.columns[warpgroup_][stages_.index_b()] + 2 * (lane() % 4));
        return factors;
    }
    static __device__ __forceinline__ void clear(float (&sums)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
    }

    // ---- steps
    __device__ __forceinline__ void run_tile() {
        // accumulating, there is a step between them for the loads, where a tile has four
        const int count = steps_, last = max(count - kLastSteps, min(count - 1, kAdds ? kFetchStep + 1 : 2));
        edge_steps(0, count > 1, true, count <= 2);
        if (count <= 2) return;
        int step = 2;
        if (kAdds && !kBf16 && count >= kLongSteps) {
            for (const int add_step = min(kAddStep, last - 1); step < add_step; ++step)
                middle_step<false>(step);
            middle_step<true>(step++);
        }
        for (; step < last; ++step) middle_step<false>(step);
        edge_steps(last, count - last == 2, false, true);
    }
    // A tile's first or last steps (two, if it has as many): wgmma of the first block, then of the second.
    __device__ __forceinline__ void edge_steps(int step, bool two, bool begins, bool ends) {
        float partial[64];
        Factors factors[2];
        start_block(partial, 0);
        if (!first_) stages_.release_previous();
        if (begins) {
            store_second(0);
            if (!two) store_second(1);
        }
        factors[0] = read_factors(step);
        const uint64_t first_a = advance_descriptor(stages_.a, 64 * kStageRowBytes), first_b = stages_.b;
        if (two) {
            stages_.next();
            stages_.wait();
        }
        wait_and_promote(partial, 0, factors[0]);
        first_ = false;
        if (two) {
            start_block(partial, 0);
            if (begins) store_second(1);
            factors[1] = read_factors(step + 1);
            wait_and_promote(partial, 0, factors[1]);
        }
        start_mma<typename Policy::Wgmma>(partial, first_a, first_b);
        if (begins) d_.squares.finish(d_.p, previous_);
        if (ends) store_first();
        if (!two) leave_edge(ends);
        wait_and_promote(partial, 1, factors[0]);
        if (two) {
            start_block(partial, 1);
            stages_.release_previous();
            leave_edge(ends);
            wait_and_promote(partial, 1, factors[1]);
        }
    }
    // During the last batch: goes on to the next stage, and to the next tile if this one ends.
    __device__ __forceinline__ void leave_edge(bool ends) {
        stages_.next();
        if (ends) more_ = next_work();
        if (!ends || more_) stages_.wait();
    }
    // A step between them. kAdding: adds the old values of the second block and loads the first block's.
    template <bool kAdding> __device__ __forceinline__ void middle_step(int step) {
        float partial[64];
        start_block(partial, 0);
        stages_.release_previous();
        const Factors factors = read_factors(step);
        wait_and_promote(partial, 0, factors);
        start_block(partial, 1);
        if (kAdds && !kAdding && step == kFetchStep) fetch_block(steps_ >= kLongSteps ? 1 : 0);
        if (kAdding) {
            d_.wait_for_fetched();
            add_staged(d_.staging, sum_[1]);
            __syncwarp();
            fetch_block(0);
        }
        stages_.next();
        stages_.wait();
        wait_and_promote(partial, 1, factors);
    }

    // ---- D
    //
    // Loads old values: FP32 of one block, BF16 of both.
    __device__ __forceinline__ void fetch_block(int block) {
        d_.fetch(kBf16 || block == 0 ? origin_ : second_block(origin_));
    }
    // Stores half of block 1 of the previous tile. A short tile's is added in memory, unless squares are
    // summed.
    __device__ __forceinline__ void store_second(int half) {
        const BlockOrigin second = second_block(previous_);
        if (kBf16 || kSquares == Squares::none || !kAdds || !previous_short_) {
            d_.template store_second<StoreD::overwrite, Order::fragment>(
                second, sum_[1], half,
                kAdds && previous_short_ ? BulkStore::reduce_add : BulkStore::overwrite);
        } else {
            if (half == 0) {
                d_.fetch(second);
                d_.wait_for_fetched();
            }
            d_.template store_second<StoreD::add_pairs, Order::fragment>(second, sum_[1], half);
        }
        if (half == 1) clear(sum_[1]);
    }
    __device__ __forceinline__ void store_first() {
        if (kAdds) {
            if (steps_ < kFetchStep + 2) fetch_block(0);
            d_.wait_for_fetched();
        }
        d_.template store_first<kAdds ? StoreD::add_pairs : StoreD::overwrite>(origin_, sum_[0]);
        clear(sum_[0]);
        previous_ = origin_;
        if (kAdds) previous_short_ = steps_ < kLongSteps;
    }

    Shared& shared_;
    const int warpgroup_, warp_;
    WarpGradient<kMode, kOutput, kSquares> d_;
    ConsumerStages<Policy> stages_;
    TileScaleReader<Policy> tile_scales_;
    RingPosition<kTileSlots> ring_;
    int steps_ = 0;
    // origin_: of block 0. previous_: of the tile with a block 1 that is not stored yet (at first none).
    BlockOrigin origin_{}, previous_{0, kNoRow, 0};
    bool first_ = true, more_ = true, previous_short_ = false;
    float sum_[2][64];
};

// ---- operands
//
constexpr int kStageOutputs = 128;  // rows of A, or columns of B, in a stage
constexpr uint32_t kScaleBytes = kStageOutputs * sizeof(float);
constexpr int kOperandBoxRows = kStageOutputs / 2;  // of one TMA load of an operand
static_assert(kTileRows == kStageOutputs && kWarpgroupCols == kStageOutputs);

// Transposed copies, K-major: a stage has 128 rows of 128 bytes of each. The policy of wgrad_roles.h, and
//   Wgmma                        the MMA
//   kRowScales, kColumnScales    one scale per row of A, per column of B; else one for all of a tile's step
//   Scales                       rows[stage], columns[warpgroup][stage], tiles[warp]
template <class Multiply, ScaleMode kMode, int kMost> struct Fp8Policy {
    using Wgmma = Multiply;
    static constexpr int kSets = kMost;
    static constexpr bool kRowScales = has_row_scales(kMode), kColumnScales = has_column_scales(kMode);
    static constexpr int kStageK = kFp8StageK, kStagesA = kMode == ScaleMode::tiles ? 4 : 3, kStagesB = 3;
    static constexpr uint32_t kOperandStageBytes = kStageOutputs * kStageRowBytes;
    template <Multicast kOperand>
    static constexpr bool kLoadsScales = kOperand == Multicast::a ? kRowScales : kColumnScales;
    template <Multicast kOperand>
    static constexpr uint32_t kLoadBytes = kOperandStageBytes + (kLoadsScales<kOperand> ? kScaleBytes : 0);

    // Row and column scales of the stages. Tile scales are read from global memory.
    struct Scales {
        alignas(16) float rows[kStagesA][kRowScales ? kStageOutputs : 1];
        alignas(16) float columns[kConsumerWarpgroups][kStagesB][kColumnScales ? kStageOutputs : 1];
        TileScales tiles[kConsumerWarps];
    };

    static __device__ __forceinline__ int steps(const WorkTile& tile) { return tile.steps; }
    static __device__ __forceinline__ uint64_t descriptor(const uint8_t* stage) {
        return k_major_descriptor(stage);
    }
    static __device__ __forceinline__ void load(Load load, const StepSource& from, int64_t output,
                                                Mbarrier* full, uint8_t* to) {
        const int x = from.k, y = static_cast<int>(output);
        load_operand<2>(load, static_cast<int>(cluster_rank()), from.map, full, to,
                        kOperandBoxRows * kStageRowBytes,
                        [&](int i) { return make_int2(x, y + i * kOperandBoxRows); });
    }
    template <Multicast kOperand>
    static __device__ __forceinline__ void load_scales(const GemmProblem& p, const StepSource& from,
                                                       int64_t output, Mbarrier* full, Scales& to,
                                                       const StageOf& at) {
        if constexpr (!kLoadsScales<kOperand>) return;
        if constexpr (kOperand == Multicast::a)
            bulk_load(from.scales + output, full, to.rows[at.index], kScaleBytes);
        else  // columns past the last are not stored, so any scale is fine
            bulk_load(from.scales + min(output, p.n - kWarpgroupCols), full,
                      to.columns[at.warpgroup][at.index], kScaleBytes);
    }
};

// ---- the CTA
template <class Policy, DType kOutput, Squares kSquares>
__global__ void __launch_bounds__(kCtaThreads, 1)
    wgrad_kernel(const __grid_constant__ GemmProblem problem,
                 const __grid_constant__ WgradMaps<Policy::kSets> maps) {
    run_wgrad_roles<Policy, kSquares>(
        problem, maps, [&]<Gradient kMode>(WgradStorage<Policy>& shared, int warpgroup) {
            Fp8WgradConsumer<Policy, kMode, kOutput, kSquares>(problem, shared, maps, warpgroup).run();
        });
}

template <class Wgmma, ScaleMode kScaleMode, int kSets>
void launch(const GemmProblem& p, const Launch& how, const WgradMaps<kSets>& maps) {
    using Policy = Fp8Policy<Wgmma, kScaleMode, kSets>;
    launch_wgrad<Policy>(p, how, maps, [&]<DType kOutput, Squares kSquares>() {
        return wgrad_kernel<Policy, kOutput, kSquares>;
    });
}

template <int kSets>
void launch_sets(const GemmProblem& p, const std::vector<StoredSet>& sets, const Launch& how) {
    const bool columns = p.b.scale.outputs_per_scale == 1, e5m2 = p.a.dtype == DType::e5m2;
    const auto run = columns ? (e5m2 ? launch<WgmmaE5m2, ScaleMode::rows_columns, kSets>
                                     : launch<WgmmaE4m3, ScaleMode::rows_columns, kSets>)
                             : (e5m2 ? launch<WgmmaE5m2, ScaleMode::tiles, kSets>
                                     : launch<WgmmaE4m3, ScaleMode::tiles, kSets>);
    run(p, how, wgrad_maps<kSets>(p, sets, kOperandBoxRows));
}

}  // namespace

void launch_wgmma_fp8_wgrad(const GemmProblem& p, const StoredShape& a, const StoredShape& b,
                            const Launch& how) {
    launch_sets<1>(p, {{{p.groups, p.a, p.b}, a, b}}, how);
}

void launch_wgmma_fp8_wgrad_sets(const GemmProblem& p, const std::vector<StoredSet>& sets,
                                 const Launch& how) {
    launch_sets<op::kMaxWgradSets>(p, sets, how);
}

}  // namespace fp8flow::hopper::gemm
