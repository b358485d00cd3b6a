// The forms of scales of FP8 warpgroup products, and one block of sums scaled and added: what the loops over stages are built from.
#pragma once

#include "kernels/hopper/gemm_wgmma.h"

namespace fp8flow::hopper {

constexpr int kFp8Depth = 128;  // contraction elements of a stage, and per promotion

// Scales of A by those of B, for each 128 of the contraction: one per 128 rows and 128 columns; per row and 128 columns; per row and per
// column. outputs: constant along the contraction, per row or one by per column or one.
enum class Scales { tiles, rows_tiles, rows_columns, outputs };
constexpr bool has_row_scales(Scales scales) {
    return scales == Scales::rows_tiles || scales == Scales::rows_columns;
}
constexpr bool has_column_scales(Scales scales) { return scales == Scales::rows_columns; }

// Which of a tile's steps: its first one stores the tile before, its last one goes over to the next tile. Each is code of its own, so that
// the steps between them, nearly all, are a short loop: with their branches inside it took 6 % longer.
enum class Step { only, first, between, last };

// Starts the products of 64 rows and 128 columns over one stage, and waits until the last that were started are done.
template <class Wgmma>
__device__ __forceinline__ void start_products(float (&partial)[64], uint64_t a, uint64_t b) {
    wgmma_fence();
    keep_in_place(partial);
#pragma unroll
    for (int k = 0; k < kFp8Depth / 32; ++k)
        Wgmma::multiply(partial, descriptor_at(a, 32 * k), descriptor_at(b, 32 * k), k > 0);
    wgmma_commit();
}
__device__ __forceinline__ void wait_for_products(float (&partial)[64]) {
    wgmma_wait<0>();
    keep_in_place(partial);
}
// result += partial, scaled: `above` for a thread's upper row, `below` for its lower.
__device__ __forceinline__ void add_scaled(const float (&partial)[64], float (&result)[64], float above,
                                           float below) {
#pragma unroll
    for (int i = 0; i < 64; ++i) result[i] = fma_float(partial[i], i / 2 % 2 == 0 ? above : below, result[i]);
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

}  // namespace fp8flow::hopper
