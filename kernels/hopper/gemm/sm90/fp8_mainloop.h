// SPDX-License-Identifier: MIT
// The computing warpgroups of FP8 products with row scales times tile scales, rows grouped (forward and data
// gradient): the sums and the barriers of fp8.cu but the named ones, with nothing but additions between the
// products. Included by fp8.cu, whose tiles become rows of D in BF16, and fp8_swiglu.cu, whose tiles are
// activated and quantised.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/fp8_scales.h"

namespace fp8flow::hopper {

// One warpgroup. Behind the first product of a stage: the release of the stage before, and this stage's
// factors; behind the second: the wait for the next stage and the reading of its scales. A finished tile is
// worked up by `finish` behind its last product and the first two of the next one, which has been found one
// step before its first. Between the end of one product and the start of the next only the 64 additions of a
// thread remain, so the warpgroups need no offset. A tile's place in the ring is given back when it is worked
// up; the last stage of all is never released: nobody waits for it. No deadlock: the loader announces a tile
// once it has asked for all stages of the one before, and has a place for it since the first step of that
// one. The contraction is not empty (launch_wgmma).
//
// Finish: kOwned; prepare(tile, sums): behind the last product of a tile, when the first chain's sums are
// finished; behind<i>(tile, sums, rows): behind product i of the next one, whose first step replaces the
// sums, or at the end; end(): behind all. A thread's rows are row0 and row0 + 8. kHoldsStage: `rows` are this
// warp's rows of A in the tile's last stage, which nobody else reads (a warp of a wgmma reads its own 16 rows
// of A, and has waited for it): room for what leaves through TMA. The stage is released one step
// later, behind freed(). Such a contraction has at least kHoldingSteps steps.
constexpr int kHoldingSteps = 3;
template <class Wgmma, class Shared, class Finish>
__device__ void multiply_tiles_overlapped(const DeviceProduct& p, Shared& shared, int warpgroup,
                                          Finish finish) {
    constexpr bool kRowsOwned = Finish::kOwned == Owned::rows, kHoldsStage = Finish::kHoldsStage;
    // scales that a thread needs for a step: of its rows, and of the columns of its chains
    constexpr int kRowScales = kRowsOwned ? 2 : 4, kColScales = kRowsOwned ? 2 : 1, kHeld = 32 / kColScales;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row0 = first_row<Finish::kOwned>(warpgroup);
    const int steps = static_cast<int>((p.k + kFp8Depth - 1) / kFp8Depth);  // of every tile
    const uint32_t other_empty = cluster_address(shared.empty, cluster_rank() ^ 1);
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;  // of the next tile
    const auto find_tile = [&] {
        mbarrier_wait(&shared.tile_full[ring.index], ring.parity);
        __syncwarp();  // products are issued by whole warps
        return warp_uniform(shared.tiles[ring.index].past_end) == 0;
    };
    if (!find_tile()) return;
    int tile = 0, done = 0;  // places in the ring: of the tile that is multiplied, of the one before it
    ring.advance();
    bool first = true, more = true;

    // B's scales: lane l holds those of step l % kHeld of every kHeld steps, of two times as many; and the
    // next tile's
    const auto scales_of = [&](const MathTile& t) {
        static_assert(kColumns == kFp8Depth, "a scale covers the columns of a chain");
        const int64_t column = kRowsOwned ? min(t.b_output / 2, p.n / 2 - 1) + lane / kHeld * (p.n / 2)
                                          : min(t.b_output + warpgroup * kColumns, p.n - 1);
        return static_cast<const float*>(p.b.scale.scales) + t.group * p.b.scale.group_stride +
               static_cast<int>(column) / kColumns * p.b.scale.output_stride;
    };
    const auto read_scales = [&](const float* at, int step) {
        step += lane % kHeld;
        return step < steps ? at[step * p.b.scale.block_stride] : 0.0f;
    };
    const float *at_b = scales_of(shared.tiles[tile]), *next_at_b = nullptr;
    float scales[2] = {read_scales(at_b, 0), read_scales(at_b, kHeld)}, next_scales[2];
    // the scales of a step, read while the step before it is multiplied
    float of_row[kRowScales], of_columns[kColScales];
    const auto read_step = [&](int step) {
#pragma unroll
        for (int i = 0; i < kColScales; ++i)
            of_columns[i] = __shfl_sync(kFullMask, scales[0], step % kHeld + i * kHeld);
#pragma unroll
        for (int i = 0; i < kRowScales; ++i)
            of_row[i] = shared.row_scales[stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)];
    };
    const auto look_ahead = [&] {
        more = find_tile();
        if (!more) return;
        next_at_b = scales_of(shared.tiles[ring.index]);
        for (int i = 0; i < 2; ++i) next_scales[i] = read_scales(next_at_b, kHeld * i);
    };

    // operands of the stage that is multiplied next; moved on behind products, so that nothing is to be
    // computed before the next ones
    uint64_t a = k_major_descriptor(shared.stages[0] + (kRowsOwned ? warpgroup * 64 : 0) * kFp8Depth),
             b = k_major_descriptor(shared.stages[0] +
                                    (kTileRows + (kRowsOwned ? 0 : warpgroup * kColumns)) * kFp8Depth);
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
    const auto multiply = [&]<Step kStep>(int step) {
        constexpr bool kFirst = kStep == Step::first || kStep == Step::only,
                       kLast = kStep == Step::last || kStep == Step::only;
        float partial[64], factor[4];
        uint8_t* rows = nullptr;
        start_products<Wgmma>(partial, a, b);
        if (kStep == Step::second && !first) {
            finish.freed();
            release(before(before(stage.index)));
        }
        if (!kFirst || (!kHoldsStage && !first)) release(before(stage.index));
        if (kFirst && !first) {
            rows = last_rows();
            finish.template behind<0>(shared.tiles[done], sum, rows);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) factor[i] = of_row[i % kRowScales] * of_columns[i / 2 % kColScales];
        wait_for_products(partial);
        add_scaled<kFirst>(partial, sum[0], factor[0], factor[1]);

        start_products<Wgmma>(partial, advance_descriptor(a, kRowsOwned ? 0 : 64 * kFp8Depth),
                              advance_descriptor(b, kRowsOwned ? kColumns * kFp8Depth : 0));
        if (kFirst && !first) {
            finish.template behind<1>(shared.tiles[done], sum, rows);
            mbarrier_arrive(&shared.tile_empty[done]);
        }
        if (kStep == Step::only) look_ahead();
        if (kLast) finish.prepare(shared.tiles[tile], sum);
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
        wait_for_products(partial);
        add_scaled<kFirst>(partial, sum[1], factor[2], factor[3]);
    };

    mbarrier_wait(&shared.full[stage.index], stage.parity);
    read_step(0);
    while (more) {
        if (!kHoldsStage && steps == 1) {
            multiply.template operator()<Step::only>(0);
        } else {
            multiply.template operator()<Step::first>(0);
            if constexpr (kHoldsStage) multiply.template operator()<Step::second>(1);
            for (int step = kHoldsStage ? 2 : 1; step + 1 < steps; ++step)
                multiply.template operator()<Step::between>(step);
            look_ahead();
            multiply.template operator()<Step::last>(steps - 1);
        }
        first = false;
        done = tile;
        tile = ring.index;
        ring.advance();
    }
    finish.template behind<0>(shared.tiles[done], sum, last_rows());
    finish.template behind<1>(shared.tiles[done], sum, last_rows());
    finish.end();
}

}  // namespace fp8flow::hopper
