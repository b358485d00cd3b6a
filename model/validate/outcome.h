// SPDX-License-Identifier: MIT
// From the runs of a validation to what is said of each arm: differences with intervals, verdict, columns of
// the table. Pure functions.
#pragma once

#include "model/config/config.h"
#include "model/validate/arms.h"
#include "model/validate/statistics.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::validate {

// Two runs with one seed that ended.
struct Pair {
    const Curve *own, *base;
};

// Points into the runs that it was made from.
struct Outcome {
    std::string arm, against;            // against: empty for the baseline
    std::vector<const Run*> runs;        // those of the arm that ended, by seed
    std::vector<Pair> pairs;             // with the arm `against`
    int64_t diverged = 0;                // seeds with which it diverged
    Losses losses, held_out_losses;      // of `runs`; the training loss is the mean of the window
    Difference training, held_out;       // to the arm `against`
    double base = 0, base_held_out = 0;  // mean losses of that arm with the same seeds: nats to percent
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
    Verdict verdict = Verdict::pass;  // of all arms but the control arm

    const Outcome* find(const std::string& arm) const;
};

Outcomes outcomes_of(const std::vector<Run>& runs, const std::vector<Arm>& arms, const ValidateSpec& spec);

}  // namespace fp8flow::validate
