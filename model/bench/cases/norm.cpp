// SPDX-License-Identifier: MIT
// Bench cases of RMSNorm: plain, with FP8 outputs, backward.
#include "kernels/core/error.h"
#include "model/bench/cases/case.h"

namespace fp8flow::bench {

namespace {

const Keys kRows = {{"T", "4096", "40", "rows"},
                    {"H", "7168", "256", "columns"},
                    {"dtype", "bf16", "bf16", "of x and y: bf16 | f16 | f32"},
                    {"gamma", "plain", "plain", "weight: plain | zero_centered"}};

constexpr std::initializer_list<DType> kPlain = {DType::bf16, DType::f16, DType::f32};

op::GammaForm gamma_form(const Shape& shape) {
    return shape.choice("gamma", {"plain", "zero_centered"}) == 0 ? op::GammaForm::plain
                                                                  : op::GammaForm::zero_centered;
}

op::RmsNorm norm(Buffers& buffers, const Shape& shape) {
    const int64_t rows = shape.number("T"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kPlain);
    return {.x = buffers.normal(dtype, {rows, columns}),
            .gamma = buffers.normal(DType::f32, {columns}),
            .gamma_form = gamma_form(shape),
            .y = buffers.output(dtype, {rows, columns}),
            .rstd = buffers.output(DType::f32, {rows})};
}

// The baseline of the transposed output: FP8 rows, then the stand-alone transpose. That reads a scale for
// each 1x128 block; where the rows have one scale for all of them it gets a table of ones, which leaves the
// FP8 values as they are.
Call norm_then_transpose(Machine& machine, Buffers& buffers, const op::RmsNormQuantize& args) {
    require(
        args.rows && args.transposed && args.rows.layout != ScaleLayout::vec128_wire, ExitCode::usage,
        "bench rms_norm_quantize: fused=no wants FP8 rows that can be transposed (fp8=vec128 or tensor) and "
        "transposed=tile128 or tensor");
    const int64_t rows = args.x.dim(0), columns = args.x.dim(1);
    op::TransposeFp8 transpose{.src = args.rows, .dst = args.transposed};
    if (args.rows.layout == ScaleLayout::tensor) {
        const int64_t blocks = ceil_div(columns, kBlock);
        const std::vector<float> ones(to_size(blocks * rows), 1.0f);
        transpose.src.scales = buffers.values(ones).reshape({blocks, rows});
        transpose.src.layout = ScaleLayout::vec128;
        transpose.src.format = ScaleFormat::pow2;
    }
    if (args.transposed.layout == ScaleLayout::tensor)
        transpose.dst = {args.transposed.data,
                         buffers.output(DType::f32, {ceil_div(rows, kBlock), ceil_div(columns, kBlock)}),
                         ScaleLayout::tile128};
    op::RmsNormQuantize rows_alone = args;
    rows_alone.transposed = {};
    return two_calls(machine, args, &Ops::rms_norm_quantize, rows_alone, &Ops::transpose_fp8, transpose);
}

Call norm_quantize(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t rows = shape.number("T"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kPlain), fp8 = shape.dtype("codes", {DType::e4m3, DType::e5m2});
    const ScaleFormat scale = shape.scale_format();
    const ScaleLayout row_layout = shape.layout(
        "fp8", {ScaleLayout::none, ScaleLayout::vec128_wire, ScaleLayout::vec128, ScaleLayout::tensor});
    const ScaleLayout other =
        shape.layout("transposed", {ScaleLayout::none, ScaleLayout::tile128, ScaleLayout::tensor});
    op::RmsNormQuantize args{.x = buffers.normal(dtype, {rows, columns}),
                             .gamma = buffers.normal(DType::f32, {columns}),
                             .gamma_form = gamma_form(shape),
                             .scale_format = scale,
                             .rstd = buffers.output(DType::f32, {rows})};
    if (shape.yes("y")) args.y = buffers.output(DType::bf16, {rows, columns});
    if (row_layout != ScaleLayout::none)
        args.rows = buffers.fp8_output(fp8, {rows, columns}, row_layout, 0, scale);
    if (other != ScaleLayout::none)
        args.transposed = buffers.fp8_output(fp8, {columns, round_up(rows, kBlock)}, other);
    // with delayed scaling the one scale is an input, the same for both copies
    const TensorView delayed = buffers.pow2(DType::f32, {1});
    for (ScaledTensor* copy : {&args.rows, &args.transposed})
        if (copy->layout == ScaleLayout::tensor) copy->scales = delayed;
    if (shape.yes("amax")) args.amax = buffers.zeros(DType::f32, {1});
    if (shape.yes("fused")) return call_of(machine, &Ops::rms_norm_quantize, args);
    return norm_then_transpose(machine, buffers, args);
}

Call norm_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t rows = shape.number("T"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kPlain);
    op::RmsNormBackward args{.dy = buffers.normal(dtype, {rows, columns}),
                             .x = buffers.normal(dtype, {rows, columns}),
                             .gamma = buffers.normal(DType::f32, {columns}),
                             .rstd = buffers.pow2(DType::f32, {rows}),
                             .gamma_form = gamma_form(shape),
                             .dgamma_mode = shape.gradient(),
                             .dx = buffers.output(dtype, {rows, columns}),
                             .dgamma = buffers.zeros(DType::f32, {columns})};
    if (shape.yes("residual")) args.dresidual = buffers.normal(dtype, {rows, columns});
    return call_of(machine, &Ops::rms_norm_backward, args);
}

}  // namespace

std::vector<Case> norm_cases() {
    return {
        {"rms_norm", "RMSNorm forward", kRows, local<&Ops::rms_norm, norm>},
        {"rms_norm_quantize", "RMSNorm forward with FP8 outputs from the same pass",
         kRows + Keys{{"y", "yes", "yes", "also y in bf16: yes | no"},
                      {"fp8", "vec128_wire", "vec128_wire", "FP8 rows: no | vec128_wire | vec128 | tensor"},
                      {"transposed", "no", "no", "transposed FP8: no | tile128 | tensor"},
                      {"codes", "e4m3", "e4m3", "e4m3 | e5m2"},
                      {"scale", "pow2", "pow2", "scales: pow2 | fp32"},
                      {"amax", "no", "no", "write the largest magnitude back (delayed scaling): yes | no"},
                      {"fused", "yes", "yes", "yes | no: transposed in a second pass over the FP8 rows"}},
         norm_quantize},
        {"rms_norm_backward", "RMSNorm backward with the gradient of gamma",
         kRows + Keys{{"residual", "yes", "yes", "add the residual's gradient: yes | no"},
                      {"mode", "overwrite", "overwrite", "dgamma: overwrite | accumulate"}},
         norm_backward}};
}

}  // namespace fp8flow::bench
