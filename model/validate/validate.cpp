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
    // std::max would drop a NaN, and a curve that is not a number must not pass
    const auto raise = [](double& largest, double value) {
        if (value > largest || std::isnan(value)) largest = value;
    };
    for (size_t i = 0; i < steps; ++i) {
        result.relative_error.push_back(std::abs(smooth[i] - base[i]) / base[i]);
        result.raw_relative_error.push_back(std::abs(arm.loss[i] - baseline.loss[i]) / baseline.loss[i]);
        if (static_cast<int64_t>(i) < warmup) continue;
        raise(result.max, result.relative_error[i]);
        raise(result.raw_max, result.raw_relative_error[i]);
        result.mean += result.relative_error[i];
        ratio += arm.grad_norm[i] / baseline.grad_norm[i];
    }
    const double counted = static_cast<double>(static_cast<int64_t>(steps) - warmup);
    result.mean /= counted;
    result.grad_norm_ratio = ratio / counted;
    result.signed_last = (smooth.back() - base.back()) / base.back();
    return result;
}

Verdict judge(double max_error, std::optional<double> noise, double limit) {
    if (noise && !(*noise <= 0.5 * limit)) return Verdict::inconclusive;
    return max_error <= limit ? Verdict::pass : Verdict::miss;
}

}  // namespace fp8flow::validate
