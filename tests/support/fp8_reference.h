// SPDX-License-Identifier: MIT
// The FP8 formats and the quantisation rules once more, in double precision and by searching the table of
// FP8 values: what kernels/core/scalar_math.h and the quantisers are compared with. Shares no code with them.
#pragma once

#include "kernels/core/scaled_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace fp8flow::test {

// Value of a code from the definition of the format.
inline double code_value(uint8_t code, DType dtype) {
    const bool e5m2 = dtype == DType::e5m2;
    const int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, magnitude = code & 0x7F;
    const double sign = code & 0x80 ? -1.0 : 1.0;
    if (e5m2 ? magnitude > 0x7C : magnitude == 0x7F) return std::copysign(std::nan(""), sign);
    if (e5m2 && magnitude == 0x7C) return sign * std::numeric_limits<double>::infinity();
    const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

inline int num_finite(DType dtype) { return dtype == DType::e5m2 ? 0x7C : 0x7F; }  // FP8 values 0 .. this - 1
inline double max_value(DType dtype) { return dtype == DType::e5m2 ? 57344.0 : 448.0; }

// Nearest code, ties to the even code, saturating; NaN gives 0x7F with the sign.
inline uint8_t nearest_code(double value, DType dtype) {
    static const auto build = [](DType t) {
        std::vector<double> values;
        for (int code = 0; code < num_finite(t); ++code)
            values.push_back(code_value(static_cast<uint8_t>(code), t));
        return values;
    };
    static const std::vector<double> e4m3 = build(DType::e4m3), e5m2 = build(DType::e5m2);
    const std::vector<double>& table = dtype == DType::e5m2 ? e5m2 : e4m3;
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return sign | 0x7F;
    const double magnitude = std::fabs(value);
    if (magnitude >= table.back()) return static_cast<uint8_t>(sign | (table.size() - 1));
    const std::size_t above =
        static_cast<std::size_t>(std::upper_bound(table.begin(), table.end(), magnitude) - table.begin());
    const double to_below = magnitude - table[above - 1], to_above = table[above] - magnitude;
    const bool up = to_above < to_below || (to_above == to_below && above % 2 == 0);
    return static_cast<uint8_t>(sign | (up ? above : above - 1));
}

struct ReferenceScale {
    float multiplier;
    float dequant;
};
// Power of two: the largest with amax * 2^e <= max. Otherwise max / amax, both divisions correctly rounded
// (double is wide enough).
inline ReferenceScale reference_scale(double amax, DType dtype, ScaleFormat format) {
    if (std::isinf(amax)) return {1.0f, 1.0f};
    const double least = 0x1.0p-100;
    amax = std::max(amax, least);
    if (format == ScaleFormat::fp32) {
        const float multiplier = static_cast<float>(max_value(dtype) / amax);
        return {multiplier, static_cast<float>(1.0 / static_cast<double>(multiplier))};
    }
    int exponent = 200;
    while (std::ldexp(amax, exponent) > max_value(dtype)) --exponent;
    return {static_cast<float>(std::ldexp(1.0, exponent)), static_cast<float>(std::ldexp(1.0, -exponent))};
}

struct ReferenceMx {
    uint8_t byte;
    float multiplier;
};
inline ReferenceMx reference_mx(double amax, DType dtype, MxRounding rounding) {
    if (std::isinf(amax)) return {0xFF, std::nanf("")};
    int exponent = -126;  // least stored exponent; byte 0 is kept for pads
    if (rounding == MxRounding::floor) {
        if (amax > 0) exponent = std::max(exponent, std::ilogb(amax) - std::ilogb(max_value(dtype)));
    } else {
        while (std::ldexp(max_value(dtype), exponent) < amax) ++exponent;
    }
    return {static_cast<uint8_t>(exponent + 127), static_cast<float>(std::ldexp(1.0, -exponent))};
}

// max|x| of finite and infinite values; NaN is skipped.
inline double reference_amax(const std::vector<float>& values) {
    double amax = 0;
    for (float x : values)
        if (!std::isnan(x)) amax = std::max(amax, std::fabs(static_cast<double>(x)));
    return amax;
}

// One block in FP8 with its scale: f32 and, where the layout stores bytes, the e8m0 byte.
struct ReferenceBlock {
    std::vector<uint8_t> data;
    float scale = 0.0f;
    uint8_t byte = 0;
};
inline ReferenceBlock reference_block(const std::vector<float>& values, DType dtype, ScaleLayout layout,
                                      ScaleFormat format, MxRounding rounding) {
    ReferenceBlock block;
    const double amax = reference_amax(values);
    float multiplier;
    if (layout == ScaleLayout::mx32) {
        const ReferenceMx mx = reference_mx(amax, dtype, rounding);
        multiplier = mx.multiplier;
        block.byte = mx.byte;
    } else {
        const ReferenceScale scale = reference_scale(amax, dtype, format);
        multiplier = scale.multiplier;
        block.scale = scale.dequant;
        block.byte = static_cast<uint8_t>(std::ilogb(scale.dequant) + 127);
    }
    for (float x : values) {
        const float scaled = x * multiplier;  // one fp32 rounding, as the rule says
        block.data.push_back(nearest_code(scaled, dtype));
    }
    return block;
}

}  // namespace fp8flow::test
