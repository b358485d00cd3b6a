// SPDX-License-Identifier: MIT
// Scalar arithmetic shared by host and device, so that both give the same bits: format conversions, the one
// quantisation rule, the scaling-aware shift of FP8 values, exp / log / sigmoid / silu. Only IEEE +, -, *,
// /, sqrt and explicit fma are used.
#pragma once

#include "kernels/core/dtype.h"
#include "kernels/core/scaled_tensor.h"

#include <bit>
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FP8FLOW_HD __host__ __device__ __forceinline__
#else
#define FP8FLOW_HD inline
#endif

namespace fp8flow {

FP8FLOW_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    return std::bit_cast<uint32_t>(x);
#endif
}
FP8FLOW_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    return std::bit_cast<float>(bits);
#endif
}
FP8FLOW_HD bool is_nan_bits(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }
FP8FLOW_HD float abs_float(float x) { return bits_float(float_bits(x) & 0x7FFFFFFFu); }
// max that ignores NaN
FP8FLOW_HD float max_ignore_nan(float a, float b) { return b > a || is_nan_bits(float_bits(a)) ? b : a; }
FP8FLOW_HD float fma_float(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}
FP8FLOW_HD float sqrt_float(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}
FP8FLOW_HD float div_float(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// ---- BF16 and FP16
FP8FLOW_HD float to_float(Bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
FP8FLOW_HD Bf16 to_bf16(float x) {  // RNE; NaN stays NaN
    const uint32_t bits = float_bits(x);
    if (is_nan_bits(bits)) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}
FP8FLOW_HD float round_bf16(float x) { return to_float(to_bf16(x)); }

FP8FLOW_HD float to_float(Fp16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t exponent = (x.bits >> 10) & 0x1Fu, mantissa = x.bits & 0x3FFu;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
        const float magnitude = static_cast<float>(mantissa) * 0x1.0p-24f;
        return bits_float(float_bits(magnitude) | sign);
    }
    if (exponent == 31) return bits_float(sign | 0x7F800000u | (mantissa << 13));
    return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}
FP8FLOW_HD Fp16 to_f16(float x) {  // RNE; overflow to infinity as IEEE
    const uint32_t bits = float_bits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(sign | 0x7E00u)};
    // 65520 and above round to infinity
    if (magnitude >= 0x477FF000u) return {static_cast<uint16_t>(sign | 0x7C00u)};
    if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 rounds to multiples of 2^-24
        const float shifted = bits_float(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3F000000u))};
    }
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

// ---- FP8
constexpr float kE4m3Max = 448.0f;
constexpr float kE5m2Max = 57344.0f;

FP8FLOW_HD float to_float(E4m3 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
    const uint32_t exponent = (x.bits >> 3) & 0xFu, mantissa = x.bits & 7u;
    if ((x.bits & 0x7Fu) == 0x7Fu) return bits_float(sign | 0x7FC00000u);
    if (exponent == 0) return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0x1.0p-9f));
    return bits_float(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}
FP8FLOW_HD float to_float(E5m2 x) { return to_float(Fp16{static_cast<uint16_t>(x.bits << 8)}); }

// Saturating RNE: |x| > max (infinity too) gives the largest finite value; NaN gives NaN.
FP8FLOW_HD E4m3 to_e4m3(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return {static_cast<uint8_t>(sign | 0x7Fu)};
    if (magnitude >= 0x43E00000u) return {static_cast<uint8_t>(sign | 0x7Eu)};  // >= 448
    if (magnitude < 0x3C800000u) {  // below 2^-6: subnormal; adding 2^14 rounds to multiples of 2^-9
        const float shifted = bits_float(magnitude) + 16384.0f;
        return {static_cast<uint8_t>(sign | (float_bits(shifted) - 0x46800000u))};
    }
    const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
    const uint32_t code = (rounded - 0x3C000000u) >> 20;
    return {static_cast<uint8_t>(sign | (code > 0x7Eu ? 0x7Eu : code))};
}
FP8FLOW_HD E5m2 to_e5m2(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return {static_cast<uint8_t>(sign | 0x7Fu)};
    if (magnitude >= 0x47600000u) return {static_cast<uint8_t>(sign | 0x7Bu)};  // >= 57344
    if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 2^7 rounds to multiples of 2^-16
        const float shifted = bits_float(magnitude) + 128.0f;
        return {static_cast<uint8_t>(sign | (float_bits(shifted) - 0x43000000u))};
    }
    const uint32_t rounded = magnitude + 0xFFFFFu + ((magnitude >> 21) & 1u);
    const uint32_t code = (rounded - 0x38000000u) >> 21;
    return {static_cast<uint8_t>(sign | (code > 0x7Bu ? 0x7Bu : code))};
}

FP8FLOW_HD float fp8_max(DType dtype) { return dtype == DType::e5m2 ? kE5m2Max : kE4m3Max; }
FP8FLOW_HD uint8_t to_fp8(float x, DType dtype) {
    return dtype == DType::e5m2 ? to_e5m2(x).bits : to_e4m3(x).bits;
}
FP8FLOW_HD float fp8_to_float(uint8_t code, DType dtype) {
    return dtype == DType::e5m2 ? to_float(E5m2{code}) : to_float(E4m3{code});
}

// An FP8 value, with its magnitude limited to that of the FP8 value `most`; NaN stays NaN.
FP8FLOW_HD uint8_t fp8_clip(uint8_t code, uint8_t most, DType dtype) {
    const uint8_t magnitude = code & 0x7Fu, finite = dtype == DType::e5m2 ? 0x7Bu : 0x7Eu;
    return magnitude > most && magnitude <= finite ? static_cast<uint8_t>((code & 0x80u) | most) : code;
}

// ---- the quantisation rule
//
// All-zero blocks get this amax, so their scale never exceeds a real block's. A token's gradient is far above
// it, also if divided by all tokens of a batch; no multiplier passes 2^126.
constexpr float kAmaxEps = 0x1.0p-100f;

struct QuantScale {
    float multiplier;  // FP8 value = round(x * multiplier)
    float dequant;     // stored: value = FP8 value * dequant
};

// amax: max|x| of the block (NaN ignored, may be infinite). Power-of-two form: floor of the multiplier, at
// most 2^126, so that dequant is a normal number. NaN amax: as kAmaxEps. Infinite: scale 1 (values saturate).
FP8FLOW_HD QuantScale quant_scale(float amax, float code_max, ScaleFormat format) {
    if (!(amax >= kAmaxEps)) amax = kAmaxEps;
    if (float_bits(amax) >= 0x7F800000u) return {1.0f, 1.0f};
    if (format == ScaleFormat::pow2) {
        // code_max / amax down to a power of two, without dividing: the difference of the bits is that of the
        // exponents, less one where amax has the larger mantissa. kAmaxEps keeps it far below 2^126, and 1 /
        // multiplier a normal number.
        const uint32_t bits = ((float_bits(code_max) - float_bits(amax)) & 0xFF800000u) + 0x3F800000u;
        return {bits_float(bits), bits_float(0x7F000000u - bits)};
    }
    float multiplier = div_float(code_max, amax);
    constexpr float kMultiplierMax = 0x1.0p126f;
    if (multiplier > kMultiplierMax) multiplier = kMultiplierMax;
    return {multiplier, div_float(1.0f, multiplier)};
}

FP8FLOW_HD float e8m0_to_float(uint8_t code) {  // 2^(code - 127); 0 marks padding and gives 0
    if (code == 0) return 0.0f;
    if (code == 0xFF) return bits_float(0x7FC00000u);
    return bits_float(static_cast<uint32_t>(code) << 23);
}
// Exact for powers of two in the normal range and for 0 (pads).
FP8FLOW_HD uint8_t float_to_e8m0(float scale) {
    return static_cast<uint8_t>((float_bits(scale) >> 23) & 0xFFu);
}

// MXFP8 (OCP MX; torchao): the stored E8M0 byte and the multiplier. floor: floor(log2 amax) - floor(log2
// max_code); values may clip. rceil: amax/max_code rounded up to a power of two. NaN or infinite amax gives
// 0xFF.
struct MxScale {
    uint8_t code;
    float multiplier;
};
FP8FLOW_HD MxScale mx_scale(float amax, DType dtype, MxRounding rounding) {
    if (float_bits(amax) >= 0x7F800000u) return {0xFF, bits_float(0x7FC00000u)};
    int exponent;  // biased exponent of the dequantisation scale
    if (rounding == MxRounding::floor) {
        exponent = static_cast<int>(float_bits(amax) >> 23) - (dtype == DType::e5m2 ? 15 : 8);
    } else {
        const uint32_t bits = float_bits(div_float(amax, fp8_max(dtype)));
        exponent = static_cast<int>(bits >> 23) + ((bits & 0x7FFFFFu) != 0);
    }
    // 1 (2^-126) is the least: 0 marks padding. 253 is the greatest with a normal number as multiplier.
    exponent = exponent < 1 ? 1 : (exponent > 253 ? 253 : exponent);
    return {static_cast<uint8_t>(exponent), bits_float(static_cast<uint32_t>(254 - exponent) << 23)};
}

// ---- scaling-aware shift (FP8-Flow-MoE; docs/numerics.md)
//
// FP8 value * 2^-k, rounded to nearest even, by arithmetic on the exponent field. k = 0 is the identity; NaN
// and E5M2's infinity pass.
FP8FLOW_HD uint8_t fp8_shift_down(uint8_t code, int k, DType dtype) {
    const int mantissa_bits = dtype == DType::e5m2 ? 2 : 3;
    const uint32_t magnitude = code & 0x7Fu;
    const bool special = dtype == DType::e5m2 ? magnitude >= 0x7Cu : magnitude == 0x7Fu;
    if (k <= 0 || special) return code;
    const uint32_t sign = code & 0x80u;
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    if (exponent - k >= 1) return static_cast<uint8_t>(code - (k << mantissa_bits));
    const uint32_t mantissa = magnitude & ((1u << mantissa_bits) - 1u);
    const uint32_t significand = exponent > 0 ? (1u << mantissa_bits) + mantissa : mantissa;
    const int shift = exponent > 0 ? 1 - (exponent - k) : k;
    if (shift >= 8) return static_cast<uint8_t>(sign);
    const uint32_t half = 1u << (shift - 1), rest = significand & ((1u << shift) - 1u);
    uint32_t rounded = significand >> shift;
    if (rest > half || (rest == half && (rounded & 1u))) ++rounded;  // a carry rolls into exponent 1
    return static_cast<uint8_t>(sign | rounded);
}

// ---- elementary functions
// exp(r) for |r| <= ln(2) / 2.
FP8FLOW_HD float exp_polynomial(float r) {
    float p = 1.9875691500e-4f;
    p = fma_float(p, r, 1.3981999507e-3f);
    p = fma_float(p, r, 8.3334519073e-3f);
    p = fma_float(p, r, 4.1665795894e-2f);
    p = fma_float(p, r, 1.6666665459e-1f);
    p = fma_float(p, r, 5.0000001201e-1f);
    return fma_float(p, r * r, r) + 1.0f;
}
// exp: |relative error| below 2e-7 on the normal range; overflows to infinity, underflows to 0 below 2^-126.
FP8FLOW_HD float exp_float(float x) {
    if (is_nan_bits(float_bits(x))) return x;
    if (x > 88.72283f) return bits_float(0x7F800000u);
    if (x < -87.33654f) return 0.0f;
    // n = round(x / ln 2), by the 1.5 * 2^23 trick; ln 2 in two parts
    const float n = fma_float(x, 1.44269504f, 12582912.0f) - 12582912.0f;
    float r = fma_float(n, -0.693359375f, x);
    r = fma_float(n, 2.12194440e-4f, r);
    const float p = exp_polynomial(r);
    // n is in [-126, 128]: scale in two steps so that 2^128 is not needed
    const int exponent = static_cast<int>(n), half = exponent / 2;
    return p * bits_float(static_cast<uint32_t>(half + 127) << 23) *
           bits_float(static_cast<uint32_t>(exponent - half + 127) << 23);
}
// exp_float for |x| <= kNear, bit by bit and without its cases: n is in the low bits of the shifted sum,
// and p * 2^n is a normal number.
constexpr float kNear = 80.0f;
FP8FLOW_HD float exp_near(float x) {
    const float shifted = fma_float(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
    float r = fma_float(n, -0.693359375f, x);
    r = fma_float(n, 2.12194440e-4f, r);
    return bits_float(float_bits(exp_polynomial(r)) + (float_bits(shifted) << 23));
}
// log of a positive normal number; |error| below 2e-7 relative to max(1, |log x|).
FP8FLOW_HD float log_float(float x) {
    const uint32_t bits = float_bits(x);
    if (is_nan_bits(bits) || x < 0.0f) return bits_float(0x7FC00000u);
    if (x == 0.0f) return bits_float(0xFF800000u);
    if (bits == 0x7F800000u) return x;
    int exponent = static_cast<int>(bits >> 23) - 126;
    float m = bits_float((bits & 0x7FFFFFu) | 0x3F000000u);  // [0.5, 1)
    if (m < 0.707106781f) {
        m += m;
        --exponent;
    }
    m -= 1.0f;
    const float e = static_cast<float>(exponent), z = m * m;
    float p = 7.0376836292e-2f;
    p = fma_float(p, m, -1.1514610310e-1f);
    p = fma_float(p, m, 1.1676998740e-1f);
    p = fma_float(p, m, -1.2420140846e-1f);
    p = fma_float(p, m, 1.4249322787e-1f);
    p = fma_float(p, m, -1.6668057665e-1f);
    p = fma_float(p, m, 2.0000714765e-1f);
    p = fma_float(p, m, -2.4999993993e-1f);
    p = fma_float(p, m, 3.3333331174e-1f);
    float y = p * m * z;
    y = fma_float(e, -2.12194440e-4f, y);
    y = fma_float(z, -0.5f, y);
    return fma_float(e, 0.693359375f, m + y);
}
FP8FLOW_HD float sigmoid_float(float x) { return div_float(1.0f, 1.0f + exp_float(-x)); }
FP8FLOW_HD float silu_float(float x) { return x * sigmoid_float(x); }

}  // namespace fp8flow
