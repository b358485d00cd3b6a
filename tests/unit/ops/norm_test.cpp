// SPDX-License-Identifier: MIT
// RMSNorm against double precision, its gradient against central differences, the order of its sums bit for
// bit, and its FP8 outputs against the composed ops byte for byte.
#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/fp8_reference.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

using namespace test;
using op::GammaForm;

constexpr float kEps = 1e-5f;

// y and rstd in double from the stored x.
struct Exact {
    std::vector<double> y, rstd;
};
Exact exact_norm(const std::vector<double>& x, const std::vector<double>& gamma, GammaForm form,
                 int64_t width) {
    Exact result;
    const int64_t rows = static_cast<int64_t>(x.size()) / width;
    for (int64_t t = 0; t < rows; ++t) {
        double sum = 0;
        for (int64_t i = 0; i < width; ++i)
            sum += x[static_cast<std::size_t>(t * width + i)] * x[static_cast<std::size_t>(t * width + i)];
        const double rstd = 1.0 / std::sqrt(sum / static_cast<double>(width) + kEps);
        result.rstd.push_back(rstd);
        for (int64_t i = 0; i < width; ++i) {
            const double g =
                gamma[static_cast<std::size_t>(i)] + (form == GammaForm::zero_centered ? 1.0 : 0.0);
            result.y.push_back(x[static_cast<std::size_t>(t * width + i)] * rstd * g);
        }
    }
    return result;
}

void fill_x(const TensorView& x, uint64_t seed) {
    const int64_t width = x.cols();
    fill(x, [&](int64_t i) {  // rows of very different size
        return std::ldexp(random_normal(seed, 0, static_cast<uint64_t>(i)),
                          static_cast<int>(i / width % 9) - 4);
    });
}

struct Inputs {
    HostTensor x, gamma, y, rstd;
    Inputs(DType dtype, int64_t rows, int64_t width, GammaForm form, uint64_t seed)
        : x(dtype, {rows, width}),
          gamma(DType::f32, {width}),
          y(dtype, {rows, width}),
          rstd(DType::f32, {rows}) {
        fill_x(x, seed);
        fill(gamma, [&](int64_t i) {
            return (form == GammaForm::plain ? 1.0 : 0.0) +
                   0.3 * random_normal(seed, 1, static_cast<uint64_t>(i));
        });
    }
};

// Spacing of the storage type at |value|.
double ulp(double value, DType dtype) {
    const int bits = dtype == DType::bf16  ? 7
                     : dtype == DType::f16 ? 10
                                           : 23,
              least = dtype == DType::f16 ? -14 : -126;
    return std::ldexp(1.0, std::max(value == 0 ? least : std::ilogb(value), least) - bits);
}

TEST(RmsNorm, AgainstDouble) {
    ReferenceOps ops;
    for (DType dtype : {DType::bf16, DType::f16, DType::f32})
        for (GammaForm form : {GammaForm::plain, GammaForm::zero_centered})
            for (int64_t width : {1, 7, 128, 1000, 17389}) {
                if (width > 1000 && form == GammaForm::zero_centered) continue;
                Inputs in(dtype, 29, width, form, 21);
                ops.rms_norm({.x = in.x,
                              .gamma = in.gamma,
                              .eps = kEps,
                              .gamma_form = form,
                              .y = in.y,
                              .rstd = in.rstd});
                const Exact want = exact_norm(to_doubles(in.x), to_doubles(in.gamma), form, width);
                EXPECT_LT(nmse(in.y, want.y), dtype == DType::bf16  ? 4e-6
                                              : dtype == DType::f16 ? 1e-7
                                                                    : 1e-12)
                    << width;
                EXPECT_LT(nmse(in.rstd, want.rstd), 1e-11) << width;
                for (int64_t i = 0; i < in.y.numel(); ++i) {
                    const double exact = want.y[static_cast<std::size_t>(i)];
                    // f32: three roundings and those of the sum
                    const double allowed = (dtype == DType::f32 ? 8 : 1) * ulp(exact, dtype);
                    ASSERT_LE(std::fabs(in.y(i) - exact), allowed) << name_of(dtype) << " width " << width;
                }
            }
}

TEST(RmsNorm, OutputTypeIsFreeAndZeroRowsAreZero) {
    ReferenceOps ops;
    Inputs in(DType::bf16, 5, 96, GammaForm::plain, 22);
    for (int64_t i = 0; i < 96; ++i) set(in.x, 2 * 96 + i, 0.0);
    HostTensor y(DType::f32, {5, 96});
    ops.rms_norm({.x = in.x, .gamma = in.gamma, .eps = kEps, .y = y, .rstd = in.rstd});
    ops.rms_norm({.x = in.x, .gamma = in.gamma, .eps = kEps, .y = in.y, .rstd = in.rstd});
    for (int64_t i = 0; i < y.numel(); ++i)
        ASSERT_EQ(in.y.as<Bf16>()[i].bits, to_bf16(y.as<float>()[i]).bits);
    for (int64_t i = 0; i < 96; ++i) EXPECT_EQ(y(2 * 96 + i), 0.0);
    EXPECT_NEAR(in.rstd(2), 1.0 / std::sqrt(kEps), 1e-4);
    Inputs none(DType::bf16, 0, 96, GammaForm::plain, 22);
    ops.rms_norm({.x = none.x, .gamma = none.gamma, .y = none.y, .rstd = none.rstd});
}

// The order of the sum of squares is part of the contract: 256 strands of units of 8, fma, then halves and
// pairs.
float sum_of_squares(const float* x, int64_t width) {
    std::vector<float> strands(256, 0.0f);
    for (int64_t i = 0; i < width; ++i) {
        float& strand = strands[static_cast<std::size_t>(i / 8 % 256)];
        strand = std::fma(x[i], x[i], strand);
    }
    std::vector<float> sums;
    for (int64_t first = 0; first < 256; first += 32) {
        std::vector<float> part(strands.begin() + first, strands.begin() + first + 32);
        while (part.size() > 1) {
            const std::size_t half = part.size() / 2;
            for (std::size_t s = 0; s < half; ++s) part[s] += part[s + half];
            part.resize(half);
        }
        sums.push_back(part[0]);
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

TEST(RmsNorm, SumOfSquaresInTheStatedOrder) {
    ReferenceOps ops;
    // segments: how wide rows of more than 8192 columns are cut
    const std::pair<int64_t, std::vector<int64_t>> kRows[] = {
        {3, {3}},
        {8, {8}},
        {131, {131}},
        {2051, {2051}},
        {8192, {8192}},
        {8193, {4224, 3969}},
        {12288, {6144, 6144}},
        {17389, {5888, 5888, 5613}},
        {65536, {8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192}}};
    for (const auto& [width, segments] : kRows) {
        Inputs in(DType::f32, 4, width, GammaForm::plain, 23);
        ops.rms_norm({.x = in.x, .gamma = in.gamma, .eps = kEps, .y = in.y, .rstd = in.rstd});
        for (int64_t t = 0; t < 4; ++t) {
            const float* x = in.x.as<float>() + t * width;
            float sum = sum_of_squares(x, segments[0]);
            int64_t first = segments[0];
            for (std::size_t i = 1; i < segments.size(); first += segments[i++])
                sum += sum_of_squares(x + first, segments[i]);
            ASSERT_EQ(first, width);
            const float rstd = 1.0f / std::sqrt(sum / static_cast<float>(width) + kEps);
            ASSERT_EQ(in.rstd.as<float>()[t], rstd);
            for (int64_t i = 0; i < width; ++i)
                ASSERT_EQ(in.y.as<float>()[t * width + i], x[i] * rstd * in.gamma.as<float>()[i]);
        }
    }
}

// ---- backward
// L = sum dy * y(x, gamma) in double.
double loss(const std::vector<double>& x, const std::vector<double>& gamma, const std::vector<double>& dy,
            GammaForm form, int64_t width) {
    const Exact exact = exact_norm(x, gamma, form, width);
    double sum = 0;
    for (std::size_t i = 0; i < dy.size(); ++i) sum += dy[i] * exact.y[i];
    return sum;
}

struct BackwardRun {
    HostTensor dy, dx, dgamma, dresidual;
    BackwardRun(ReferenceOps& ops, Inputs& in, GammaForm form, bool residual, Gradient mode,
                double dgamma_before, uint64_t seed)
        : dy(in.x.view().dtype, {in.x.view().dim(0), in.x.view().dim(1)}),
          dx(in.x.view().dtype, {in.x.view().dim(0), in.x.view().dim(1)}),
          dgamma(DType::f32, {in.x.view().dim(1)}),
          dresidual(in.x.view().dtype, {in.x.view().dim(0), in.x.view().dim(1)}) {
        fill_normal(dy, seed);
        fill_normal(dresidual, seed + 1);
        if (mode == Gradient::accumulate)
            fill(dgamma, [&](int64_t i) { return dgamma_before * static_cast<double>(i % 5 - 2); });
        ops.rms_norm(
            {.x = in.x, .gamma = in.gamma, .eps = kEps, .gamma_form = form, .y = in.y, .rstd = in.rstd});
        ops.rms_norm_backward({.dy = dy,
                               .x = in.x,
                               .gamma = in.gamma,
                               .rstd = in.rstd,
                               .dresidual = residual ? dresidual.view() : TensorView{},
                               .gamma_form = form,
                               .dgamma_mode = mode,
                               .dx = dx,
                               .dgamma = dgamma});
    }
};

TEST(RmsNormBackward, AgainstCentralDifferences) {
    ReferenceOps ops;
    for (GammaForm form : {GammaForm::plain, GammaForm::zero_centered})
        for (int64_t width : {1, 7, 40})
            for (bool residual : {false, true}) {
                const int64_t rows = 6;
                Inputs in(DType::f32, rows, width, form, 24);
                const Gradient mode = residual ? Gradient::accumulate : Gradient::overwrite;
                const BackwardRun run(ops, in, form, residual, mode, 0.5, 25);
                std::vector<double> x = to_doubles(in.x), gamma = to_doubles(in.gamma),
                                    dy = to_doubles(run.dy);
                const auto slope_in = [&](double& at) {
                    return slope(at, 1e-5 * std::max(1.0, std::fabs(at)),
                                 [&] { return loss(x, gamma, dy, form, width); });
                };
                std::vector<double> dx, dgamma;
                for (std::size_t i = 0; i < x.size(); ++i)
                    dx.push_back(slope_in(x[i]) + (residual ? run.dresidual(static_cast<int64_t>(i)) : 0.0));
                for (std::size_t i = 0; i < gamma.size(); ++i)
                    dgamma.push_back(
                        slope_in(gamma[i]) +
                        (residual ? 0.5 * static_cast<double>(static_cast<int64_t>(i) % 5 - 2) : 0.0));
                // At width 1 y is the sign of x: the gradient all but cancels, so only the sum with a
                // residual is held to it.
                const bool cancels = width == 1 && !residual;
                EXPECT_LT(cancels ? 0.0 : std::sqrt(nmse(run.dx, dx)), 1e-5) << width;
                EXPECT_LT(std::sqrt(nmse(run.dgamma, dgamma)), 1e-5) << width;
            }
}

TEST(RmsNormBackward, Bf16AndOddWidthsAgainstTheFormulaInDouble) {
    ReferenceOps ops;
    for (DType dtype : {DType::bf16, DType::f16, DType::f32})
        for (int64_t width : {7, 256, 17389}) {
            const int64_t rows = 33;
            Inputs in(dtype, rows, width, GammaForm::plain, 26);
            const BackwardRun run(ops, in, GammaForm::plain, true, Gradient::overwrite, 0, 27);
            std::vector<double> want_dx, want_dgamma(static_cast<std::size_t>(width), 0.0);
            const Exact exact = exact_norm(to_doubles(in.x), to_doubles(in.gamma), GammaForm::plain, width);
            for (int64_t t = 0; t < rows; ++t) {
                const double r = exact.rstd[static_cast<std::size_t>(t)];
                double mean = 0;
                for (int64_t i = 0; i < width; ++i)
                    mean += run.dy(t * width + i) * in.gamma(i) * in.x(t * width + i) /
                            static_cast<double>(width);
                for (int64_t i = 0; i < width; ++i) {
                    const double dy = run.dy(t * width + i), x = in.x(t * width + i);
                    want_dx.push_back(r * (dy * in.gamma(i) - x * r * r * mean) +
                                      run.dresidual(t * width + i));
                    want_dgamma[static_cast<std::size_t>(i)] += dy * x * r;
                }
            }
            EXPECT_LT(nmse(run.dx, want_dx), dtype == DType::bf16  ? 6e-6
                                             : dtype == DType::f16 ? 1e-7
                                                                   : 1e-10)
                << width;
            EXPECT_LT(std::sqrt(nmse(run.dgamma, want_dgamma)), 1e-5) << width;
        }
}

// dgamma: as many parts as the width allows, of one chunk, of two or four where rows are narrow or in many
// segments; parts in groups of 11; the same bits for any number of threads.
TEST(RmsNormBackward, GammaGradientInTheStatedOrder) {
    ReferenceOps ops;
    struct Case {
        int64_t rows, width, parts, chunks;
    };
    for (const Case& c : {Case{700, 9, 132, 4},
                          {4097, 9, 132, 4},
                          {100, 9, 132, 4},
                          {900, 2048, 132, 4},
                          {270, 2049, 132, 2},
                          {270, 4096, 132, 2},
                          {270, 4097, 132, 1},
                          {150, 8200, 66, 1},
                          {90, 17389, 41, 1},
                          {70, 32768, 29, 1},
                          {50, 32776, 22, 2},
                          {40, 65536, 13, 2},
                          {30, 73736, 13, 2}}) {
        Inputs in(DType::f32, c.rows, c.width, GammaForm::plain, 28);
        const BackwardRun run(ops, in, GammaForm::plain, false, Gradient::accumulate, 0.25, 29);
        for (int64_t i = 0; i<c.width; i += c.width> 100 ? 97 : 1) {
            const int64_t all = c.chunks * c.parts;
            std::vector<float> sums(static_cast<std::size_t>(all), 0.0f);
            for (int64_t t = 0; t < c.rows; ++t) {
                float& sum = sums[static_cast<std::size_t>(t % all)];
                sum = std::fma(run.dy.as<float>()[t * c.width + i],
                               in.x.as<float>()[t * c.width + i] * in.rstd.as<float>()[t], sum);
            }
            const auto chunk = [&](int64_t at) { return sums[static_cast<std::size_t>(at)]; };
            float total = 0.0f;
            for (int64_t group_first = 0; group_first < c.parts; group_first += 11) {
                float group = 0.0f;
                for (int64_t part = group_first; part < std::min(c.parts, group_first + 11); ++part) {
                    float of_part = chunk(part);
                    for (int64_t k = 1; k < c.chunks; ++k) of_part += chunk(part + k * c.parts);
                    group += of_part;
                }
                total += group;
            }
            EXPECT_EQ(run.dgamma.as<float>()[i], 0.25f * static_cast<float>(i % 5 - 2) + total);
        }
    }
}

TEST(RmsNormBackward, NoRows) {
    ReferenceOps ops;
    Inputs in(DType::bf16, 0, 64, GammaForm::plain, 30);
    const BackwardRun run(ops, in, GammaForm::plain, false, Gradient::overwrite, 0, 31);
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(run.dgamma(i), 0.0);
}

// y as the FP8 values see it: rounded to bf16 whatever x is.
HostTensor composed_y(ReferenceOps& ops, const Inputs& in, GammaForm form) {
    HostTensor y(DType::bf16, {in.x.view().dim(0), in.x.view().dim(1)});
    ops.rms_norm({.x = in.x, .gamma = in.gamma, .eps = kEps, .gamma_form = form, .y = y, .rstd = in.rstd});
    return y;
}

TEST(RmsNormQuantize, BlocksEqualTheComposedOps) {
    ReferenceOps ops;
    for (DType dtype : {DType::bf16, DType::f16, DType::f32})
        for (ScaleLayout layout : {ScaleLayout::vec128_wire, ScaleLayout::vec128})
            for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32})
                for (int64_t tokens : {0, 1, 130}) {
                    const int64_t width = 384, padded = round_up(tokens, 128);
                    const GammaForm form = tokens == 1 ? GammaForm::zero_centered : GammaForm::plain;
                    const DType scale_dtype = format == ScaleFormat::pow2 ? DType::e8m0 : DType::f32;
                    Inputs in(dtype, tokens, width, form, 32);
                    const HostTensor want_y = composed_y(ops, in, form);
                    const HostTensor want_rstd = std::move(in.rstd);
                    in.rstd = HostTensor(DType::f32, {tokens});
                    HostScaled rows(DType::e4m3, {tokens, width}, layout, 0, scale_dtype),
                        want(DType::e4m3, {tokens, width}, layout, 0, scale_dtype);
                    ops.quantize_rows({.src = want_y, .scale_format = format, .dst = want});

                    const bool tiles = format == ScaleFormat::pow2;
                    HostScaled transposed(DType::e4m3, {width, padded}, ScaleLayout::tile128),
                        want_transposed(DType::e4m3, {width, padded}, ScaleLayout::tile128);
                    HostTensor y(DType::bf16, {tokens, width}), amax(DType::f32, {1});
                    amax.as<float>()[0] = 0.0f;
                    op::RmsNormQuantize args = {.x = in.x,
                                                .gamma = in.gamma,
                                                .eps = kEps,
                                                .gamma_form = form,
                                                .scale_format = format,
                                                .y = y,
                                                .rows = rows,
                                                .amax = amax,
                                                .rstd = in.rstd};
                    if (tiles) args.transposed = transposed;
                    ops.rms_norm_quantize(args);
                    EXPECT_TRUE(same_bytes(y, want_y));
                    EXPECT_TRUE(same_bytes(in.rstd, want_rstd));
                    expect_same(rows, want);
                    if (tiles) {
                        const HostScaled vec = HostScaled(DType::e4m3, {tokens, width}, ScaleLayout::vec128)
                                                   .declared(ScaleFormat::pow2);
                        ops.quantize_rows({.src = want_y, .dst = vec});
                        ops.transpose_fp8({.src = vec, .dst = want_transposed});
                        expect_same(transposed, want_transposed);
                    }
                    // y is optional: the same FP8 values without it
                    rows.data.poison();
                    rows.scales.poison();
                    args.y = {};
                    args.amax = {};
                    ops.rms_norm_quantize(args);
                    expect_same(rows, want);
                }
}

TEST(RmsNormQuantize, DelayedScalingReadsItsScaleAndKeepsTheMaximum) {
    ReferenceOps ops;
    for (DType code : {DType::e4m3, DType::e5m2})
        for (DType dtype : {DType::bf16, DType::f32})
            for (int64_t width : {7, 300}) {
                const int64_t tokens = 37, padded = 48;
                Inputs in(dtype, tokens, width, GammaForm::plain, 33);
                HostTensor y(DType::f32, {tokens, width});  // unrounded
                ops.rms_norm({.x = in.x, .gamma = in.gamma, .eps = kEps, .y = y, .rstd = in.rstd});
                double largest = 0;
                for (int64_t i = 0; i < y.numel(); ++i) largest = std::max(largest, std::fabs(y(i)));

                HostScaled rows(code, {tokens, width}, ScaleLayout::tensor),
                    transposed(code, {width, padded}, ScaleLayout::tensor);
                const float scale = 0.0123f;
                rows.scales.as<float>()[0] = transposed.scales.as<float>()[0] = scale;
                HostTensor amax(DType::f32, {1});
                for (float held : {0.0f, 1e30f}) {
                    amax.as<float>()[0] = held;
                    ops.rms_norm_quantize({.x = in.x,
                                           .gamma = in.gamma,
                                           .eps = kEps,
                                           .rows = rows,
                                           .transposed = transposed,
                                           .amax = amax,
                                           .rstd = in.rstd});
                    EXPECT_EQ(amax(0), std::max(largest, static_cast<double>(held)));
                }
                EXPECT_EQ(rows.scales.as<float>()[0], scale);
                EXPECT_EQ(transposed.scales.as<float>()[0], scale);
                const float multiplier = 1.0f / scale;
                for (int64_t t = 0; t < padded; ++t)
                    for (int64_t i = 0; i < width; ++i) {
                        uint8_t want = 0;
                        if (t < tokens) {
                            const float scaled = y.as<float>()[t * width + i] * multiplier;
                            want = nearest_code(scaled, code);
                            ASSERT_EQ(rows.data.view().bytes_ptr()[t * width + i], want);
                        }
                        ASSERT_EQ(transposed.data.view().bytes_ptr()[i * padded + t], want);
                    }
            }
}

TEST(RmsNormQuantize, RefusesTilesWithoutPowersOfTwo) {
    ReferenceOps ops;
    Inputs in(DType::bf16, 128, 128, GammaForm::plain, 34);
    HostScaled rows(DType::e4m3, {128, 128}, ScaleLayout::vec128),
        transposed(DType::e4m3, {128, 128}, ScaleLayout::tile128);
    EXPECT_THROW(ops.rms_norm_quantize({.x = in.x,
                                        .gamma = in.gamma,
                                        .scale_format = ScaleFormat::fp32,
                                        .rows = rows,
                                        .transposed = transposed,
                                        .rstd = in.rstd}),
                 Error);
    EXPECT_THROW(
        ops.rms_norm_quantize({.x = in.x, .gamma = in.gamma, .transposed = transposed, .rstd = in.rstd}),
        Error);
}

}  // namespace
}  // namespace fp8flow
