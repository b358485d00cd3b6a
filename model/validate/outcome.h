// SPDX-License-Identifier: MIT
// Compares the runs of a validation: for each arm the differences with intervals and the verdict. Pure
// functions.
#pragma once

#include "model/config/config.h"
#include "model/validate/arms.h"
#include "model/validate/statistics.h"

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::validate {

// An arm trained with one seed.
struct Run {
    std::string arm;
    int64_t seed = 0;
    Curve curve;
    bool diverged = false;  // the curve ends before the step that diverged
    // As validate.json has them: "seconds per step" (median), "casts per step", ...
    nlohmann::json costs = nlohmann::json::object();
};

// Two runs with one seed that ended.
struct Pair {
    const Curve *own, *base;
};

// An arm. Points into the runs.
struct Outcome {
    std::string arm, against;            // against: empty for the baseline
    std::vector<const Run*> runs;        // those that ended, by seed
    std::vector<Pair> pairs;             // with the arm `against`
    int64_t diverged = 0;                // seeds with which it diverged
    Losses losses, held_out_losses;      // of `runs`; the training loss is the mean of the window
    Difference training, held_out;       // to the arm `against`
    double base = 0, base_held_out = 0;  // mean losses of that arm with the same seeds
    Comparison smoothed;                 // over seeds: the largest of its maxima, the mean of the rest
    double root_mean_square = 0;         // of the training differences over seeds, nats
    std::optional<double> to_control;    // its ratio to the control arm's
    bool overlaps_control = false;       // the two intervals have a value in common
    Verdict verdict = Verdict::inconclusive;
    std::optional<double> growth;  // growth_to_decide, if inconclusive
};

struct Outcomes {
    std::vector<int64_t> seeds;
    Window window;
    PooledVariance training, held_out;
    std::vector<Outcome> arms;        // the baseline first
    std::optional<double> noise;      // the control arm's largest smoothed difference
    int64_t judged = 0;               // all arms but the baseline and the control arm
    Verdict verdict = Verdict::pass;  // the worst of them; inconclusive if there are none

    const Outcome* find(const std::string& arm) const;
};

Outcomes outcomes_of(const std::vector<Run>& runs, const std::vector<Arm>& arms, const ValidateSpec& spec);
Outcomes outcomes_of(std::vector<Run>&& runs, const std::vector<Arm>& arms,
                     const ValidateSpec& spec) = delete;

}  // namespace fp8flow::validate
