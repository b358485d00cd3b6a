// SPDX-License-Identifier: MIT
// Limits on the loss and the gradient norm of a step. A step past a limit, or with a NaN, sets the step
// status on the device and is not applied; training.on_divergence says what happens then. The limits are
// computed from losses that every rank has, so they are the same on all ranks. Read next: trainer.h.
#pragma once

#include "kernels/core/error.h"
#include "model/config/config.h"

#include <deque>
#include <string>
#include <utility>

namespace fp8flow {

// A run that skips steps ends after this many in a row; a run that goes back to checkpoints, after this many
// times.
inline constexpr int64_t kMostSkippedInARow = 10, kMostRollbacks = 3;

class DivergenceLimits {
public:
    explicit DivergenceLimits(const TrainingSpec& training) : training_(training) {}

    // Least number of earlier losses, to distinguish a spike from the first steps of a run.
    static constexpr size_t kWindow = 32;

    // Largest mean loss of a step: loss_spike_factor x the median of the last kWindow accepted losses,
    // without the two steps before it, which may be in flight. 0: no limit, or too few losses. A resumed run
    // starts without losses.
    double loss_of(int64_t step) const;
    void accept(int64_t step, double loss);
    // Text for the error of a step with this limit of the loss.
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
