// SPDX-License-Identifier: MIT
// Smoothing, Student's t, intervals over seeds and over blocks of steps, the verdict.
#include "model/validate/statistics.h"

#include "kernels/core/error.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace fp8flow::validate {

namespace {

// arm - base where both have a run.
std::vector<double> differences(const Losses& arm, const Losses& base) {
    std::vector<double> result;
    for (size_t seed = 0; seed < arm.size(); ++seed)
        if (const double difference = arm[seed] - base[seed]; std::isfinite(difference))
            result.push_back(difference);
    return result;
}

// The sum of squares around the mean.
double squares_of(const std::vector<double>& values) {
    const double mean = mean_of(values);
    double sum = 0;
    for (const double value : values) sum += (value - mean) * (value - mean);
    return sum;
}

// Rows are arms, columns seeds; NaN: no such run.
using Table = std::vector<std::vector<double>>;

// Takes out of `values` what lies along each of the unit vectors.
void remove_along(const Table& units, std::vector<double>& values) {
    for (const auto& unit : units) {
        const double along = std::inner_product(unit.begin(), unit.end(), values.begin(), 0.0);
        for (size_t i = 0; i < unit.size(); ++i) values[i] -= along * unit[i];
    }
}

// What least squares with an effect of each row and one of each column leave.
PooledVariance residual_of(const Table& rows) {
    std::vector<double> runs;
    Table effects(rows.size() + rows.front().size());  // 1 for the runs that have this effect
    for (size_t row = 0; row < rows.size(); ++row)
        for (size_t column = 0; column < rows[row].size(); ++column) {
            if (!std::isfinite(rows[row][column])) continue;
            runs.push_back(rows[row][column]);
            for (auto& effect : effects) effect.push_back(0);
            effects[row].back() = effects[rows.size() + column].back() = 1;
        }
    Table units;  // an orthonormal basis of the effects
    for (auto& effect : effects) {
        remove_along(units, effect);
        const double length =
            std::sqrt(std::inner_product(effect.begin(), effect.end(), effect.begin(), 0.0));
        if (length < 1e-6) continue;  // a sum of the effects before
        for (double& value : effect) value /= length;
        units.push_back(std::move(effect));
    }
    remove_along(units, runs);
    const auto freedom = static_cast<double>(runs.size() - units.size());
    return {.variance = std::inner_product(runs.begin(), runs.end(), runs.begin(), 0.0) / freedom,
            .freedom = freedom};
}

// The statistic of Bartlett's test over the differences of every two rows; 0: all variances are equal.
// Residuals would not do: a few noisy rows move the means of the columns, and with them the residuals of the
// quiet ones.
double bartlett_of_pairs(const Table& rows) {
    double squares = 0, freedom = 0, logs = 0;
    for (size_t row = 0; row < rows.size(); ++row)
        for (size_t other = 0; other < row; ++other) {
            const std::vector<double> pairs = differences(rows[row], rows[other]);
            if (pairs.size() < 2) continue;
            const double own = squares_of(pairs), own_freedom = static_cast<double>(pairs.size() - 1);
            squares += own;
            freedom += own_freedom;
            logs += own_freedom * std::log(own / own_freedom);
        }
    return freedom > 0 ? freedom * std::log(squares / freedom) - logs : 0;
}

// The share of 1,000 tables of normal values with equal variances that have at least the statistic of `rows`.
// Absent runs are absent there too.
double share_of_draws_above(const Table& rows) {
    constexpr int kDraws = 1000;
    std::mt19937_64 generator(51);
    std::normal_distribution<double> normal;
    const double own = bartlett_of_pairs(rows);
    int above = 0;
    Table draw = rows;
    for (int i = 0; i < kDraws; ++i) {
        for (auto& row : draw)
            for (double& value : row)
                if (std::isfinite(value)) value = normal(generator);
        above += bartlett_of_pairs(draw) >= own;
    }
    return static_cast<double>(above) / kDraws;
}

// Adds an arm. The same bits twice are one arm, with the runs of both.
void add_arm(const Losses& arm, Table& rows) {
    for (Losses& row : rows) {
        const std::vector<double> both = differences(arm, row);
        if (both.empty() || std::ranges::any_of(both, [](double x) { return x != 0; })) continue;
        for (size_t seed = 0; seed < row.size(); ++seed)
            if (!std::isfinite(row[seed])) row[seed] = arm[seed];
        return;
    }
    if (std::ranges::any_of(arm, [](double x) { return std::isfinite(x); })) rows.push_back(arm);
}

}  // namespace

double mean_of(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

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
    const double counted = static_cast<double>(static_cast<int64_t>(steps) - warmup);
    for (size_t i = static_cast<size_t>(warmup); i < steps; ++i) {
        const double error = std::abs(smooth[i] - base[i]) / base[i];
        result.max = larger(result.max, error);
        result.raw_max = larger(result.raw_max, std::abs(arm.loss[i] / baseline.loss[i] - 1));
        result.mean += error / counted;
        result.grad_norm_ratio += arm.grad_norm[i] / baseline.grad_norm[i] / counted;
    }
    result.signed_last = (smooth.back() - base.back()) / base.back();
    return result;
}

double student_quantile(double probability, double freedom) {
    FP8FLOW_CHECK(probability > 0 && probability < 1 && freedom > 0, "t quantile {} of {} degrees of freedom",
                  probability, freedom);
    if (probability < 0.5) return -student_quantile(1 - probability, freedom);
    const double factor = std::exp(std::lgamma((freedom + 1) / 2) - std::lgamma(freedom / 2)) /
                          std::sqrt(freedom * std::acos(-1.0));
    const auto density = [&](double t) { return factor * std::pow(1 + t * t / freedom, -(freedom + 1) / 2); };
    const auto area = [&](double t, double width) {  // Simpson's rule
        return width / 6 * (density(t) + 4 * density(t + width / 2) + density(t + width));
    };
    constexpr double kStep = 1.0 / 64;
    double t = 0, left = probability - 0.5, width = 0;
    for (double step = area(t, kStep); step < left; step = area(t, kStep)) {
        left -= step;
        t += kStep;
    }
    for (int i = 0; i < 4; ++i) width += (left - area(t, width)) / density(t + width);  // Newton's method
    return t + width;
}

Window window_of(size_t steps, size_t warmup) {
    const size_t count = std::max(steps / 10, std::min<size_t>(10, (steps + 1) / 2));
    return {std::max(steps - count, std::min(warmup, steps)), steps};
}

double mean_in(Window window, const std::vector<double>& values) {
    double sum = 0;
    for (size_t i = window.first; i < window.end; ++i) sum += values.at(i);
    return sum / static_cast<double>(window.end - window.first);
}

const char* name_of(Noise noise) {
    constexpr const char* kNames[] = {"unknown", "noise within one run only", "over seeds",
                                      "over seeds, variance pooled over arms"};
    return kNames[static_cast<size_t>(noise)];
}

double Difference::half_width() const {
    if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
    return error > 0 ? student_quantile(0.975, freedom) * error : 0;
}

double Difference::detectable() const {
    if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
    return error > 0 ? half_width() + student_quantile(0.8, freedom) * error : 0;
}

PooledVariance pooled_variance(const std::vector<Losses>& arms) {
    Table rows;
    for (const Losses& arm : arms) add_arm(arm, rows);
    if (rows.size() < 2) return {};
    PooledVariance result = residual_of(rows);
    if (result.freedom == 0) return {};
    if (rows.size() > 2) result.p = share_of_draws_above(rows);  // two arms have one difference
    result.same = result.p > 0.25;
    return result;
}

Difference over_seeds(const Losses& arm, const Losses& base, const PooledVariance& pooled) {
    FP8FLOW_CHECK(arm.size() == base.size(), "{} and {} seeds", arm.size(), base.size());
    const std::vector<double> pairs = differences(arm, base);
    Difference result;
    const auto count = static_cast<double>(pairs.size());
    result.pairs = std::ssize(pairs);
    if (pairs.empty()) return result;
    result.mean = mean_of(pairs);
    const bool alone = pairs.size() == 1;
    double variance = alone ? 0 : squares_of(pairs) / (count - 1);
    result.freedom = count - 1;
    result.noise = Noise::seeds;
    // arms with the same bits differ by 0 whatever the other arms do
    const bool varies = alone ? pairs.front() != 0 : variance > 0;
    if (pooled.same && pooled.freedom > result.freedom && varies) {
        // a difference has the variance of two runs; an arm that shows more than the others keeps its own
        variance = std::max(variance, 2 * pooled.variance);
        result.freedom = pooled.freedom;
        result.noise = Noise::pooled;
    } else if (alone) {
        result.noise = Noise::unknown;
        return result;
    }
    result.error = std::sqrt(variance / count);
    return result;
}

Difference within_run(const std::vector<double>& arm, const std::vector<double>& base, Window window) {
    FP8FLOW_CHECK(arm.size() >= window.end && base.size() >= window.end, "steps {} to {} of {} and {}",
                  window.first, window.end, arm.size(), base.size());
    Difference result;
    result.pairs = 1;
    const size_t steps = window.end - window.first, blocks = std::min<size_t>(20, steps);
    if (steps == 0) return result;
    const size_t length = steps / blocks;
    std::vector<double> means(blocks, 0.0);
    double sum = 0;
    for (size_t i = window.first; i < window.end; ++i) {
        sum += arm[i] - base[i];
        // the first steps that fill no block count in the mean only
        const size_t left = window.end - 1 - i;
        if (left < blocks * length)
            means[blocks - 1 - left / length] += (arm[i] - base[i]) / static_cast<double>(length);
    }
    result.mean = sum / static_cast<double>(steps);
    if (blocks < 3 || !std::isfinite(result.mean)) return result;
    const double squares = squares_of(means), mean = mean_of(means);
    double products = 0;
    for (size_t i = 1; i < blocks; ++i) products += (means[i] - mean) * (means[i - 1] - mean);
    const double correlation = squares > 0 ? std::clamp(products / squares, 0.0, 0.8) : 0;
    const double count = static_cast<double>(blocks),
                 independent = count * (1 - correlation) / (1 + correlation);
    result.freedom = std::max(1.0, independent - 1);
    result.error = std::sqrt(squares / (count - 1) / independent);
    result.noise = Noise::run;
    return result;
}

const char* name_of(Verdict verdict) {
    constexpr const char* kNames[] = {"pass", "inconclusive", "miss"};
    return kNames[static_cast<size_t>(verdict)];
}

Verdict judge(const Difference& difference, double limit) {
    const double mean = std::abs(difference.mean), half = difference.half_width();
    if (difference.pairs == 0) return Verdict::inconclusive;
    if (!std::isfinite(mean)) return Verdict::miss;
    if (mean + half <= limit) return Verdict::pass;
    return mean - half > limit ? Verdict::miss : Verdict::inconclusive;
}

std::optional<double> growth_to_decide(const Difference& difference, double limit) {
    constexpr double kMost = 1000;
    const double distance = std::abs(limit - std::abs(difference.mean));
    const auto growth_of = [&](double half_width) { return std::pow(half_width / distance, 2); };
    if (!std::isfinite(difference.error) || !(distance > 0)) return std::nullopt;
    if (difference.noise == Noise::run) {
        const double growth = growth_of(difference.half_width());
        return growth <= kMost ? std::optional(growth) : std::nullopt;
    }
    const auto pairs = static_cast<double>(difference.pairs);
    for (double more = pairs + 1; more <= kMost * pairs; ++more) {
        const double freedom = difference.freedom * (more - 1) / std::max(pairs - 1, 1.0);
        const double growth = more / pairs;
        if (growth_of(student_quantile(0.975, freedom) * difference.error) <= growth) return growth;
    }
    return std::nullopt;
}

}  // namespace fp8flow::validate
