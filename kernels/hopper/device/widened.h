// SPDX-License-Identifier: MIT
// Values in the type that they are computed in: BF16 in FP32, others as they are; and back, BF16 rounded to
// nearest even. For kernels of several types.
#pragma once

#include "kernels/core/scalar_math.h"

#include <type_traits>

namespace fp8flow::hopper {

template <class T> __device__ __forceinline__ T widened(T x) { return x; }
__device__ __forceinline__ float widened(Bf16 x) { return to_float(x); }

template <class T, class Sum> __device__ __forceinline__ T narrowed(Sum sum) {
    if constexpr (std::is_same_v<T, Bf16>)
        return to_bf16(sum);
    else
        return sum;
}

}  // namespace fp8flow::hopper
