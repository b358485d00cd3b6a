// SPDX-License-Identifier: MIT
// RMSNorm on the GPU against the reference, bit by bit: every dtype, both gammas, rows wider than shared
// memory, all FP8 outputs, both gradients.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"

namespace fp8flow::test {
namespace {

struct Shape {
    int64_t rows, width;
    DType dtype;
};
const Shape kShapes[] = {
    {0, 128, DType::bf16},
    {1, 1, DType::f32},
    {1, 7168, DType::bf16},
    {127, 384, DType::bf16},
    {128, 2048, DType::f16},
    {129, 100, DType::f32},
    {600, 136, DType::bf16},
    {5, 8192, DType::bf16},
    {3, 16400, DType::bf16},
    {2, 8201, DType::f32},
    {4099, 1032, DType::bf16},
    {1700, 7168, DType::bf16},
    {40, 4096, DType::bf16},
    {300, 5000, DType::bf16},
    // whole blocks, the last one in half a warp, with one, two and four units per thread
    {70, 1152, DType::bf16},
    {70, 2176, DType::bf16},
    {450, 5248, DType::bf16},
    {450, 5248, DType::f16},
    {700, 1024, DType::f16},
    // rows of several segments: a cluster of two, three, four and eight; the last segment shorter; few CTAs
    {300, 12288, DType::bf16},
    {260, 12288, DType::bf16},
    {150, 16400, DType::f16},
    // odd widths
    {29, 17389, DType::bf16},
    {400, 1025, DType::f16},
    {300, 1536, DType::bf16},
    {29, 8191, DType::f16},
    {300, 9001, DType::bf16},
    {70, 32768, DType::f16},
    {40, 65536, DType::bf16},
    {5, 65544, DType::bf16},
};
std::vector<Shape> shapes_here() {
    std::vector<Shape> here;
    for (const Shape& s : kShapes)
        if (!too_large_here(s.rows * s.width)) here.push_back(s);
    return here;
}
std::string text(const Shape& s) {
    return std::to_string(s.rows) + " x " + std::to_string(s.width) + " " + name_of(s.dtype);
}

HostTensor normal(const Shape& s, uint64_t seed, double stddev = 1.0) {
    HostTensor t(s.dtype, {s.rows, s.width});
    fill_normal(t, seed, stddev);
    return t;
}
HostTensor gamma_of(const Shape& s, op::GammaForm form) {
    HostTensor g(DType::f32, {s.width});
    const double center = form == op::GammaForm::plain ? 1.0 : 0.0;
    fill_uniform(g, 7, center - 0.5, center + 0.5);
    return g;
}
// On few SMs every CTA has several rows, tiles or chunks.
Launch few_or_all(const Shape& s) { return {.sm_limit = s.rows == 300 ? 3 : 0}; }
constexpr op::GammaForm kForms[] = {op::GammaForm::plain, op::GammaForm::zero_centered};

TEST(NormParity, Plain) {
    for (const Shape& s : shapes_here())
        for (const op::GammaForm form : kForms) {
            SCOPED_TRACE(text(s));
            Parity p;
            const HostTensor x = normal(s, 1), gamma = gamma_of(s, form), y(s.dtype, {s.rows, s.width}),
                             rstd(DType::f32, {s.rows});
            p.check(op::RmsNorm{.x = x, .gamma = gamma, .gamma_form = form, .y = y, .rstd = rstd},
                    few_or_all(s));
        }
}

struct Outputs {
    ScaleLayout rows, transposed;  // none: absent
    DType dtype = DType::e4m3;
    ScaleFormat format = ScaleFormat::pow2;
    DType scale_dtype = DType::e8m0;
    bool with_y = true;
    bool with_amax = true;
};

TEST(NormParity, Quantized) {
    using L = ScaleLayout;
    const Outputs kOutputs[] = {
        {.rows = L::vec128_wire, .transposed = L::none},
        {.rows = L::vec128_wire, .transposed = L::tile128, .dtype = DType::e5m2},
        {.rows = L::vec128_wire,
         .transposed = L::none,
         .format = ScaleFormat::fp32,
         .scale_dtype = DType::f32,
         .with_y = false},
        {.rows = L::vec128, .transposed = L::tile128},
        {.rows = L::tensor, .transposed = L::tensor},
        {.rows = L::none, .transposed = L::tensor, .dtype = DType::e5m2},
        {.rows = L::none, .transposed = L::none},
        {.rows = L::vec128_wire, .transposed = L::none, .with_amax = false},
        {.rows = L::vec128_wire,
         .transposed = L::none,
         .format = ScaleFormat::fp32,
         .scale_dtype = DType::f32,
         .with_amax = false},
        {.rows = L::vec128, .transposed = L::none, .with_y = false, .with_amax = false},
        // rows and their transposed copy from one kernel
        {.rows = L::vec128, .transposed = L::tile128, .with_y = false, .with_amax = false},
        {.rows = L::vec128_wire, .transposed = L::tile128, .with_amax = false},
        {.rows = L::tensor, .transposed = L::tensor, .with_y = false, .with_amax = false},
        {.rows = L::tensor, .transposed = L::none, .with_y = false, .with_amax = false},
    };
    for (const Shape& s : shapes_here())
        for (const Outputs& o : kOutputs) {
            SCOPED_TRACE(text(s) + " " + name_of(o.rows) + " " + name_of(o.transposed));
            Parity p;
            const op::GammaForm form = s.rows % 2 == 0 ? kForms[0] : kForms[1];
            const HostTensor x = normal(s, 2, 3.0), gamma = gamma_of(s, form),
                             y(DType::bf16, {s.rows, s.width}), rstd(DType::f32, {s.rows});
            const HostTensor scale = HostTensor::of(std::vector<float>{0.0123f}),
                             amax = HostTensor::of(std::vector<float>{0.5f});
            const int64_t wide = round_up(s.rows, 128) + 16;
            HostScaled rows(o.dtype, {s.rows, s.width}, o.rows, 0, o.scale_dtype),
                transposed(o.dtype, {s.width, wide}, o.transposed);
            ScaledTensor row_view = rows, transposed_view = transposed;
            if (o.rows == L::none) row_view = {};
            if (o.transposed == L::none) transposed_view = {};
            if (o.rows == L::tensor) row_view.scales = scale;
            if (o.transposed == L::tensor) transposed_view.scales = scale;
            const TensorView y_view = o.with_y ? y.view() : TensorView{},
                             amax_view = o.with_amax ? amax.view() : TensorView{};
            p.check(op::RmsNormQuantize{.x = x,
                                        .gamma = gamma,
                                        .gamma_form = form,
                                        .scale_format = o.format,
                                        .y = y_view,
                                        .rows = row_view,
                                        .transposed = transposed_view,
                                        .amax = amax_view,
                                        .rstd = rstd},
                    few_or_all(s));
        }
}

TEST(NormParity, Backward) {
    for (const Shape& s : shapes_here())
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            SCOPED_TRACE(text(s));
            Parity p;
            const op::GammaForm form = mode == Gradient::overwrite ? kForms[0] : kForms[1];
            const HostTensor x = normal(s, 3), dy = normal(s, 4, 0.1), residual = normal(s, 5, 0.1),
                             gamma = gamma_of(s, form);
            HostTensor rstd(DType::f32, {s.rows}), dx(s.dtype, {s.rows, s.width}),
                dgamma(DType::f32, {s.width});
            fill_uniform(rstd, 6, 0.5, 1.5);
            if (mode == Gradient::accumulate) fill_normal(dgamma, 8);
            const TensorView residual_view = mode == Gradient::accumulate ? residual.view() : TensorView{};
            p.check(op::RmsNormBackward{.dy = dy,
                                        .x = x,
                                        .gamma = gamma,
                                        .rstd = rstd,
                                        .dresidual = residual_view,
                                        .gamma_form = form,
                                        .dgamma_mode = mode,
                                        .dx = dx,
                                        .dgamma = dgamma},
                    few_or_all(s));
        }
}

}  // namespace
}  // namespace fp8flow::test
