// SPDX-License-Identifier: MIT
// Bench cases of the GEMMs: dense, grouped by expert, weight gradients, and fc1 with its fused epilogue.
#include "model/bench/cases/case.h"

namespace fp8flow::bench {

namespace {

using L = ScaleLayout;

// What the operands are made of, by recipe: their scales.
const std::vector<std::string> kTypes = {"bf16", "f32", "fp8", "fp8_row", "fp8_tensor", "mx"};
constexpr const char* kTypeMeaning =
    "operands: bf16 | f32 | fp8 (1x128 by 128x128) | fp8_row | fp8_tensor | mx (1x32)";

struct Operands {
    DType dtype;
    L first, second, transposed;  // scales of activations, weights, transposed copies
};
Operands operands(const Shape& shape) {
    switch (shape.choice("type", kTypes)) {
        case 0: return {DType::bf16, L::none, L::none, L::none};
        case 1: return {DType::f32, L::none, L::none, L::none};
        case 2: return {DType::e4m3, L::vec128, L::block128, L::vec128};
        case 3: return {DType::e4m3, L::row, L::row, L::group_row};
        case 4: return {DType::e4m3, L::tensor, L::tensor, L::tensor};
        default: return {DType::e4m3, L::mx32, L::mx32, L::mx32};
    }
}

RowGroups grouped_rows(Buffers& buffers, const Shape& shape) {
    shape.positive("G");
    return buffers.routed(shape);
}

const Keys kProduct = {{"N", "4096", "256", "columns of the result"}, {"K", "7168", "256", "contraction"}};
const Key kType = {"type", "fp8", "fp8", kTypeMeaning};
const Key kMode = {"mode", "overwrite", "overwrite", "result: overwrite | accumulate (f32)"};
const Key kOut = {"out", "bf16", "bf16", "result: bf16 | f32"};
const Key kForm = {"form", "nt", "nt", "nt: rows by rows; nn | tn: plain operands only"};

op::Gemm dense(Buffers& buffers, const Shape& shape) {
    const int64_t m = shape.number("M"), n = shape.positive("N"), k = shape.positive("K");
    const Operands kind = operands(shape);
    const int64_t form = shape.choice("form", {"nt", "nn", "tn"});
    return {.a = form == 2 ? buffers.operand(kind.dtype, {k, m}, kind.first)
                           : buffers.operand(kind.dtype, {m, k}, kind.first),
            .b = form == 0 ? buffers.operand(kind.dtype, {n, k}, kind.second)
                           : buffers.operand(kind.dtype, {k, n}, kind.second),
            .form = form == 0   ? op::GemmForm::nt
                    : form == 1 ? op::GemmForm::nn
                                : op::GemmForm::tn,
            .mode = shape.gradient(),
            .d = buffers.zeros(shape.dtype("out", {DType::bf16, DType::f32}), {m, n})};
}

op::GroupedGemm grouped(Buffers& buffers, const Shape& shape) {
    const RowGroups routed = grouped_rows(buffers, shape);
    const int64_t groups = routed.num_groups, n = shape.positive("N"), k = shape.positive("K");
    const Operands kind = operands(shape);
    const bool nn = shape.choice("form", {"nt", "nn"}) == 1;
    return {.a = buffers.operand(kind.dtype, {routed.row_capacity, k}, kind.first),
            .b = nn ? buffers.operand(kind.dtype, {groups, k, n}, kind.second)
                    : buffers.operand(kind.dtype, {groups, n, k}, kind.second),
            .groups = routed,
            .form = nn ? op::GemmForm::nn : op::GemmForm::nt,
            .d = buffers.output(shape.dtype("out", {DType::bf16, DType::f32}), {routed.row_capacity, n})};
}

Call wgrad(Machine& machine, Buffers& buffers, const Shape& shape) {
    const RowGroups routed = grouped_rows(buffers, shape);
    const int64_t groups = routed.num_groups, n = shape.positive("N"), k = shape.positive("K");
    const int64_t micro_batches = shape.choice("micro_batches", {"1", "2", "3", "4", "5", "6", "7", "8"}) + 1;
    const Operands kind = operands(shape);
    // fp8_flow's operands carry one scale per 128x128 tile
    const bool tiles = shape.choice("tiles", {"no", "yes"}) == 1 && kind.transposed == L::vec128;
    const L layout = tiles ? L::tile128 : kind.transposed;
    const bool clean_pads = routed.alignment % kBlock == 0;
    const auto operand = [&](int64_t dim) {
        if (!is_fp8(kind.dtype)) return buffers.operand(kind.dtype, {routed.row_capacity, dim}, L::none);
        return clean_pads ? buffers.transposed_input(machine.ops, kind.dtype, dim, layout, routed)
                          : buffers.operand(kind.dtype, {dim, routed.row_capacity}, layout, groups);
    };
    op::GroupedGemmWgrad args{
        .dy = operand(n),
        .x = operand(k),
        .groups = routed,
        .mode = shape.gradient(),
        .dw = buffers.zeros(shape.dtype("dw", {DType::f32, DType::bf16}), {groups, n, k})};
    if (shape.yes("squares")) {
        const auto [g, r, c, w] = op::squares_shape(groups, n, k);
        args.squares = buffers.output(DType::f64, {g, r, c, w});
    }
    for (int64_t i = 1; i < micro_batches; ++i) {
        op::WgradOperands& set = i == 1 ? args.second : args.more[to_size(i - 2)];
        set = {operand(n), operand(k), routed};
    }
    return call_of(machine, &Ops::grouped_gemm_wgrad, args);
}

Call fused(Machine& machine, Buffers& buffers, const Shape& shape) {
    const RowGroups routed = grouped_rows(buffers, shape);
    const int64_t groups = routed.num_groups, f = shape.positive("F"), k = shape.positive("K");
    op::GroupedGemmSwigluQuantize args{
        .a = buffers.fp8_input(DType::e4m3, {routed.row_capacity, k}, L::vec128),
        .b = buffers.fp8_input(DType::e4m3, {groups, 2 * f, k}, L::block128),
        .groups = routed,
        .scale_format = shape.scale_format(),
        .save_h = shape.yes("save_h") ? op::SaveH::yes : op::SaveH::no,
        .h = buffers.output(DType::bf16, {routed.row_capacity, 2 * f}),
        .act = buffers.fp8_output(DType::e4m3, {routed.row_capacity, f}, L::vec128)};
    if (shape.yes("prob")) args.prob = buffers.normal(DType::f32, {routed.row_capacity});
    return call_of(machine, &Ops::grouped_gemm_swiglu_quantize, args);
}

}  // namespace

std::vector<Case> gemm_cases() {
    return {{"gemm", "dense GEMM",
             Keys{{"M", "4096", "40", "rows of the result"}} + kProduct + Keys{kType, kForm, kOut, kMode},
             local<&Ops::gemm, dense>},
            {"grouped_gemm", "one GEMM per expert: fc1, fc2 and their input gradients",
             group_keys() + kProduct + Keys{kType, {"form", "nt", "nt", "nt; nn: plain operands only"}, kOut},
             local<&Ops::grouped_gemm, grouped>},
            {"grouped_gemm_wgrad", "one weight gradient [N, K] per expert, over its rows",
             group_keys() + kProduct +
                 Keys{kType,
                      kMode,
                      {"tiles", "yes", "yes", "type fp8: one scale per 128x128 tile: yes | no"},
                      {"dw", "f32", "f32",
                       "the gradient: f32 | bf16, rounded stochastically where it accumulates"},
                      {"squares", "no", "yes", "sums of squares of what is written, for its norm: yes | no"},
                      {"micro_batches", "1", "1", "of M rows each; their sum is written or added: 1 to 8"}},
             wgrad},
            {"grouped_gemm_swiglu_quantize", "fc1 with SwiGLU and quantisation in its epilogue",
             group_keys() + Keys{{"F", "2048", "128", "columns of gate and of up"},
                                 {"K", "7168", "256", "contraction"},
                                 {"prob", "yes", "yes", "times a probability: yes | no"},
                                 {"save_h", "yes", "yes", "keep the values before SwiGLU: yes | no"},
                                 {"scale", "pow2", "pow2", "scales: pow2 | fp32"}},
             fused}};
}

}  // namespace fp8flow::bench
