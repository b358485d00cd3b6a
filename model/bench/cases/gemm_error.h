// SPDX-License-Identifier: MIT
// The error of a benchmarked GEMM against a GEMM in double precision of the same values and scales, on a
// sample of D: some rows and columns of the group with the most rows. Written from the layouts of
// kernels/core/scaled_tensor.h, independent of the backends.
#pragma once

#include "kernels/ops/gemm.h"

namespace fp8flow {
class Device;
}

namespace fp8flow::bench {

// Normalised mean square error of D on the device. Operands have no row base; D held zeros where the GEMM
// accumulates. FP8 operands of weight gradients are 0 in pads, or have no pads.
double gemm_error(Device& device, const op::Gemm& args);
double gemm_error(Device& device, const op::GroupedGemm& args);
double gemm_error(Device& device, const op::GroupedGemmWgrad& args);

}  // namespace fp8flow::bench
