// SPDX-License-Identifier: MIT
// FP8 weight gradients of one group and few outputs (fp8_wgrad_small.cu).
#pragma once

#include "kernels/hopper/gemm/sm90/pipeline.h"

namespace fp8flow::hopper::gemm {

// Whether a weight gradient that fp8_wgrad.cu supports goes to this kernel: D in FP32, tile scales, one
// group, at most a tile of 64 x 128 per SM.
bool is_small_wgrad(const GemmProblem& problem);
LaunchWgmma launch_wgmma_fp8_wgrad_small;

}  // namespace fp8flow::hopper::gemm
