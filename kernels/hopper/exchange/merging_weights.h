// SPDX-License-Identifier: MIT
// Orders the merging weights of this rank's tokens for combine in order `invariant` (kernels/exchange.h).
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/stream.h"
#include "kernels/dispatch_plan.h"

namespace fp8flow::hopper {

// [T, K] f32 in `scratch`: the probabilities of rank `rank`'s tokens in ascending expert order, 0 past the
// last.
TensorView weights_in_expert_order(const DispatchPlan& plan, int64_t rank, Arena& scratch,
                                   const Launch& launch);

}  // namespace fp8flow::hopper
