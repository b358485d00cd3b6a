// SPDX-License-Identifier: MIT
// The statistic of `validate` against tables, closed forms and synthetic draws with a known answer.
#include "model/validate/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

namespace fp8flow::validate {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Statistics, StudentQuantilesOfTheTable) {
    const struct {
        double probability, freedom, value;
    } table[] = {{0.975, 1, 12.7062047}, {0.975, 2, 4.3026527},  {0.975, 4, 2.7764451},
                 {0.975, 8, 2.3060041},  {0.975, 30, 2.0422725}, {0.975, 1e6, 1.9599664},
                 {0.995, 3, 5.8409093},  {0.95, 10, 1.8124611},  {0.8, 2, 1.0606602},
                 {0.8, 8, 0.8888895},    {0.5, 5, 0.0},          {0.025, 4, -2.7764451}};
    for (const auto& row : table)
        EXPECT_NEAR(student_quantile(row.probability, row.freedom), row.value, 4e-6)
            << row.probability << " of " << row.freedom;
}

TEST(Statistics, WindowIsTheLastTenthAndNoWarmUp) {
    const auto bounds = [](size_t steps, size_t warmup) {
        const Window window = window_of(steps, warmup);
        EXPECT_EQ(window.end, steps);
        return window.first;
    };
    EXPECT_EQ(bounds(16000, 20), 14400u);
    EXPECT_EQ(bounds(150, 20), 135u);
    EXPECT_EQ(bounds(40, 20), 30u) << "ten steps at least";
    EXPECT_EQ(bounds(7, 2), 3u) << "or half of the run";
    EXPECT_EQ(bounds(40, 35), 35u);
    EXPECT_EQ(bounds(1, 0), 0u);
}

TEST(Statistics, PairsOfSeedsByHand) {
    // differences 1, 2, 3: mean 2, standard deviation 1
    const Difference d = over_seeds({11, 22, 33, kNan, 5}, {10, 20, 30, 40, kNan}, {});
    EXPECT_EQ(d.pairs, 3);
    EXPECT_EQ(d.noise, Noise::seeds);
    EXPECT_DOUBLE_EQ(d.mean, 2);
    EXPECT_DOUBLE_EQ(d.error, 1 / std::sqrt(3.0));
    EXPECT_EQ(d.freedom, 2);
    EXPECT_NEAR(d.half_width(), 4.3026527 / std::sqrt(3.0), 1e-6);
    EXPECT_NEAR(d.detectable(), (4.3026527 + 1.0606602) / std::sqrt(3.0), 1e-6);
    EXPECT_FALSE(std::isfinite(over_seeds({1}, {2}, {}).half_width()));
    EXPECT_EQ(over_seeds({kNan}, {2}, {}).pairs, 0);
    EXPECT_EQ(over_seeds({1, 2}, {1, 2}, {.variance = 1, .freedom = 9, .same = true}).half_width(), 0)
        << "the same bits";
    // pooled: standard deviation 1, and with less the arm's own
    const auto pooled = [](double variance) {
        return over_seeds({11, 22, 33}, {10, 20, 30}, {.variance = variance, .freedom = 9, .same = true});
    };
    EXPECT_DOUBLE_EQ(pooled(2).error, 2 / std::sqrt(3.0));
    EXPECT_DOUBLE_EQ(pooled(0.1).error, 1 / std::sqrt(3.0));
    EXPECT_EQ(pooled(0.1).freedom, 9);
}

TEST(Statistics, PooledVarianceIsTheResidualOfTheTwoWayLayout) {
    // two arms: half of the variance of their differences, so the paired interval
    const std::vector<Losses> two = {{10, 20, 30}, {11, 22, 33}};
    EXPECT_NEAR(pooled_variance(two).variance, 0.5, 1e-12);
    EXPECT_EQ(pooled_variance(two).freedom, 2);
    // an effect of the seed and of the arm leaves nothing
    const Losses copy = {1, 5, 2};
    EXPECT_NEAR(pooled_variance({copy, {2, 6, 3}, {9, 13, 10}}).variance, 0, 1e-12);
    // an arm with the same bits, or without a run, counts once or not
    EXPECT_EQ(pooled_variance({{1, 2, 4}, {1, 2, 4}, {1, 3, kNan}, {2, 1, 1}, {kNan, kNan, kNan}}).freedom,
              3);
    // absent runs: an arm's only run, and a seed's, are their effects; others count
    const std::vector<Losses> absent = {{10, 20, 30, kNan}, {11, 22, 33, 50}, {kNan, 7, kNan, kNan}};
    EXPECT_NEAR(pooled_variance(absent).variance, 0.5, 1e-12);
    EXPECT_EQ(pooled_variance(absent).freedom, 2);
    const Losses longer = {1, 5, 2, 7, 3};
    const PooledVariance additive = pooled_variance({longer, {3, 7, 4, kNan, kNan}, {0, 4, kNan, 6, 2}});
    EXPECT_NEAR(additive.variance, 0, 1e-12);
    EXPECT_EQ(additive.freedom, 5);
    EXPECT_EQ(pooled_variance({}).freedom, 0);
    EXPECT_FALSE(pooled_variance({{1}, {2}}).same);
}

TEST(Statistics, PooledVarianceOfTablesWithFewRuns) {
    // without a common seed: two tables, each with its degree of freedom
    const PooledVariance apart =
        pooled_variance({{1, 2, kNan, kNan}, {1, 3, kNan, kNan}, {kNan, kNan, 5, 6}, {kNan, kNan, 5, 8}});
    EXPECT_EQ(apart.freedom, 2);
    EXPECT_NEAR(apart.variance, (0.25 + 1) / 2, 1e-12);
    // each arm has two seeds, one of them the next arm's: a long chain of effects, without noise
    constexpr size_t kArms = 30;
    std::vector<Losses> ring(kArms, Losses(kArms, kNan));
    for (size_t arm = 0; arm < kArms; ++arm)
        for (const size_t seed : {arm, (arm + 1) % kArms})
            ring[arm][seed] = static_cast<double>(arm + seed * seed);
    EXPECT_EQ(pooled_variance(ring).freedom, 1);
    EXPECT_NEAR(pooled_variance(ring).variance, 0, 1e-12);
    EXPECT_EQ(pooled_variance(ring).p, 1) << "no two arms with two seeds";
    // the same bits: the runs of both count, in either order
    const Losses base = {1, 2, 4}, part = {1, 2, kNan}, other = {1, 3, 7};
    EXPECT_EQ(pooled_variance({part, base, other}).freedom, 2);
    EXPECT_EQ(pooled_variance({base, part, other}).freedom, 2);
    // without a common seed nothing is the same
    EXPECT_EQ(pooled_variance({{1, 2, 3, 4}, {1, 3, kNan, kNan}, {kNan, kNan, 4, 4}, {3, 3, 3, 3}}).freedom,
              5);
}

// Losses of `sd.size()` arms with an effect of each seed.
std::vector<Losses> draw(std::mt19937_64& generator, const std::vector<double>& sd, size_t seeds) {
    std::normal_distribution<double> normal;
    Losses effects(seeds);
    for (double& effect : effects) effect = 5 * normal(generator);
    std::vector<Losses> arms;
    for (const double scale : sd) {
        arms.emplace_back();
        for (const double effect : effects) arms.back().push_back(effect + scale * normal(generator));
    }
    return arms;
}

// The share of 1,500 synthetic validations with true difference 0 that have it in their 95 % interval.
double coverage(const std::function<Difference()>& one) {
    constexpr int kDraws = 1500;
    int inside = 0;
    for (int i = 0; i < kDraws; ++i) {
        const Difference d = one();
        inside += std::abs(d.mean) <= d.half_width();
    }
    return static_cast<double>(inside) / kDraws;
}

TEST(Statistics, IntervalsCoverNinetyFivePercent) {
    std::mt19937_64 generator(7);
    for (const size_t seeds : {3, 5})
        for (const size_t arms : {2, 4}) {
            const double share = coverage([&] {
                const auto losses = draw(generator, std::vector<double>(arms, 0.3), seeds);
                return over_seeds(losses[1], losses[0], pooled_variance(losses));
            });
            EXPECT_GE(share, 0.93) << seeds << " seeds, " << arms << " arms";
            EXPECT_LE(share, 0.97) << seeds << " seeds, " << arms << " arms";
        }
    const double absent = coverage([&] {
        auto losses = draw(generator, {1, 1, 1, 1}, 5);
        losses[1].resize(3, kNan);
        losses[2].resize(2, kNan);
        for (auto& arm : losses) arm.resize(5, kNan);
        return over_seeds(losses[1], losses[0], pooled_variance(losses));
    });
    EXPECT_GE(absent, 0.93);
    EXPECT_LE(absent, 0.97);
    const double noisy = coverage([&] {
        const auto losses = draw(generator, {1, 3, 1, 1}, 3);
        return over_seeds(losses[1], losses[0], pooled_variance(losses));
    });
    EXPECT_GE(noisy, 0.905) << "an arm with three times the noise";
    // one run whose differences have correlation 0.5 from step to step
    std::normal_distribution<double> normal;
    const std::vector<double> base(1600, 2.0);
    const double share = coverage([&] {
        std::vector<double> arm = base;
        double state = normal(generator) / std::sqrt(0.75);
        for (double& loss : arm) loss += state = 0.5 * state + normal(generator);
        return within_run(arm, base, {0, arm.size()});
    });
    EXPECT_GE(share, 0.93);
    EXPECT_LE(share, 0.97);
}

TEST(Statistics, PoolingNeedsEqualVariancesAndShortensTheInterval) {
    std::mt19937_64 generator(3);
    int equal = 0, unequal = 0, quiet = 0;
    double own = 0, pooled = 0;
    for (int i = 0; i < 200; ++i) {
        const auto losses = draw(generator, {1, 1, 1, 1}, 3);
        const PooledVariance variance = pooled_variance(losses);
        equal += variance.same;
        unequal += pooled_variance(draw(generator, {1, 30, 1, 1}, 5)).same;
        quiet += pooled_variance(draw(generator, {1, 1, 30, 30, 30}, 3)).same;
        own += over_seeds(losses[1], losses[0], {}).half_width();
        pooled += over_seeds(losses[1], losses[0], variance).half_width();
    }
    EXPECT_NEAR(equal / 200.0, 0.75, 0.08);
    EXPECT_LT(unequal, 4);
    EXPECT_LT(quiet, 10) << "two quiet arms among noisy ones";
    EXPECT_LT(pooled, 0.9 * own);
}

TEST(Statistics, OneRunByHand) {
    std::vector<double> base(40, 1.0), arm(40);
    for (size_t i = 0; i < arm.size(); ++i) arm[i] = 1.1 + (i / 2 % 2 == 0 ? 0.01 : -0.01);
    const Difference d = within_run(arm, base, {0, 40});  // 20 blocks of +-0.01, anticorrelated
    EXPECT_EQ(d.noise, Noise::run);
    EXPECT_NEAR(d.mean, 0.1, 1e-12);
    EXPECT_NEAR(d.error, 0.01 / std::sqrt(19.0), 1e-12);
    EXPECT_EQ(d.freedom, 19);
    std::vector<double> longer(5, 9.0), longer_base(45, 1.0);  // steps that fill no block
    longer.insert(longer.end(), arm.begin(), arm.end());
    EXPECT_NEAR(within_run(longer, longer_base, {0, 45}).error, d.error, 1e-12);
    EXPECT_NEAR(within_run(longer, longer_base, {0, 45}).mean, (5 * 8 + 40 * 0.1) / 45, 1e-12);
    for (size_t i = 0; i < arm.size(); ++i) arm[i] = 1.1 + (i < 20 ? 0.01 : -0.01);  // a drift
    EXPECT_GT(within_run(arm, base, {0, 40}).error, 2 * d.error);
    arm[39] = kNan;
    EXPECT_EQ(judge(within_run(arm, base, {0, 40}), 1.0), Verdict::miss);
    EXPECT_FALSE(std::isfinite(within_run(base, base, {38, 40}).half_width())) << "too few steps";
}

TEST(Statistics, VerdictNeedsTheWholeInterval) {
    const auto with = [](double mean, double half) {
        return Difference{.mean = mean,
                          .error = half / student_quantile(0.975, 2),
                          .freedom = 2,
                          .pairs = 3,
                          .noise = Noise::seeds};
    };
    EXPECT_EQ(judge(with(0.1, 0.1), 0.25), Verdict::pass);
    EXPECT_EQ(judge(with(-0.1, 0.1), 0.25), Verdict::pass);
    EXPECT_EQ(judge(with(0.1, 0.2), 0.25), Verdict::inconclusive);
    EXPECT_EQ(judge(with(0.4, 0.2), 0.25), Verdict::inconclusive);
    EXPECT_EQ(judge(with(0.4, 0.1), 0.25), Verdict::miss);
    EXPECT_EQ(judge(with(-0.4, 0.1), 0.25), Verdict::miss);
    EXPECT_EQ(judge(with(kNan, 0.1), 0.25), Verdict::miss);
    EXPECT_EQ(judge({.mean = 0.1, .pairs = 1}, 0.25), Verdict::inconclusive) << "no interval";
    EXPECT_EQ(judge({}, 0.25), Verdict::inconclusive) << "no pair";

    // 3 seeds, half-width 0.3: t_4 sqrt(3 / 5) / t_2 * 0.3 = 0.1499 fits into 0.15, four seeds do not
    EXPECT_NEAR(growth_to_decide(with(0.1, 0.3), 0.25).value(), 5.0 / 3, 1e-12);
    EXPECT_FALSE(growth_to_decide(with(0.25, 0.1), 0.25)) << "on the limit no number of seeds decides";
    Difference run = with(0.1, 0.3);
    run.noise = Noise::run;
    EXPECT_NEAR(growth_to_decide(run, 0.25).value(), 4, 1e-9) << "four times the steps halve the interval";
    EXPECT_FALSE(growth_to_decide({.mean = 0.1, .pairs = 1}, 0.25));
    Difference one = with(0.1, 0.3);
    one.pairs = 1;
    one.noise = Noise::pooled;
    EXPECT_EQ(growth_to_decide(one, 0.25), 3.0) << "t_4 / sqrt(3)";
}

}  // namespace
}  // namespace fp8flow::validate
