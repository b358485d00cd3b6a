// SPDX-License-Identifier: MIT
// What `profile` prints at its end: layer times and speed-ups, the largest stages, and what to change next.
#include "model/config/check.h"
#include "model/profile/profile.h"
#include "model/report/table.h"

#include <fmt/format.h>

#include <algorithm>

namespace fp8flow::profile {

using namespace report;

namespace {

constexpr size_t kShownArms = 7, kShownStages = 5, kShownAdvice = 2, kShownParts = 3;
constexpr double kWorthwhile = 0.03;  // of the layer; a smaller gain is not worth a run

std::string layer_table(const Profile& profile) {
    const auto any = [&](auto known) { return std::ranges::any_of(profile.arms, known); };
    const bool clock = any([](const ArmProfile& arm) { return arm.whole.clock.median > 0; });
    const bool energy = any([](const ArmProfile& arm) { return arm.passes_joules_per_step.has_value(); });
    Table::Headers numbers = {"layer ms", "min", "max", "speed-up", "TFLOP/s"};
    if (clock) numbers.push_back("M cycles");
    if (energy) numbers.push_back("mJ/token");
    numbers.insert(numbers.end(), {"saved", "step ms"});
    Table table({"recipe"}, numbers);
    const size_t shown = std::min(profile.arms.size(), kShownArms);
    bool unresolved = false;
    for (size_t i = 0; i < shown; ++i) {
        const ArmProfile& arm = profile.arms[i];
        const std::string speed_up = speed_up_text(profile, arm);
        unresolved |= speed_up == kNotResolved;
        std::vector<std::string> cells = {arm.name,
                                          milliseconds(arm.whole.layer.median),
                                          milliseconds(arm.whole.layer.min),
                                          milliseconds(arm.whole.layer.max),
                                          speed_up,
                                          fmt::format("{:.3g}", arm.flops_per_second() * 1e-12)};
        if (clock) cells.push_back(cycles_text(arm.whole.cycles));
        if (energy) cells.push_back(energy_text(arm));
        cells.insert(cells.end(),
                     {format_bytes(f64(sum_of(arm.memory.saved))), milliseconds(arm.step_seconds)});
        table.add_row(cells);
    }
    std::string text = table.text(2);
    if (shown < profile.arms.size())
        text += fmt::format("  {} more: profile.log\n", profile.arms.size() - shown);
    if (unresolved) text += fmt::format("  {}: {}\n", kNotResolved, kResolvedRule);
    return text;
}

// Padding and waiting, which are part of the times of the stages.
std::string rows_and_waiting(const Profile& profile, const ArmProfile& arm) {
    std::string text = fmt::format("  padding: {} of the GEMMs' rows", format_percent(arm.padding_share, 1));
    if (profile.ranks > 1)
        text += fmt::format("; plan, dispatch, combine: {} ms, {} of it waiting for other ranks",
                            milliseconds(arm.wire_seconds), milliseconds(arm.waiting_seconds()));
    return text + "\n";
}

// For a whole model: the parts furthest above their ceiling.
std::string parts_text(const ArmProfile& arm) {
    const auto is_attention = [](const ProfileRow& row) { return row.part == "attention"; };
    if (std::ranges::none_of(arm.rows, is_attention)) return "";
    std::string text;
    std::vector<PartTime> parts = parts_above_ceiling(arm.rows);
    parts.resize(std::min(parts.size(), kShownParts));
    for (const PartTime& part : parts)
        text += fmt::format("{} {} {} of {}", text.empty() ? "" : ",", part.name,
                            milliseconds(part.above_ceiling()), milliseconds(part.seconds));
    return "  to improve next (ms of a step above the ceiling, of all)\n   " + text + "\n";
}

std::vector<const ProfileRow*> largest_stages(const ArmProfile& arm) {
    std::vector<const ProfileRow*> rows;
    for (const ProfileRow& row : arm.rows)
        if (row.part == kMoeLayer && row.stage != row.part) rows.push_back(&row);
    std::ranges::stable_sort(
        rows, [](const auto* a, const auto* b) { return a->seconds.median > b->seconds.median; });
    if (rows.size() > kShownStages) rows.resize(kShownStages);
    return rows;
}

std::string stage_table(const ArmProfile& base, const ArmProfile& arm) {
    Table::Headers numbers = {"ms", "of layer", "of ceiling"};
    if (&base != &arm) numbers.push_back(base.name + " ms");
    Table table({"stage", "direction"}, numbers);
    for (const ProfileRow* row : largest_stages(arm)) {
        std::vector<std::string> cells = {row->stage, row->direction, milliseconds(row->seconds.median),
                                          format_percent(row->share, 0), ceiling_text(*row)};
        if (&base != &arm) {
            const ProfileRow* other = find_stage(base.rows, row->stage, row->direction);
            cells.push_back(other == nullptr ? "-" : milliseconds(other->seconds.median));
        }
        table.add_row(cells);
    }
    return table.text(2);
}

struct Advice {
    double gain = 0;  // at most, as a share of the layer
    std::string key, value, why;
};

// Every setting that this run can judge, whether or not the configuration accepts it.
std::vector<Advice> judged_settings(const Profile& profile, const ArmProfile& arm, const Config& config) {
    constexpr double kFewRows = 512, kFarFromCeiling = 0.7;
    double layer = 0, gemms = 0, ideal = 0;  // seconds, by stages
    for (const ProfileRow& row : arm.rows) {
        if (row.part != kMoeLayer) continue;
        layer += row.seconds.median;
        if (!row.stage.starts_with("fc")) continue;
        gemms += row.seconds.median;
        ideal += row.ideal_seconds;
    }
    if (layer <= 0) return {};
    const auto seconds = [&](const char* stage, const char* direction) {
        const ProfileRow* row = find_stage(arm.rows, stage, direction);
        return row == nullptr ? 0 : row->seconds.median;
    };
    const auto of_layer = [&](double part) {
        return fmt::format("{} ms ({:.0f} %) per layer", milliseconds(part), 100 * part / layer);
    };
    const bool gpus = profile.provenance.gpus > 0, several = profile.ranks > 1;
    const double alone = arm.wire_alone_seconds(), shared = seconds("shared expert", "forward"),
                 before = seconds("route", "forward") + seconds("plan", "forward") +
                          seconds("dispatch", "forward"),
                 combine = seconds("combine", "backward"), wgrad = seconds("fc1 wgrad", "backward"),
                 rows = arm.tokens * f64(config.moe.moe_router_topk) *
                        f64(config.parallel.expert_model_parallel_size) / f64(config.moe.num_experts);
    const bool small = rows < kFewRows && ideal > 0 && ideal < kFarFromCeiling * gemms;
    return {
        {several ? alone / layer : 0, "schedule.overlap_moe_expert_parallel_comm", "true",
         fmt::format("the exchange takes {} with no compute in parallel; a second micro-batch can fill it",
                     of_layer(alone))},
        {several && profile.routing == "data" ? 1 - 1 / std::max(arm.rank_load, 1.0) : 0, "profile.routing",
         "balanced",
         fmt::format("the fullest rank has {:.2f} x the mean rows; this shows the cost", arm.rank_load)},
        {gpus && arm.host_seconds > 0.9 * arm.step_seconds ? 0.5 : 0, "schedule.cuda_graph_impl",
         "full_iteration",
         fmt::format("the host needs {} ms to launch a step of {} ms", milliseconds(arm.host_seconds),
                     milliseconds(arm.step_seconds))},
        {gpus && arm.host_stops.value_or(0) > 0 ? 0.1 : 0, "parallel.moe_message_sizes", "fixed",
         fmt::format("the host waits {} times per step for the GPU", arm.host_stops.value_or(0))},
        {gpus ? std::min(shared, before) / layer : 0, "schedule.moe_shared_expert_overlap", "true",
         fmt::format("the shared expert's forward, {}, can run in parallel with dispatch", of_layer(shared))},
        {gpus ? std::min(wgrad, combine) / layer : 0, "schedule.delay_wgrad_compute", "true",
         fmt::format("the backward combine, {}, can run in parallel with fc1 wgrad", of_layer(combine))},
        {gpus && small ? (gemms - ideal) / layer / 2 : 0, "training.micro_batch_size",
         std::to_string(2 * config.training.micro_batch_size),
         fmt::format("expert GEMMs of {:.0f} rows reach {:.0f} % of the ceiling; larger ones reach more",
                     rows, 100 * ideal / std::max(gemms, ideal))}};
}

// Whether it is legal and changes something.
bool accepts(const Config& config, const Advice& advice, int64_t ranks) {
    Config changed = config;
    return set_if_legal(changed, advice.key, advice.value, ranks) && !diff_configs(config, changed).empty();
}

std::string advice_text(const Profile& profile, const ArmProfile& arm, const Config& config) {
    std::vector<Advice> advice = judged_settings(profile, arm, config);
    std::erase_if(advice, [&](const Advice& one) {
        return one.gain < kWorthwhile || !accepts(config, one, profile.ranks);
    });
    for (Advice& one : advice) one.key = fmt::format("--set {}={}", one.key, one.value);
    if (arm.whole.layer.samples < kFewestSamples)
        advice.push_back({1, "--steps 10", "", "fewer than 3 measured steps have no spread"});
    if (profile.provenance.gpus == 0)
        advice.push_back({kWorthwhile, "the same command on GPUs", "",
                          "CPUs convert FP8 in software, so these speed-ups say nothing about GPUs"});
    if (advice.empty())
        return "what to try next: no setting promises 3 % of the layer; see the stages far from the "
               "ceiling\n";
    std::ranges::stable_sort(advice, std::greater{}, &Advice::gain);
    std::string text = "what to try next\n";
    for (size_t i = 0; i < std::min(advice.size(), kShownAdvice); ++i)
        text += fmt::format("  {}\n      {}\n", advice[i].key, advice[i].why);
    return text;
}

}  // namespace

std::string answer_text(const Profile& profile, const std::vector<Config>& configs, std::string_view recipe) {
    const auto found = std::ranges::find(profile.arms, recipe, &ArmProfile::recipe);
    const size_t own =
        found != profile.arms.end() ? to_size(found - profile.arms.begin()) : profile.arms.size() - 1;
    const ArmProfile& arm = profile.arms[own];
    return fmt::format(
        "MoE layer, forward + backward, {} routing: median over {} steps, slowest rank of each\n{}\n"
        "largest stages of {} (of ceiling: time at the rates measured here, over their own time)\n{}{}{}\n{}",
        profile.routing, profile.steps, layer_table(profile), arm.name,
        stage_table(profile.arms.front(), arm), rows_and_waiting(profile, arm), parts_text(arm),
        advice_text(profile, arm, configs[own]));
}

}  // namespace fp8flow::profile
