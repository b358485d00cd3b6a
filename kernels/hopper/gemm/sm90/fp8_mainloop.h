// SPDX-License-Identifier: MIT
// The overlapped FP8 mainloop: A scaled per row and 128 of the contraction, B per 128 x 128, rows grouped
// (forward and data gradient). Barriers as in pipeline.h; between two wgmma batches only the promotion
// remains, everything else overlaps with wgmma. Instantiated by fp8.cu (BF16 rows of D: bf16_epilogue.h) and
// fp8_swiglu.cu (SwiGLU and quantisation in the epilogue).
#pragma once

#include "kernels/hopper/gemm/sm90/fp8_scales.h"

namespace fp8flow::hopper::gemm {

// The scales of a step, held by a thread: of its rows, and of the columns of its chains. A's come from the
// stage. Of B's, lane l holds those of step l % kHeld, for the current and the following kHeld steps; and the
// next tile's.
template <Owned kOwned> struct StepScales {
    static constexpr bool kRowsOwned = kOwned == Owned::rows;
    static constexpr int kRows = kRowsOwned ? 2 : 4, kCols = kRowsOwned ? 2 : 1, kHeld = 32 / kCols;
    const GemmProblem& p;
    int warpgroup, steps;
    const float *at_b, *next_at_b = nullptr;
    float held[2], next_held[2];
    float of_row[kRows], of_columns[kCols];  // of the current step

    __device__ __forceinline__ StepScales(const GemmProblem& problem, int of_warpgroup, int steps_of_tile,
                                          const WorkTile& tile)
        : p(problem),
          warpgroup(of_warpgroup),
          steps(steps_of_tile),
          at_b(first_of(tile)),
          held{read(at_b, 0), read(at_b, kHeld)} {}

    __device__ __forceinline__ const float* first_of(const WorkTile& t) const {
        static_assert(kWarpgroupCols == kFp8StageK, "a scale covers the columns of a chain");
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int64_t column = kRowsOwned ? min(t.b_output / 2, p.n / 2 - 1) + lane / kHeld * (p.n / 2)
                                          : min(t.b_output + warpgroup * kWarpgroupCols, p.n - 1);
        return static_cast<const float*>(p.b.scale.scales) + t.group * p.b.scale.group_stride +
               static_cast<int>(column) / kWarpgroupCols * p.b.scale.output_stride;
    }
    __device__ __forceinline__ float read(const float* at, int step) const {
        step += static_cast<int>(threadIdx.x) % 32 % kHeld;
        return step < steps ? at[step * p.b.scale.block_stride] : 0.0f;
    }
    // The scales of a step, whose stage has arrived, from `rows` of it.
    __device__ __forceinline__ void read_step(int step, const float (&rows)[kTileRows], int row0) {
#pragma unroll
        for (int i = 0; i < kCols; ++i)
            of_columns[i] = __shfl_sync(kFullMask, held[0], step % kHeld + i * kHeld);
#pragma unroll
        for (int i = 0; i < kRows; ++i) of_row[i] = rows[row0 + 64 * (i / 2) + 8 * (i % 2)];
    }
    // Of this thread's upper and lower row in the first chain, then in the second.
    __device__ __forceinline__ float factor(int i) const {
        return of_row[i % kRows] * of_columns[i / 2 % kCols];
    }
    __device__ __forceinline__ void end_step(int step) {
        if ((step + 1) % kHeld != 0) return;
        held[0] = held[1];
        held[1] = read(at_b, step + 1 + kHeld);
    }
    __device__ __forceinline__ void prefetch(const WorkTile& next) {
        next_at_b = first_of(next);
        for (int i = 0; i < 2; ++i) next_held[i] = read(next_at_b, kHeld * i);
    }
    __device__ __forceinline__ void start_next_tile() {
        at_b = next_at_b;
        for (int i = 0; i < 2; ++i) held[i] = next_held[i];
    }
};

// One consumer warpgroup. A step is two wgmma batches, one for each chain. During the first: release of the
// stage before, factors of this step. During the second: wait for the next stage, read its scales. The
// epilogue of a tile overlaps with its own last batch and with the first two of the next tile, which has been
// fetched one step before its start. Between the end of one batch and the issue of the next only the 64
// promotions of a thread remain, so the two warpgroups need no offset (fp8.cu's alternating mainloop does).
//
// A tile's slot in the tile ring is released after its epilogue. The last stage of all is never released: no
// producer waits for it. No deadlock: the producer publishes a tile once it has issued all stages of the one
// before, and a slot is free for it since the first step of that one. The contraction is not empty
// (launch_wgmma).
//
// Epilogue: kOwned; begin(tile, sums) during the last batch of a tile, when the first chain is final;
// overlap<i>(tile, sums, rows) during batch i of the next tile, whose first step overwrites the accumulators,
// or at the end; end() after everything. A thread's rows are row0 and row0 + 8. kHoldsStage: `rows` are this
// warp's rows of A in the tile's last stage, as staging memory for TMA stores; nobody else reads them (a warp
// of a wgmma reads its own 16 rows of A, and has waited for it). That stage is released one step later, after
// wait_read(). Such a contraction has at least kMinStepsHoldingStage steps.
constexpr int kMinStepsHoldingStage = 3;
template <class Wgmma, class Shared, class Epilogue> struct OverlappedMainloop {
    static constexpr bool kRowsOwned = Epilogue::kOwned == Owned::rows, kHoldsStage = Epilogue::kHoldsStage;
    Shared& shared;
    Epilogue epilogue;
    int row0, steps;  // steps: of every tile
    uint32_t other_empty;
    uint64_t a, b;  // descriptors of the current stage, so that the next batch can be issued at once
    RingPosition<kStages> stage;
    RingPosition<kTileSlots> ring;  // slot of the next tile
    int tile = 0, done = 0;         // slots: of the current tile, of the one before it
    bool first = true, more = true;

    __device__ __forceinline__ OverlappedMainloop(const GemmProblem& p, Shared& of, int warpgroup,
                                                  const Epilogue& by)
        : shared(of),
          epilogue(by),
          row0(first_row<Epilogue::kOwned>(warpgroup)),
          steps(static_cast<int>((p.k + kFp8StageK - 1) / kFp8StageK)),
          other_empty(cluster_address(of.empty, cluster_rank() ^ 1)),
          a(k_major_descriptor(of.stages[0] + (kRowsOwned ? warpgroup * 64 : 0) * kFp8StageK)),
          b(k_major_descriptor(of.stages[0] +
                               (kTileRows + (kRowsOwned ? 0 : warpgroup * kWarpgroupCols)) * kFp8StageK)) {}

    __device__ __forceinline__ bool wait_for_tile() const {
        mbarrier_wait(&shared.tile_full[ring.index], ring.parity);
        __syncwarp();  // wgmma is issued by whole warps
        return warp_uniform(shared.tiles[ring.index].past_end) == 0;
    }
    __device__ __forceinline__ void next_stage() {
        stage.advance();
        const int bytes = static_cast<int>(kStageBytes) * (stage.index == 0 ? 1 - kStages : 1);
        a = advance_descriptor(a, bytes);
        b = advance_descriptor(b, bytes);
    }
    static __device__ __forceinline__ int before(int index) { return (index == 0 ? kStages : index) - 1; }
    __device__ __forceinline__ void release(int index) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.empty[index]);
        if (lane == 1) mbarrier_arrive_remote(other_empty + index * sizeof(Mbarrier));
    }
    __device__ __forceinline__ uint8_t* last_rows() const {
        return kHoldsStage ? shared.stages[before(stage.index)] + warp_uniform(row0) * kStageRowBytes
                           : nullptr;
    }
    template <class Scales> __device__ __forceinline__ void prefetch_next_tile(Scales& scales) {
        more = wait_for_tile();
        if (more) scales.prefetch(shared.tiles[ring.index]);
    }
    template <class Scales> __device__ __forceinline__ void read_step(Scales& scales, int step) const {
        scales.read_step(step, shared.row_scales[stage.index], row0);
    }

    // A step: during the first batch the stage before is released, during the second the next is awaited.
    template <Step kStep, class Scales>
    __device__ __forceinline__ void run_step(int step, Scales& scales, float (&sum)[2][64]) {
        constexpr bool kFirst = kStep == Step::first || kStep == Step::only,
                       kLast = kStep == Step::last || kStep == Step::only;
        float partial[64], factor[4];
        uint8_t* rows = nullptr;
        start_mma<Wgmma>(partial, a, b);
        if (kStep == Step::second && !first) {
            epilogue.wait_read();
            release(before(before(stage.index)));
        }
        if (!kFirst || (!kHoldsStage && !first)) release(before(stage.index));
        if (kFirst && !first) {
            rows = last_rows();
            epilogue.template overlap<0>(shared.tiles[done], sum, rows);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) factor[i] = scales.factor(i);
        wait_mma(partial);
        promote<kFirst>(partial, sum[0], factor[0], factor[1]);

        start_mma<Wgmma>(partial, advance_descriptor(a, kRowsOwned ? 0 : 64 * kFp8StageK),
                         advance_descriptor(b, kRowsOwned ? kWarpgroupCols * kFp8StageK : 0));
        if (kFirst && !first) {
            epilogue.template overlap<1>(shared.tiles[done], sum, rows);
            mbarrier_arrive(&shared.tile_empty[done]);
        }
        if (kStep == Step::only) prefetch_next_tile(scales);
        if (kLast) epilogue.begin(shared.tiles[tile], sum);
        next_stage();
        if (!kLast || more) mbarrier_wait(&shared.full[stage.index], stage.parity);
        if (!kLast) {
            scales.end_step(step);
            read_step(scales, step + 1);
        } else if (more) {
            scales.start_next_tile();
            read_step(scales, 0);
        }
        wait_mma(partial);
        promote<kFirst>(partial, sum[1], factor[2], factor[3]);
    }

    template <class Scales> __device__ __forceinline__ void run_tile(Scales& scales, float (&sum)[2][64]) {
        if (!kHoldsStage && steps == 1) {
            run_step<Step::only>(0, scales, sum);
            return;
        }
        run_step<Step::first>(0, scales, sum);
        if constexpr (kHoldsStage) run_step<Step::second>(1, scales, sum);
        for (int step = kHoldsStage ? 2 : 1; step + 1 < steps; ++step)
            run_step<Step::between>(step, scales, sum);
        prefetch_next_tile(scales);
        run_step<Step::last>(steps - 1, scales, sum);
    }
};

template <class Wgmma, class Shared, class Epilogue>
__device__ void overlapped_mainloop(const GemmProblem& p, Shared& shared, int warpgroup, Epilogue epilogue) {
    OverlappedMainloop<Wgmma, Shared, Epilogue> loop(p, shared, warpgroup, epilogue);
    if (!loop.wait_for_tile()) return;
    loop.ring.advance();
    StepScales<Epilogue::kOwned> scales(p, warpgroup, loop.steps, shared.tiles[loop.tile]);
    float sum[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
    mbarrier_wait(&shared.full[loop.stage.index], loop.stage.parity);
    loop.read_step(scales, 0);
    while (loop.more) {
        loop.run_tile(scales, sum);
        loop.first = false;
        loop.done = loop.tile;
        loop.tile = loop.ring.index;
        loop.ring.advance();
    }
    loop.epilogue.template overlap<0>(shared.tiles[loop.done], sum, loop.last_rows());
    loop.epilogue.template overlap<1>(shared.tiles[loop.done], sum, loop.last_rows());
    loop.epilogue.end();
}

}  // namespace fp8flow::hopper::gemm
