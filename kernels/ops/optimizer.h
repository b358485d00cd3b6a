// SPDX-License-Identifier: MIT
// AdamW with FP32 masters, gradient norm, and the writing of the working copies. Source: Loshchilov & Hutter
// 2019; Megatron-LM.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stochastic_rounding.h"

namespace fp8flow::op {

// sum += sum of squares of x, in double, rounded to f32 once per call. In a block of 8192 elements, element i
// goes to strand i % 128 (ascending); each four neighbouring strands are added as (0+1) + (2+3), the 32 sums
// in halves (s + (s+16), then + 8, 4, 2, 1). The sum of block b goes to strand b % 1024 (ascending); each 32
// neighbouring strands are added in halves, then the 32 sums in the same way. The two steps can be separate
// calls: block_sums without sum stores the sums of x's blocks, block_sums without x adds them. So ranks that
// have whole blocks of a tensor get the same sum as one rank that has the whole tensor.
constexpr int64_t kNormSquaredBlock = 8192, kNormSquaredStrands = 128, kNormSquaredBlockStrands = 1024;
struct NormSquared {
    TensorView x;           // f32 | bf16, any shape
    TensorView block_sums;  // [blocks] f64, out or in; absent: x to sum
    TensorView sum;         // in/out [1] f32
};

// g = grad * grad_scale; m = b1 m + (1-b1) g; v = b2 v + (1-b2) (g g); w -= lr * ((m/c1) / (sqrt(v/c2) + eps)
// + wd w). All fp32, each operation as written and rounded on its own (no fma), bit-equal across backends.
// Nothing is written when *status != 0. Moments in BF16 are read as they are and rounded stochastically when
// they are written, each with its own key, by global element (kernels/core/stochastic_rounding.h); the update
// itself takes the values before that.
// Values that change from step to step, such as lr, c1 and c2, are read from the device.
struct AdamW {
    TensorView grad;      // f32 | bf16
    TensorView schedule;  // [3] f32: lr, c1 = 1 - b1^t, c2 = 1 - b2^t of step t, from 1
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0;
    TensorView grad_scale;          // [1] f32: clipping factor / loss scale
    TensorView status;              // [1] i32, optional
    TensorView master;              // in/out f32
    TensorView m, v;                // in/out f32 | bf16, each
    uint64_t m_key = 0, v_key = 0;  // of moments in BF16
    TensorView rounding_step;       // [1] i64: what the step XORs into the keys, optional
    int64_t first_element = 0;      // of the whole tensor, for the same
    TensorView copy;                // out bf16 | f32 working copy, optional
};

// AdamW, then the FP8 copies from the new master (composed as AdamW + QuantizeWeight).
struct AdamWQuantize {
    AdamW adamw;
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
    ScaledTensor fprop;  // [E, N, K], optional
    ScaledTensor dgrad;  // [E, K, N], optional
};

// Gradient clipping by global norm without a host round trip: norm = sqrt(sum of norm_squared); factor = clip
// / (norm + 1e-6) if that is below 1 (clip > 0), else 1. A norm that is not finite sets *status to
// kStepNonFinite if it was 0, one above a limit > 0 to kStepDiverged.
struct ClipFactor {
    TensorView norm_squared;  // [1] f32
    float clip = 0.0f;        // 0: no clipping
    TensorView limit;         // [1] f32, optional
    TensorView status;        // in/out [1] i32
    TensorView norm;          // out [1] f32
    TensorView factor;        // out [1] f32
};

// Values of the step status word; 0 is a good step. Everything persistent is skipped unless it is 0.
constexpr int32_t kStepOverflow = 1;   // routed rows exceeded the capacity: redo with a larger capacity
constexpr int32_t kStepNonFinite = 2;  // NaN or Inf in the loss or the gradients
constexpr int32_t kStepDiverged = 3;   // the loss or the norm of the gradients is past its limit

}  // namespace fp8flow::op
