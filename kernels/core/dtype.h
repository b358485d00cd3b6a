// SPDX-License-Identifier: MIT
// Storage types of tensors. The narrow formats are plain structs of bits; arithmetic on them lives in
// scalar_math.h.
#pragma once

#include <cstdint>

namespace fp8flow {

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};
// OCP FP8 E4M3: max 448, NaN 0x7F/0xFF, no infinity
struct E4m3 {
    uint8_t bits;
};
// OCP FP8 E5M2: max 57344, infinity 0x7C/0xFC
struct E5m2 {
    uint8_t bits;
};
// a power of two 2^(bits-127); 0xFF is NaN
struct E8m0 {
    uint8_t bits;
};

enum class DType : uint8_t { f32, bf16, f16, e4m3, e5m2, e8m0, i32, i64, f64 };

constexpr int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::f32:
        case DType::i32: return 4;
        case DType::bf16:
        case DType::f16: return 2;
        case DType::e4m3:
        case DType::e5m2:
        case DType::e8m0: return 1;
        case DType::i64:
        case DType::f64: return 8;
    }
    return 0;
}

constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::f32: return "f32";
        case DType::bf16: return "bf16";
        case DType::f16: return "f16";
        case DType::e4m3: return "e4m3";
        case DType::e5m2: return "e5m2";
        case DType::e8m0: return "e8m0";
        case DType::i32: return "i32";
        case DType::i64: return "i64";
        case DType::f64: return "f64";
    }
    return "?";
}

constexpr bool is_fp8(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2; }

template <class T> struct dtype_of;
template <> struct dtype_of<float> { static constexpr DType value = DType::f32; };
template <> struct dtype_of<Bf16> { static constexpr DType value = DType::bf16; };
template <> struct dtype_of<Fp16> { static constexpr DType value = DType::f16; };
template <> struct dtype_of<E4m3> { static constexpr DType value = DType::e4m3; };
template <> struct dtype_of<E5m2> { static constexpr DType value = DType::e5m2; };
template <> struct dtype_of<E8m0> { static constexpr DType value = DType::e8m0; };
template <> struct dtype_of<int32_t> { static constexpr DType value = DType::i32; };
template <> struct dtype_of<int64_t> { static constexpr DType value = DType::i64; };
template <> struct dtype_of<double> { static constexpr DType value = DType::f64; };

}  // namespace fp8flow
