// SPDX-License-Identifier: MIT
// The consumers of the FP8 weight gradients (fp8_wgrad.cu): scales of a step, mainloop, and when D is loaded
// and stored. A `Policy` is that of wgrad_roles.h with, besides,
//
//   Wgmma                        multiplies
//   kRowScales, kColumnScales    a scale a row of A, a column of B; else one for all of a tile's step
//   Scales                       rows[stage], columns[warpgroup][stage] of such scales, tiles[warp]
#pragma once

#include "kernels/hopper/gemm/sm90/fp8_scales.h"
#include "kernels/hopper/gemm/sm90/wgrad_roles.h"

namespace fp8flow::hopper::gemm {

// Tile scales of a warp, one a step: address of step 0, extrapolated for the second set.
template <Sets kSets> struct TileScales {
    const float *a[kNumSets<kSets>], *b[kNumSets<kSets>];
    int first_steps;
};

// Scales at contraction index k; both sets have the same stride.
__device__ __forceinline__ const float* scales_at(const OperandScale& s, const void* scales, int64_t k,
                                                  int64_t output) {
    return static_cast<const float*>(scales) + k / kFp8StageK * s.block_stride + output;
}

// The tile scales of a consumer warp: lane l holds those of step l of every 32 steps, read long before they
// are used. With scales of rows and columns it does nothing.
template <class Policy> class TileScaleReader {
public:
    __device__ __forceinline__ TileScaleReader(const GemmProblem& p, TileScales<Policy::kSets>& at)
        : p_(p), at_(at) {}

    __device__ __forceinline__ void begin(const WgradTile<Policy::kSets>& tile, int64_t column) {
        if (Policy::kRowScales) return;
        if (lane() == 0) {
            const int64_t a = tile.a_output / kTileRows * p_.a.scale.output_stride,
                          b = min(column, p_.n - 1) / kWarpgroupCols * p_.b.scale.output_stride;
            at_.a[0] = scales_at(p_.a.scale, p_.a.scale.scales, tile.a_k, a);
            at_.b[0] = scales_at(p_.b.scale, p_.b.scale.scales, tile.b_k, b);
            if constexpr (Policy::kSets == Sets::two) {
                at_.a[1] = scales_at(p_.a.scale, p_.second.a.scale.scales, tile.second_a_k, a);
                at_.b[1] = scales_at(p_.b.scale, p_.second.b.scale.scales, tile.second_b_k, b);
                at_.first_steps = tile.first_steps;
            }
        }
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
        const int set = Policy::kSets == Sets::two && step >= at_.first_steps ? 1 : 0;
        next_a_ = at_.a[set][step * p_.a.scale.block_stride];
        next_b_ = at_.b[set][step * p_.b.scale.block_stride];
    }

    const GemmProblem& p_;
    TileScales<Policy::kSets>& at_;
    float scales_ = 0.0f, next_a_ = 0.0f, next_b_ = 0.0f;
};

// The scales of a step: of this thread's rows, 8 apart, of both blocks, or one for all; of its columns.
template <class Policy> struct StepFactors {
    static constexpr int kRows = Policy::kRowScales ? 4 : 1;
    float row[kRows];
    const float2* columns;
    __device__ __forceinline__ float above(int block) const { return row[kRows / 2 * block]; }
    __device__ __forceinline__ float below(int block) const {
        return row[kRows / 2 * block + (kRows > 1 ? 1 : 0)];
    }
};

// Accumulate: the steps after which the second block's old values are loaded into the staging boxes, which
// have been stored by then, and after which they are added to its sums; the first block's are loaded next.
// Tiles of fewer steps than kLongSteps reduce-add the second block in memory.
constexpr int kFetchStep = 2, kAddStep = 5, kLongSteps = kFetchStep + 3;

// One consumer warpgroup. During the first wgmma batch of a step: release of the stage before, factors of
// this step. During the second: wait for the next stage. The epilogue is spread over the mainloop as
// fp8_wgrad.cu says; a tile's first and last two steps are separate code, so that the steps between them are
// a short loop. Between the end of one batch and the issue of the next only the 64 promotions of a thread
// remain. The last stage of all is never released: no producer waits for it. A step reads the scales of its
// stage before it issues the next batch.
template <class Policy, Gradient kMode, DType kOutput, Squares kSquares> class Fp8WgradConsumer {
public:
    using Shared = WgradStorage<Policy>;

    __device__ __forceinline__ Fp8WgradConsumer(const GemmProblem& p, Shared& shared,
                                                const CUtensorMap* map_d, int warpgroup)
        : shared_(shared),
          warpgroup_(warpgroup),
          warp_(consumer_warp()),
          d_{p, map_d, shared.staging[warp_], &shared.d_full[warp_]},
          stages_(shared, warpgroup),
          tile_scales_(p, shared.scales.tiles[warp_]) {}

    __device__ __forceinline__ void run() {
        if (!next_work()) return;
        clear(sum_[0]);
        clear(sum_[1]);
        stages_.wait();
        while (more_) run_tile();
        store_second(0);
        store_second(1);
        d_.squares.finish(d_.p, previous_);
        if (lane() == 0) bulk_wait_all();
    }

private:
    static constexpr bool kAdds = kMode == Gradient::accumulate, kBf16 = kOutput == DType::bf16;
    // steps that edge_steps runs together at the end; of two, the first block would be stored before its old
    // values in FP32 have arrived
    static constexpr int kLastSteps = kAdds && !kBf16 ? 1 : 2;
    using Factors = StepFactors<Policy>;
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

    __device__ __forceinline__ bool next_work() {
        if (!next_tile(shared_, ring_, tile_)) return false;
        steps_ = tile_.steps;
        origin_ = first_block(tile_, warpgroup_, warp_);
        tile_scales_.begin(tile_, tile_.b_output + warpgroup_ * kWarpgroupCols);
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
        const int count = steps_, last = max(count - kLastSteps, 2);
        edge_steps(0, count > 1, true, count <= 2);
        if (count <= 2) return;
        int step = 2;
        if (kAdds && !kBf16 && count >= kLongSteps) {
            for (const int add_step = min(kAddStep, last - 1); step < add_step; ++step)
                middle_step<false>(step);
            middle_step<true>(step++);
        }
        for (; step < last; ++step) middle_step<false>(step);
        edge_steps(last, kLastSteps == 2 && count > 3, false, true);
    }
    // A tile's first steps or its last, two where there are as many: wgmma of the first block, then of the
    // second.
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
    // During its last batch: on to the stage after it, of the next tile where this one ends.
    __device__ __forceinline__ void leave_edge(bool ends) {
        stages_.next();
        if (ends) more_ = next_work();
        if (!ends || more_) stages_.wait();
    }
    // A step between them. kAdding: the old values of the second block are added, the first's loaded.
    template <bool kAdding> __device__ __forceinline__ void middle_step(int step) {
        float partial[64];
        start_block(partial, 0);
        stages_.release_previous();
        const Factors factors = read_factors(step);
        wait_and_promote(partial, 0, factors);
        start_block(partial, 1);
        if (kAdds && !kAdding && step == kFetchStep && steps_ >= kLongSteps) fetch_block(1);
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
    // Old values: in FP32 of one block, in BF16 of both.
    __device__ __forceinline__ void fetch_block(int block) {
        d_.fetch(kBf16 || block == 0 ? origin_ : second_block(origin_));
    }
    // Half of block 1 of the tile before. A short tile's is added in memory, unless its squares are needed.
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
            if (steps_ < kLongSteps) fetch_block(0);
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
    WgradTile<Policy::kSets> tile_{};
    int steps_ = 0;
    // of block 0; `previous_`: of the tile whose block 1 has not been stored yet, at first of none
    BlockOrigin origin_{}, previous_{0, kNoRow, 0};
    bool first_ = true, more_ = true, previous_short_ = false;
    float sum_[2][64];
};

}  // namespace fp8flow::hopper::gemm
