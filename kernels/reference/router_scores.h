// What the router's ops share: softmax, scores of all experts, and the choice of the largest values.
#pragma once

#include "kernels/ops/router.h"

#include <cstdint>

namespace fp8flow::reference {

// Keeps s / sum(s) finite where every sigmoid underflows (Megatron-LM).
constexpr float kScoreSumEps = 1e-20f;

// log(sum exp(values)); softmax receives exp(values - that). NaN anywhere, or +Inf, makes all of it NaN.
float log_sum_exp(const float* values, int64_t count, float* softmax);

// Scores as the balancing losses see them: softmax, or sigmoid / (sum + eps); sum over e is 1.
void normalized_scores(const float* logits, int64_t experts, op::Score score, float* scores);

// The `chosen` largest of the values whose `excluded` flag is 0, in descending order; ties go to the lowest index, NaN counts as the
// lowest value. Sets the flags of what it chose. At least `chosen` values must not be excluded.
void choose_largest(const float* values, int64_t count, int64_t chosen, uint8_t* excluded, int32_t* ids);

}  // namespace fp8flow::reference
