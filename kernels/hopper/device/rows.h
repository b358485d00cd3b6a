// SPDX-License-Identifier: MIT
// Rows on the device: each thread owns a unit of eight neighbouring columns, so 16 threads own a 1x128 block.
// Loads and stores of a unit in any dtype, sums in the order of the contracts, and maxima over a block. Read
// next: scales.h.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/hopper/device/view.h"

#include <cuda_fp16.h>

#include <algorithm>

namespace fp8flow::hopper {

constexpr int kBlockThreads = static_cast<int>(kBlock) / kUnit;  // threads of a 1x128 block: half a warp
constexpr int kRowThreads = 256;                                 // threads of a CTA that works on rows

// A CTA for rows of `cols` columns: x threads share a row (whole blocks), y rows are processed at once.
inline dim3 row_block(int64_t cols) {
    const int64_t wanted = round_up(ceil_div(std::max<int64_t>(cols, 1), kUnit), kBlockThreads);
    const unsigned x = static_cast<unsigned>(std::min<int64_t>(wanted, kRowThreads));
    return {x, kRowThreads / x, 1};
}

// ---- conversions in hardware: the same bits as scalar_math.h (tests/gpu/runtime/device_test.cpp), NaN apart
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    const __half2 half = __floats2half2_rn(low, high);
    uint32_t word;
    memcpy(&word, &half, sizeof(word));
    return word;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t pack_fp8(float a, float b, float c, float d, DType dtype) {
    uint16_t low, high;
    if (dtype == DType::e5m2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    } else {
        low = pack_e4m3(a, b);
        high = pack_e4m3(c, d);
    }
    uint32_t fp8;  // ptxas merges both conversions into one register: no shift and no OR
    asm("mov.b32 %0, {%1, %2};" : "=r"(fp8) : "h"(low), "h"(high));
    return fp8;
}
__device__ __forceinline__ float2 unpack_half2(uint32_t word) {
    __half2 half;
    memcpy(&half, &word, sizeof(half));
    return __half22float2(half);
}
__device__ __forceinline__ float2 unpack_fp8x2(uint16_t fp8,
                                               DType dtype) {  // exact: FP8 is a subset of FP16
    uint32_t word;
    if (dtype == DType::e5m2)
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(word) : "h"(fp8));
    else
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(fp8));
    return unpack_half2(word);
}

// ---- units
__device__ __forceinline__ void unpack_unit(uint4 words, DType dtype, float (&v)[kUnit]) {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = dtype == DType::f16
                                ? unpack_half2(w[i])
                                : float2{__uint_as_float(w[i] << 16), __uint_as_float(w[i] & 0xFFFF0000u)};
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ uint4 pack_unit_bf16(const float (&v)[kUnit]) {
    return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}

// Columns [col, col + 8) of a row as fp32; zeros from column `limit` on. The row is absolute in its buffer.
__device__ __forceinline__ void load_unit(const RowView& t, int64_t row, int col, int limit,
                                          float (&v)[kUnit]) {
    const int64_t first = row * t.cols + col;
    if (t.vector && col + kUnit <= limit) {
        if (t.dtype == DType::bf16 || t.dtype == DType::f16) {
            unpack_unit(*reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(t.data) + first),
                        t.dtype, v);
        } else if (t.dtype == DType::f32) {
            load_floats(static_cast<const float*>(t.data) + first, v);
        } else {
            const uint2 fp8 = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(t.data) + first);
            const uint32_t w[2] = {fp8.x, fp8.y};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_fp8x2(static_cast<uint16_t>(w[i / 2] >> (16 * (i % 2))), t.dtype);
                v[2 * i] = pair.x;
                v[2 * i + 1] = pair.y;
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = col + i < limit ? load_float(t.data, t.dtype, first + i) : 0.0f;
}
__device__ __forceinline__ void load_unit(const RowView& t, int64_t row, int col, float (&v)[kUnit]) {
    load_unit(t, row, col, t.cols, v);
}

// One rounding per element; nothing from column `limit` on. The wide form is for whole units.
__device__ __forceinline__ void store_unit(const RowView& t, int64_t row, int col, int limit,
                                           const float (&v)[kUnit]) {
    const int64_t first = row * t.cols + col;
    if (t.vector && col + kUnit <= limit && t.dtype == DType::bf16) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + first) = pack_unit_bf16(v);
        return;
    }
    if (t.vector && col + kUnit <= limit && t.dtype == DType::f16) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + first) =
            uint4{pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
        return;
    }
    if (t.vector && col + kUnit <= limit && t.dtype == DType::f32) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(t.data) + first);
        out[0] = float4{v[0], v[1], v[2], v[3]};
        out[1] = float4{v[4], v[5], v[6], v[7]};
        return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
        if (col + i < limit) store_float(t.data, t.dtype, first + i, v[i]);
}
__device__ __forceinline__ void store_unit(const RowView& t, int64_t row, int col, const float (&v)[kUnit]) {
    store_unit(t, row, col, t.cols, v);
}

// FP8 values = to_fp8(v * multiplier), eight of them in two words.
__device__ __forceinline__ uint2 encode_unit(const float (&v)[kUnit], float m, DType dtype) {
    return {pack_fp8(v[0] * m, v[1] * m, v[2] * m, v[3] * m, dtype),
            pack_fp8(v[4] * m, v[5] * m, v[6] * m, v[7] * m, dtype)};
}
__device__ __forceinline__ void store_fp8(const RowView& t, int64_t row, int col, uint2 fp8) {
    uint8_t* out = static_cast<uint8_t*>(t.data) + row * t.cols + col;
    if (t.vector && col + kUnit <= t.cols) {
        *reinterpret_cast<uint2*>(out) = fp8;
        return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
        if (col + i < t.cols) out[i] = static_cast<uint8_t>((i < 4 ? fp8.x : fp8.y) >> (8 * (i % 4)));
}

// ---- maxima
// The maximum of |x| over a unit as ordered bits; NaN counts as 0. Maxima of bits are the same in any order.
// fmaxf ignores a NaN: one instruction per element.
__device__ __forceinline__ uint32_t unit_magnitude(const float (&v)[kUnit]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) largest = fmaxf(largest, fabsf(v[i]));
    return __float_as_uint(largest);
}
// The threads of this thread's 1x128 block, as a mask of its warp. A CTA's x extent is a multiple of 16, so
// blocks never straddle warps.
__device__ __forceinline__ unsigned linear_thread() { return threadIdx.y * blockDim.x + threadIdx.x; }
__device__ __forceinline__ unsigned block_mask() { return 0xFFFFu << (linear_thread() & 16u); }
// Maximum over `threads` (a power of two up to 16) neighbouring threads; every thread of the block must call
// it.
__device__ __forceinline__ uint32_t max_over(uint32_t value, int threads) {
    for (int step = threads / 2; step > 0; step /= 2)
        value = max(value, __shfl_xor_sync(block_mask(), value, step));
    return value;
}

}  // namespace fp8flow::hopper
