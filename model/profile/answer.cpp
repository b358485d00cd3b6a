// SPDX-License-Identifier: MIT
// What `profile` prints at its end: layer times and speed-ups, the largest stages, and what to change next.
#include "kernels/core/error.h"
#include "model/config/fields.h"
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
    const auto any = [&](auto known) { return std::any_of(profile.arms.begin(), profile.arms.end(), known); };
    const bool clock = any([](const ArmProfile& arm) { return arm.whole.clock.median > 0; });
    const bool energy = any([](const ArmProfile& arm) { return arm.passes_joules_per_step.has_value(); });
    std::vector<Table::Column> columns = {
        {"recipe", Align::left}, {"layer ms"}, {"min"}, {"max"}, {"speed-up"}, {"TFLOP/s"}};
    if (clock) columns.push_back({"M cycles"});
    if (energy) columns.push_back({"mJ/token"});
    columns.insert(columns.end(), {{"saved"}, {"step ms"}});
    Table table(columns);
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
        cells.insert(cells.end(), {format_bytes(arm.saved_total()), milliseconds(arm.step_seconds)});
        table.add_row(cells);
    }
    std::string text = table.text(2);
    if (shown < profile.arms.size())
        text += fmt::format("  {} more: profile.log\n", profile.arms.size() - shown);
    if (unresolved) text += fmt::format("  {}: {}\n", kNotResolved, kResolvedRule);
    return text;
}

// What the time of the stages hides.
std::string rows_and_waiting(const Profile& profile, const ArmProfile& arm) {
    std::string text = fmt::format("  padding: {} of the GEMMs' rows", format_percent(arm.padding_share, 1));
    if (profile.ranks > 1)
        text += fmt::format("; plan, dispatch, combine: {} ms, {} of it waiting for other ranks",
                            milliseconds(arm.wire_seconds), milliseconds(arm.waiting_seconds()));
    return text + "\n";
}

// Of a whole model: the parts that lose most.
std::string parts_text(const ArmProfile& arm) {
    const auto is_attention = [](const ProfileRow& row) { return row.part == "attention"; };
    if (std::none_of(arm.rows.begin(), arm.rows.end(), is_attention)) return "";
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
    std::stable_sort(rows.begin(), rows.end(),
                     [](const auto* a, const auto* b) { return a->seconds.median > b->seconds.median; });
    if (rows.size() > kShownStages) rows.resize(kShownStages);
    return rows;
}

std::string stage_table(const ArmProfile& base, const ArmProfile& arm) {
    std::vector<Table::Column> columns = {
        {"stage", Align::left}, {"direction", Align::left}, {"ms"}, {"of layer"}, {"of ceiling"}};
    if (&base != &arm) columns.push_back({base.name + " ms"});
    Table table(columns);
    for (const ProfileRow* row : largest_stages(arm)) {
        std::vector<std::string> cells = {row->stage, row->direction, milliseconds(row->seconds.median),
                                          format_percent(row->share, 0), ceiling_text(*row)};
        if (&base != &arm) {
            const ProfileRow* other = base.find(row->stage, row->direction);
            cells.push_back(other == nullptr ? "-" : milliseconds(other->seconds.median));
        }
        table.add_row(cells);
    }
    return table.text(2);
}

struct Advice {
    double gain = 0;  // at most, as a share of the layer
    std::string setting, why;
};

// Collects settings that this configuration accepts and that promise enough.
class Adviser {
public:
    Adviser(const Profile& profile, const std::vector<Config>& configs, size_t own)
        : profile_(profile),
          configs_(configs),
          arm_(profile.arms[own]),
          config_(configs[own]),
          gpus_(profile.provenance.gpus > 0),
          layer_(arm_.whole.layer.median) {
        for (const ProfileRow& row : arm_.rows) stages_ += row.part == kMoeLayer ? row.seconds.median : 0;
    }

    std::vector<Advice> advice() {
        if (layer_ <= 0 || stages_ <= 0) return {};
        if (arm_.whole.layer.samples < kFewestSamples)
            advice_.push_back({1, "--steps 10", "fewer than 3 measured steps have no spread"});
        fastest_arm();
        wire();
        if (gpus_) {
            host();
            streams();
            gemm_size();
        } else {
            advice_.push_back({kWorthwhile, "the same command on GPUs",
                               "CPUs convert FP8 in software, so these speed-ups say nothing about GPUs"});
        }
        std::stable_sort(advice_.begin(), advice_.end(),
                         [](const Advice& a, const Advice& b) { return a.gain > b.gain; });
        if (advice_.size() > kShownAdvice) advice_.resize(kShownAdvice);
        return std::move(advice_);
    }

private:
    std::string of_layer(double seconds) const {
        return fmt::format("{} ms ({:.0f} %) per layer", milliseconds(seconds), 100 * seconds / stages_);
    }

    bool accepts(const std::string& key, const std::string& value) const {
        Config changed = config_;
        field_named(key).set(changed, WrittenValue{false, {value}});
        try {
            check_config(changed, static_cast<int64_t>(profile_.ranks));
        } catch (const Error&) {
            return false;
        }
        return !diff_configs(config_, changed).empty();
    }

    void add(double gain, const std::string& key, const std::string& value, const std::string& why) {
        if (gain >= kWorthwhile && accepts(key, value))
            advice_.push_back({gain, fmt::format("--set {}={}", key, value), why});
    }

    double stage_seconds(const char* stage, const char* direction) const {
        const ProfileRow* row = arm_.find(stage, direction);
        return row == nullptr ? 0 : row->seconds.median;
    }

    void fastest_arm() {
        size_t best = configs_.size();
        for (size_t i = 0; i < configs_.size(); ++i) {
            const Spread& layer = profile_.arms[i].whole.layer;
            if (resolved(layer, arm_.whole.layer) &&
                layer.median < (best == configs_.size() ? layer_ : profile_.arms[best].whole.layer.median))
                best = i;
        }
        if (best == configs_.size()) return;
        std::string setting;
        for (const std::string& line : diff_configs(config_, configs_[best])) {
            const std::string key = line.substr(0, line.find(':')), value = line.substr(line.find("| ") + 2);
            if (key == "precision.recipe" && !gpus_) return;
            // the other differences follow from the recipe's
            setting = key == "precision.recipe" ? "" : setting + (setting.empty() ? "" : " ");
            setting += fmt::format("--set {}={}", key, value);
            if (key == "precision.recipe") break;
        }
        const double seconds = profile_.arms[best].whole.layer.median;
        advice_.push_back(
            {1 - seconds / layer_, setting,
             fmt::format("{} takes {} ms per layer here, {} takes {} ms", profile_.arms[best].name,
                         milliseconds(seconds), arm_.name, milliseconds(layer_))});
    }

    void wire() {
        if (profile_.ranks == 1) return;
        const double alone = arm_.wire_alone_seconds();
        add(alone / stages_, "schedule.overlap_moe_expert_parallel_comm", "true",
            fmt::format("the exchange takes {} with no compute in parallel; a second micro-batch can fill it",
                        of_layer(alone)));
        if (profile_.routing == "data" && arm_.rank_load > 1)
            add(1 - 1 / arm_.rank_load, "profile.routing", "balanced",
                fmt::format("the fullest rank has {:.2f} x the mean rows; this shows the cost",
                            arm_.rank_load));
    }

    void host() {
        if (arm_.host_seconds > 0.9 * arm_.step_seconds)
            add(0.5, "schedule.cuda_graph_impl", "full_iteration",
                fmt::format("the host needs {} ms to launch a step of {} ms", milliseconds(arm_.host_seconds),
                            milliseconds(arm_.step_seconds)));
        if (arm_.host_stops.value_or(0) > 0)
            add(0.1, "parallel.moe_message_sizes", "fixed",
                fmt::format("the host waits {} times per step for the GPU", *arm_.host_stops));
    }

    void streams() {
        const double shared = stage_seconds("shared expert", "forward");
        const double before = stage_seconds("route", "forward") + stage_seconds("plan", "forward") +
                              stage_seconds("dispatch", "forward");
        add(std::min(shared, before) / stages_, "schedule.moe_shared_expert_overlap", "true",
            fmt::format("the shared expert's forward, {}, can run in parallel with dispatch",
                        of_layer(shared)));
        const double wgrad = stage_seconds("fc1 wgrad", "backward"),
                     combine = stage_seconds("combine", "backward");
        add(std::min(wgrad, combine) / stages_, "schedule.delay_wgrad_compute", "true",
            fmt::format("the backward combine, {}, can run in parallel with fc1 wgrad", of_layer(combine)));
    }

    void gemm_size() {
        constexpr double kFewRows = 512, kFarFromCeiling = 0.7;
        const double rows = arm_.tokens * static_cast<double>(config_.moe.moe_router_topk) *
                            static_cast<double>(config_.parallel.expert_model_parallel_size) /
                            static_cast<double>(config_.moe.num_experts);
        double seconds = 0, ideal = 0;
        for (const ProfileRow& row : arm_.rows) {
            if (row.part != kMoeLayer || !row.stage.starts_with("fc")) continue;
            seconds += row.seconds.median;
            ideal += row.ideal_seconds;
        }
        if (rows < kFewRows && ideal > 0 && ideal < kFarFromCeiling * seconds)
            add((seconds - ideal) / stages_ / 2, "training.micro_batch_size",
                std::to_string(2 * config_.training.micro_batch_size),
                fmt::format(
                    "expert GEMMs of {:.0f} rows reach {:.0f} % of the ceiling; larger ones reach more", rows,
                    100 * ideal / seconds));
    }

    const Profile& profile_;
    const std::vector<Config>& configs_;
    const ArmProfile& arm_;
    const Config& config_;
    bool gpus_;
    double layer_, stages_ = 0;  // seconds without the stage timer, and with it
    std::vector<Advice> advice_;
};

std::string advice_text(const std::vector<Advice>& advice) {
    if (advice.empty())
        return "what to try next: no setting promises 3 % of the layer; see the stages far from the "
               "ceiling\n";
    std::string text = "what to try next\n";
    for (const Advice& one : advice) text += fmt::format("  {}\n      {}\n", one.setting, one.why);
    return text;
}

}  // namespace

std::string answer_text(const Profile& profile, const std::vector<Config>& configs, std::string_view recipe) {
    const auto found = std::find_if(profile.arms.begin(), profile.arms.end(),
                                    [&](const ArmProfile& arm) { return arm.recipe == recipe; });
    const size_t own = found != profile.arms.end() ? static_cast<size_t>(found - profile.arms.begin())
                                                   : profile.arms.size() - 1;
    const ArmProfile& arm = profile.arms[own];
    return fmt::format(
        "MoE layer, forward + backward, {} routing: median over {} steps, slowest rank of each\n{}\n"
        "largest stages of {} (of ceiling: time at the rates measured here, over their own time)\n{}{}{}\n{}",
        profile.routing, profile.steps, layer_table(profile), arm.name,
        stage_table(profile.arms.front(), arm), rows_and_waiting(profile, arm), parts_text(arm),
        advice_text(Adviser(profile, configs, own).advice()));
}

}  // namespace fp8flow::profile
