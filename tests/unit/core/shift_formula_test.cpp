// SPDX-License-Identifier: MIT
// The arithmetic of kernels/hopper/device/shift.h (FP8 -> FP16 * 2^-k -> FP8) with FP16 rounded on the host:
// every code under every shift becomes what fp8_shift_down says. The kernel itself:
// tests/gpu/quantize/transpose_parity_test.cu.
#include "kernels/core/scalar_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace fp8flow::test {
namespace {

// A product of two FP16 numbers is exact in fp32; one rounding to FP16.
float half_product(float a, float b) { return to_float(to_f16(a * b)); }

uint8_t shift_by_half(uint8_t code, int k, DType dtype) {
    const float value = fp8_to_float(code, dtype);
    if (dtype == DType::e5m2) {
        if ((code & 0x7Fu) >= 0x7Cu) return code;
        const int first = std::min(k, 16), second = std::clamp(k - 16, 0, 24);
        const float once = half_product(value, std::ldexp(1.0f, -first));
        return to_fp8(half_product(once, std::ldexp(1.0f, -second)), dtype);
    }
    const float shifted = half_product(value, std::ldexp(1.0f, -std::min(k, 24)));
    return static_cast<uint8_t>(to_fp8(shifted, dtype) | (code & 0x80u));
}

TEST(ShiftFormula, EveryCodeAndShift) {
    for (const DType dtype : {DType::e4m3, DType::e5m2})
        for (int k = 0; k <= 63; ++k)
            for (int code = 0; code < 256; ++code)
                EXPECT_EQ(shift_by_half(static_cast<uint8_t>(code), k, dtype),
                          fp8_shift_down(static_cast<uint8_t>(code), k, dtype))
                    << name_of(dtype) << " code " << code << ", shift " << k;
}

// Half of one power more or less gives other codes: the comparison above can fail.
TEST(ShiftFormula, AnotherPowerIsNoticed) {
    EXPECT_NE(shift_by_half(0x39, 2, DType::e4m3), fp8_shift_down(0x39, 1, DType::e4m3));
    EXPECT_NE(shift_by_half(0x39, 2, DType::e5m2), fp8_shift_down(0x39, 3, DType::e5m2));
}

}  // namespace
}  // namespace fp8flow::test
