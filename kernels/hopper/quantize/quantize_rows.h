// SPDX-License-Identifier: MIT
// Launchers of the row quantiser and of the amax of rows, for quantize_rows, quantize_dual, quantize_weight
// and quantize_tensor.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stream.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/scales.h"

namespace fp8flow::hopper::quantize {

// [M, K] (or [E, N, K]) -> dst in layout vec128_wire, vec128, mx32 or row. Padding has value 0 and scale 0.
void launch_quantize_rows(const TensorView& src, const RowGroups& groups, const QuantizeRule& rule,
                          const ScaledTensor& dst, const Launch& launch);

// amax[0] = max(amax[0], |x|) as bits over all valid rows of an aligned 16-bit tensor; `rows`: capacity.
// False for other tensors: nothing is launched.
bool launch_rows_amax(const RowView& src, const DeviceGroups& groups, int64_t rows, uint32_t* amax,
                      const Launch& launch);

}  // namespace fp8flow::hopper::quantize
