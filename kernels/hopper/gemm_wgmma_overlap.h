// The computing warpgroups of FP8 products with row scales times tile scales, rows grouped, BF16 results (forward and data gradient): the
// sums and the barriers of gemm_wgmma_fp8.cu but the named ones, with nothing but additions between the products. Included by gemm_wgmma_fp8.cu.
#pragma once

#include "kernels/hopper/gemm_wgmma_fp8.h"

namespace fp8flow::hopper {

// 64 rows by 128 columns of a finished tile from column col0 on, a thread's rows being `row` and row + 8; zeros where rows hold no products.
// The sums are zero afterwards. Only a group's last row tile has rows without products: other tiles branch around what clears them.
__device__ __forceinline__ void store_and_clear(const DeviceProduct& p, const MathTile& tile, int64_t col0,
                                                int row, float (&sum)[64]) {
    const int quad = static_cast<int>(threadIdx.x % 4);
    const int columns = static_cast<int>(min(p.n - col0, int64_t{kColumns})) - 8 * quad;
    Bf16* const d = static_cast<Bf16*>(p.d) + (tile.d_row + row) * p.n + col0 + 8 * quad;
    if (same_in_warp(tile.valid) < kTileRows) {
#pragma unroll
        for (int i = 0; i < 64; ++i)
            if (row + 8 * (i / 2 % 2) >= tile.valid) sum[i] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int left = row + 8 * r < tile.rows ? columns : 0;
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int i = 4 * (j + c) + 2 * r;
                words[c] = pack_bf16(sum[i], sum[i + 1]);
            }
            const uint4 chunk = gather_chunk(words);
            if (8 * j < left) store_in_memory(reinterpret_cast<uint4*>(d + 8 * r * p.n + 8 * j), chunk);
        }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
}

// One warpgroup. Behind the first product of a stage: the release of the stage before, and this stage's factors; behind the second: the wait
// for the next stage and the reading of its scales. A finished tile is stored behind the first two products of the next one, which has been found
// one step before its first. Between the end of one product and the start of the next only the 64 additions of a thread remain, so the
// warpgroups need no offset. A tile's place in the ring is given back when the tile is stored; the last stage of all is never
// released: nobody waits for it. No deadlock: the loader announces a tile once it has asked for all stages of the one before, and has a place
// for it since the first step of that one. The contraction is not empty (launch_wgmma).
template <class Wgmma>
__device__ void multiply_tiles_overlapped(const DeviceProduct& p, WgmmaShared& shared, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * 16 + lane / 4;  // this thread's rows: row0 + {0, 8} of each 64
    const int steps = static_cast<int>((p.k + kFp8Depth - 1) / kFp8Depth);  // of every tile
    const uint32_t other_empty = cluster_address(shared.empty, cluster_rank() ^ 1);
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;  // of the next tile
    const auto find_tile = [&] {
        barrier_wait(&shared.tile_full[ring.index], ring.parity);
        __syncwarp();  // products are issued by whole warps
        return same_in_warp(shared.tiles[ring.index].past_end) == 0;
    };
    if (!find_tile()) return;
    int tile = 0, done = 0;  // places in the ring: of the tile that is multiplied, of the one before it
    ring.advance();
    bool first = true, more = true;

    // B's scales: lane l holds those of step l of every 32 steps, of 64 steps; and the next tile's
    const auto scales_of = [&](const MathTile& t) {
        static_assert(kColumns == kFp8Depth, "a scale covers the columns of a warpgroup");
        const int block = static_cast<int>(min(t.b_output + warpgroup * kColumns, p.n - 1)) / kColumns;
        return static_cast<const float*>(p.b.scale.scales) + t.group * p.b.scale.group_stride +
               block * p.b.scale.output_stride;
    };
    const auto read_scales = [&](const float* at, int step) {
        return step + lane < steps ? at[(step + lane) * p.b.scale.block_stride] : 0.0f;
    };
    const float *at_b = scales_of(shared.tiles[tile]), *next_at_b = nullptr;
    float scales[2] = {read_scales(at_b, 0), read_scales(at_b, 32)}, next_scales[2];
    // the scales of a step, read while the step before it is multiplied
    float of_row[4], of_columns;
    const auto read_step = [&](int step) {
        of_columns = __shfl_sync(0xFFFFFFFFu, scales[0], step % 32);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            of_row[i] = shared.row_scales[stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)];
    };
    const auto look_ahead = [&] {
        more = find_tile();
        if (!more) return;
        next_at_b = scales_of(shared.tiles[ring.index]);
        for (int i = 0; i < 2; ++i) next_scales[i] = read_scales(next_at_b, 32 * i);
    };

    // operands of the stage that is multiplied next; moved on behind products, so that nothing is to be computed before the next ones
    uint64_t a = swizzled_rows(shared.stages[0]),
             b = swizzled_rows(shared.stages[0] + (kTileRows + warpgroup * kColumns) * kFp8Depth);
    const auto next_stage = [&] {
        stage.advance();
        const int bytes = static_cast<int>(kStageBytes) * (stage.index == 0 ? 1 - kStages : 1);
        a = descriptor_at(a, bytes);
        b = descriptor_at(b, bytes);
    };
    const auto release_last_stage = [&] {
        __syncwarp();
        const int last = (stage.index == 0 ? kStages : stage.index) - 1;
        if (lane == 0) barrier_arrive(&shared.empty[last]);
        if (lane == 1) barrier_arrive_remote(other_empty + last * sizeof(Barrier));
    };

    float sum[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.0f;
    const auto store = [&](int half) {
        const MathTile& t = shared.tiles[done];
        store_and_clear(p, t, t.b_output + warpgroup * kColumns, row0 + 64 * half, sum[half]);
    };
    const auto multiply = [&]<Step kStep>(int step) {
        constexpr bool kFirst = kStep == Step::first || kStep == Step::only,
                       kLast = kStep == Step::last || kStep == Step::only;
        float partial[64], factor[4];
        start_products<Wgmma>(partial, a, b);
        if (!kFirst || !first) release_last_stage();
        if (kFirst && !first) store(0);
#pragma unroll
        for (int i = 0; i < 4; ++i) factor[i] = of_row[i] * of_columns;
        wait_for_products(partial);
        add_scaled(partial, sum[0], factor[0], factor[1]);

        start_products<Wgmma>(partial, descriptor_at(a, 64 * kFp8Depth), b);
        if (kFirst && !first) {
            store(1);
            barrier_arrive(&shared.tile_empty[done]);
        }
        if (kStep == Step::only) look_ahead();
        next_stage();
        if (!kLast || more) barrier_wait(&shared.full[stage.index], stage.parity);
        if (!kLast) {
            if ((step + 1) % 32 == 0) {
                scales[0] = scales[1];
                scales[1] = read_scales(at_b, step + 33);
            }
            read_step(step + 1);
        } else if (more) {
            at_b = next_at_b;
            for (int i = 0; i < 2; ++i) scales[i] = next_scales[i];
            read_step(0);
        }
        wait_for_products(partial);
        add_scaled(partial, sum[1], factor[2], factor[3]);
    };

    barrier_wait(&shared.full[stage.index], stage.parity);
    read_step(0);
    while (more) {
        if (steps == 1) {
            multiply.template operator()<Step::only>(0);
        } else {
            multiply.template operator()<Step::first>(0);
            for (int step = 1; step + 1 < steps; ++step) multiply.template operator()<Step::between>(step);
            look_ahead();
            multiply.template operator()<Step::last>(steps - 1);
        }
        first = false;
        done = tile;
        tile = ring.index;
        ring.advance();
    }
    store(0);
    store(1);
}

}  // namespace fp8flow::hopper
