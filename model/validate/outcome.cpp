// SPDX-License-Identifier: MIT
// Pairs the runs of the arms by seed and judges each arm.
#include "model/validate/outcome.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace fp8flow::validate {

namespace {

// One arm, by seed. Null: no run with this seed. NaN: no run, it diverged, or it has no such loss.
struct ArmLosses {
    std::vector<const Run*> runs;
    Losses training, held_out;
};

bool ended(const Run* run) { return run != nullptr && !run->diverged; }

ArmLosses losses_of(const std::string& arm, const std::vector<Run>& runs, const Outcomes& all) {
    ArmLosses losses;
    for (const int64_t seed : all.seeds) {
        const auto found =
            std::ranges::find_if(runs, [&](const Run& run) { return run.arm == arm && run.seed == seed; });
        const Run* const run = found == runs.end() ? nullptr : &*found;
        const bool evaluated = ended(run) && run->curve.held_out > 0;
        losses.runs.push_back(run);
        losses.training.push_back(ended(run) ? mean_in(all.window, run->curve.loss) : std::nan(""));
        losses.held_out.push_back(evaluated ? run->curve.held_out : std::nan(""));
    }
    return losses;
}

void add_smoothed(Outcome& outcome, const ValidateSpec& spec) {
    Comparison& sum = outcome.smoothed;
    const auto count = f64(outcome.pairs.size());
    for (const Pair& pair : outcome.pairs) {
        const Comparison one = compare(*pair.own, *pair.base, spec.ema_decay, spec.warmup_iters);
        sum.max = larger(sum.max, one.max);
        sum.raw_max = larger(sum.raw_max, one.raw_max);
        sum.mean += one.mean / count;
        sum.signed_last += one.signed_last / count;
        sum.grad_norm_ratio += one.grad_norm_ratio / count;
    }
}

// If an arm diverges, or has a loss that is not a number, with a seed with which its baseline ends, it is a
// miss, whatever the other seeds say.
void compare_with_baseline(const ArmLosses& own, const ArmLosses& base, const Outcomes& all,
                           const ValidateSpec& spec, Outcome& outcome) {
    bool fails = false;
    double squares = 0;
    for (size_t i = 0; i < own.runs.size(); ++i) {
        if (own.runs[i] == nullptr || !ended(base.runs[i])) continue;
        const double difference = own.training[i] - base.training[i];
        fails |= std::isnan(difference);
        if (own.runs[i]->diverged) continue;
        outcome.pairs.push_back({&own.runs[i]->curve, &base.runs[i]->curve});
        outcome.base += base.training[i];
        squares += difference * difference;
    }
    const std::vector<Pair>& pairs = outcome.pairs;
    const auto count = f64(pairs.size());
    outcome.base /= count;
    outcome.root_mean_square = std::sqrt(squares / count);
    outcome.training = over_seeds(own.training, base.training, all.training);
    if (outcome.training.noise == Noise::unknown && pairs.size() == 1)
        outcome.training = within_run(pairs[0].own->loss, pairs[0].base->loss, all.window);
    outcome.held_out = over_seeds(own.held_out, base.held_out, all.held_out);
    for (size_t i = 0; i < own.runs.size(); ++i)
        if (std::isfinite(own.held_out[i] - base.held_out[i]))
            outcome.base_held_out += base.held_out[i] / f64(outcome.held_out.pairs);
    add_smoothed(outcome, spec);
    const double limit = spec.max_relative_loss_error * outcome.base;
    outcome.verdict = fails ? Verdict::miss : judge(outcome.training, limit);
    if (outcome.verdict == Verdict::inconclusive) outcome.growth = growth_to_decide(outcome.training, limit);
}

void compare_with_control(Outcomes& outcomes) {
    const Outcome* control = outcomes.find(kControlArm);
    if (control == nullptr || control->training.pairs == 0) return;
    outcomes.noise = control->smoothed.max;
    for (Outcome& o : outcomes.arms) {
        if (o.training.pairs == 0 || &o == control) continue;
        if (control->root_mean_square > 0) o.to_control = o.root_mean_square / control->root_mean_square;
        o.overlaps_control = std::abs(o.training.mean - control->training.mean) <=
                             o.training.half_width() + control->training.half_width();
    }
}

}  // namespace

const Outcome* Outcomes::find(const std::string& arm) const {
    const auto found = std::ranges::find(arms, arm, &Outcome::arm);
    return found == arms.end() ? nullptr : &*found;
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
    result.window = window_of(steps, to_size(spec.warmup_iters));

    std::vector<Losses> training, held_out;
    for (const Arm& arm : arms) {
        ArmLosses own = losses_of(arm.name, runs, result);
        training.push_back(std::move(own.training));
        held_out.push_back(std::move(own.held_out));
    }
    result.training = pooled_variance(training);
    result.held_out = pooled_variance(held_out);
    for (const Arm& arm : arms) {
        const ArmLosses own = losses_of(arm.name, runs, result);
        Outcome outcome{.arm = arm.name};
        for (size_t i = 0; i < own.runs.size(); ++i) {
            outcome.diverged += own.runs[i] != nullptr && own.runs[i]->diverged;
            if (!ended(own.runs[i])) continue;
            outcome.runs.push_back(own.runs[i]);
            outcome.losses.push_back(own.training[i]);
            outcome.held_out_losses.push_back(own.runs[i]->curve.held_out);
        }
        if (!result.arms.empty()) {
            outcome.against = arm.against.empty() ? arms.front().name : arm.against;
            compare_with_baseline(own, losses_of(outcome.against, runs, result), result, spec, outcome);
            if (arm.name != kControlArm) {
                ++result.judged;
                result.verdict = std::max(result.verdict, outcome.verdict);
            }
        }
        result.arms.push_back(std::move(outcome));
    }
    if (result.judged == 0) result.verdict = Verdict::inconclusive;
    compare_with_control(result);
    return result;
}

}  // namespace fp8flow::validate
