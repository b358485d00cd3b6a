// SPDX-License-Identifier: MIT
// The statistics of `validate`: smoothed differences of curves, mean differences of losses, paired by seed,
// with 95 % intervals, and the verdict. Pure functions. docs/usage/validate.md has the formulas and their
// sources.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace fp8flow::validate {

struct Curve {
    std::vector<double> loss, grad_norm;  // one per step
    double held_out = 0;                  // nats; 0: not evaluated
};

// The larger of two; NaN if the second is NaN, which std::max would drop: a curve with NaN must not pass.
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

// The value that Student's t with `freedom` degrees of freedom stays below with this probability.
double student_quantile(double probability, double freedom);

// The steps whose mean is compared: [first, end), the last tenth, at least ten or half of the run, and none
// of the warm-up.
struct Window {
    size_t first = 0, end = 0;
};
Window window_of(size_t steps, size_t warmup);
double mean_in(Window window, const std::vector<double>& values);
double mean_of(const std::vector<double>& values);

// Losses of one arm, one per seed in the order of all seeds, nats; NaN: no such run, or it diverged.
using Losses = std::vector<double>;

// Where the interval comes from. run: blocks of steps of one run; another seed can differ by more.
enum class Noise : uint8_t { unknown, run, seeds, pooled };
const char* name_of(Noise noise);

// A mean difference of losses, nats.
struct Difference {
    double mean = std::numeric_limits<double>::quiet_NaN();
    double error = std::numeric_limits<double>::infinity();  // standard error of the mean
    double freedom = 0;                                      // degrees of freedom
    int64_t pairs = 0;                                       // seeds
    Noise noise = Noise::unknown;

    double half_width() const;  // of the 95 % interval; infinite: unknown
    // The smallest true difference that an interval like this one leaves out 0 for in about 80 % of
    // all validations: (t_0.975 + t_0.8) times the standard error.
    double detectable() const;
};

// The variance of one run around the sum of an arm's and a seed's effect, over all arms that differ: the
// residual of a two-way layout, in which runs may be absent. `same`: Bartlett's statistic of the differences
// of every two arms is not among the largest quarter of 1,000 draws with equal variances, so it may be
// pooled. The level is 25 % because with three seeds the usual 5 % finds a variance of four times in few
// cases.
struct PooledVariance {
    double variance = 0, freedom = 0, p = 1;
    bool same = false;
};
PooledVariance pooled_variance(const std::vector<Losses>& arms);

// Paired by seed. Pooled if that is allowed and gives more degrees of freedom: then with the pooled variance,
// or with the arm's own if that is larger, because the test misses an arm with three times the noise often.
// One pair has the pooled variance or none.
Difference over_seeds(const Losses& arm, const Losses& base, const PooledVariance& pooled);
// One seed: 20 blocks of steps. Their correlation r leaves 20 (1 - r) / (1 + r) independent ones.
Difference within_run(const std::vector<double>& arm, const std::vector<double>& base, Window window);

enum class Verdict : uint8_t { pass, inconclusive, miss };  // the best first
const char* name_of(Verdict verdict);
// limit in nats. pass: the interval lies within +-limit; miss: outside, or the mean is not a number.
Verdict judge(const Difference& difference, double limit);
// How many times the seeds (over seeds) or the steps (one run) must grow until the same difference and noise
// decide; nullopt: more than a thousand times, or unknown.
std::optional<double> growth_to_decide(const Difference& difference, double limit);

}  // namespace fp8flow::validate
