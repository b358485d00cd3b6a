// SPDX-License-Identifier: MIT
// Bench cases of the optimizer: gradient norm, clipping, AdamW and the FP8 copies that it writes.
#include "model/bench/cases/case.h"

namespace fp8flow::bench {

namespace {

const Keys kWeight = {{"E", "8", "2", "experts"},
                      {"N", "4096", "256", "rows of a weight"},
                      {"K", "7168", "384", "columns of a weight"}};

const Key kState = {"state", "f32", "f32", "gradient and moments: f32 | bf16"};

op::NormSquared norm_squared(Buffers& buffers, const Shape& shape) {
    return {.x = buffers.normal(DType::f32, {shape.number("N")}), .sum = buffers.zeros(DType::f32, {1})};
}

op::AddSquares add_squares(Buffers& buffers, const Shape& shape) {
    return {.squares = buffers.normal(DType::f64, {shape.number("N")}),
            .sum = buffers.zeros(DType::f32, {1})};
}

op::ClipFactor clip_factor(Buffers& buffers, const Shape&) {
    return {.norm_squared = buffers.pow2(DType::f32, {1}),
            .clip = 1.0f,
            .status = buffers.zeros(DType::i32, {1}),
            .norm = buffers.output(DType::f32, {1}),
            .factor = buffers.output(DType::f32, {1})};
}

op::AdamW adamw_arguments(Buffers& buffers, const Shape& shape) {
    const Buffers::Dims dims = {shape.positive("E"), shape.positive("N"), shape.positive("K")};
    const DType state = shape.dtype("state", {DType::f32, DType::bf16});
    return {.grad = buffers.normal(state, dims, 1e-3),
            .schedule = buffers.values(std::vector<float>{1e-5f, 0.1f, 0.05f}),
            .weight_decay = 0.1f,
            .grad_scale = buffers.values(std::vector<float>{1.0f}),
            .status = buffers.zeros(DType::i32, {1}),
            .master = buffers.normal(DType::f32, dims, 0.02),
            .m = buffers.zeros(state, dims),
            .v = buffers.pow2(state, dims)};
}

Call adamw(Machine& machine, Buffers& buffers, const Shape& shape) {
    op::AdamW args = adamw_arguments(buffers, shape);
    if (const int64_t copy = shape.choice("copy", {"no", "bf16", "f32"}); copy > 0)
        args.copy = buffers.output(copy == 1 ? DType::bf16 : DType::f32,
                                   {shape.positive("E"), shape.positive("N"), shape.positive("K")});
    return call_of(machine, &Ops::adamw, args);
}

Call adamw_quantize(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t experts = shape.positive("E"), n = shape.positive("N"), k = shape.positive("K");
    const ScaleLayout layout = shape.layout(
        "layout", {ScaleLayout::block128, ScaleLayout::row, ScaleLayout::tensor, ScaleLayout::mx32});
    op::AdamWQuantize args{.adamw = adamw_arguments(buffers, shape),
                           .scale_format = shape.scale_format(),
                           .mx_rounding = shape.mx_rounding()};
    if (shape.yes("fprop")) args.fprop = buffers.fp8_output(DType::e4m3, {experts, n, k}, layout);
    if (shape.yes("dgrad")) args.dgrad = buffers.fp8_output(DType::e4m3, {experts, k, n}, layout);
    return call_of(machine, &Ops::adamw_quantize, args);
}

}  // namespace

std::vector<Case> optimizer_cases() {
    return {{"norm_squared",
             "sum of squares of a gradient",
             {{"N", "268435456", "10000", "values"}},
             local<&Ops::norm_squared, norm_squared>},
            {"add_squares",
             "sum of the squares that weight gradients left",
             {{"N", "688128", "10000", "patches of 4096 elements of a gradient"}},
             local<&Ops::add_squares, add_squares>},
            {"clip_factor", "clipping by the global norm", {}, local<&Ops::clip_factor, clip_factor>},
            {"adamw", "AdamW with FP32 masters",
             kWeight + Keys{kState, {"copy", "bf16", "bf16", "working copy: no | bf16 | f32"}}, adamw},
            {"adamw_quantize", "AdamW, then both FP8 copies of the weights",
             kWeight + Keys{kState,
                            {"layout", "block128", "block128", "scales: block128 | row | tensor | mx32"},
                            {"fprop", "yes", "yes", "copy for the forward pass: yes | no"},
                            {"dgrad", "yes", "yes", "transposed copy: yes | no"},
                            {"scale", "pow2", "pow2", "scales: pow2 | fp32"},
                            {"rounding", "rceil", "rceil", "scales of mx32: floor | rceil"}},
             adamw_quantize}};
}

}  // namespace fp8flow::bench
