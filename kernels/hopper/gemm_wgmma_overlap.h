// The computing warpgroups of FP8 products with row scales times tile scales, rows grouped, BF16 results (forward and data gradient): the
// sums and the barriers of gemm_wgmma_fp8.cu but the named ones, with nothing but additions between the products. Included by gemm_wgmma_fp8.cu
// and gemm_wgmma_swiglu.cu.
#pragma once

#include "kernels/hopper/gemm_wgmma_fp8.h"

namespace fp8flow::hopper {

// A tile that is multiplied and not stored yet: its first row and a warpgroup's first column where it goes, rows to write, and products in them.
struct DoneTile {
    int64_t row = 0;
    int32_t col = 0, rows = 0, valid = 0;
};

// Where finished tiles go: to D. A warpgroup's columns in B and in D, and what is done around a tile's stores, here nothing.
struct IntoD {
    const DeviceProduct& p;
    __device__ int64_t column(const MathTile& tile, int warpgroup) const {
        return tile.b_output + warpgroup * kColumns;
    }
    __device__ const DeviceProduct& rows() const { return p; }
    // at a tile's end, and once it is known whether another follows
    __device__ DoneTile finished(const MathTile& tile, int warpgroup) const {
        return {tile.d_row, static_cast<int32_t>(column(tile, warpgroup)), tile.rows, tile.valid};
    }
    __device__ void known(bool) const {}
    // around a tile's stores
    __device__ void before_stores() const {}
    __device__ void after_stores() const {}
    // where the CTA has no tile; where its last one is stored
    __device__ void no_tile() const {}
    __device__ void after_last() const {}
};

// One warpgroup. Behind the first product of a stage: the release of the stage before, and this stage's factors; behind the second: the wait
// for the next stage, and at a tile's end the next tile and its scales. A finished tile is stored behind the first two products of the
// next one. Between the end of one product and the start of the next only the 64 additions of a thread remain, so the warpgroups need no
// offset. The last stage of all is never released: nobody waits for it. A stage's row scales are read before its first sums are added, so long before its release. The
// contraction is not empty (launch_wgmma).
template <class Wgmma, class Out>
__device__ void multiply_tiles_overlapped(const DeviceProduct& p, WgmmaShared& shared, int warpgroup,
                                          Out out) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
    const int row0 = thread / 32 * 16 + lane / 4;  // this thread's rows: row0 + {0, 8} of each 64
    const int steps = static_cast<int>((p.k + kFp8Depth - 1) / kFp8Depth);  // of every tile
    RingPosition<kStages> stage;
    RingPosition<kRing> ring;
    MathTile tile{};
    DoneTile done;
    const auto scales_of = [&](const MathTile& t) {
        const int64_t col0 = out.column(t, warpgroup);
        return static_cast<const float*>(p.b.scale.scales) + t.group * p.b.scale.group_stride +
               min(col0, p.n - 1) / p.b.scale.outputs_per_scale * p.b.scale.output_stride;
    };
    const float* at_b = nullptr;
    // lane l holds the scale of step l of every 32 steps
    const auto read_scale = [&](int step) {
        return step < steps ? at_b[step * p.b.scale.block_stride] : 0.0f;
    };
    float sum[2][64];
    const auto clear = [](float(&sums)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
    };
    const auto store = [&](int half, const float(&sums)[64]) {
        const int row = row0 + 64 * half;
        const auto use = [&](int r) {
            return r >= done.rows ? RowUse::none : r >= done.valid ? RowUse::zero : RowUse::product;
        };
        store_row_bf16<0>(out.rows(), done.row + row, done.col, sums, use(row));
        store_row_bf16<1>(out.rows(), done.row + row + 8, done.col, sums, use(row + 8));
    };
    const auto start = [&](float(&partial)[64], int half) {
        const uint8_t* rows = shared.stages[stage.index];
        const uint64_t a = swizzled_rows(rows + half * 64 * kFp8Depth),
                       b = swizzled_rows(rows + (kTileRows + warpgroup * kColumns) * kFp8Depth);
        start_products<Wgmma>(partial, a, b);
    };
    const auto finish = [](float(&partial)[64], float(&sums)[64], float above, float below) {
        wait_for_products(partial);
        add_scaled(partial, sums, above, below);
    };

    if (!next_tile(shared, ring, tile)) {
        out.no_tile();
        return;
    }
    at_b = scales_of(tile);
    float scales = read_scale(lane), next_scales = 0.0f;
    clear(sum[0]);
    clear(sum[1]);
    barrier_wait(&shared.full[stage.index], stage.parity);
    bool first = true, more = true;
    while (more) {
        for (int step = 0; step < steps; ++step) {
            float partial[64], factor[4];
            start(partial, 0);
            if (step > 0 || !first) release_stage(shared, (stage.index == 0 ? kStages : stage.index) - 1);
            if (step == 0 && !first) {
                out.before_stores();
                store(0, sum[0]);
                clear(sum[0]);
            }
            if (step % 32 == 0) {
                if (step > 0) scales = next_scales;
                next_scales = read_scale(step + 32 + lane);
            }
            const float scale = __shfl_sync(0xFFFFFFFFu, scales, step % 32);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                factor[i] = shared.row_scales[stage.index][row0 + 64 * (i / 2) + 8 * (i % 2)] * scale;
            finish(partial, sum[0], factor[0], factor[1]);

            start(partial, 1);
            if (step == 0 && !first) {
                store(1, sum[1]);
                out.after_stores();
                clear(sum[1]);
            }
            if (step + 1 == steps) {
                done = out.finished(tile, warpgroup);
                more = next_tile(shared, ring, tile);
                out.known(more);
                if (more) {
                    at_b = scales_of(tile);
                    scales = read_scale(lane);
                }
            }
            stage.advance();
            if (more) barrier_wait(&shared.full[stage.index], stage.parity);
            finish(partial, sum[1], factor[2], factor[3]);
        }
        first = false;
    }
    out.before_stores();
    store(0, sum[0]);
    store(1, sum[1]);
    out.after_stores();
    out.after_last();
}

}  // namespace fp8flow::hopper
