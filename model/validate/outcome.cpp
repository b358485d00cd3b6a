// SPDX-License-Identifier: MIT
// Pairs the runs of the arms by seed and judges each arm.
#include "model/validate/outcome.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

namespace fp8flow::validate {

namespace {

using Value = std::function<double(const Curve&)>;

// What the arms of one validation share.
struct Validation {
    const std::vector<Run>& runs;
    const ValidateSpec& spec;
    const Outcomes& outcomes;

    const Run* find(const std::string& arm, int64_t seed) const {
        for (const Run& run : runs)
            if (run.arm == arm && run.seed == seed) return &run;
        return nullptr;
    }
    std::vector<Pair> pairs(const Outcome& outcome) const {
        std::vector<Pair> result;
        for (const int64_t seed : outcomes.seeds) {
            const Run *own = find(outcome.arm, seed), *base = find(outcome.against, seed);
            if (own != nullptr && base != nullptr && !own->diverged && !base->diverged)
                result.push_back({&own->curve, &base->curve});
        }
        return result;
    }
    // One value per seed; NaN: the arm did not run with it, or diverged.
    Losses losses(const std::string& arm, const Value& value) const {
        Losses result;
        for (const int64_t seed : outcomes.seeds) {
            const Run* run = find(arm, seed);
            const bool ended = run != nullptr && !run->diverged;
            result.push_back(ended ? value(run->curve) : std::nan(""));
        }
        return result;
    }
    double training_loss(const Curve& curve) const { return mean_in(outcomes.window, curve.loss); }
};

double held_out_loss(const Curve& curve) { return curve.held_out > 0 ? curve.held_out : std::nan(""); }

double mean_over(const std::vector<Pair>& pairs, const std::function<double(const Pair&)>& value) {
    double sum = 0;
    for (const Pair& pair : pairs) sum += value(pair);
    return sum / static_cast<double>(pairs.size());
}

Comparison smoothed(const std::vector<Pair>& pairs, const ValidateSpec& spec) {
    Comparison result;
    const auto count = static_cast<double>(pairs.size());
    for (const Pair& pair : pairs) {
        const Comparison one = compare(*pair.own, *pair.base, spec.ema_decay, spec.warmup_iters);
        result.max = larger(result.max, one.max);
        result.raw_max = larger(result.raw_max, one.raw_max);
        result.mean += one.mean / count;
        result.signed_last += one.signed_last / count;
        result.grad_norm_ratio += one.grad_norm_ratio / count;
    }
    return result;
}

// An arm that diverges, or has a loss that is not a number, with a seed with which its baseline ends is a
// miss, whatever the other seeds say.
void give_verdict(const Validation& all, Outcome& outcome) {
    const double limit = all.spec.max_relative_loss_error * outcome.base;
    outcome.verdict = judge(outcome.training, limit);
    for (const int64_t seed : all.outcomes.seeds) {
        const Run *own = all.find(outcome.arm, seed), *base = all.find(outcome.against, seed);
        if (own == nullptr || base == nullptr || base->diverged) continue;
        if (own->diverged || std::isnan(all.training_loss(own->curve) - all.training_loss(base->curve)))
            outcome.verdict = Verdict::miss;
    }
    if (outcome.verdict == Verdict::inconclusive) outcome.growth = growth_to_decide(outcome.training, limit);
}

void compare_with_baseline(const Validation& all, Outcome& outcome) {
    const Outcomes& outcomes = all.outcomes;
    const auto difference = [&](const Value& value, const PooledVariance& pooled) {
        return over_seeds(all.losses(outcome.arm, value), all.losses(outcome.against, value), pooled);
    };
    const std::vector<Pair>& pairs = outcome.pairs = all.pairs(outcome);
    const auto training = [&](const Curve& curve) { return all.training_loss(curve); };
    outcome.training = pairs.size() == 1
                           ? within_run(pairs[0].own->loss, pairs[0].base->loss, outcomes.window)
                           : difference(training, outcomes.training);
    outcome.held_out = difference(held_out_loss, outcomes.held_out);
    outcome.base = mean_over(pairs, [&](const Pair& pair) { return training(*pair.base); });
    outcome.base_held_out = mean_over(pairs, [](const Pair& pair) { return pair.base->held_out; });
    outcome.root_mean_square = std::sqrt(mean_over(
        pairs, [&](const Pair& pair) { return std::pow(training(*pair.own) - training(*pair.base), 2); }));
    outcome.smoothed = smoothed(pairs, all.spec);
    give_verdict(all, outcome);
}

void compare_with_control(Outcomes& outcomes) {
    const Outcome* control = outcomes.find(kControlArm);
    if (control == nullptr || control->training.pairs == 0) return;
    outcomes.noise = control->smoothed.max;
    for (Outcome& o : outcomes.arms) {
        if (o.training.pairs == 0 || &o == control) continue;
        o.to_control = o.root_mean_square / control->root_mean_square;
        o.overlaps_control = std::abs(o.training.mean - control->training.mean) <=
                             o.training.half_width() + control->training.half_width();
    }
}

}  // namespace

const Outcome* Outcomes::find(const std::string& arm) const {
    for (const Outcome& outcome : arms)
        if (outcome.arm == arm) return &outcome;
    return nullptr;
}

Outcomes outcomes_of(const std::vector<Run>& runs, const std::vector<Arm>& arms, const ValidateSpec& spec) {
    Outcomes result;
    std::set<int64_t> seeds;
    size_t steps = 0;
    for (const Run& run : runs) {
        seeds.insert(run.seed);
        if (!run.diverged) steps = std::max(steps, run.curve.loss.size());
    }
    result.seeds.assign(seeds.begin(), seeds.end());
    result.window = window_of(steps, static_cast<size_t>(spec.warmup_iters));

    const Validation all{runs, spec, result};
    std::vector<Losses> training, held_out;
    for (const Arm& arm : arms) {
        training.push_back(all.losses(arm.name, [&](const Curve& c) { return all.training_loss(c); }));
        held_out.push_back(all.losses(arm.name, held_out_loss));
    }
    result.training = pooled_variance(training);
    result.held_out = pooled_variance(held_out);
    bool miss = false, open = false;
    for (const Arm& arm : arms) {
        Outcome outcome{.arm = arm.name};
        for (const int64_t seed : result.seeds)
            if (const Run* run = all.find(arm.name, seed); run != nullptr) {
                outcome.diverged += run->diverged;
                if (run->diverged) continue;
                outcome.runs.push_back(run);
                outcome.losses.push_back(all.training_loss(run->curve));
                outcome.held_out_losses.push_back(run->curve.held_out);
            }
        if (!result.arms.empty()) {
            outcome.against = arm.against.empty() ? arms.front().name : arm.against;
            compare_with_baseline(all, outcome);
            miss |= arm.name != kControlArm && outcome.verdict == Verdict::miss;
            open |= arm.name != kControlArm && outcome.verdict == Verdict::inconclusive;
        }
        result.arms.push_back(std::move(outcome));
    }
    compare_with_control(result);
    result.verdict = miss ? Verdict::miss : open ? Verdict::inconclusive : Verdict::pass;
    return result;
}

}  // namespace fp8flow::validate
