// SPDX-License-Identifier: MIT
// AdamW against the textbook in double and, bit for bit, against a plain loop; the gradient norm; the status
// word that stops a step.
#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

using namespace test;

struct Weights {
    explicit Weights(int64_t count)
        : grad(DType::f32, {count}),
          master(DType::f32, {count}),
          m(DType::f32, {count}),
          v(DType::f32, {count}),
          copy(DType::bf16, {count}) {
        fill_normal(grad, 1, 0.01);
        fill_normal(master, 2, 0.05);
        m.zero();
        v.zero();
    }
    op::AdamW args(int step) const {
        float* now = schedule.as<float>();
        now[0] = 3e-3f;
        now[1] = static_cast<float>(1 - std::pow(0.9, step));
        now[2] = static_cast<float>(1 - std::pow(0.95, step));
        return {.grad = grad,
                .schedule = schedule,
                .beta1 = 0.9f,
                .beta2 = 0.95f,
                .eps = 1e-8f,
                .weight_decay = 0.1f,
                .grad_scale = grad_scale,
                .status = status,
                .master = master,
                .m = m,
                .v = v,
                .copy = copy};
    }
    HostTensor grad, master, m, v, copy, schedule{DType::f32, {3}};
    HostTensor grad_scale = HostTensor::of<float>({0.7f}), status = HostTensor::of<int32_t>({0});
};

TEST(AdamW, FollowsTheTextbookInDouble) {
    ReferenceOps ops;
    const int64_t count = 1000;
    Weights weights(count);
    std::vector<double> w = to_doubles(weights.master), m(w.size()), v(w.size());
    for (int step = 1; step <= 20; ++step) {
        fill_normal(weights.grad, static_cast<uint64_t>(100 + step), 0.01);
        ops.adamw(weights.args(step));
        for (std::size_t i = 0; i < w.size(); ++i) {
            const double g = 0.7 * weights.grad(static_cast<int64_t>(i));
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            const double m_hat = m[i] / (1 - std::pow(0.9, step)), v_hat = v[i] / (1 - std::pow(0.95, step));
            w[i] -= 3e-3 * (m_hat / (std::sqrt(v_hat) + 1e-8) + 0.1 * w[i]);
        }
    }
    EXPECT_LE(nmse(weights.m, m), 1e-12);
    EXPECT_LE(nmse(weights.v, v), 1e-12);
    EXPECT_LE(nmse(weights.master, w), 1e-12);
}

// The order of kernels/ops/optimizer.h, one rounding an operation.
TEST(AdamW, EqualsAPlainLoopBitForBit) {
    for (int64_t count : {0, 1, 7, 4096, 10001}) {
        ReferenceOps ops;
        Weights actual(count), plain(count);
        for (int step = 1; step <= 3; ++step) {
            const op::AdamW args = actual.args(step);
            const float* schedule = args.schedule.as<float>();
            actual.copy.poison();
            ops.adamw(args);
            for (int64_t i = 0; i < count; ++i) {
                float &w = plain.master.as<float>()[i], &m = plain.m.as<float>()[i],
                      &v = plain.v.as<float>()[i];
                // volatile: every intermediate is rounded to fp32, whatever the compiler would rather do
                const volatile float g = plain.grad.as<float>()[i] * 0.7f;
                const volatile float kept_m = 0.9f * m, new_m = (1.0f - 0.9f) * g, g2 = g * g;
                const volatile float kept_v = 0.95f * v, new_v = (1.0f - 0.95f) * g2;
                m = kept_m + new_m;
                v = kept_v + new_v;
                const volatile float m_hat = m / schedule[1], v_hat = v / schedule[2];
                const volatile float root = std::sqrt(v_hat), denominator = root + 1e-8f;
                const volatile float ratio = m_hat / denominator, decay = 0.1f * w, direction = ratio + decay;
                const volatile float delta = 3e-3f * direction;
                w = w - delta;
            }
            EXPECT_TRUE(same_bytes(actual.master, plain.master)) << count << " step " << step;
            EXPECT_TRUE(same_bytes(actual.m, plain.m));
            EXPECT_TRUE(same_bytes(actual.v, plain.v));
            for (int64_t i = 0; i < count; ++i)
                ASSERT_EQ(actual.copy(i), round_bf16(static_cast<float>(actual.master(i))));
        }
    }
}

// Moments in BF16: the update takes them as they are, and the new ones are rounded with their own bits.
TEST(AdamW, Bf16StateIsFp32OfTheSameValuesRoundedAtTheEnd) {
    const int64_t count = 20000, first = 3 * 8192 - 5;  // several rows of counters, from within one
    for (const bool m_narrow : {false, true})
        for (const bool v_narrow : {false, true}) {
            SCOPED_TRACE(std::to_string(m_narrow) + std::to_string(v_narrow));
            ReferenceOps ops;
            Weights wide(count);
            HostTensor grad(DType::bf16, {count}), m(m_narrow ? DType::bf16 : DType::f32, {count}),
                v(v_narrow ? DType::bf16 : DType::f32, {count}), master(DType::f32, {count});
            fill_normal(grad, 5, 0.01);
            fill_normal(m, 6, 1e-4);
            fill_uniform(v, 7, 0, 1e-6);
            op::AdamW args = wide.args(3);
            for (int64_t i = 0; i < count; ++i) {
                wide.grad.as<float>()[i] = static_cast<float>(grad(i));
                wide.m.as<float>()[i] = static_cast<float>(m(i));
                wide.v.as<float>()[i] = static_cast<float>(v(i));
                master.as<float>()[i] = wide.master.as<float>()[i];
            }
            ops.adamw(args);
            args.grad = grad;
            args.m = m;
            args.v = v;
            args.master = master;
            const HostTensor step = HostTensor::of<int64_t>({int64_t{1} << 40 | 6});
            args.m_key = 11 ^ static_cast<uint64_t>(step.as<int64_t>()[0]);
            args.v_key = 12 ^ static_cast<uint64_t>(step.as<int64_t>()[0]);
            args.rounding_step = step;
            args.first_element = first;
            ops.adamw(args);
            EXPECT_TRUE(same_bytes(master, wide.master));
            for (int64_t i = 0; i < count; ++i) {
                const float exact[] = {wide.m.as<float>()[i], wide.v.as<float>()[i]};
                const auto rounded = [&](int which, uint64_t key) {
                    return to_float(
                        round_stochastically(exact[which], rounding_bits_of_element(key, first + i)));
                };
                ASSERT_EQ(static_cast<float>(m(i)), m_narrow ? rounded(0, 11) : exact[0]) << i;
                ASSERT_EQ(static_cast<float>(v(i)), v_narrow ? rounded(1, 12) : exact[1]) << i;
            }
        }
}

TEST(NormSquared, OfBf16IsThatOfTheSameValuesInFp32) {
    ReferenceOps ops;
    for (const int64_t count : {1, 8191, 20000}) {
        HostTensor narrow(DType::bf16, {count}), wide(DType::f32, {count});
        fill_normal(narrow, 8);
        for (int64_t i = 0; i < count; ++i) wide.as<float>()[i] = static_cast<float>(narrow(i));
        const HostTensor one = HostTensor::of<float>({0.25f}), other = HostTensor::of<float>({0.25f});
        ops.norm_squared({.x = narrow, .sum = one});
        ops.norm_squared({.x = wide, .sum = other});
        EXPECT_TRUE(same_bytes(one, other)) << count;
    }
}

TEST(AdamW, WritesNothingWhenTheStepFailed) {
    ReferenceOps ops;
    Weights weights(100), untouched(100);
    for (int32_t status : {1, -1, 1 << 20}) {
        weights.status.as<int32_t>()[0] = status;
        ops.adamw(weights.args(1));
        EXPECT_TRUE(same_bytes(weights.master, untouched.master));
        EXPECT_TRUE(same_bytes(weights.m, untouched.m));
        EXPECT_TRUE(same_bytes(weights.v, untouched.v));
        EXPECT_TRUE(same_bytes(weights.copy, untouched.copy));  // still poison
    }
    weights.status.as<int32_t>()[0] = 0;
    ops.adamw(weights.args(1));
    EXPECT_FALSE(same_bytes(weights.master, untouched.master));
}

TEST(AdamW, StatusAndCopyAreOptional) {
    ReferenceOps ops;
    Weights with(50), without(50);
    ops.adamw(with.args(1));
    op::AdamW args = without.args(1);
    args.status = {};
    args.copy = {};
    ops.adamw(args);
    EXPECT_TRUE(same_bytes(with.master, without.master));
}

TEST(AdamW, SameBitsForAnyNumberOfThreads) {
    Weights one(20000), four(20000);
    const int saved = omp_get_max_threads();
    for (const auto& [threads, weights] : {std::pair{1, &one}, {4, &four}}) {
        ReferenceOps ops;
        omp_set_num_threads(threads);
        ops.adamw(weights->args(1));
    }
    omp_set_num_threads(saved);
    EXPECT_TRUE(same_bytes(one.master, four.master));
    EXPECT_TRUE(same_bytes(one.copy, four.copy));
}

TEST(AdamW, ChecksItsArguments) {
    ReferenceOps ops;
    Weights weights(10), other(11);
    op::AdamW args = weights.args(1);
    args.grad = other.grad;
    EXPECT_THROW(ops.adamw(args), Error);
    args = weights.args(1);
    args.schedule = other.grad;  // three words are wanted
    EXPECT_THROW(ops.adamw(args), Error);
    args = weights.args(1);
    args.grad_scale = {};
    EXPECT_THROW(ops.adamw(args), Error);
}

// ---- gradient norm

// A tree over 32 terms whose halves are added element by element.
double halves(std::vector<double> terms) {
    EXPECT_EQ(terms.size(), 32u);
    while (terms.size() > 1) {
        const size_t half = terms.size() / 2;
        std::vector<double> sums;
        for (size_t i = 0; i < half; ++i) sums.push_back(terms[i] + terms[half + i]);
        terms = sums;
    }
    return terms[0];
}

double stated_sum_of_squares(const HostTensor& x, int64_t count) {
    std::vector<double> last(1024, 0.0), all;
    for (int64_t block = 0; block * 8192 < count; ++block) {
        std::vector<double> fours;
        for (int64_t lane = 0; lane < 32; ++lane) {
            double strand[4] = {};
            for (int64_t turn = 0; turn < 64; ++turn)
                for (int64_t k = 0; k < 4; ++k) {
                    const int64_t i = block * 8192 + turn * 128 + lane * 4 + k;
                    if (i < count) strand[k] += x(i) * x(i);
                }
            fours.push_back((strand[0] + strand[1]) + (strand[2] + strand[3]));
        }
        last[static_cast<size_t>(block % 1024)] += halves(fours);
    }
    for (size_t first = 0; first < 1024; first += 32)
        all.push_back(halves({last.begin() + static_cast<std::ptrdiff_t>(first),
                              last.begin() + static_cast<std::ptrdiff_t>(first) + 32}));
    return halves(all);
}

TEST(NormSquared, FollowsTheStatedOrder) {
    // the last has more blocks than there are strands for their sums
    for (int64_t count : {0, 1, 127, 129, 8191, 8192, 8193, 100000, 1030 * 8192 + 5}) {
        HostTensor x(DType::f32, {count});
        for (int64_t i = 0; i < count; ++i)  // magnitudes that differ, so that the order shows
            x.as<float>()[i] =
                static_cast<float>((i * 2654435761 % 2001 - 1000) * (i % 97 == 0 ? 1e6 : 1e-3));
        const double total = stated_sum_of_squares(x, count);
        const int saved = omp_get_max_threads();
        for (int threads : {1, 4}) {
            ReferenceOps ops;
            omp_set_num_threads(threads);
            // what a float holds of the sum is taken away first, so that the last bits of the double show
            const float before = -static_cast<float>(total);
            const HostTensor sum = HostTensor::of<float>({before});
            ops.norm_squared({.x = x, .sum = sum});
            EXPECT_EQ(sum(0), static_cast<float>(static_cast<double>(before) + total)) << count;
            // blocks of two ranks, then the sum of all
            const int64_t blocks = ceil_div(count, op::kNormSquaredBlock), first = blocks / 3;
            const int64_t cut = first * op::kNormSquaredBlock;
            HostTensor sums(DType::f64, {blocks});
            ops.norm_squared({.x = x.view().slice(0, cut), .block_sums = sums.view().slice(0, first)});
            ops.norm_squared({.x = x.view().slice(cut, count - cut),
                              .block_sums = sums.view().slice(first, blocks - first)});
            const HostTensor halves_sum = HostTensor::of<float>({before});
            ops.norm_squared({.block_sums = sums, .sum = halves_sum});
            EXPECT_TRUE(same_bytes(halves_sum, sum)) << count;
        }
        omp_set_num_threads(saved);
    }
}

TEST(NormSquared, RefusesWhatIsNoHalf) {
    ReferenceOps ops;
    const HostTensor x(DType::f32, {10000}), sums(DType::f64, {2}), few(DType::f64, {1}),
        narrow(DType::f32, {2}), sum = HostTensor::of<float>({0.0f});
    EXPECT_THROW(ops.norm_squared({.sum = sum}), Error);
    EXPECT_THROW(ops.norm_squared({.x = x, .block_sums = sums, .sum = sum}), Error);
    EXPECT_THROW(ops.norm_squared({.x = x, .block_sums = few}), Error);
    EXPECT_THROW(ops.norm_squared({.block_sums = narrow, .sum = sum}), Error);
    EXPECT_THROW(ops.norm_squared({.block_sums = sums}), Error);
}

TEST(NormSquared, AccumulatesOverTensorsWithoutOverflow) {
    ReferenceOps ops;
    const HostTensor a = HostTensor::of<float>({3.0f, -4.0f}), b = HostTensor::of<float>({1e-30f, 12.0f}),
                     huge = HostTensor::of<float>({1e19f}), sum = HostTensor::of<float>({0.0f});
    ops.norm_squared({.x = a, .sum = sum});
    ops.norm_squared({.x = b, .sum = sum});
    EXPECT_EQ(sum(0), 169.0);
    ops.norm_squared({.x = huge, .sum = sum});
    EXPECT_NEAR(sum(0) / 1e38, 1.0, 1e-6);
    const HostTensor bad = HostTensor::of<float>({1.0f, std::nanf("")});
    ops.norm_squared({.x = bad, .sum = sum});
    EXPECT_TRUE(std::isnan(sum(0)));  // a NaN gradient is seen in the norm
}

// ---- clipping

TEST(AddSquares, AddsEveryEntryInDouble) {
    ReferenceOps ops;
    for (const int64_t count : {0, 1, 1023, 1024, 3 * 1024 + 5, 1100 * 1024}) {
        HostTensor squares(DType::f64, {count});
        for (int64_t i = 0; i < count; ++i) squares.as<double>()[i] = static_cast<double>(i % 1000 + 1);
        const HostTensor sum = HostTensor::of<float>({0.5f});
        double wanted = 0.5;  // whole numbers: exact in any order
        for (int64_t i = 0; i < count; ++i) wanted += static_cast<double>(i % 1000 + 1);
        ops.add_squares({.squares = squares, .sum = sum});
        EXPECT_EQ(sum(0), static_cast<double>(static_cast<float>(wanted))) << count;
    }
    const HostTensor sum = HostTensor::of<float>({0.0f}), narrow(DType::f32, {4});
    EXPECT_THROW(ops.add_squares({.squares = narrow, .sum = sum}), Error);
}

TEST(ClipFactor, ScalesLongGradientsOnlyAndFlagsBrokenOnes) {
    struct Case {
        float norm_squared, clip;
        int32_t status_before;
        double norm, factor;
        int32_t status;
        float limit = 0.0f;
    };
    const float inf = std::numeric_limits<float>::infinity();
    const Case cases[] = {
        {25.0f, 1.0f, 0, 5.0, 1.0 / (5.0 + 1e-6), 0},
        {0.25f, 1.0f, 0, 0.5, 1.0, 0},  // short enough
        {25.0f, 0.0f, 0, 5.0, 1.0, 0},  // no clipping
        {0.0f, 1.0f, 0, 0.0, 1.0, 0},
        {25.0f, 1.0f, op::kStepOverflow, 5.0, 1.0 / (5.0 + 1e-6), op::kStepOverflow},
        {inf, 1.0f, 0, inf, 0.0, op::kStepNonFinite},
        {inf, 1.0f, op::kStepOverflow, inf, 0.0, op::kStepOverflow},  // the first cause remains
        {25.0f, 1.0f, 0, 5.0, 1.0 / (5.0 + 1e-6), 0, 5.0f},
        {25.0f, 1.0f, 0, 5.0, 1.0 / (5.0 + 1e-6), op::kStepDiverged, 4.999f},
        {inf, 1.0f, 0, inf, 0.0, op::kStepNonFinite, 4.0f},
        {25.0f, 1.0f, op::kStepOverflow, 5.0, 1.0 / (5.0 + 1e-6), op::kStepOverflow, 4.0f},
    };
    ReferenceOps ops;
    for (const Case& c : cases) {
        const HostTensor norm_squared = HostTensor::of<float>({c.norm_squared}),
                         limit = HostTensor::of<float>({c.limit}),
                         status = HostTensor::of<int32_t>({c.status_before}), norm(DType::f32, {1}),
                         factor(DType::f32, {1});
        ops.clip_factor({.norm_squared = norm_squared,
                         .clip = c.clip,
                         .limit = c.limit > 0 ? TensorView(limit) : TensorView{},
                         .status = status,
                         .norm = norm,
                         .factor = factor});
        EXPECT_EQ(norm(0), c.norm);
        EXPECT_NEAR(factor(0), c.factor, 1e-7);
        EXPECT_EQ(status(0), c.status);
    }
    const HostTensor broken = HostTensor::of<float>({std::nanf("")}), status = HostTensor::of<int32_t>({0}),
                     norm(DType::f32, {1}), factor(DType::f32, {1});
    ops.clip_factor({.norm_squared = broken, .clip = 1.0f, .status = status, .norm = norm, .factor = factor});
    EXPECT_EQ(status(0), op::kStepNonFinite);
}

// ---- AdamW with FP8 copies

// One expert dimension or none; the copies are those of the new master, and of the old one when the step
// failed.
TEST(AdamWQuantize, IsAdamWThenQuantizeWeight) {
    for (int32_t status : {0, 1}) {
        ReferenceOps ops;
        const int64_t rows = 128, columns = 256;
        Weights fused(rows * columns), composed(rows * columns);
        fused.status.as<int32_t>()[0] = composed.status.as<int32_t>()[0] = status;
        const HostScaled fprop(DType::e4m3, {1, rows, columns}, ScaleLayout::block128),
            dgrad(DType::e4m3, {1, columns, rows}, ScaleLayout::block128),
            fprop_wanted(DType::e4m3, {1, rows, columns}, ScaleLayout::block128),
            dgrad_wanted(DType::e4m3, {1, columns, rows}, ScaleLayout::block128);
        op::AdamW args = fused.args(1);
        args.master = args.master.reshape({rows, columns});
        ops.adamw_quantize({.adamw = args, .fprop = fprop, .dgrad = dgrad});
        ops.adamw(composed.args(1));
        ops.quantize_weight({.src = composed.master.view().reshape({1, rows, columns}),
                             .fprop = fprop_wanted,
                             .dgrad = dgrad_wanted});
        EXPECT_TRUE(same_bytes(fused.master, composed.master));
        EXPECT_TRUE(same_bytes(fused.copy, composed.copy));
        EXPECT_TRUE(same_bytes(fprop, fprop_wanted));
        EXPECT_TRUE(same_bytes(dgrad, dgrad_wanted));
    }
}

TEST(AdamWQuantize, ChecksTheCopies) {
    ReferenceOps ops;
    HostTensor grad(DType::f32, {2, 128, 256}), master(DType::f32, {2, 128, 256}),
        m(DType::f32, {2, 128, 256}), v(DType::f32, {2, 128, 256});
    const HostTensor scale = HostTensor::of<float>({1.0f});
    const HostScaled wrong(DType::e4m3, {2, 256, 128}, ScaleLayout::block128);
    op::AdamWQuantize args{.adamw = {.grad = grad, .grad_scale = scale, .master = master, .m = m, .v = v}};
    args.fprop = wrong;
    EXPECT_THROW(ops.adamw_quantize(args), Error);
    args.fprop = {};
    args.dgrad = HostScaled(DType::e4m3, {2, 128, 256}, ScaleLayout::block128);
    EXPECT_THROW(ops.adamw_quantize(args), Error);
}

}  // namespace
}  // namespace fp8flow
