// SPDX-License-Identifier: MIT
// Tables and JSON of the outcomes of `validate`.
#include "model/report/validate_report.h"

#include "kernels/core/error.h"
#include "model/report/table.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace fp8flow::report {

using namespace validate;

namespace {

using nlohmann::json;

constexpr double kPercent = 100;

double limit_of(const Config& config) { return config.validate.max_relative_loss_error; }

// "fp8_flow", or "no_act_fusion (to fp8_flow)" if that is not the baseline.
std::string label_of(const Outcome& outcome, const Outcomes& outcomes) {
    const bool plain = outcome.against.empty() || outcome.against == outcomes.arms.front().arm;
    return plain ? outcome.arm : fmt::format("{} (to {})", outcome.arm, outcome.against);
}

struct Need {
    double count;
    const char* of;  // seeds or tokens
};
std::optional<Need> need_to_decide(const Outcome& outcome, const Config& config) {
    if (!outcome.growth) return std::nullopt;
    if (outcome.training.noise != Noise::run)
        return Need{std::round(*outcome.growth * f64(outcome.training.pairs)), "seeds"};
    const TrainingSpec& training = config.training;
    return Need{
        *outcome.growth * f64(training.train_iters * training.global_batch_size * config.model.seq_length),
        "tokens"};
}

const char* verdict_name(const Outcome& outcome) {
    if (outcome.against.empty()) return "baseline";
    return outcome.arm == kControlArm ? "noise floor" : name_of(outcome.verdict);
}

// "pass", "miss, 1 diverged", "inconclusive, 7 seeds would decide"
std::string verdict_text(const Outcome& outcome, const Config& config) {
    std::string text = verdict_name(outcome);
    if (outcome.diverged > 0) text += fmt::format(", {} diverged", outcome.diverged);
    if (outcome.against.empty() || outcome.arm == kControlArm) return text;
    if (const auto need = need_to_decide(outcome, config))
        text += fmt::format(", {} {} would decide",
                            need->count < 1000 ? fmt::format("{:.0f}", need->count) : format_si(need->count),
                            need->of);
    return text;
}

json difference_json(const Difference& d, double base) {
    const double percent = kPercent / base, half = d.half_width();
    return {{"mean_nats", d.mean},
            {"interval_nats", {d.mean - half, d.mean + half}},
            {"mean_percent", d.mean * percent},
            {"interval_percent", {(d.mean - half) * percent, (d.mean + half) * percent}},
            {"standard_error_nats", d.error},
            {"degrees_of_freedom", d.freedom},
            {"seeds", d.pairs},
            {"noise", name_of(d.noise)},
            {"detectable_percent", d.detectable() * percent}};
}

json pooled_json(const PooledVariance& pooled) {
    return {{"deviation_nats", std::sqrt(pooled.variance)},
            {"degrees_of_freedom", pooled.freedom},
            {"p", pooled.p},
            {"pooled", pooled.same}};
}

// Keys with spaces are those of earlier versions; with several seeds costs are of the first.
json arm_json(const Outcome& o, json keys, const Config& config) {
    std::vector<int64_t> seeds;
    for (const Run* run : o.runs) seeds.push_back(run->seed);
    std::string name = o.arm;
    std::ranges::replace(name, ' ', '_');
    json arm = {{"arm", o.arm},
                {"name", name},
                {"seeds", seeds},
                {"diverged", o.diverged},
                {"losses", o.losses},
                {"held_out_losses", o.held_out_losses},
                {"keys", std::move(keys)},
                {"verdict", verdict_name(o)}};
    if (!o.runs.empty()) {
        arm.update(o.runs.front()->costs);
        arm["held out"] = mean_of(o.held_out_losses);
    }
    if (o.training.pairs == 0) return arm;
    arm.update({{"against", o.against},
                {"training_difference", difference_json(o.training, o.base)},
                {"held_out_difference", difference_json(o.held_out, o.base_held_out)},
                {"ratio_to_control", o.to_control ? json(*o.to_control) : nullptr},
                {"overlaps_control", o.overlaps_control},
                {"max relative error", o.smoothed.max},
                {"mean relative error", o.smoothed.mean},
                {"raw max", o.smoothed.raw_max},
                {"signed, end", o.smoothed.signed_last},
                {"grad norm ratio", o.smoothed.grad_norm_ratio}});
    if (const auto need = need_to_decide(o, config)) arm[fmt::format("{}_to_decide", need->of)] = need->count;
    return arm;
}

}  // namespace

std::string percent_text(const Difference& d, double base) {
    if (d.pairs == 0 || !(base > 0)) return "-";
    const double half_width = d.half_width() / base * kPercent;
    return fmt::format("{}{} %", format_signed(d.mean / base * kPercent, 3),
                       std::isfinite(half_width) ? fmt::format(" ± {:.3f}", half_width) : "");
}

Cells outcome_cells(const Outcomes& outcomes, const Config& config) {
    Cells cells = {{"arm", "seeds", "loss", "difference", "nats", "held out", "/ control", "detects",
                    "max error", "ms", "verdict"}};
    for (const Outcome& o : outcomes.arms) {
        const auto percent = [&](double ratio) {
            return o.pairs.empty() || !std::isfinite(ratio) ? "-" : format_percent(ratio, 3);
        };
        const int64_t seeds = o.against.empty() ? std::ssize(o.runs) : std::ssize(o.pairs);
        const double loss =
            o.against.empty() ? mean_of(o.losses) : o.base + o.training.mean;  // of these seeds
        cells.push_back(
            {label_of(o, outcomes), format_count(seeds), seeds == 0 ? "-" : format_fixed(loss, 4),
             percent_text(o.training, o.base), o.pairs.empty() ? "-" : format_signed(o.training.mean, 4),
             percent_text(o.held_out, o.base_held_out), o.to_control ? format_fixed(*o.to_control, 1) : "-",
             percent(o.training.detectable() / o.base), percent(o.smoothed.max),
             o.runs.empty() ? "-"
                            : format_fixed(o.runs.front()->costs.value("seconds per step", 0.0) * 1e3, 0),
             verdict_text(o, config)});
    }
    return cells;
}

std::string outcome_table(const Cells& cells) {
    const auto& headers = cells.front();
    Table table({headers.front()}, {headers.begin() + 1, headers.end() - 1}, {headers.back()});
    for (size_t i = 1; i < cells.size(); ++i) table.add_row(cells[i]);
    return table.text(2);
}

std::string table_heading(const Outcomes& outcomes, const Config& config) {
    return fmt::format(
        "mean loss of iterations {} to {}: difference to {}, or to the arm named, with the same seed, and of "
        "the held-out loss;\n± 95 % interval, limit {}",
        outcomes.window.first + 1, outcomes.window.end, outcomes.arms.front().arm,
        format_percent(limit_of(config)));
}

std::string control_text(const Outcomes& outcomes) {
    if (!outcomes.noise)
        return fmt::format("No noise floor: {}",
                           outcomes.find(kControlArm) != nullptr
                               ? "the control arm has no seed in common with its baseline"
                               : "no control arm ran (validate.control_arm)");
    const auto names = [&](bool overlapping) {
        std::vector<std::string> arms;
        for (const Outcome& o : outcomes.arms)
            if (!o.pairs.empty() && o.arm != kControlArm && o.overlaps_control == overlapping)
                arms.push_back(o.arm);
        return arms.empty() ? "none" : fmt::format("{}", fmt::join(arms, ", "));
    };
    return fmt::format("Intervals against that of {}: overlap {}; apart {}", kControlArm, names(true),
                       names(false));
}

std::string noise_text(const Outcomes& outcomes) {
    if (outcomes.seeds.size() < 2)
        return "Intervals: noise within one run only, from blocks of steps; another seed can differ by more "
               "(--seeds 1,2,3)";
    const PooledVariance& pooled = outcomes.training;
    std::vector<std::string> single;  // arms with one pair of runs
    bool pools = false;
    for (const Outcome& o : outcomes.arms) {
        if (o.training.noise == Noise::run) single.push_back(o.arm);
        pools |= o.training.noise == Noise::pooled;
    }
    return fmt::format(
        "Intervals: over {} seeds, Student's t{}{}", outcomes.seeds.size(),
        pools || (pooled.freedom > 0 && !pooled.same)
            ? fmt::format("; variances of the arms {} (Bartlett, p = {:.2f})", pools ? "pooled" : "differ",
                          pooled.p)
            : "",
        single.empty() ? "" : fmt::format("; noise within one run only: {}", fmt::join(single, ", ")));
}

std::string answer_text(const Outcomes& outcomes, const Config& config) {
    const Outcome* worst = nullptr;
    for (const Outcome& o : outcomes.arms) {
        if (o.pairs.empty() || o.against != outcomes.arms.front().arm || o.arm == kControlArm) continue;
        if (worst == nullptr || std::abs(o.training.mean) > std::abs(worst->training.mean)) worst = &o;
    }
    if (outcomes.judged == 0)
        return fmt::format("no arm was compared with {} (validate.recipes, --arm)",
                           outcomes.arms.front().arm);
    if (worst == nullptr) return "no arm and its baseline ended with the same seed";
    const int64_t seeds = worst->training.pairs;
    return fmt::format("{} {} from the loss of {} {}, limit {:.3g} %", worst->arm,
                       percent_text(worst->training, worst->base), outcomes.arms.front().arm,
                       seeds > 1 ? fmt::format("over {} seeds", seeds) : "with one seed",
                       limit_of(config) * kPercent);
}

json validate_json(const Outcomes& outcomes, const std::vector<Arm>& arms, const Config& config) {
    const ValidateSpec& v = config.validate;
    json result = {{"bar", v.max_relative_loss_error},
                   {"noise floor", outcomes.noise ? json(*outcomes.noise) : nullptr},
                   {"warmup_iters", v.warmup_iters},
                   {"ema_decay", v.ema_decay},
                   {"iterations", config.training.train_iters},
                   {"seeds", outcomes.seeds},
                   {"confidence", 0.95},
                   {"compared_iterations", {outcomes.window.first + 1, outcomes.window.end}},
                   {"variance_of_training", pooled_json(outcomes.training)},
                   {"variance_of_held_out", pooled_json(outcomes.held_out)},
                   {"verdict", name_of(outcomes.verdict)}};
    for (size_t i = 0; i < outcomes.arms.size(); ++i)
        result["arms"].push_back(arm_json(outcomes.arms[i], arms[i].keys, config));
    return result;
}

}  // namespace fp8flow::report
