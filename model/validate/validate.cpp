// SPDX-License-Identifier: MIT
// Smoothing, relative errors and the verdict of `validate`.
#include "model/validate/validate.h"

#include "kernels/core/error.h"

#include <cmath>

namespace fp8flow::validate {

std::vector<double> ema(const std::vector<double>& values, double decay) {
    std::vector<double> result;
    double sum = 0, weight = 0;
    for (double value : values) {
        sum = decay * sum + (1 - decay) * value;
        weight = decay * weight + (1 - decay);
        result.push_back(sum / weight);
    }
    return result;
}

Comparison compare(const Curve& arm, const Curve& baseline, double decay, int64_t warmup) {
    const size_t steps = arm.loss.size();
    FP8FLOW_CHECK(steps == baseline.loss.size() && static_cast<int64_t>(steps) > warmup,
                  "{} and {} steps, warm-up {}", steps, baseline.loss.size(), warmup);
    const std::vector<double> smooth = ema(arm.loss, decay), base = ema(baseline.loss, decay);
    Comparison result;
    const double counted = static_cast<double>(static_cast<int64_t>(steps) - warmup);
    for (size_t i = static_cast<size_t>(warmup); i < steps; ++i) {
        const double error = std::abs(smooth[i] - base[i]) / base[i];
        result.max = larger(result.max, error);
        result.raw_max = larger(result.raw_max, std::abs(arm.loss[i] / baseline.loss[i] - 1));
        result.mean += error / counted;
        result.grad_norm_ratio += arm.grad_norm[i] / baseline.grad_norm[i] / counted;
    }
    result.signed_last = (smooth.back() - base.back()) / base.back();
    return result;
}

}  // namespace fp8flow::validate
