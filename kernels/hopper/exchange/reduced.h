// SPDX-License-Identifier: MIT
// The type in which a reduction over ranks adds, and the rounding at its end: BF16 is added in FP32 and
// rounded to nearest even once. Contract: Exchange::all_reduce.
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
