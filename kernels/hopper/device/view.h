// SPDX-License-Identifier: MIT
// A TensorView as a kernel argument, and element access by dtype.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/core/tensor.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace fp8flow::hopper {

// A TensorView as a kernel argument: no checks, no names. base() is the first row of an M-tensor, read on the
// device.
struct DeviceView {
    void* data;
    DType dtype;
    int64_t dims[TensorView::kMaxRank];
    const int64_t* row_base;
    __device__ int64_t base() const { return row_base != nullptr ? *row_base : 0; }
};
inline DeviceView device_view(const TensorView& v) {
    return {v.data, v.dtype, {v.dims[0], v.dims[1], v.dims[2], v.dims[3]}, v.row_base};
}

// One element as FP32 (FP8 values without their scale), and one rounding back. The dtype branch is uniform
// over the grid.
__device__ __forceinline__ float load_float(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
        case DType::f32: return static_cast<const float*>(data)[i];
        case DType::bf16: return to_float(static_cast<const Bf16*>(data)[i]);
        case DType::f16: return to_float(static_cast<const Fp16*>(data)[i]);
        case DType::e4m3: return to_float(static_cast<const E4m3*>(data)[i]);
        case DType::e5m2: return to_float(static_cast<const E5m2*>(data)[i]);
        case DType::e8m0: return e8m0_to_float(static_cast<const uint8_t*>(data)[i]);
        default: return 0.0f;
    }
}
__device__ __forceinline__ void store_float(void* data, DType dtype, int64_t i, float value) {
    switch (dtype) {
        case DType::f32: static_cast<float*>(data)[i] = value; return;
        case DType::bf16: static_cast<Bf16*>(data)[i] = to_bf16(value); return;
        case DType::f16: static_cast<Fp16*>(data)[i] = to_f16(value); return;
        case DType::e4m3: static_cast<E4m3*>(data)[i] = to_e4m3(value); return;
        case DType::e5m2: static_cast<E5m2*>(data)[i] = to_e5m2(value); return;
        default: return;
    }
}

constexpr bool is_half(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

inline bool is_aligned(const void* data, uintptr_t bytes = 16) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

constexpr int kUnit = 8;  // a unit: neighbouring elements that a thread moves at once

// Eight floats at a multiple of 16 bytes.
__device__ __forceinline__ void load_floats(const void* from, float (&v)[kUnit]) {
    const float4* in = static_cast<const float4*>(from);
    const float4 a = in[0], b = in[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// A tensor of rows as a kernel argument. `vector`: every unit is whole and aligned for wide accesses.
struct RowView {
    void* data = nullptr;
    const int64_t* row_base = nullptr;
    int cols = 0;
    DType dtype = DType::f32;
    bool vector = false;
    __device__ int64_t base() const { return row_base != nullptr ? *row_base : 0; }
    __device__ explicit operator bool() const { return data != nullptr; }
};
inline RowView row_view(const TensorView& v) {
    if (!v) return {};
    const bool vector = v.cols() % kUnit == 0 && is_aligned(v.data);
    return {v.data, v.row_base, static_cast<int>(v.cols()), v.dtype, vector};
}

}  // namespace fp8flow::hopper
