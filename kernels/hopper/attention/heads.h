// SPDX-License-Identifier: MIT
// The heads of a token in one pass each way. False: not these sizes, types or addresses; nothing was
// launched.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/ops/attention.h"

namespace fp8flow::hopper::attention {

bool launch_heads(const op::QkvHeads& args, const Launch& launch);
// partials: heads_backward_partials(D) words; tickets: those of norm::launch_narrow_gamma for two gammas.
bool launch_heads_backward(const op::QkvHeadsBackward& args, float* partials, uint32_t* tickets,
                           const Launch& launch);
int64_t heads_backward_partials(int64_t depth);

}  // namespace fp8flow::hopper::attention
