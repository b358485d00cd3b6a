// SPDX-License-Identifier: MIT
// The router's shared pieces: softmax by the largest value, scores, choice with NaN and ties in a total
// order.
#include "kernels/reference/router_scores.h"

#include "kernels/core/scalar_math.h"

namespace fp8flow::reference {

namespace {

bool is_better(float a, float b) {
    return a > b || (is_nan_bits(float_bits(b)) && !is_nan_bits(float_bits(a)));
}

constexpr int64_t kLanes = 32;
float join(float (&lanes)[kLanes]) {
    for (int64_t distance = kLanes / 2; distance > 0; distance /= 2)
        for (int64_t i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
    return lanes[0];
}

}  // namespace

float token_sum(const float* values, int64_t count) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i % kLanes] += values[i];
    return join(lanes);
}

float token_dot(const float* a, const float* b, int64_t count) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i % kLanes] = fma_float(a[i], b[i], lanes[i % kLanes]);
    return join(lanes);
}

float log_sum_exp(const float* values, int64_t count, float* softmax) {
    float largest = values[0];
    for (int64_t i = 1; i < count; ++i) largest = max_ignore_nan(largest, values[i]);
    for (int64_t i = 0; i < count; ++i) softmax[i] = exp_float(values[i] - largest);
    const float sum = token_sum(softmax, count), factor = div_float(1.0f, sum);
    for (int64_t i = 0; i < count; ++i) softmax[i] *= factor;
    return largest + log_float(sum);
}

void normalized_scores(const float* logits, int64_t experts, op::Score score, float* scores) {
    if (score == op::Score::softmax) {
        log_sum_exp(logits, experts, scores);
        return;
    }
    for (int64_t e = 0; e < experts; ++e) scores[e] = sigmoid_float(logits[e]);
    const float factor = div_float(1.0f, token_sum(scores, experts) + kScoreSumEps);
    for (int64_t e = 0; e < experts; ++e) scores[e] *= factor;
}

void choose_largest(const float* values, int64_t count, int64_t chosen, uint8_t* excluded, int32_t* ids) {
    for (int64_t k = 0; k < chosen; ++k) {
        int64_t best = 0;
        while (excluded[best]) ++best;
        for (int64_t i = best + 1; i < count; ++i)
            if (!excluded[i] && is_better(values[i], values[best])) best = i;
        excluded[best] = 1;
        ids[k] = static_cast<int32_t>(best);
    }
}

}  // namespace fp8flow::reference
