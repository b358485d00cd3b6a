// SPDX-License-Identifier: MIT
// The transpose that weight gradients need: FP8 rows [M, dim] -> FP8 [dim, M]. Scaling-aware (exponent
// arithmetic on FP8 values, no dequantisation) or, for the ablation, the naive dequantise + requantise.
// Source: FP8-Flow-MoE, NVIDIA/TransformerEngine#2544. Corner cases: docs/numerics.md (round to nearest even
// into subnormals, k = 0 is the identity, NaN passes).
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

// Per group and 128x128 tile (tiles counted from the group's first row): target = max of the tile's valid row
// scales; each value of row r is multiplied by 2^-k, k = exponent(target) - exponent(scale_r) >= 0, in its
// exponent field, and stored transposed. src declares power-of-two scales (the reference backend reads them
// and rejects others), and groups are aligned to 128. Pad rows (not read) and rows with scale 0.0f give zeros
// and do not count for the target. A tile that has nothing else has scale 0.0f. All-zero rows have the scale
// of kAmaxEps, which never exceeds that of a real row.
// Without groups dst may be wider than M: the rest is padding. Every tile below offsets[G] is written,
// nothing past it.
struct TransposeFp8 {
    ScaledTensor src;  // [M, dim] vec128
    RowGroups groups;
    ScaledTensor dst;  // out [dim, M] tile128
};

// Double quantisation: value*scale in fp32, then quantised again in 128x1 blocks along M
// (layout vec128 of [dim, M]).
struct TransposeRequantize {
    ScaledTensor src;  // [M, dim] vec128
    RowGroups groups;
    ScaleFormat scale_format = ScaleFormat::fp32;
    ScaledTensor dst;  // out [dim, M] vec128
};

}  // namespace fp8flow::op
