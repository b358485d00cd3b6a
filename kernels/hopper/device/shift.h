// SPDX-License-Identifier: MIT
// The scaling-aware shift (fp8_shift_down of scalar_math.h) of four FP8 values at a time, through
// FP16: the same bits for every FP8 value and shift (tests/gpu/quantize/transpose_parity_test.cu; the
// arithmetic also on a CPU: tests/unit/core/shift_formula_test.cpp). Why one multiplication suffices: an FP8
// value has at most 4 significant bits and FP16 reaches down to 2^-24, so value * 2^-k is exact unless its
// last bit lies below 2^-24. Then it is below 2^-20, which rounds to 0 in either format (half the least
// value: 2^-10, 2^-17) regardless of its rounding in FP16. So values are rounded once, by the conversion
// back, to nearest even, subnormals included.
#pragma once

#include "kernels/core/scalar_math.h"

namespace fp8flow::hopper {

// The multiplier of a row's FP8 values: factor * second = 2^-k in both halves of each word; keep == 0 clears
// the row.
struct RowShift {
    uint32_t factor, second, keep;
};

__device__ __forceinline__ uint32_t half2_power(int k) {  // 2^-k, 0 <= k <= 24
    const float power = __uint_as_float(static_cast<uint32_t>(127 - k) << 23);
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(word) : "f"(power));
    return word;
}

// target >= scale, both by their exponents; a scale that is not positive clears its row. E4M3 is 0 from k =
// 19 on, E5M2 from k = 33 on, past the smallest FP16: its power comes in two factors.
template <DType kFp8> __device__ __forceinline__ RowShift row_shift(float target, float scale) {
    const int k =
        static_cast<int>(__float_as_uint(target) >> 23) - static_cast<int>(__float_as_uint(scale) >> 23);
    const uint32_t keep = scale > 0.0f ? 0xFFFFFFFFu : 0u;
    if constexpr (kFp8 == DType::e5m2) {
        const int first = max(0, min(k, 16)), second = max(0, min(k - 16, 24));
        return {half2_power(first), half2_power(second), keep};
    }
    return {half2_power(max(0, min(k, 24))), 0, keep};
}

// Both halves of a word in one piece of assembly: ptxas then reads and writes them in place.
template <DType kFp8> __device__ __forceinline__ uint32_t shift_words(uint32_t fp8, const RowShift& shift) {
    uint32_t shifted;
    if constexpr (kFp8 == DType::e5m2) {
        asm("{\n"
            ".reg .b16 low, high;\n"
            ".reg .b32 v, w;\n"
            "mov.b32 {low, high}, %1;\n"
            "cvt.rn.f16x2.e5m2x2 v, low;\n"
            "cvt.rn.f16x2.e5m2x2 w, high;\n"
            "mul.rn.f16x2 v, v, %2;\n"
            "mul.rn.f16x2 w, w, %2;\n"
            "mul.rn.f16x2 v, v, %3;\n"
            "mul.rn.f16x2 w, w, %3;\n"
            "cvt.rn.satfinite.e5m2x2.f16x2 low, v;\n"
            "cvt.rn.satfinite.e5m2x2.f16x2 high, w;\n"
            "mov.b32 %0, {low, high};\n"
            "}"
            : "=r"(shifted)
            : "r"(fp8), "r"(shift.factor), "r"(shift.second));
    } else {
        asm("{\n"
            ".reg .b16 low, high;\n"
            ".reg .b32 v, w;\n"
            "mov.b32 {low, high}, %1;\n"
            "cvt.rn.f16x2.e4m3x2 v, low;\n"
            "cvt.rn.f16x2.e4m3x2 w, high;\n"
            "mul.rn.f16x2 v, v, %2;\n"
            "mul.rn.f16x2 w, w, %2;\n"
            "cvt.rn.satfinite.e4m3x2.f16x2 low, v;\n"
            "cvt.rn.satfinite.e4m3x2.f16x2 high, w;\n"
            "mov.b32 %0, {low, high};\n"
            "}"
            : "=r"(shifted)
            : "r"(fp8), "r"(shift.factor));
    }
    return shifted;
}

// Four FP8 values of one row. E4M3: a NaN is converted to 0x7F, so only its sign has to be restored. E5M2:
// infinity and NaN (0x7C and above) are restored.
template <DType kFp8> __device__ __forceinline__ uint32_t shift_four(uint32_t fp8, const RowShift& shift) {
    constexpr uint32_t kSigns = 0x80808080u;
    fp8 &= shift.keep;
    const uint32_t shifted = shift_words<kFp8>(fp8, shift);
    if constexpr (kFp8 == DType::e5m2) {
        const uint32_t special = ((fp8 & ~kSigns) + 0x04040404u) & kSigns, bytes = (special >> 7) * 0xFFu;
        return (shifted & ~bytes) | (fp8 & bytes);
    }
    return shifted | (fp8 & kSigns);
}

}  // namespace fp8flow::hopper
