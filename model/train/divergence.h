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

// A run that skips steps ends after so many in a row; one that goes back to checkpoints after so many times.
inline constexpr int64_t kMostSkippedInARow = 10, kMostRollbacks = 3;

class DivergenceLimits {
public:
    explicit DivergenceLimits(const TrainingSpec& training) : training_(training) {}

    // Losses that a step needs before it, to distinguish a spike from the first steps of a run.
    static constexpr size_t kWindow = 32;

    // Largest mean loss of a step: loss_spike_factor x the median of the last kWindow accepted losses, those
    // of the two steps before it left out, which may be under way; 0: none, or fewer losses. A resumed run
    // begins to count again.
    double loss_of(int64_t step) const;
    void accept(int64_t step, double loss);
    // What a step that was given this limit of the loss did wrong, as text.
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
