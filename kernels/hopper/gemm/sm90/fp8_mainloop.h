// SPDX-License-Identifier: MIT
// The overlapped FP8 mainloop: A scaled per row and 128 of the contraction, B per 128 x 128, rows grouped
// (forward and data gradient). Barriers as in pipeline.h; between two wgmma batches only the promotion
// remains, everything else overlaps with wgmma. Instantiated by fp8.cu (BF16 rows of D: bf16_epilogue.h) and
// fp8_swiglu.cu (SwiGLU and quantisation in the epilogue).
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/fp8_scales.h"

namespace fp8flow::hopper::gemm {

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
template <class Wgmma, class Shared, class Epilogue>
__device__ void overlapped_mainloop(const GemmProblem& p, Shared& shared, int warpgroup, Epilogue epilogue) {
    constexpr bool kRowsOwned = Epilogue::kOwned == Owned::rows, kHoldsStage = Epilogue::kHoldsStage;
    // scales that a thread needs in a step: of its rows, and of the columns of its chains
    constexpr int kRowScales = kRowsOwned ? 2 : 4, kColScales = kRowsOwned ? 2 : 1, kHeld = 32 / kColScales;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row0 = first_row<Epilogue::kOwned>(warpgroup);
    const int steps = static_cast<int>((p.k + kFp8StageK - 1) / kFp8StageK);  // of every tile
    const uint32_t other_empty = cluster_address(shared.empty, cluster_rank() ^ 1);
    RingPosition<kStages> stage;
    RingPosition<kTileSlots> ring;  // slot of the next tile
    const auto wait_for_tile = [&] {
        mbarrier_wait(&shared.tile_full[ring.index], ring.parity);
        __syncwarp();  // wgmma is issued by whole warps
        return warp_uniform(shared.tiles[ring.index].past_end) == 0;
    };
    if (!wait_for_tile()) return;
    int tile = 0, done = 0;  // slots: of the current tile, of the one before it
    ring.advance();
    bool first = true, more = true;

    // B's scales: lane l holds those of step l % kHeld, for the current and the following kHeld steps; and
    // the next tile's
    const auto scales_of = [&](const WorkTile& t) {
        static_assert(kWarpgroupCols == kFp8StageK, "a scale covers the columns of a chain");
        const int64_t column = kRowsOwned ? min(t.b_output / 2, p.n / 2 - 1) + lane / kHeld * (p.n / 2)
                                          : min(t.b_output + warpgroup * kWarpgroupCols, p.n - 1);
        return static_cast<const float*>(p.b.scale.scales) + t.group * p.b.scale.group_stride +
               static_cast<int>(column) / kWarpgroupCols * p.b.scale.output_stride;
    };
    const auto read_scales = [&](const float* at, int step) {
        step += lane % kHeld;
        return step < steps ? at[step * p.b.scale.block_stride] : 0.0f;
    };
    const float *at_b = scales_of(shared.tiles[tile]), *next_at_b = nullptr;
    float scales[2] = {read_scales(at_b, 0), read_scales(at_b, kHeld)}, next_scales[2];
    // the scales of a step, read during the last wgmma batch of the step before
    float of_row[kRowScales], of_columns[kColScales];
    const auto read_step = [&](int step) {
#pragma unroll
        for (int i = 0; i < kColScales; ++i)
            of_columns[i] = __shfl_sync(kFullMask, scales[0], step % kHeld + i * kHeld);
#pragma unroll
        for (int i = 0; i < kRowScales; ++i)
            of_row[i] = shared.row_scales[stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)];
    };
    const auto prefetch_next_tile = [&] {
        more = wait_for_tile();
        if (!more) return;
        next_at_b = scales_of(shared.tiles[ring.index]);
        for (int i = 0; i < 2; ++i) next_scales[i] = read_scales(next_at_b, kHeld * i);
    };

    // descriptors of the current stage, advanced during wgmma so that the next batch can be issued at once
    uint64_t a = k_major_descriptor(shared.stages[0] + (kRowsOwned ? warpgroup * 64 : 0) * kFp8StageK),
             b = k_major_descriptor(shared.stages[0] +
                                    (kTileRows + (kRowsOwned ? 0 : warpgroup * kWarpgroupCols)) * kFp8StageK);
    const auto next_stage = [&] {
        stage.advance();
        const int bytes = static_cast<int>(kStageBytes) * (stage.index == 0 ? 1 - kStages : 1);
        a = advance_descriptor(a, bytes);
        b = advance_descriptor(b, bytes);
    };
    const auto before = [](int index) { return (index == 0 ? kStages : index) - 1; };
    const auto release = [&](int index) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.empty[index]);
        if (lane == 1) mbarrier_arrive_remote(other_empty + index * sizeof(Mbarrier));
    };
    const auto last_rows = [&]() -> uint8_t* {
        return kHoldsStage ? shared.stages[before(stage.index)] + warp_uniform(row0) * kStageRowBytes
                           : nullptr;
    };

    float sum[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
    const auto run_step = [&]<Step kStep>(int step) {
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
        for (int i = 0; i < 4; ++i) factor[i] = of_row[i % kRowScales] * of_columns[i / 2 % kColScales];
        wait_mma(partial);
        promote<kFirst>(partial, sum[0], factor[0], factor[1]);

        start_mma<Wgmma>(partial, advance_descriptor(a, kRowsOwned ? 0 : 64 * kFp8StageK),
                         advance_descriptor(b, kRowsOwned ? kWarpgroupCols * kFp8StageK : 0));
        if (kFirst && !first) {
            epilogue.template overlap<1>(shared.tiles[done], sum, rows);
            mbarrier_arrive(&shared.tile_empty[done]);
        }
        if (kStep == Step::only) prefetch_next_tile();
        if (kLast) epilogue.begin(shared.tiles[tile], sum);
        next_stage();
        if (!kLast || more) mbarrier_wait(&shared.full[stage.index], stage.parity);
        if (!kLast) {
            if ((step + 1) % kHeld == 0) {
                scales[0] = scales[1];
                scales[1] = read_scales(at_b, step + 1 + kHeld);
            }
            read_step(step + 1);
        } else if (more) {
            at_b = next_at_b;
            for (int i = 0; i < 2; ++i) scales[i] = next_scales[i];
            read_step(0);
        }
        wait_mma(partial);
        promote<kFirst>(partial, sum[1], factor[2], factor[3]);
    };

    mbarrier_wait(&shared.full[stage.index], stage.parity);
    read_step(0);
    while (more) {
        if (!kHoldsStage && steps == 1) {
            run_step.template operator()<Step::only>(0);
        } else {
            run_step.template operator()<Step::first>(0);
            if constexpr (kHoldsStage) run_step.template operator()<Step::second>(1);
            for (int step = kHoldsStage ? 2 : 1; step + 1 < steps; ++step)
                run_step.template operator()<Step::between>(step);
            prefetch_next_tile();
            run_step.template operator()<Step::last>(steps - 1);
        }
        first = false;
        done = tile;
        tile = ring.index;
        ring.advance();
    }
    epilogue.template overlap<0>(shared.tiles[done], sum, last_rows());
    epilogue.template overlap<1>(shared.tiles[done], sum, last_rows());
    epilogue.end();
}

}  // namespace fp8flow::hopper::gemm
