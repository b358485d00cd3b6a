// SPDX-License-Identifier: MIT
// GEMMs: dense, grouped by expert, and grouped weight gradients. Accumulation orders are part of the
// contract.
//
// Plain operands (bf16 | f32): acc = fma(a, b, acc) in fp32 over ascending k, one rounding to the output
// dtype. FP8 operands: products of values summed in fp32 over each scale block of the contraction (128; 32
// for mx32; the whole contraction for scales constant along it), ascending k; then acc = fma(partial,
// scale_a*scale_b, acc), scales multiplied first; one rounding. Sources: DeepSeek-V3 (FP32 promotion every
// 128), DeepGEMM, torchao.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stochastic_rounding.h"
#include "kernels/ops/squares.h"
#include "kernels/ops/swiglu.h"

#include <array>

namespace fp8flow::op {

// nt: D[M,N] = A[M,K] B[N,K]^T   nn: D = A[M,K] B[K,N]   tn: D = A[K,M]^T B[K,N]. FP8 operands: nt only
// (Hopper reads both operands contiguous along the contraction).
enum class GemmForm { nt, nn, tn };

struct Gemm {
    ScaledTensor a;  // layout none for plain tensors
    ScaledTensor b;
    GemmForm form = GemmForm::nt;
    // accumulate: D f32 only, D = D + A B (one fp32 addition per element)
    Gradient mode = Gradient::overwrite;
    TensorView d;  // out [M, N] bf16 | f32
};

// D[r] = A[r] B[g mod E]^T for every row r of group g; the number of groups G is a multiple of E. nt with B
// [E, N, K], or nn with B [E, K, N] (plain operands only). Row scales: A vec128 | row | mx32 | tensor | none,
// B block128 | row | mx32 | tensor | none. Pad rows of D are written as zeros; rows past offsets[G] are
// untouched.
struct GroupedGemm {
    ScaledTensor a;  // [M, K]
    ScaledTensor b;  // [E, N, K]
    RowGroups groups;
    GemmForm form = GemmForm::nt;
    TensorView d;  // out [M, N]
};

// dy, x and the rows of one micro-batch.
struct WgradOperands {
    ScaledTensor dy;
    ScaledTensor x;
    RowGroups groups;

    explicit operator bool() const { return static_cast<bool>(dy); }
};
// One weight gradient can sum over the rows of so many micro-batches.
inline constexpr int kMaxWgradSets = 8;

// dW[g] (+)= dY_g^T X_g, contraction over the group's rows. Plain operands: dy [M, N], x [M, K] (rows in
// ascending order, fma). FP8: the transposed copies dy [N, M], x [K, M], layouts tile128 | vec128 | group_row
// | mx32 | tensor; blocks of the contraction are counted from the group's first row; pads contribute nothing:
// the kernel that wrote the copies has set their values to 0 (a backend may multiply over them); plain pad
// rows are not read. A group of 0 rows writes zeros (overwrite) or nothing. accumulate: dW = dW +
// dY^T X, one fp32 addition of the old value per element, after the last block of the contraction; a backend
// may add it after an earlier one.
//
// second, more: the operands of other micro-batches for the same experts:
// dW[g] (+)= dY_g^T X_g + dY2_g^T X2_g + ..., so that dW is read and written once for all.
// Dtypes and layouts are the same; capacities and group sizes may differ. One accumulator takes the rows of
// the first operands, then those of the second, and so on; a backend may instead add the result of each to dW
// as a separate accumulating call would.
// A group counts as empty only if it is empty in all.
//
// dw in BF16: overwrite rounds the sum to nearest even. accumulate rounds the old value in FP32 plus the sum
// stochastically, by global row (kernels/core/stochastic_rounding.h): row n of group g is row rounding.first
// + g N + n. With `second`, a value is rounded once, or in every call by a backend that makes several.
//
// squares: sums of squares of dw after the call, in double, one per patch, for all groups, empty ones too.
// A kernel that computes them in its epilogue does not read dw again (kernels/ops/squares.h).
struct GroupedGemmWgrad {
    ScaledTensor dy;
    ScaledTensor x;
    RowGroups groups;
    Gradient mode = Gradient::overwrite;
    TensorView dw;                                           // out [G, N, K] f32 | bf16
    WgradOperands second;                                    // optional
    std::array<WgradOperands, kMaxWgradSets - 2> more = {};  // optional; after `second`, without gaps
    StochasticRounding rounding = {};
    TensorView squares;  // out squares_shape(dw) f64, optional
};
inline WgradOperands set_of(const GroupedGemmWgrad& args, int index) {
    if (index == 0) return {args.dy, args.x, args.groups};
    return index == 1 ? args.second : args.more[static_cast<size_t>(index - 2)];
}
inline int num_sets(const GroupedGemmWgrad& args) {
    int sets = 1;
    while (sets < kMaxWgradSets && set_of(args, sets)) ++sets;
    return sets;
}
// Calls, one per set, that together give the same gradient as `args`.
inline GroupedGemmWgrad call_of_set(const GroupedGemmWgrad& args, int index) {
    const auto [dy, x, groups] = set_of(args, index);
    return {.dy = dy,
            .x = x,
            .groups = groups,
            .mode = index == 0 ? args.mode : Gradient::accumulate,
            .dw = args.dw,
            .rounding = {args.rounding.key + static_cast<uint64_t>(index), args.rounding.first,
                         args.rounding.step},
            .squares = index + 1 == num_sets(args) ? args.squares : TensorView{}};
}

// fc1 with SwiGLU x prob + 1x128 quantise in its epilogue: h = A B^T rounded to BF16, a = quantise(swiglu(h)
// * prob); bit-equal to the composed ops. The composed form always writes h; a fused backend may skip it with
// SaveH::no.
enum class SaveH { yes, no };
struct GroupedGemmSwigluQuantize {
    ScaledTensor a;  // [M, K] vec128
    ScaledTensor b;  // [E, 2F, K] block128
    RowGroups groups;
    TensorView prob;  // [M] f32, optional
    GluForm form = {};
    ScaleFormat scale_format = ScaleFormat::pow2;
    SaveH save_h = SaveH::yes;
    TensorView h;      // out [M, 2F] bf16
    ScaledTensor act;  // out [M, F] vec128
};

}  // namespace fp8flow::op
