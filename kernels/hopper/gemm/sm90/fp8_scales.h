// SPDX-License-Identifier: MIT
// The forms of scales of FP8 warpgroup products, and one block of sums scaled and added: what the loops over
// stages are built from.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/wgmma.h"
#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper {

constexpr int kFp8Depth = 128;  // contraction elements of a stage, and per promotion

// Scales of A by those of B, for each 128 of the contraction: one per 128 rows and 128 columns; per row and
// 128 columns; per row and per column. outputs: constant along the contraction, per row or one by per column
// or one.
enum class Scales { tiles, rows_tiles, rows_columns, outputs };
constexpr bool has_row_scales(Scales scales) {
    return scales == Scales::rows_tiles || scales == Scales::rows_columns;
}
constexpr bool has_column_scales(Scales scales) { return scales == Scales::rows_columns; }

// Which of a tile's steps: its first one stores the tile before, its second one gives back what that took,
// its last one goes over to the next tile. Each is code of its own, so that the steps between them, nearly
// all, are a short loop: with their branches inside it took 6 % longer.
enum class Step { only, first, second, between, last };

// What of a tile a warpgroup computes, as two chains of products of 64 rows and 128 columns. columns: all
// rows of its 128 columns. rows: its 64 rows, of 128 columns of the first half of D's and of the 128 of the
// second half that belong to them (gate and up).
enum class Owned { columns, rows };
// This thread's upper row in the first chain.
template <Owned kOwned> __device__ __forceinline__ int first_row(int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    return (kOwned == Owned::rows ? 64 * warpgroup : 0) + thread / 32 * 16 + thread % 32 / 4;
}

// Starts the products of 64 rows and 128 columns over one stage, and waits until the last that were started
// are done.
template <class Wgmma>
__device__ __forceinline__ void start_products(float (&partial)[64], uint64_t a, uint64_t b) {
    wgmma_fence();
    wgmma_fence_operand(partial);
#pragma unroll
    for (int k = 0; k < kFp8Depth / 32; ++k)
        Wgmma::multiply(partial, advance_descriptor(a, 32 * k), advance_descriptor(b, 32 * k), k > 0);
    wgmma_commit();
}
__device__ __forceinline__ void wait_for_products(float (&partial)[64]) {
    wgmma_wait<0>();
    wgmma_fence_operand(partial);
}
// result += partial, scaled: `above` for a thread's upper row, `below` for its lower. kBegins: as if result
// were 0.
template <bool kBegins = false>
__device__ __forceinline__ void add_scaled(const float (&partial)[64], float (&result)[64], float above,
                                           float below) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
        result[i] = fma_float(partial[i], i / 2 % 2 == 0 ? above : below, kBegins ? 0.0f : result[i]);
}

// The same, also times `columns`: of this thread's first two columns, further ones 8 apart.
__device__ __forceinline__ void add_scaled(const float (&partial)[64], float (&result)[64], float above,
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

// All of it. `read` is called once nothing of the stage is needed any more.
template <class Wgmma, Scales kScales, class Read>
__device__ __forceinline__ void add_products(uint64_t a, uint64_t b, float (&result)[64], float above,
                                             float below, const float2* columns, Read read) {
    float partial[64];
    start_products<Wgmma>(partial, a, b);
    wait_for_products(partial);
    if (has_column_scales(kScales)) {
        add_scaled(partial, result, above, below, columns);
        read();
    } else {
        read();
        add_scaled(partial, result, above, below);
    }
}

// ---- loading: one thread
// B's part of a stage are rows of B that follow each other; where warpgroups own rows, half of them from
// either half of the group's B, and groups divide rows.
template <Scales kScales, Owned kOwned = Owned::columns, class Shared>
__device__ __forceinline__ void load_operands(const DeviceProduct& product, Shared& shared,
                                              const CUtensorMap* map_a, const CUtensorMap* map_b) {
    constexpr bool kRowsOwned = kOwned == Owned::rows;
    const int rank = static_cast<int>(cluster_rank());
    constexpr uint32_t kRowBytes = has_row_scales(kScales) ? kTileRows * sizeof(float) : 0,
                       kColBytes = kScales == Scales::rows_columns ? kTileCols * sizeof(float) : 0;
    const int b_half = kRowsOwned ? static_cast<int>(product.n / 2) : kTileCols / 2;
    load_tiles<kFp8Depth>(
        product, shared, kStageBytes + kRowBytes + kColBytes,
        [&](const MathTile& tile, auto common, int step, int index, Mbarrier* full) {
            const int64_t first_a = kRowsOwned ? 0 : tile.a_k, first_b = kRowsOwned ? 0 : tile.b_k;
            const int a_k = static_cast<int>(first_a) + step * kFp8Depth,
                      b_k = static_cast<int>(first_b) + step * kFp8Depth;
            const bool rows_grouped = kRowsOwned || product.grouped == Grouped::rows;
            const int a = static_cast<int>(tile.a_output),
                      b = static_cast<int>((rows_grouped ? tile.group * product.n : 0) +
                                           (kRowsOwned ? tile.b_output / 2 : tile.b_output));
            const auto load_of = [&](Common operand) { return common == operand ? Load::common : Load::own; };
            uint8_t *to_a = shared.stages[index], *to_b = to_a + kTileRows * kStageRowBytes;
            load_operand<2>(load_of(Common::a), rank, map_a, full, to_a, kTileRows / 2 * kStageRowBytes,
                            [&](int i) { return make_int2(a_k, a + i * kTileRows / 2); });
            load_operand<2>(load_of(Common::b), rank, map_b, full, to_b, kTileCols / 2 * kStageRowBytes,
                            [&](int i) { return make_int2(b_k, b + i * b_half); });
            const auto scales_at = [step](const DeviceScale& s, int64_t k, int64_t output) {
                return static_cast<const float*>(s.scales) + (k / kFp8Depth + step) * s.block_stride + output;
            };
            if (kRowBytes > 0)
                bulk_load(scales_at(product.a.scale, first_a, tile.a_output), full, shared.row_scales[index],
                          kRowBytes);
            if constexpr (kColBytes > 0)
                // the second CTA of a pair may be past the last column
                bulk_load(scales_at(product.b.scale, first_b, min(tile.b_output, product.n - kTileCols)),
                          full, shared.col_scales[index], kColBytes);
        });
}

}  // namespace fp8flow::hopper
