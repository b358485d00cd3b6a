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
    result.name = arm.name;
    double ratio = 0;
    for (size_t i = 0; i < steps; ++i) {
        result.relative_error.push_back(std::abs(smooth[i] - base[i]) / base[i]);
        result.raw_relative_error.push_back(std::abs(arm.loss[i] - baseline.loss[i]) / baseline.loss[i]);
        if (static_cast<int64_t>(i) < warmup) continue;
        result.max = larger(result.max, result.relative_error[i]);
        result.raw_max = larger(result.raw_max, result.raw_relative_error[i]);
        result.mean += result.relative_error[i];
        ratio += arm.grad_norm[i] / baseline.grad_norm[i];
    }
    const double counted = static_cast<double>(static_cast<int64_t>(steps) - warmup);
    result.mean /= counted;
    result.grad_norm_ratio = ratio / counted;
    result.signed_last = (smooth.back() - base.back()) / base.back();
    return result;
}

}  // namespace fp8flow::validate
