// SPDX-License-Identifier: MIT
// Eight elements of any float dtype at a time, as fp32: one or two 16-byte accesses where the rows allow it,
// element by element where not. Used by kernels on plain row arrays. Read next: permute/permute.cu.
#pragma once

#include "kernels/hopper/device/view.h"

namespace fp8flow::hopper {

// True when every multiple of 8 elements of every row (row_length apart) can be read and written as a vector.
inline bool is_vectorisable(const void* data, int64_t row_length) {
    return is_aligned(data) && row_length % kUnit == 0;
}

__device__ __forceinline__ void load8(const void* data, DType dtype, int64_t i, float (&v)[kUnit]) {
    switch (dtype) {
        case DType::f32: return load_floats(static_cast<const float*>(data) + i, v);
        case DType::bf16:
        case DType::f16: {
            const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + i);
            const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
            for (int j = 0; j < kUnit; ++j) {
                const uint16_t half = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
                v[j] = dtype == DType::bf16 ? to_float(Bf16{half}) : to_float(Fp16{half});
            }
            return;
        }
        default: {
            const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(data) + i);
            const uint32_t words[2] = {bits.x, bits.y};
#pragma unroll
            for (int j = 0; j < kUnit; ++j) {
                const uint8_t code = static_cast<uint8_t>(words[j / 4] >> (j % 4 * 8));
                v[j] = dtype == DType::e8m0 ? e8m0_to_float(code) : fp8_to_float(code, dtype);
            }
            return;
        }
    }
}

// One rounding per element. f32, bf16 and f16 only.
__device__ __forceinline__ void store8(void* data, DType dtype, int64_t i, const float (&v)[kUnit]) {
    if (dtype == DType::f32) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(data) + i);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
        return;
    }
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t low = dtype == DType::bf16 ? to_bf16(v[2 * j]).bits : to_f16(v[2 * j]).bits;
        const uint32_t high = dtype == DType::bf16 ? to_bf16(v[2 * j + 1]).bits : to_f16(v[2 * j + 1]).bits;
        words[j] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + i) =
        make_uint4(words[0], words[1], words[2], words[3]);
}

// The first `count` of eight elements from i (count <= 0: none); the rest of v is 0.
__device__ __forceinline__ void load_up_to_8(const void* data, DType dtype, int64_t i, int64_t count,
                                             bool vectorised, float (&v)[kUnit]) {
    if (vectorised && count >= kUnit) return load8(data, dtype, i, v);
#pragma unroll
    for (int j = 0; j < kUnit; ++j) v[j] = j < count ? load_float(data, dtype, i + j) : 0.0f;
}
__device__ __forceinline__ void store_up_to_8(void* data, DType dtype, int64_t i, int64_t count,
                                              bool vectorised, const float (&v)[kUnit]) {
    if (vectorised && count >= kUnit) return store8(data, dtype, i, v);
#pragma unroll
    for (int j = 0; j < kUnit; ++j)
        if (j < count) store_float(data, dtype, i + j, v[j]);
}

}  // namespace fp8flow::hopper
