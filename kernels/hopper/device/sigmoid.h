// The sigmoid of several columns on the device: the bits of sigmoid_float (scalar_math.h) in a third of its instructions where no argument
// is extreme.
#pragma once

#include "kernels/core/scalar_math.h"

namespace fp8flow::hopper {

// 1 / d rounded once for 2^-126 <= d < 2^126: what __frcp_rn does in that range, without its test of the range.
__device__ __forceinline__ float reciprocal_near(float d) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}
// sigmoid_float(x) for |x| <= kNear: 16 instructions.
__device__ __forceinline__ float sigmoid_near(float x) { return reciprocal_near(1.0f + exp_near(-x)); }

// Every element moves one place down and the first to the end: how a loop that is not worth unrolling walks over an array in registers,
// which have no index at run time. After kCount turns all is in place again.
template <int kCount> __device__ __forceinline__ void rotate(float (&v)[kCount]) {
    const float first = v[0];
#pragma unroll
    for (int i = 0; i + 1 < kCount; ++i) v[i] = v[i + 1];
    v[kCount - 1] = first;
}

// NaN: the result of sigmoid_near may be any number then; every user multiplies it by its argument.
template <int kCount>
__device__ __forceinline__ void sigmoids_of(const float (&x)[kCount], float (&sigmoid)[kCount]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(x[i]));
    if (largest <= kNear) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sigmoid[i] = sigmoid_near(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sigmoid[i] = x[i];
#pragma unroll 1
        for (int i = 0; i < kCount; ++i) {
            sigmoid[0] = sigmoid_float(sigmoid[0]);
            rotate(sigmoid);
        }
    }
}

}  // namespace fp8flow::hopper
