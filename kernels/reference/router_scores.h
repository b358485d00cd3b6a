// SPDX-License-Identifier: MIT
// Shared parts of the router's operations: softmax, scores of all experts, and the choice of the largest
// values.
#pragma once

#include "kernels/ops/router.h"

#include <cstdint>

namespace fp8flow::reference {

// Keeps s / sum(s) finite where every sigmoid underflows (Megatron-LM).
constexpr float kScoreSumEps = 1e-20f;

// The router's sums over experts or choices (kernels/ops/router.h): 32 lanes, then halves added to each
// other.
float token_sum(const float* values, int64_t count);
float token_dot(const float* a, const float* b, int64_t count);  // fma into the lanes

// log(sum exp(values)); softmax receives exp(values - that). NaN anywhere, or +Inf, makes all of it NaN.
float log_sum_exp(const float* values, int64_t count, float* softmax);

// Scores as the balancing losses see them: softmax, or sigmoid / (sum + eps); sum over e is 1.
void normalized_scores(const float* logits, int64_t experts, op::Score score, float* scores);

// The `chosen` largest of the values whose `excluded` flag is 0, in descending order; ties go to the lowest
// index, NaN counts as the lowest value. Sets the flags of what it chose. At least `chosen` values must not
// be excluded.
void choose_largest(const float* values, int64_t count, int64_t chosen, uint8_t* excluded, int32_t* ids);

// The balancing parts of router_top_k and of its backward (kernels/ops/router.h): sums of the scores,
// gradients into the logits, and losses.
void sum_balance(const TensorView& logits, op::Score score, int64_t topk, const op::RouterBalance& balance);
void add_balance_gradients(const op::RouterTopKBackward& args);
void add_balance_losses(const op::RouterTopKBackward& args);

}  // namespace fp8flow::reference
