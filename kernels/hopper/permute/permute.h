// SPDX-License-Identifier: MIT
// Routed rows and tokens' rows on the GPU when every expert is here: what exchange/local/exchange.cu asks of
// the row movers beyond the operations.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/view.h"
#include "kernels/ops/permute.h"

namespace fp8flow::hopper {

// Where a sum over routed rows is rounded: once, with the residual in it; or before the residual is added,
// and again after that.
enum class SumRounding { once, before_residual };

// What is added to a sum: `rows` (optional; may be dst).
struct SumResidual {
    TensorView rows;
    SumRounding rounding = SumRounding::once;
};

// unpermute_unpad, plus a residual. False, and nothing happens, unless all rows are BF16 in whole vectors and
// a token has at most 8 of them.
bool launch_unpermute_sums(const op::UnpermuteUnpad& args, const SumResidual& residual, const Launch& launch);

// permute_pad from the tokens' side. False, and nothing happens, unless recv_rows is there, rows are whole
// vectors, without scales or with wire scales, and a token has at most 8 places.
bool launch_fan_out(const op::PermutePad& args, const Launch& launch);

}  // namespace fp8flow::hopper
