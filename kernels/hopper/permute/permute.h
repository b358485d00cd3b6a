// SPDX-License-Identifier: MIT
// Row movers for the exchange of a single rank (exchange/local/local_exchange.cu), where every expert is
// local: forms that op::PermutePad and op::UnpermuteUnpad do not offer.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/view.h"
#include "kernels/ops/permute.h"

namespace fp8flow::hopper::permute {

// Where a sum over routed rows is rounded to BF16: once, after the residual is added; or before the residual
// is added and again after.
enum class SumRounding { once, before_residual };

// What is added to a sum: `rows` (optional; may alias dst), or the sum of `rows` and `addend` (optional),
// rounded to BF16.
struct SumResidual {
    TensorView rows, addend;
    SumRounding rounding = SumRounding::once;
};

// unpermute_unpad plus a residual. Returns false and launches nothing unless all rows are BF16 in whole
// vectors and a token has at most 8 of them; and with an addend, if there are weights or no residual.
bool launch_unpermute_sums(const op::UnpermuteUnpad& args, const SumResidual& residual, const Launch& launch);

// permute_pad by token. Returns false and launches nothing unless recv_rows is given, rows are whole vectors,
// scales are absent or in wire layout, and a token has at most 8 places.
bool launch_fan_out(const op::PermutePad& args, const Launch& launch);

}  // namespace fp8flow::hopper::permute
