// SPDX-License-Identifier: MIT
// Quantisers, transposes, SwiGLU and norms on tensors with more than 2^31 elements, against the reference on
// the rows beyond element 2^31.
#include "tests/support/large_index.h"

namespace fp8flow::test {
namespace {

TEST_F(LargeIndex, QuantizeTransposeDequantize) {
    const HostTensor src(DType::bf16, {kTotal, kCols}), back(DType::bf16, {kTotal, kCols});
    fill_normal(src, 1, 2.0);
    const HostScaled rows =
        HostScaled(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
    const HostScaled turned(DType::e4m3, {kCols, kTotal}, ScaleLayout::tile128),
        columns(DType::e4m3, {kCols, kTotal}, ScaleLayout::vec128);
    const TensorView large_src = routed(DType::bf16, {kCapacity, kCols});
    put_rows(large_src, src, kBase);

    const ScaledTensor large = large_rows(kCols);
    gpu_.quantize_rows({.src = large_src, .groups = gpu_groups_, .dst = large});
    cpu_.quantize_rows({.src = src, .groups = groups_, .dst = rows});
    expect_same_rows(large.data, rows.data, kBase, "rows");
    expect_same_stretches(large.scales, rows.scales, "scales of rows");

    const TensorView tile_scales = buffer(DType::f32, {kCapacity / kBlock, kCols / kBlock});
    const ScaledTensor large_turned = {routed(DType::e4m3, {kCols, kCapacity}), tile_scales,
                                       ScaleLayout::tile128};
    gpu_.transpose_fp8({.src = large, .groups = gpu_groups_, .dst = large_turned});
    cpu_.transpose_fp8({.src = rows, .groups = groups_, .dst = turned});
    expect_same_stretches(large_turned.data, turned.data, "transposed");
    expect_same_rows(tile_scales, turned.scales, kBase / kBlock, "scales of the transposed copy");

    const ScaledTensor large_columns = {large_turned.data, buffer(DType::f32, {kCapacity / kBlock, kCols}),
                                        ScaleLayout::vec128};
    gpu_.quantize_columns(
        {.src = large_src, .groups = gpu_groups_, .dst = large_columns, .src2 = {}, .dst2 = {}});
    cpu_.quantize_columns({.src = src, .groups = groups_, .dst = columns, .src2 = {}, .dst2 = {}});
    expect_same_stretches(large_columns.data, columns.data, "columns");
    expect_same_rows(large_columns.scales, columns.scales, kBase / kBlock, "scales of columns");

    gpu_.dequantize({.src = large, .groups = gpu_groups_, .dst = large_src});
    cpu_.dequantize({.src = rows, .groups = groups_, .dst = back});
    expect_same_rows(large_src, back, kBase, "dequantized");
}

TEST_F(LargeIndex, Swiglu) {
    const HostTensor h(DType::bf16, {kTotal, kCols}), da(DType::bf16, {kTotal, kCols / 2}),
        dprob(DType::f32, {kTotal});
    fill_normal(h, 2, 2.0);
    fill_normal(da, 3, 0.1);
    const HostScaled a(DType::e4m3, {kTotal, kCols / 2}, ScaleLayout::vec128),
        dh(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128);
    const TensorView large_h = routed(DType::bf16, {kCapacity, kCols}),
                     large_da = routed(DType::bf16, {kCapacity, kCols / 2}),
                     large_dprob = routed(DType::f32, {kCapacity});
    put_rows(large_h, h, kBase);
    put_rows(large_da, da, kBase);
    const ScaledTensor large_a = large_rows(kCols / 2), large_dh = large_rows(kCols);
    gpu_.swiglu_quantize({.h = large_h, .prob = {}, .groups = gpu_groups_, .a = large_a});
    cpu_.swiglu_quantize({.h = h, .prob = {}, .groups = groups_, .a = a});
    expect_same_rows(large_a.data, a.data, kBase, "a");
    expect_same_stretches(large_a.scales, a.scales, "scales of a");
    gpu_.swiglu_backward_quantize({.da = large_da,
                                   .h = large_h,
                                   .prob = {},
                                   .groups = gpu_groups_,
                                   .dh = large_dh,
                                   .dprob = large_dprob});
    cpu_.swiglu_backward_quantize(
        {.da = da, .h = h, .prob = {}, .groups = groups_, .dh = dh, .dprob = dprob});
    expect_same_rows(large_dh.data, dh.data, kBase, "dh");
    expect_same_stretches(large_dh.scales, dh.scales, "scales of dh");
    expect_same(large_dprob, kBase, dprob, 0, kTotal, "dprob");
}

// No row base here: all rows are processed, the last ones compared.
TEST_F(LargeIndex, Norm) {
    constexpr int64_t kLast = 40, kRows = kBase + kLast;
    const HostTensor x(DType::bf16, {kLast, kCols}), y(DType::bf16, {kLast, kCols}),
        dx(DType::bf16, {kLast, kCols}), gamma(DType::f32, {kCols}), rstd(DType::f32, {kLast}),
        dgamma(DType::f32, {kCols});
    fill_normal(x, 4);
    fill_uniform(gamma, 5, 0.5, 1.5);
    const TensorView large_x = buffer(DType::bf16, {kRows, kCols}),
                     large_y = buffer(DType::bf16, {kRows, kCols}), large_rstd = buffer(DType::f32, {kRows}),
                     gpu_gamma = upload(gamma), gpu_dgamma = buffer(DType::f32, {kCols});
    gpu_.device().fill(large_x.data, 0x3F, static_cast<std::size_t>(large_x.bytes()));
    put_rows(large_x, x, kBase);
    gpu_.rms_norm({.x = large_x, .gamma = gpu_gamma, .y = large_y, .rstd = large_rstd});
    cpu_.rms_norm({.x = x, .gamma = gamma, .y = y, .rstd = rstd});
    expect_same_rows(large_y, y, kBase, "y");
    expect_same(large_rstd, kBase, rstd, 0, kLast, "rstd");
    // y is used as dy and overwritten by dx
    gpu_.rms_norm_backward({.dy = large_y,
                            .x = large_x,
                            .gamma = gpu_gamma,
                            .rstd = large_rstd,
                            .dresidual = {},
                            .dx = large_y,
                            .dgamma = gpu_dgamma});
    cpu_.rms_norm_backward(
        {.dy = y, .x = x, .gamma = gamma, .rstd = rstd, .dresidual = {}, .dx = dx, .dgamma = dgamma});
    expect_same_rows(large_y, dx, kBase, "dx");
}

TEST_F(LargeIndex, QuantizeBothWaysAndAgain) {
    const HostTensor src(DType::bf16, {kTotal, kCols});
    fill_normal(src, 1, 2.0);
    const TensorView large_src = routed(DType::bf16, {kCapacity, kCols});
    put_rows(large_src, src, kBase);
    const HostScaled rows(DType::e4m3, {kTotal, kCols}, ScaleLayout::vec128),
        columns(DType::e4m3, {kCols, kTotal}, ScaleLayout::vec128),
        again(DType::e4m3, {kCols, kTotal}, ScaleLayout::vec128);
    const ScaledTensor large = large_rows(kCols);
    const auto large_columns = [&] {
        return ScaledTensor{routed(DType::e4m3, {kCols, kCapacity}),
                            buffer(DType::f32, {kCapacity / kBlock, kCols}), ScaleLayout::vec128};
    };
    const auto expect_same_columns = [&](const ScaledTensor& got, const HostScaled& want, const char* what) {
        expect_same_stretches(got.data, want.data, what);
        expect_same_rows(got.scales, want.scales, kBase / kBlock, what);
    };
    const ScaledTensor large_both = large_columns(), large_again = large_columns();
    gpu_.quantize_dual({.src = large_src, .groups = gpu_groups_, .rows = large, .columns = large_both});
    cpu_.quantize_dual({.src = src, .groups = groups_, .rows = rows, .columns = columns});
    expect_same_rows(large.data, rows.data, kBase, "rows");
    expect_same_stretches(large.scales, rows.scales, "scales of rows");
    expect_same_columns(large_both, columns, "columns");

    gpu_.transpose_requantize({.src = large, .groups = gpu_groups_, .dst = large_again});
    cpu_.transpose_requantize({.src = rows, .groups = groups_, .dst = again});
    expect_same_columns(large_again, again, "requantized");

    const HostScaled one(DType::e4m3, {kTotal, kCols}, ScaleLayout::tensor),
        turned(DType::e4m3, {kCols, kTotal}, ScaleLayout::tensor);
    const TensorView scale = buffer(DType::f32, {1});
    gpu_.quantize_tensor({.src = large_src,
                          .groups = gpu_groups_,
                          .rows = {large.data, scale, ScaleLayout::tensor},
                          .transposed = {large_both.data, scale, ScaleLayout::tensor}});
    cpu_.quantize_tensor({.src = src, .groups = groups_, .rows = one, .transposed = turned});
    expect_same_rows(large.data, one.data, kBase, "rows with one scale");
    expect_same_stretches(large_both.data, turned.data, "columns with one scale");
    expect_same(scale, 0, one.scales, 0, 1, "scale");
}

TEST_F(LargeIndex, PlainSwiglu) {
    const HostTensor h(DType::bf16, {kTotal, kCols}), da(DType::bf16, {kTotal, kCols / 2}),
        prob(DType::f32, {kTotal}), a(DType::bf16, {kTotal, kCols / 2}), dh(DType::bf16, {kTotal, kCols}),
        dprob(DType::f32, {kTotal});
    fill_normal(h, 2, 2.0);
    fill_normal(da, 3, 0.1);
    fill_uniform(prob, 4, 0, 1);
    const TensorView large_h = routed(DType::bf16, {kCapacity, kCols}),
                     large_da = routed(DType::bf16, {kCapacity, kCols / 2}),
                     large_a = routed(DType::bf16, {kCapacity, kCols / 2}),
                     large_dh = routed(DType::bf16, {kCapacity, kCols}),
                     large_prob = routed(DType::f32, {kCapacity}),
                     large_dprob = routed(DType::f32, {kCapacity});
    put_rows(large_h, h, kBase);
    put_rows(large_da, da, kBase);
    put(large_prob, kBase, prob);
    gpu_.swiglu({.h = large_h, .prob = large_prob, .groups = gpu_groups_, .a = large_a});
    cpu_.swiglu({.h = h, .prob = prob, .groups = groups_, .a = a});
    expect_same_rows(large_a, a, kBase, "a");
    gpu_.swiglu_backward({.da = large_da,
                          .h = large_h,
                          .prob = large_prob,
                          .groups = gpu_groups_,
                          .dh = large_dh,
                          .dprob = large_dprob});
    cpu_.swiglu_backward({.da = da, .h = h, .prob = prob, .groups = groups_, .dh = dh, .dprob = dprob});
    expect_same_rows(large_dh, dh, kBase, "dh");
    expect_same(large_dprob, kBase, dprob, 0, kTotal, "dprob");
}

TEST_F(LargeIndex, NormQuantize) {
    constexpr int64_t kLast = 40, kRows = kBase + kLast;
    const HostTensor x(DType::bf16, {kLast, kCols}), y(DType::bf16, {kLast, kCols}),
        gamma(DType::f32, {kCols}), rstd(DType::f32, {kLast});
    const HostScaled rows(DType::e4m3, {kLast, kCols}, ScaleLayout::vec128_wire);
    fill_normal(x, 4);
    fill_uniform(gamma, 5, 0.5, 1.5);
    const TensorView large_x = buffer(DType::bf16, {kRows, kCols}),
                     large_y = buffer(DType::bf16, {kRows, kCols}), large_rstd = buffer(DType::f32, {kRows});
    const ScaledTensor large = {buffer(DType::e4m3, {kRows, kCols}),
                                buffer(DType::e8m0, {kRows, kCols / kBlock}), ScaleLayout::vec128_wire};
    gpu_.device().fill(large_x.data, 0x3F, static_cast<std::size_t>(large_x.bytes()));
    put_rows(large_x, x, kBase);
    gpu_.rms_norm_quantize({.x = large_x,
                            .gamma = upload(gamma),
                            .y = large_y,
                            .rows = large,
                            .transposed = {},
                            .amax = {},
                            .rstd = large_rstd});
    cpu_.rms_norm_quantize(
        {.x = x, .gamma = gamma, .y = y, .rows = rows, .transposed = {}, .amax = {}, .rstd = rstd});
    expect_same_rows(large_y, y, kBase, "y");
    expect_same_rows(large.data, rows.data, kBase, "codes");
    expect_same_rows(large.scales, rows.scales, kBase, "scales");
    expect_same(large_rstd, kBase, rstd, 0, kLast, "rstd");
}

}  // namespace
}  // namespace fp8flow::test
