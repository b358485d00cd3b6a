// SPDX-License-Identifier: MIT
// Sums of squares of a weight gradient [G, N, K], for the norm of all gradients: places and order of
// summation, part of the contracts of grouped_gemm_wgrad and add_squares. Both backends follow it, so that
// equal gradients give equal bits, whichever kernel wrote them.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/core/tensor.h"

#include <array>

namespace fp8flow::op {

// Entry (g, r, c, w) of [G, ceil(N/128), ceil(K/128), 4] f64 is the sum of a patch: of group g the rows 128 r
// + 64 b + 16 w + {0..15}, b = 0, 1, and the columns 128 c + {0..127}; what is past N or K counts as 0. A
// patch is what a warp of the Hopper kernels holds of a tile (kernels/hopper/gemm/sm90/wgrad_epilogue.h).
constexpr int64_t kSquaresTile = 128, kSquaresPatches = 4, kSquaresRows = 16;
constexpr std::array<int64_t, 4> squares_shape(int64_t groups, int64_t n, int64_t k) {
    return {groups, ceil_div(n, kSquaresTile), ceil_div(k, kSquaresTile), kSquaresPatches};
}

// Order of a patch: 32 lanes; lane 4 i + q has the rows i and i + 8 of every 16, and of every 8 columns (j,
// ascending) the columns 2 q and 2 q + 1: 128 values. It sums their squares in FP32, by quarters of the
// patch, b and 64 columns h: four strands by bit 1 of j and by column, each fma by fma over ascending (j,
// row), added as (s00 + s01) + (s10 + s11). Its quarters are added in the order (b, h) = 00, 01, 10, 11. The
// lanes are added in double, in halves (l + (l+16), then + 8, 4, 2, 1). Swapping the halves of j changes no
// bit. A lane with NaN, or with a square past FP32, is infinite.
constexpr int kSquaresLanes = 32;
struct SquareStrands {
    float strands[2][2] = {};

    // Two neighbouring columns; half: bit 1 of j.
    FP8FLOW_HD void add(int half, float x, float y) {
        strands[half][0] = fma_float(x, x, strands[half][0]);
        strands[half][1] = fma_float(y, y, strands[half][1]);
    }
    FP8FLOW_HD float sum() const { return (strands[0][0] + strands[0][1]) + (strands[1][0] + strands[1][1]); }
};
// A lane's quarters, for the sum of lanes.
FP8FLOW_HD double lane_of_squares(float quarters) {
    const float infinite = bits_float(0x7F800000u);
    return static_cast<double>(quarters < infinite ? quarters : infinite);
}

// sum += all entries, in double, rounded to f32 once per call: blocks of 1024 entries; in a block entry i
// goes to strand i % 32 (ascending), the strands are added in halves. The sum of block b goes to strand b %
// 1024 (ascending); each 32 neighbouring strands are added in halves, then the 32 sums in the same way.
constexpr int64_t kAddSquaresBlock = 1024, kAddSquaresStrands = 32;
struct AddSquares {
    TensorView squares;  // f64, any shape
    TensorView sum;      // in/out [1] f32
};

}  // namespace fp8flow::op
