// SPDX-License-Identifier: MIT
// Limits on the loss and the gradient norm of a step. A step past a limit, or with a NaN, sets the step
// status on the device and so is never applied; what happens then is training.on_divergence. The limits
// follow from losses that every rank has, so all ranks have the same. Read next: trainer.h.
#pragma once

#include "kernels/core/error.h"
#include "model/config/config.h"

#include <deque>
#include <string>
#include <utility>

namespace fp8flow {

class DivergenceLimits {
public:
    explicit DivergenceLimits(const TrainingSpec& training) : training_(training) {}

    // Losses a step needs behind it before a spike can be told from the first steps of a run.
    static constexpr size_t kWindow = 32;

    // Largest mean loss of a step: loss_spike_factor x the median of the last kWindow accepted losses, those
    // of the two steps before it left out, which may be under way; 0: none, or fewer losses. A resumed run
    // begins to count anew.
    double loss_of(int64_t step) const;
    void accept(int64_t step, double loss);
    // What a step did wrong that was given this limit of the loss, for people.
    std::string reason(double loss, double loss_limit, double grad_norm) const;

private:
    static constexpr int64_t kUnderWay = 2;

    TrainingSpec training_;
    std::deque<std::pair<int64_t, double>> losses_;  // step, loss
};

// A step that was not applied ended the run, or the part of it since the last checkpoint. The model is that
// before the step.
class Diverged : public Error {
public:
    Diverged(int64_t at, const std::string& text) : Error(ExitCode::numeric, text), step(at) {}
    int64_t step;  // 0-based
};

}  // namespace fp8flow
