// SPDX-License-Identifier: MIT
// Launcher of the scaling-aware transpose, for transpose_fp8 and the transposed output of the norm.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/core/stream.h"
#include "kernels/core/tensor.h"

namespace fp8flow::hopper::quantize {

// src [M, dim] with 1x128 scales (vec128 or vec128_wire) -> dst [dim, M] tile128. Without groups dst may be
// wider: the rest is padding.
void launch_transpose_tiles(const ScaledTensor& src, const RowGroups& groups, const ScaledTensor& dst,
                            const Launch& launch);

}  // namespace fp8flow::hopper::quantize
