// SPDX-License-Identifier: MIT
// How far a benchmarked product is from a product in double precision of the same codes and scales, on a
// sample of D: some rows and columns of the group with the most rows. Written from the layouts of
// kernels/core/scaled_tensor.h, apart from the backends.
#pragma once

#include "kernels/ops/gemm.h"

namespace fp8flow {
class Device;
}

namespace fp8flow::bench {

// Normalised mean square error of D as it stands on the device. Operands without row base; D held zeros where
// it was added to. FP8 operands of weight gradients have codes of 0 in pads, or no pads.
double product_error(Device& device, const op::Gemm& args);
double product_error(Device& device, const op::GroupedGemm& args);
double product_error(Device& device, const op::GroupedGemmWgrad& args);

}  // namespace fp8flow::bench
