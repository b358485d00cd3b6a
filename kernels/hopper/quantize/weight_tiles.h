// SPDX-License-Identifier: MIT
// Launchers for FP8 copies of weights: both copies in 128x128 blocks (quantize_weight, adamw_quantize), and
// the MX dgrad copy alone.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stream.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/ops/optimizer.h"

namespace fp8flow::hopper::quantize {

// src [N, K] or [E, N, K] f32 | bf16 -> FP8 values and their transpose, layout block128; either may be
// absent. With `step`, src is its master, which is updated first. Scale tables are padded with 0 to a
// multiple of 4 columns. False, and nothing is launched, unless N and K are multiples of 128 and all
// addresses of 16.
bool launch_weight_tiles(const TensorView& src, const op::AdamW* step, const QuantizeRule& rule,
                         const ScaledTensor& fprop, const ScaledTensor& dgrad, const Launch& launch);

// src [N, K] or [E, N, K] f32 | bf16 -> the transposed FP8 values of layout mx32 alone (weight_mx.cu). False,
// and nothing is launched, unless N is a multiple of 128, K of 64 (f32: 32), and all addresses of 16.
bool launch_mx_columns(const TensorView& src, const QuantizeRule& rule, const ScaledTensor& dgrad,
                       const Launch& launch);

}  // namespace fp8flow::hopper::quantize
