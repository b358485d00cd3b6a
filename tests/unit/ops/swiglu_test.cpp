// SPDX-License-Identifier: MIT
// SwiGLU of the reference backend: the forward against its formula in double, the backward against central
// differences of that formula, and the fused quantised forms against quantising the fp32 result.
#include "kernels/ops/swiglu.h"

#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>
#include <omp.h>

namespace fp8flow::test {
namespace {

double swiglu(double gate, double up, double prob) { return gate / (1.0 + std::exp(-gate)) * up * prob; }
double gated(const op::GluForm& form, double gate, double up) {
    const double limit = form.limit > 0 ? form.limit : HUGE_VAL, g = std::min(gate, limit),
                 u = std::clamp(up, -limit, limit);
    return g / (1.0 + std::exp(-static_cast<double>(form.alpha) * g)) * (u + form.offset);
}

// Inputs and outputs of every form, for groups with pads and views into longer buffers.
struct Problem {
    Problem(const std::vector<int64_t>& counts, int64_t alignment, int64_t width, DType dtype, int64_t base)
        : groups(counts, alignment, 3),
          width(width),
          base(base),
          rows(base + groups.capacity() + 2),
          h(dtype, {rows, 2 * width}),
          da(dtype, {rows, width}),
          prob(DType::f32, {rows}),
          a(dtype, {rows, width}),
          dh(dtype, {rows, 2 * width}),
          dprob(DType::f32, {rows}),
          a_fp8(DType::e4m3, {rows, width}, ScaleLayout::vec128),
          dh_fp8(DType::e4m3, {rows, 2 * width}, ScaleLayout::vec128) {
        fill_normal(h, 1, 2.0);
        fill_normal(da, 2);
        fill_uniform(prob, 3, 0.05, 1.0);
        if (base == 0) return;
        for (HostTensor* t : {&h, &da, &prob, &a, &dh, &dprob, &a_fp8.data, &dh_fp8.data})
            t->set_row_base(base);
    }
    op::Swiglu forward() const { return {.h = h, .prob = prob, .groups = groups, .a = a}; }
    op::SwigluBackward backward() const {
        return {.da = da, .h = h, .prob = prob, .groups = groups, .dh = dh, .dprob = dprob};
    }

    double gate(int64_t row, int64_t j) const { return h((base + row) * 2 * width + j); }
    double up(int64_t row, int64_t j) const { return h((base + row) * 2 * width + width + j); }

    GroupsFixture groups;
    int64_t width, base, rows;
    HostTensor h, da, prob, a, dh, dprob;
    HostScaled a_fp8, dh_fp8;
};

// Pad rows of [rows, cols] hold zero bytes, rows outside the groups still hold poison.
void expect_pads_zero_and_rest_untouched(const Problem& p, const TensorView& view) {
    const int64_t row_bytes = view.bytes() / p.rows;
    for (int64_t row = 0; row < p.rows; ++row) {
        const bool ours = row >= p.base && row < p.base + p.groups.total();
        if (ours && !p.groups.is_pad(row - p.base)) continue;
        for (int64_t i = 0; i < row_bytes; ++i)
            ASSERT_EQ(view.bytes_ptr()[row * row_bytes + i], ours ? 0x00 : 0xFF) << "row " << row;
    }
}

const std::vector<std::vector<int64_t>> kCounts = {{0, 1, 127, 0, 128, 5}, {0, 0}, {33}};

TEST(Swiglu, ForwardMatchesTheFormula) {
    for (const auto& counts : kCounts) {
        for (DType dtype : {DType::bf16, DType::f32}) {
            for (int64_t base : {0, 256}) {
                const Problem p(counts, 16, 200, dtype, base);
                ReferenceOps().swiglu(p.forward());
                std::vector<double> actual, wanted;
                for (int64_t row = 0; row < p.groups.total(); ++row) {
                    if (p.groups.is_pad(row)) continue;
                    for (int64_t j = 0; j < p.width; ++j) {
                        actual.push_back(p.a((base + row) * p.width + j));
                        wanted.push_back(swiglu(p.gate(row, j), p.up(row, j), p.prob(base + row)));
                        if (dtype == DType::f32) {
                            ASSERT_NEAR(actual.back(), wanted.back(), 1e-6 * std::abs(wanted.back()));
                        }
                    }
                }
                EXPECT_LE(nmse(actual, wanted), dtype == DType::f32 ? 1e-12 : 4e-6);
                expect_pads_zero_and_rest_untouched(p, p.a);
            }
        }
    }
}

TEST(Swiglu, StatedOrderBitByBit) {
    const Problem p({20, 3}, 8, 72, DType::f32, 0);
    ReferenceOps ops;
    ops.swiglu(p.forward());
    ops.swiglu_backward(p.backward());
    for (int64_t row = 0; row < p.groups.total(); ++row) {
        if (p.groups.is_pad(row)) continue;
        const float prob = p.prob.as<float>()[row];
        for (int64_t j = 0; j < p.width; ++j) {
            const float gate = static_cast<float>(p.gate(row, j)), up = static_cast<float>(p.up(row, j));
            const float da = p.da.as<float>()[row * p.width + j], s = sigmoid_float(gate), scaled = da * prob;
            ASSERT_EQ(p.a.as<float>()[row * p.width + j], (silu_float(gate) * up) * prob);
            ASSERT_EQ(p.dh.as<float>()[row * 2 * p.width + j],
                      ((scaled * up) * s) * (1.0f + gate * (1.0f - s)));
            ASSERT_EQ(p.dh.as<float>()[row * 2 * p.width + p.width + j], scaled * silu_float(gate));
        }
    }
}

// Sum of a block's units [first, first + count), count a power of two: the halves added, each summed so.
float tree_sum(const std::vector<float>& units, std::size_t first, std::size_t count) {
    if (count == 1) return units[first];
    return tree_sum(units, first, count / 2) + tree_sum(units, first + count / 2, count / 2);
}
// dprob: 16 units of 8 columns a block, whatever the width leaves of the last block.
TEST(Swiglu, ProbGradientInTheStatedOrder) {
    for (int64_t width : {8, 128, 130, 500}) {
        const Problem p({9, 1}, 8, width, DType::f32, 0);
        ReferenceOps().swiglu_backward(p.backward());
        for (int64_t row = 0; row < p.groups.total(); ++row) {
            if (p.groups.is_pad(row)) continue;
            float sum = 0.0f;
            for (int64_t first = 0; first < width; first += 128) {
                std::vector<float> units(16, 0.0f);
                for (int64_t j = first; j < std::min(width, first + 128); ++j) {
                    float& unit = units[static_cast<std::size_t>(j % 128 / 8)];
                    const float gate = static_cast<float>(p.gate(row, j)),
                                up = static_cast<float>(p.up(row, j));
                    unit = std::fma(p.da.as<float>()[row * width + j], silu_float(gate) * up, unit);
                }
                sum += tree_sum(units, 0, units.size());
            }
            ASSERT_EQ(p.dprob.as<float>()[row], sum) << "width " << width << ", row " << row;
        }
    }
}

// More than 10,000 points; the error is measured against the size of the terms that cancel in dgate.
TEST(Swiglu, BackwardMatchesCentralDifferences) {
    for (int64_t base : {0, 128}) {
        const Problem p({40, 0, 61}, 16, 129, DType::f32, base);
        ReferenceOps().swiglu_backward(p.backward());
        constexpr double kStep = 1e-5;
        for (int64_t row = 0; row < p.groups.total(); ++row) {
            if (p.groups.is_pad(row)) continue;
            const double prob = p.prob(base + row);
            double dprob = 0, dprob_size = 0;
            for (int64_t j = 0; j < p.width; ++j) {
                const double gate = p.gate(row, j), up = p.up(row, j), da = p.da((base + row) * p.width + j);
                const double dgate =
                    da * (swiglu(gate + kStep, up, prob) - swiglu(gate - kStep, up, prob)) / (2 * kStep);
                const double dup =
                    da * (swiglu(gate, up + kStep, prob) - swiglu(gate, up - kStep, prob)) / (2 * kStep);
                const int64_t at = (base + row) * 2 * p.width + j;
                ASSERT_NEAR(p.dh(at), dgate, 1e-5 * std::max(std::abs(dgate), 0.1 * std::abs(da * prob * up)))
                    << row << " " << j;
                ASSERT_NEAR(p.dh(at + p.width), dup, 1e-5 * std::max(std::abs(dup), 1e-4)) << row << " " << j;
                dprob += da * swiglu(gate, up, 1.0);
                dprob_size += std::abs(da * swiglu(gate, up, 1.0));
            }
            ASSERT_NEAR(p.dprob(base + row), dprob, 1e-6 * dprob_size);
        }
        expect_pads_zero_and_rest_untouched(p, p.dh);
        expect_pads_zero_and_rest_untouched(p, p.dprob);
    }
}

// Other units: outputs and gradients against the formula, 0 where a clamp holds its input, not at the limit.
TEST(Swiglu, OtherGatedUnits) {
    for (const op::GluForm form : {op::GluForm{.limit = 1.5f}, op::GluForm{.alpha = 1.702f, .offset = 1.0f},
                                   op::GluForm{.alpha = 1.702f, .offset = 1.0f, .limit = 2.0f}}) {
        Problem p({40, 0, 61}, 16, 129, DType::f32, 0);
        set(p.h, 3, form.limit);
        set(p.h, p.width + 3, -form.limit);
        op::Swiglu forward = p.forward();
        op::SwigluBackward backward = p.backward();
        forward.form = backward.form = form;
        ReferenceOps ops;
        ops.swiglu(forward);
        ops.swiglu_backward(backward);
        const double limit = form.limit > 0 ? form.limit : HUGE_VAL;
        constexpr double kStep = 1e-5;
        for (int64_t row = 0; row < p.groups.total(); ++row) {
            if (p.groups.is_pad(row)) continue;
            const double prob = p.prob(row);
            double dprob = 0, size = 0;
            for (int64_t j = 0; j < p.width; ++j) {
                const double gate = p.gate(row, j), up = p.up(row, j), da = p.da(row * p.width + j),
                             a = gated(form, gate, up), scale = std::abs(da * prob) * (std::abs(up) + 1);
                ASSERT_NEAR(p.a(row * p.width + j), a * prob, 1e-5 * std::abs(a) + 1e-6);
                const double below = gated(form, gate - kStep, up),
                             side = gated(form, gate, up + (up < 0 ? kStep : -kStep));
                const double dgate = gate > limit ? 0 : da * prob * (a - below) / kStep,
                             dup = std::abs(up) > limit ? 0
                                                        : da * prob * (side - a) / (up < 0 ? kStep : -kStep);
                ASSERT_NEAR(p.dh(row * 2 * p.width + j), dgate, 1e-4 * scale) << gate;
                ASSERT_NEAR(p.dh((row * 2 + 1) * p.width + j), dup,
                            1e-4 * std::abs(da * prob) * (std::abs(gate) + 1));
                dprob += da * a;
                size += std::abs(da * a);
            }
            ASSERT_NEAR(p.dprob(row), dprob, 1e-5 * size);
        }
    }
}

// A kernel's table of sigmoids has one entry for all gates below 2^-25.
TEST(Swiglu, SmallGatesHaveTheSigmoidOfZero) {
    for (const float alpha : {1.0f, 1.702f, op::GluForm::kMaxAlpha})
        for (uint32_t bits = 0; bits <= (102u << 7); ++bits)
            for (const uint32_t sign : {0u, 0x8000u})
                ASSERT_EQ(sigmoid_float(alpha * bits_float((bits | sign) << 16)), 0.5f)
                    << alpha << " " << bits;
}

TEST(Swiglu, Bf16BackwardIsTheRoundedFp32One) {
    const Problem p({70, 3}, 1, 256, DType::bf16, 0);
    HostTensor h32(DType::f32, {p.rows, 2 * p.width}), da32(DType::f32, {p.rows, p.width});
    HostTensor dh32(DType::f32, {p.rows, 2 * p.width}), dprob32(DType::f32, {p.rows});
    fill(h32, [&](int64_t i) { return p.h(i); });
    fill(da32, [&](int64_t i) { return p.da(i); });
    ReferenceOps ops;
    ops.swiglu_backward(p.backward());
    ops.swiglu_backward(
        {.da = da32, .h = h32, .prob = p.prob, .groups = p.groups, .dh = dh32, .dprob = dprob32});
    for (int64_t i = 0; i < p.groups.total() * 2 * p.width; ++i)
        ASSERT_EQ(p.dh(i), round_bf16(dh32.as<float>()[i]));
    EXPECT_TRUE(same_bytes(p.dprob, dprob32));
}

TEST(Swiglu, WithoutProbWithoutGroups) {
    const Problem p({50}, 1, 130, DType::f32, 0);
    HostTensor ones(DType::f32, {p.rows}), a(DType::f32, {p.rows, p.width}),
        dh(DType::f32, {p.rows, 2 * p.width});
    fill(ones, [](int64_t) { return 1.0; });
    ReferenceOps ops;
    ops.swiglu({.h = p.h, .a = a});
    ops.swiglu({.h = p.h, .prob = ones, .a = p.a});
    EXPECT_TRUE(same_bytes(a, p.a));
    ops.swiglu_backward({.da = p.da, .h = p.h, .dh = dh});
    ops.swiglu_backward({.da = p.da, .h = p.h, .prob = ones, .dh = p.dh, .dprob = p.dprob});
    EXPECT_TRUE(same_bytes(dh, p.dh));
}

// Quantises rows of fp32 values in 1x128 blocks, straight from the rule of quantize.h.
void expect_quantized(const Problem& p, const HostScaled& actual, const HostTensor& values,
                      ScaleFormat format) {
    const int64_t cols = actual.data.view().cols();
    for (int64_t row = 0; row < p.groups.total(); ++row) {
        for (int64_t first = 0; first < cols; first += 128) {
            const int64_t last = std::min(first + 128, cols), at = p.base + row;
            float amax = 0;
            for (int64_t j = first; j < last; ++j)
                amax = std::max(amax, std::abs(values.as<float>()[at * cols + j]));
            const QuantScale scale = quant_scale(amax, 448.0f, format);
            const bool pad = p.groups.is_pad(row);
            ASSERT_EQ(actual.scales.as<float>()[first / 128 * p.rows + at], pad ? 0.0f : scale.dequant);
            for (int64_t j = first; j < last; ++j) {
                const uint8_t code =
                    pad ? 0 : to_e4m3(values.as<float>()[at * cols + j] * scale.multiplier).bits;
                ASSERT_EQ(actual.data.view().bytes_ptr()[at * cols + j], code) << row << " " << j;
            }
        }
    }
    expect_pads_zero_and_rest_untouched(p, actual.data);
    for (int64_t block = 0; block < (cols + 127) / 128; ++block)
        for (int64_t row = 0; row < p.rows; ++row)
            if (row < p.base || row >= p.base + p.groups.total()) {
                ASSERT_EQ(float_bits(actual.scales.as<float>()[block * p.rows + row]), 0xFFFFFFFFu);
            }
}

TEST(SwigluQuantize, EqualsQuantisingTheFp32Result) {
    for (const auto& counts : kCounts) {
        for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
            for (int64_t base : {0, 128}) {
                Problem p(counts, 16, 256, DType::bf16, base);
                HostTensor a32(DType::f32, {p.rows, p.width}), dh32(DType::f32, {p.rows, 2 * p.width}),
                    dprob(DType::f32, {p.rows});
                if (base > 0)
                    for (HostTensor* t : {&a32, &dh32, &dprob}) t->set_row_base(base);
                ReferenceOps ops;
                ops.swiglu({.h = p.h, .prob = p.prob, .groups = p.groups, .a = a32});
                ops.swiglu_quantize(
                    {.h = p.h, .prob = p.prob, .groups = p.groups, .scale_format = format, .a = p.a_fp8});
                expect_quantized(p, p.a_fp8, a32, format);
                ops.swiglu_backward(
                    {.da = p.da, .h = p.h, .prob = p.prob, .groups = p.groups, .dh = dh32, .dprob = dprob});
                ops.swiglu_backward_quantize({.da = p.da,
                                              .h = p.h,
                                              .prob = p.prob,
                                              .groups = p.groups,
                                              .scale_format = format,
                                              .dh = p.dh_fp8,
                                              .dprob = p.dprob});
                expect_quantized(p, p.dh_fp8, dh32, format);
                EXPECT_TRUE(same_bytes(p.dprob, dprob));
            }
        }
    }
}

TEST(SwigluQuantize, FusedProductEqualsItsParts) {
    const GroupsFixture groups({100, 0, 29}, 128);
    const int64_t M = groups.capacity(), K = 256, F = 128;
    HostScaled a(DType::e4m3, {M, K}, ScaleLayout::vec128),
        b(DType::e4m3, {3, 2 * F, K}, ScaleLayout::block128);
    for (HostScaled* t : {&a, &b}) {
        fill_normal(t->data, 5, 8.0);
        fill_pow2(t->scales, 6, -6, -3);
    }
    HostTensor prob(DType::f32, {M}), h(DType::bf16, {M, 2 * F}), h_parts(DType::bf16, {M, 2 * F});
    fill_uniform(prob, 7, 0.1, 1.0);
    HostScaled act(DType::e4m3, {M, F}, ScaleLayout::vec128),
        act_parts(DType::e4m3, {M, F}, ScaleLayout::vec128);
    ReferenceOps ops;
    ops.grouped_gemm_swiglu_quantize({.a = a, .b = b, .groups = groups, .prob = prob, .h = h, .act = act});
    ops.grouped_gemm({.a = a, .b = b, .groups = groups, .d = h_parts});
    ops.swiglu_quantize({.h = h_parts, .prob = prob, .groups = groups, .a = act_parts});
    EXPECT_TRUE(same_bytes(h, h_parts));
    EXPECT_TRUE(same_bytes(act, act_parts));
}

TEST(Swiglu, ThreadsDoNotChangeBits) {
    const int threads = omp_get_max_threads();
    const Problem one({64, 9}, 16, 256, DType::bf16, 0), three({64, 9}, 16, 256, DType::bf16, 0);
    ReferenceOps ops;
    omp_set_num_threads(1);
    ops.swiglu(one.forward());
    ops.swiglu_backward(one.backward());
    omp_set_num_threads(3);
    ops.swiglu(three.forward());
    ops.swiglu_backward(three.backward());
    omp_set_num_threads(threads);
    EXPECT_TRUE(same_bytes(one.a, three.a) && same_bytes(one.dh, three.dh) &&
                same_bytes(one.dprob, three.dprob));
}

// Far gates: silu reaches 0 and the identity without NaN; infinities in stay visible.
TEST(Swiglu, ExtremeGates) {
    const std::vector<float> gates = {-1e4f, -100.0f, -88.5f, -0.0f, 0.0f, 88.5f, 100.0f, 1e4f};
    const int64_t F = static_cast<int64_t>(gates.size());
    HostTensor h(DType::f32, {1, 2 * F}), a(DType::f32, {1, F}), da(DType::f32, {1, F}),
        dh(DType::f32, {1, 2 * F});
    fill(h, [&](int64_t i) { return i < F ? gates[static_cast<std::size_t>(i)] : 1.0; });
    fill(da, [](int64_t) { return 1.0; });
    ReferenceOps ops;
    ops.swiglu({.h = h, .a = a});
    ops.swiglu_backward({.da = da, .h = h, .dh = dh});
    for (int64_t j = 0; j < F; ++j) {
        const double gate = gates[static_cast<std::size_t>(j)];
        EXPECT_NEAR(a(j), gate > 0 ? gate : 0.0, 1e-30) << gate;
        EXPECT_NEAR(dh(j), gate == 0 ? 0.5 : (gate > 0 ? 1.0 : 0.0), 1e-30) << gate;
    }
}

}  // namespace
}  // namespace fp8flow::test
