// SPDX-License-Identifier: MIT
// The comparison of `validate`: relative loss error of an arm against the BF16 baseline, and the verdict.
// Pure functions of the curves.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fp8flow::validate {

struct Curve {
    std::vector<double> loss, grad_norm;        // one per step
    double held_out = 0;                        // nats; 0: not evaluated
    double seconds_per_step = 0;                // median
    double saved_bytes = 0;                     // for the backward, at the peak of the last step
    double saved_reserved = 0, saved_used = 0;  // Trainer::saved_memory
    std::vector<double> equal_choices;          // by MoE layer, mean over steps; empty: no given routing
    double wire_bytes_per_step = 0;
    int64_t casts_per_step = 0;
};

// One job of a validation: an arm trained with one seed. Lists of runs are ordered as the arms, then as the
// seeds were given.
struct Run {
    std::string arm;
    int64_t seed = 0;
    Curve curve;
    bool diverged = false;  // the curve ends before the step that diverged
};

// The larger of two; NaN if the second is NaN, which std::max would drop: a curve that is not a number must
// not pass.
inline double larger(double most, double value) { return value > most || std::isnan(value) ? value : most; }

// Exponential moving average with start-up correction (as Adam's moments).
std::vector<double> ema(const std::vector<double>& values, double decay);

// Over the steps after the warm-up.
struct Comparison {
    double max = 0, mean = 0;    // of |EMA - EMA_base| / EMA_base
    double raw_max = 0;          // the same without smoothing
    double signed_last = 0;      // (EMA - EMA_base) / EMA_base at the end
    double grad_norm_ratio = 0;  // mean
};
Comparison compare(const Curve& arm, const Curve& baseline, double decay, int64_t warmup);

}  // namespace fp8flow::validate
