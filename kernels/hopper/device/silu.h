// SiLU of many values at once: the bits of silu_float (kernels/core/scalar_math.h) without its branches, for values up to kNear.
#pragma once

#include "kernels/core/scalar_math.h"

namespace fp8flow::hopper {

// 1 / x, correctly rounded, for 1 <= x <= 2^116: the compiler's own steps for normal numbers, without its test for the others.
__device__ __forceinline__ float reciprocal_near(float x) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    return fma_float(estimate, -fma_float(x, estimate, -1.0f), estimate);
}

__device__ __forceinline__ float silu_near(float x) { return x * reciprocal_near(1.0f + exp_near(-x)); }

}  // namespace fp8flow::hopper
