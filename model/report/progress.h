// SPDX-License-Identifier: MIT
// The estimate of the time left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace fp8flow::report {

// Time left from an exponential mean of the step times, over about `window` steps. The first step (warm-up,
// allocations) is used until there is a second one and forgotten then; the mean is corrected for its start
// (as Adam's moments are). What comes between the steps, such as evaluations, is spread over all steps.
class EtaEstimator {
public:
    explicit EtaEstimator(int64_t total_steps, double window = 20.0)
        : left_(total_steps), decay_(window > 1.0 ? 1.0 - 1.0 / window : 0.0) {}

    // now: clock_seconds(); without one there is nothing between the steps.
    void step_done(double seconds, double now = 0.0) {
        if (++done_ == 1) begin_ = now;
        if (done_ == 2) sum_ = weight_ = 0.0;
        if (done_ > 1) {
            steps_ += seconds;
            between_ = std::max(0.0, now - begin_ - steps_) / static_cast<double>(done_ - 1);
        }
        if (left_ > 0) --left_;
        sum_ = decay_ * sum_ + (1.0 - decay_) * seconds;
        weight_ = decay_ * weight_ + (1.0 - decay_);
    }
    void leave_out(int64_t steps) { left_ -= steps; }  // that an earlier run has done
    std::optional<double> seconds_left() const {
        if (weight_ <= 0.0) return std::nullopt;
        return (sum_ / weight_ + between_) * static_cast<double>(left_);
    }

private:
    int64_t left_, done_ = 0;
    double decay_, sum_ = 0.0, weight_ = 0.0;
    double begin_ = 0.0, steps_ = 0.0, between_ = 0.0;  // all but the first step; mean of one
};

}  // namespace fp8flow::report
