// SPDX-License-Identifier: MIT
// Words of several values: maxima of two BF16 magnitudes at a time, transposes of 4x4 bytes, and words that
// are opaque to the compiler. For kernels that keep raw words in registers.
#pragma once

#include "kernels/core/stochastic_rounding.h"

#include <cstdint>

namespace fp8flow::hopper {

// Word i of four; i is a compile-time constant.
__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}
// Transposes 4x4 bytes.
__device__ __forceinline__ void transpose_4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
    const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140),
                   high01 = __byte_perm(rows[0], rows[1], 0x7362),
                   low23 = __byte_perm(rows[2], rows[3], 0x5140),
                   high23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Two neighbouring values as BF16, rounded stochastically with the halves of a random word. NaN is the one
// that arithmetic makes here, 0x7FFFFFFF.
__device__ __forceinline__ uint32_t round_pair(float x, float y, uint32_t random) {
    const uint32_t low = is_nan_bits(float_bits(x)) ? 0x7FFFFFFFu : float_bits(x) + (random & 0xFFFFu),
                   high = is_nan_bits(float_bits(y)) ? 0x7FFFFFFFu : float_bits(y) + (random >> 16);
    return __byte_perm(low, high, 0x7632);
}
// The halves of a word of two BF16 values as FP32.
__device__ __forceinline__ float2 unpack_bf16x2(uint32_t pair) {
    return {bits_float(pair << 16), bits_float(pair & 0xFFFF0000u)};
}

// |x| of both halves.
__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t pair) { return pair & 0x7FFF7FFFu; }
// The larger of each half; a NaN yields to a number, two of them stay one.
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
// The larger magnitude of each half, with any sign; NaN as above. One instruction; max_bf16x2 of two
// abs_bf16x2 takes three.
__device__ __forceinline__ uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
// Both halves multiplied, each rounded to nearest even.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
// Both halves of a maximum as fp32 bits; NaN counts as 0.
__device__ __forceinline__ uint32_t low_magnitude(uint32_t pair) {
    const uint32_t bits = pair << 16;
    return bits > 0x7F800000u ? 0u : bits;
}
__device__ __forceinline__ uint32_t high_magnitude(uint32_t pair) {
    const uint32_t bits = pair & 0xFFFF0000u;
    return bits > 0x7F800000u ? 0u : bits;
}

// Makes the words opaque to the compiler: it computes what depends on them after this line, and keeps nothing
// of it in registers from before.
__device__ __forceinline__ void opaque(uint4& words) {
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}
__device__ __forceinline__ void opaque(uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace fp8flow::hopper
