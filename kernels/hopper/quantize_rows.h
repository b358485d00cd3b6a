// The row quantiser as a function: quantize_rows, quantize_dual and quantize_weight share it.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/scales.h"

namespace fp8flow::hopper {

// [M, K] (or [E, N, K], all rows alike) -> dst in layout vec128_wire, vec128, mx32 or row. Pads: code 0, scale 0.
void launch_quantize_rows(const TensorView& src, const RowGroups& groups, const QuantizeRule& rule,
                          const Fp8Tensor& dst, const Launch& launch);

}  // namespace fp8flow::hopper
