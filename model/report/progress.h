// SPDX-License-Identifier: MIT
// The estimate of the time left.
#pragma once

#include <cstdint>
#include <optional>

namespace fp8flow::report {

// Time left from an exponential mean of the step times, over about `window` steps. The first step (warm-up,
// allocations) is used until there is a second one and forgotten then; the mean is corrected for its start
// (as Adam's moments are).
class EtaEstimator {
public:
    explicit EtaEstimator(int64_t total_steps, double window = 20.0)
        : left_(total_steps), decay_(window > 1.0 ? 1.0 - 1.0 / window : 0.0) {}

    void step_done(double seconds) {
        if (++done_ == 2) sum_ = weight_ = 0.0;
        if (left_ > 0) --left_;
        sum_ = decay_ * sum_ + (1.0 - decay_) * seconds;
        weight_ = decay_ * weight_ + (1.0 - decay_);
    }
    std::optional<double> seconds_left() const {
        if (weight_ <= 0.0) return std::nullopt;
        return sum_ / weight_ * static_cast<double>(left_);
    }

private:
    int64_t left_, done_ = 0;
    double decay_, sum_ = 0.0, weight_ = 0.0;
};

}  // namespace fp8flow::report
