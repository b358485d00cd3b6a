// SPDX-License-Identifier: MIT
// What the FP8 mainloops share: scale granularities, one wgmma batch over a stage, promotion of its partial
// sums into the FP32 accumulator, and the producer's loads.
#pragma once

#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper::gemm {

constexpr int kFp8StageK = 128;  // contraction elements of a stage, and between promotions

// Granularity of the scales of A and of B. Per 128 of the contraction: tiles (128 rows, 128 columns),
// rows_tiles (row, 128 columns), rows_columns (row, column). outputs: constant along the contraction, per row
// or one for A, per column or one for B.
enum class ScaleMode { tiles, rows_tiles, rows_columns, outputs };
constexpr bool has_row_scales(ScaleMode scales) {
    return scales == ScaleMode::rows_tiles || scales == ScaleMode::rows_columns;
}
constexpr bool has_column_scales(ScaleMode scales) { return scales == ScaleMode::rows_columns; }

// Position of a mainloop step in its tile: the first overlaps with the epilogue of the tile before, the
// second releases what that epilogue held, the last fetches the next tile. Each is separate code, so that the
// steps between them, nearly all, are a short loop: with these branches inside, the loop took 6 % longer.
enum class Step { only, first, second, between, last };

// A consumer warpgroup's part of a tile: two chains (accumulators of 64 rows x 128 columns). columns: all
// rows of its own 128 columns. rows: its own 64 rows, of 128 columns in the first half of D and of the 128
// columns of the second half that belong to them (gate and up).
enum class Owned { columns, rows };
// This thread's upper row in the first chain.
template <Owned kOwned> __device__ __forceinline__ int first_row(int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    return (kOwned == Owned::rows ? 64 * warpgroup : 0) + thread / 32 * 16 + thread % 32 / 4;
}

// Issues the wgmma of one chain over one stage, and waits for all that were issued.
template <class Wgmma>
__device__ __forceinline__ void start_mma(float (&partial)[64], uint64_t a, uint64_t b) {
    wgmma_fence();
    wgmma_fence_operand(partial);
#pragma unroll
    for (int k = 0; k < kFp8StageK / 32; ++k)
        Wgmma::multiply(partial, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), k > 0);
    wgmma_commit();
}
__device__ __forceinline__ void wait_mma(float (&partial)[64]) {
    wgmma_wait<0>();
    wgmma_fence_operand(partial);
}
// Promotion: result += partial * scale, with `above` for a thread's upper row and `below` for its lower one.
// kBegins: as if result were 0.
template <bool kBegins = false>
__device__ __forceinline__ void promote(const float (&partial)[64], float (&result)[64], float above,
                                        float below) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
        result[i] = fma_float(partial[i], i / 2 % 2 == 0 ? above : below, kBegins ? 0.0f : result[i]);
}

// The same, also times `columns`: scales of this thread's first two columns, further ones 8 apart.
__device__ __forceinline__ void promote(const float (&partial)[64], float (&result)[64], float above,
                                        float below, const float2* columns) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 column = columns[4 * j];
        result[4 * j] = fma_float(partial[4 * j], above * column.x, result[4 * j]);
        result[4 * j + 1] = fma_float(partial[4 * j + 1], above * column.y, result[4 * j + 1]);
        result[4 * j + 2] = fma_float(partial[4 * j + 2], below * column.x, result[4 * j + 2]);
        result[4 * j + 3] = fma_float(partial[4 * j + 3], below * column.y, result[4 * j + 3]);
    }
}

// One chain over one stage. `read` is called once nothing of the stage is needed any more.
template <class Wgmma, ScaleMode kScaleMode, class Read>
__device__ __forceinline__ void mma_and_promote(uint64_t a, uint64_t b, float (&result)[64], float above,
                                                float below, const float2* columns, Read read) {
    float partial[64];
    start_mma<Wgmma>(partial, a, b);
    wait_mma(partial);
    if (has_column_scales(kScaleMode)) {
        promote(partial, result, above, below, columns);
        read();
    } else {
        read();
        promote(partial, result, above, below);
    }
}

// ---- producer: one thread
//
// B's part of a stage are consecutive rows of B; where warpgroups own rows, one half of them from either half
// of the group's B, and groups divide rows.
template <ScaleMode kScaleMode, Owned kOwned = Owned::columns, class Shared>
__device__ __forceinline__ void produce_operands(const GemmProblem& problem, Shared& shared,
                                                 const CUtensorMap* map_a, const CUtensorMap* map_b) {
    constexpr bool kRowsOwned = kOwned == Owned::rows;
    const int rank = static_cast<int>(cluster_rank());
    constexpr uint32_t kRowBytes = has_row_scales(kScaleMode) ? kTileRows * sizeof(float) : 0,
                       kColBytes = has_column_scales(kScaleMode) ? kTileCols * sizeof(float) : 0;
    const int b_half = kRowsOwned ? static_cast<int>(problem.n / 2) : kTileCols / 2;
    produce_tiles<kFp8StageK>(
        problem, shared, kStageBytes + kRowBytes + kColBytes,
        [&](const WorkTile& tile, auto multicast, int step, int index, Mbarrier* full) {
            const int64_t first_a = kRowsOwned ? 0 : tile.a_k, first_b = kRowsOwned ? 0 : tile.b_k;
            const int a_k = static_cast<int>(first_a) + step * kFp8StageK,
                      b_k = static_cast<int>(first_b) + step * kFp8StageK;
            const bool rows_grouped = kRowsOwned || problem.grouped == Grouped::rows;
            const int a = static_cast<int>(tile.a_output),
                      b = static_cast<int>((rows_grouped ? tile.group * problem.n : 0) +
                                           (kRowsOwned ? tile.b_output / 2 : tile.b_output));
            uint8_t *to_a = shared.stages[index], *to_b = to_a + kTileRows * kStageRowBytes;
            load_operand<2>(load_of(multicast, Multicast::a), rank, map_a, full, to_a,
                            kTileRows / 2 * kStageRowBytes,
                            [&](int i) { return make_int2(a_k, a + i * kTileRows / 2); });
            load_operand<2>(load_of(multicast, Multicast::b), rank, map_b, full, to_b,
                            kTileCols / 2 * kStageRowBytes,
                            [&](int i) { return make_int2(b_k, b + i * b_half); });
            const auto scales_at = [step](const OperandScale& s, int64_t k, int64_t output) {
                return static_cast<const float*>(s.scales) + (k / kFp8StageK + step) * s.block_stride +
                       output;
            };
            if (kRowBytes > 0)
                bulk_load(scales_at(problem.a.scale, first_a, tile.a_output), full, shared.row_scales[index],
                          kRowBytes);
            if constexpr (kColBytes > 0)
                // of a warpgroup each, which may be past the last column: its sums are not stored
                for (int64_t col = 0; col < kTileCols; col += kWarpgroupCols)
                    bulk_load(scales_at(problem.b.scale, first_b,
                                        min(tile.b_output + col, problem.n - kWarpgroupCols)),
                              full, shared.col_scales[index] + col, kWarpgroupCols * sizeof(float));
        });
}

}  // namespace fp8flow::hopper::gemm
