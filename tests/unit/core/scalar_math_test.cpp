// SPDX-License-Identifier: MIT
// The shared scalar arithmetic, exhaustively: every bf16, fp16 and FP8 code, the quantisation rules over all
// exponents, the scaling-aware shift over all codes and shifts, exp and log against double.
#include "kernels/core/scalar_math.h"

#include "kernels/core/random.h"
#include "tests/support/fp8_reference.h"

#include <gtest/gtest.h>

#include <cfloat>

namespace fp8flow {
namespace {

using namespace test;

constexpr DType kFp8[] = {DType::e4m3, DType::e5m2};

bool is_nan(float x) { return std::isnan(x); }

// ---- max, NaN
TEST(ScalarMath, MaxIgnoresNanOnBothSides) {
    const float nan = std::nanf("");
    EXPECT_EQ(max_ignore_nan(1.0f, 2.0f), 2.0f);
    EXPECT_EQ(max_ignore_nan(2.0f, 1.0f), 2.0f);
    EXPECT_EQ(max_ignore_nan(nan, 1.0f), 1.0f);
    EXPECT_EQ(max_ignore_nan(1.0f, nan), 1.0f);
    EXPECT_EQ(max_ignore_nan(-INFINITY, -3.0f), -3.0f);
    EXPECT_EQ(max_ignore_nan(nan, -INFINITY), -INFINITY);
    EXPECT_TRUE(is_nan(max_ignore_nan(nan, nan)));
}

// ---- bf16, fp16
TEST(ScalarMath, EveryBf16RoundTrips) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float value = to_float(Bf16{static_cast<uint16_t>(bits)});
        const uint32_t back = to_bf16(value).bits;
        if (is_nan(value)) {
            EXPECT_EQ(back, bits | 0x40u);  // quiet, payload kept
        } else {
            ASSERT_EQ(back, bits);
        }
    }
}

double fp16_value(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 10) & 31, mantissa = static_cast<int>(bits & 0x3FF);
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31) return mantissa ? std::nan("") : sign * INFINITY;
    return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(ScalarMath, EveryFp16RoundTrips) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float value = to_float(Fp16{static_cast<uint16_t>(bits)});
        const double want = fp16_value(bits);
        if (std::isnan(want)) {
            EXPECT_TRUE(is_nan(value));
            EXPECT_TRUE(std::isnan(fp16_value(to_f16(value).bits)));
            continue;
        }
        ASSERT_EQ(static_cast<double>(value), want);
        ASSERT_EQ(to_f16(value).bits, bits);
    }
}

// Every pair of neighbours: their midpoint goes to the even one, one float above and below it to the nearer
// one.
template <class To, class Value>
void check_midpoints(uint32_t largest, To to, Value value, uint32_t sign_bit) {
    for (uint32_t code = 0; code < largest; ++code) {
        const double middle = (value(code) + value(code + 1)) / 2;
        const float mid = static_cast<float>(middle);
        ASSERT_EQ(static_cast<double>(mid), middle);
        const uint32_t even = code % 2 == 0 ? code : code + 1;
        for (uint32_t sign : {0u, sign_bit}) {
            const float s = sign ? -1.0f : 1.0f;
            ASSERT_EQ(to(s * mid), even | sign) << code;
            ASSERT_EQ(to(s * std::nextafterf(mid, 0.0f)), code | sign) << code;
            ASSERT_EQ(to(s * std::nextafterf(mid, FLT_MAX)), (code + 1) | sign) << code;
        }
    }
}

TEST(ScalarMath, MidpointsOfBf16AndFp16GoToEven) {
    auto bf16_value = [](uint32_t bits) {
        return static_cast<double>(to_float(Bf16{static_cast<uint16_t>(bits)}));
    };
    check_midpoints(
        0x7F7F, [](float x) { return uint32_t{to_bf16(x).bits}; }, bf16_value, 0x8000);
    check_midpoints(
        0x7BFF, [](float x) { return uint32_t{to_f16(x).bits}; }, fp16_value, 0x8000);
    EXPECT_EQ(to_f16(65519.996f).bits, 0x7BFF);
    EXPECT_EQ(to_f16(65520.0f).bits, 0x7C00);
    EXPECT_EQ(to_f16(-INFINITY).bits, 0xFC00);
    EXPECT_EQ(to_bf16(FLT_MAX).bits, 0x7F80);  // rounds to infinity, as IEEE
    EXPECT_EQ(to_bf16(-INFINITY).bits, 0xFF80);
}

// ---- FP8
TEST(ScalarMath, EveryFp8CodeHasItsValueAndRoundTrips) {
    for (DType dtype : kFp8)
        for (int code = 0; code < 256; ++code) {
            const double want = code_value(static_cast<uint8_t>(code), dtype);
            const float value = fp8_to_float(static_cast<uint8_t>(code), dtype);
            if (std::isnan(want)) {
                EXPECT_TRUE(is_nan(value)) << code;
                EXPECT_EQ(to_fp8(value, dtype), (code & 0x80) | 0x7F) << code;
                continue;
            }
            ASSERT_EQ(static_cast<double>(value), want) << code;
            ASSERT_EQ(std::signbit(value), (code & 0x80) != 0) << code;
            const int back = std::isinf(want) ? (code & 0x80) | 0x7B : code;  // saturates
            ASSERT_EQ(to_fp8(value, dtype), back) << code;
        }
}

TEST(ScalarMath, Fp8OfEveryBf16AndOfRandomFloats) {
    for (DType dtype : kFp8) {
        for (uint32_t bits = 0; bits < 65536; ++bits) {
            const float x = bits_float(bits << 16);
            ASSERT_EQ(to_fp8(x, dtype), nearest_code(x, dtype)) << x;
        }
        for (uint64_t i = 0; i < 100000; ++i) {
            const auto words = random_words(1, 0, i);
            // any float, and one whose exponent is in reach of the format
            const uint32_t near = (words[1] & 0x807FFFFFu) | ((100u + words[2] % 45u) << 23);
            for (uint32_t bits : {words[0], near}) {
                const float x = bits_float(bits);
                ASSERT_EQ(to_fp8(x, dtype), nearest_code(x, dtype)) << x;
            }
        }
    }
}

TEST(ScalarMath, MidpointsOfFp8GoToEvenAndOverflowSaturates) {
    for (DType dtype : kFp8) {
        const uint32_t largest = static_cast<uint32_t>(num_finite(dtype) - 1);
        check_midpoints(
            largest, [&](float x) { return uint32_t{to_fp8(x, dtype)}; },
            [&](uint32_t code) { return code_value(static_cast<uint8_t>(code), dtype); }, 0x80);
        for (float x : {fp8_max(dtype), fp8_max(dtype) * 1.0001f, fp8_max(dtype) * 1.5f, FLT_MAX, INFINITY}) {
            EXPECT_EQ(to_fp8(x, dtype), largest);
            EXPECT_EQ(to_fp8(-x, dtype), largest | 0x80);
        }
    }
}

// ---- quantisation scales
TEST(ScalarMath, QuantScaleOverAllExponents) {
    for (DType dtype : kFp8)
        for (uint32_t exponent = 0; exponent < 255; ++exponent)
            for (uint64_t i = 0; i < 200; ++i) {
                uint32_t mantissa = random_words(2, exponent, i)[0] & 0x7FFFFFu;
                // around 1.75, where the power of two changes, and the ends
                if (i < 8) mantissa = 0x600000u + static_cast<uint32_t>(i) - 4u;
                if (i >= 8 && i < 12)
                    mantissa =
                        i < 10 ? static_cast<uint32_t>(i) - 8u : 0x7FFFFFu - (static_cast<uint32_t>(i) - 10u);
                const float amax = bits_float((exponent << 23) | mantissa);
                for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
                    const QuantScale got = quant_scale(amax, fp8_max(dtype), format);
                    const ReferenceScale want = reference_scale(amax, dtype, format);
                    ASSERT_EQ(got.multiplier, want.multiplier) << amax;
                    ASSERT_EQ(got.dequant, want.dequant) << amax;
                    ASSERT_GE(got.dequant, FLT_MIN);
                    ASSERT_LE(got.multiplier, 0x1.0p126f);
                    const double scaled = static_cast<double>(amax) * got.multiplier,
                                 largest = max_value(dtype);
                    if (format == ScaleFormat::fp32) {
                        ASSERT_LE(scaled, largest * (1 + 1.2e-7)) << amax;
                    } else {
                        ASSERT_LE(scaled, largest) << amax;  // nothing saturates
                        ASSERT_EQ(got.dequant * got.multiplier, 1.0f);
                        ASSERT_EQ(float_bits(got.dequant) & 0x7FFFFFu, 0u);
                        ASSERT_TRUE(amax < kAmaxEps || scaled > largest / 2) << amax;
                    }
                }
            }
}

TEST(ScalarMath, QuantScaleOfNothingInfinityAndNan) {
    for (DType dtype : kFp8)
        for (ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
            const QuantScale floor = quant_scale(kAmaxEps, fp8_max(dtype), format);
            for (float amax : {0.0f, FLT_TRUE_MIN, FLT_MIN, 0x1.Fp-101f, std::nanf("")}) {
                const QuantScale scale = quant_scale(amax, fp8_max(dtype), format);
                EXPECT_EQ(scale.multiplier, floor.multiplier);
                EXPECT_EQ(scale.dequant, floor.dequant);
            }
            EXPECT_GT(floor.dequant, 0.0f);  // 0 is for pads
            EXPECT_LE(floor.dequant, quant_scale(0x1.0p-99f, fp8_max(dtype), format).dequant);
            const QuantScale infinite = quant_scale(INFINITY, fp8_max(dtype), format);
            EXPECT_EQ(infinite.multiplier, 1.0f);
            EXPECT_EQ(infinite.dequant, 1.0f);
        }
}

TEST(ScalarMath, MxScaleOverAllExponents) {
    for (DType dtype : kFp8)
        for (MxRounding rounding : {MxRounding::floor, MxRounding::rceil}) {
            for (uint32_t exponent = 0; exponent < 255; ++exponent)
                for (uint32_t i = 0; i < 64; ++i) {
                    uint32_t mantissa = random_words(3, exponent, i)[0] & 0x7FFFFFu;
                    if (i < 8) mantissa = 0x600000u + i - 4u;
                    if (i >= 8 && i < 12) mantissa = i < 10 ? i - 8u : 0x7FFFFFu - (i - 10u);
                    const float amax = bits_float((exponent << 23) | mantissa);
                    const MxScale got = mx_scale(amax, dtype, rounding);
                    const ReferenceMx want = reference_mx(amax, dtype, rounding);
                    ASSERT_EQ(got.code, want.byte) << amax;
                    ASSERT_EQ(got.multiplier, want.multiplier) << amax;
                    ASSERT_EQ(got.multiplier * e8m0_to_float(got.code), 1.0f) << amax;
                    const double scaled = static_cast<double>(amax) * got.multiplier;
                    ASSERT_TRUE(rounding == MxRounding::floor || scaled <= max_value(dtype)) << amax;
                }
            EXPECT_EQ(mx_scale(INFINITY, dtype, rounding).code, 0xFF);
            EXPECT_TRUE(is_nan(mx_scale(INFINITY, dtype, rounding).multiplier));
            EXPECT_EQ(mx_scale(std::nanf(""), dtype, rounding).code, 0xFF);
        }
}

TEST(ScalarMath, E8m0IsThePowerOfTwo) {
    EXPECT_EQ(e8m0_to_float(0), 0.0f);
    EXPECT_EQ(float_to_e8m0(0.0f), 0);
    EXPECT_TRUE(is_nan(e8m0_to_float(0xFF)));
    for (int code = 1; code < 255; ++code) {
        EXPECT_EQ(static_cast<double>(e8m0_to_float(static_cast<uint8_t>(code))),
                  std::ldexp(1.0, code - 127));
        EXPECT_EQ(float_to_e8m0(e8m0_to_float(static_cast<uint8_t>(code))), code);
    }
}

// The power-of-two form subtracts bits; dividing and cutting the mantissa off gives the same.
TEST(ScalarMath, PowerOfTwoScaleIsTheQuotientCutToAPowerOfTwo) {
    int64_t differences = 0;
    const auto check = [&](uint32_t bits, DType dtype) {
        const float amax = bits_float(bits);
        const QuantScale got = quant_scale(amax, fp8_max(dtype), ScaleFormat::pow2);
        const float quotient = fp8_max(dtype) / std::max(amax, kAmaxEps),
                    wanted = bits_float(float_bits(quotient) & 0xFF800000u);
        differences += got.multiplier != wanted || got.dequant != 1.0f / wanted;
    };
    for (const DType dtype : kFp8)
        for (uint32_t bits = 0; bits < 0x7F800000u;
             bits += 0x00200000u)  // around every quarter of a power of two
            for (const uint32_t more : {0u, 1u, 2u, 0x1FFFFFu, 0x1FFFFEu, 0x012345u})
                check(bits + more, dtype);
    EXPECT_EQ(differences, 0);
}

// ---- the scaling-aware shift
TEST(ScalarMath, ShiftDownIsRoundToNearestEvenForEveryCodeAndShift) {
    for (DType dtype : kFp8)
        for (int k = 0; k <= 300; ++k)
            for (int code = 0; code < 256; ++code) {
                const uint8_t c = static_cast<uint8_t>(code), got = fp8_shift_down(c, k, dtype);
                const double value = code_value(c, dtype);
                if (!std::isfinite(value) || k == 0) {
                    ASSERT_EQ(got, c)
                        << k;  // NaN and infinity pass; k = 0 is the identity, -0 and subnormals included
                } else {
                    ASSERT_EQ(got, nearest_code(std::ldexp(value, -k), dtype)) << code << " by " << k;
                }
            }
}

// ---- elementary functions
TEST(ScalarMath, ExpAgainstDouble) {
    double worst = 0;
    auto check = [&](float x) {
        const double want = std::exp(static_cast<double>(x));
        worst = std::max(worst, std::fabs(exp_float(x) - want) / want);
    };
    for (double x = -87.336; x < 88.722; x += 1.7e-4) check(static_cast<float>(x));
    for (int e = -40; e < 6; ++e)
        for (uint64_t i = 0; i < 500; ++i) {
            const float x =
                static_cast<float>(std::ldexp(1.0 + random_uniform(4, static_cast<uint64_t>(e + 64), i), e));
            check(std::min(x, 88.7f));
            check(-std::min(x, 87.3f));
        }
    EXPECT_LT(worst, 2e-7);
    EXPECT_EQ(exp_float(0.0f), 1.0f);
    EXPECT_EQ(exp_float(-0.0f), 1.0f);
    EXPECT_EQ(exp_float(INFINITY), INFINITY);
    EXPECT_EQ(exp_float(-INFINITY), 0.0f);
    EXPECT_EQ(exp_float(88.8f), INFINITY);
    EXPECT_EQ(exp_float(-87.4f), 0.0f);
    EXPECT_LT(exp_float(std::nextafterf(88.72283f, 0.0f)), INFINITY);
    EXPECT_GE(exp_float(std::nextafterf(-87.33654f, 0.0f)), FLT_MIN);
    EXPECT_TRUE(is_nan(exp_float(std::nanf(""))));
}

// Every BF16 value in the range, which is what the gate of a SwiGLU is, and floats between them.
TEST(ScalarMath, ExpNearHasTheBitsOfExp) {
    int64_t differences = 0, values = 0;
    for (uint32_t top = 0; top < 0x10000; ++top)
        for (const uint32_t low : {0x0000u, 0x0001u, 0x5A5Au, 0x8000u, 0xFFFFu}) {
            const float x = bits_float(top << 16 | low);
            if (!(abs_float(x) <= kNear)) continue;
            ++values;
            differences += float_bits(exp_near(x)) != float_bits(exp_float(x));
        }
    EXPECT_EQ(differences, 0);
    EXPECT_GT(values, 5 * 2 * (0x42A0 - 1));
    EXPECT_EQ(to_bf16(kNear).bits, 0x42A0);  // the bound as the kernels compare it
}

TEST(ScalarMath, LogAgainstDouble) {
    double worst = 0;
    for (uint32_t exponent = 1; exponent < 255; ++exponent)
        for (uint64_t i = 0; i < 2000; ++i) {
            const float x = bits_float((exponent << 23) | (random_words(5, exponent, i)[0] & 0x7FFFFFu));
            const double want = std::log(static_cast<double>(x));
            worst = std::max(worst, std::fabs(log_float(x) - want) / std::max(1.0, std::fabs(want)));
        }
    EXPECT_LT(worst, 2e-7);
    EXPECT_EQ(log_float(1.0f), 0.0f);
    EXPECT_EQ(log_float(0.0f), -INFINITY);
    EXPECT_EQ(log_float(INFINITY), INFINITY);
    EXPECT_TRUE(is_nan(log_float(-1.0f)));
    EXPECT_TRUE(is_nan(log_float(std::nanf(""))));
}

TEST(ScalarMath, SigmoidAndSiluAgainstDouble) {
    double worst = 0;
    for (double d = -86.0; d <= 86.0; d += 3.1e-3) {
        const float x = static_cast<float>(d);
        const double sigmoid = 1.0 / (1.0 + std::exp(-static_cast<double>(x)));
        worst = std::max(worst, std::fabs(sigmoid_float(x) - sigmoid) / sigmoid);
        if (x != 0) worst = std::max(worst, std::fabs(silu_float(x) / (x * sigmoid) - 1.0));
    }
    EXPECT_LT(worst, 4e-7);
    EXPECT_EQ(silu_float(0.0f), 0.0f);
    EXPECT_EQ(silu_float(200.0f), 200.0f);
    EXPECT_EQ(silu_float(-200.0f), 0.0f);  // the limit, not NaN
    EXPECT_EQ(sigmoid_float(INFINITY), 1.0f);
    EXPECT_EQ(sigmoid_float(-INFINITY), 0.0f);
}

}  // namespace
}  // namespace fp8flow
