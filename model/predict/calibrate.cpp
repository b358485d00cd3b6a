// SPDX-License-Identifier: MIT
// Shares of stages from one profile, the cost of a launch and attention from that of a small model.
#include "model/predict/calibrate.h"

#include "kernels/core/error.h"
#include "model/predict/time.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <regex>

namespace fp8flow::predict {

namespace {

// A stage that a launch alone explains keeps this part of its time as work.
constexpr double kLeastWork = 0.25;

std::string key_of_row(const MeasuredRow& row) { return row.part + "/" + row.stage + "/" + row.direction; }

// Time between stages belongs to the marks.
bool between_stages(const MeasuredRow& row) {
    const bool part = row.part == "moe layer" || row.part == "attention" || row.part == "dense layer" ||
                      row.part == "final norm";
    return part && row.stage == row.part;
}

std::map<std::string, Work> counts_of(const MeasuredArm& arm, int64_t ranks) {
    const TrainingSpec& training = arm.config.training;
    const double batches = static_cast<double>(training.global_batch_size) /
                           static_cast<double>(training.micro_batch_size * ranks);
    const double accumulates = (batches - 1) / batches;
    const LayerWork layer = layer_work(arm.config, arm.config.precision, accumulates);
    std::map<std::string, Work> counts;
    for (const auto& works : {layer.moe, layer.attention, layer.dense})
        for (const Work& work : works) counts[key_of(work)] = work;
    // their rows are of a whole step
    for (Work work : ends_work(arm.config, accumulates)) {
        work.launches *= batches;
        work.bytes *= batches;
        work.bf16_flops *= batches;
        counts[key_of(work)] = work;
    }
    for (const Work& work : update_work(arm.config, ranks)) {
        const auto [found, fresh] = counts.emplace(key_of(work), work);
        if (!fresh) found->second += work;
    }
    return counts;
}

double stage_seconds(const MeasuredArm& arm) {
    double sum = 0;
    for (const MeasuredRow& row : arm.rows)
        if (row.part == "moe layer" && !between_stages(row)) sum += row.seconds;
    return sum;
}

const MeasuredRow* find_row(const MeasuredArm& arm, const std::string& key) {
    const auto found = std::find_if(arm.rows.begin(), arm.rows.end(),
                                    [&](const auto& row) { return key_of_row(row) == key; });
    return found == arm.rows.end() ? nullptr : &*found;
}

class ArmShares {
public:
    ArmShares(const MeasuredArm& arm, const ProfileRecord& record, const Datasheet& sheet, double launch)
        : arm_(arm), record_(record), sheet_(sheet), launch_(launch), counts_(counts_of(arm, record.ranks)) {}

    // What a dispatch takes beyond its rows, where no rank is late.
    double exchange_seconds() const {
        return std::max(launch_, std::min(after_wire("moe layer/dispatch/forward"),
                                          after_wire("moe layer/dispatch/backward")));
    }

    // Ranks that are late: what combines take beyond their rows, of the experts' time.
    double late_share(double exchange, const RecipeShares& shares) const {
        double waited = 0, worked = 0;
        for (const char* direction : {"forward", "backward"}) {
            const std::string key = std::string("moe layer/combine/") + direction;
            const auto share = shares.shares.find(key);
            if (record_.ranks == 1 || share == shares.shares.end()) return 0;
            const double local = roofline_seconds(counts_.at(key), sheet_, arm_.clock) / share->second;
            waited += after_wire(key) - exchange -
                      std::max(0.0, local - counts_.at(key).wire_bytes / sheet_.peer_rate);
        }
        for (const auto& [key, work] : counts_)
            if (const MeasuredRow* row = find_row(arm_, key); row != nullptr && work.of_experts())
                worked += row->seconds;
        return worked > 0 ? std::max(waited, 0.0) / worked : 0;
    }

    RecipeShares shares(double exchange) const {
        RecipeShares result{
            .clock = arm_.clock, .whole_over_stages = arm_.layer / stage_seconds(arm_), .shares = {}};
        for (const auto& [key, work] : counts_) {
            const MeasuredRow* row = find_row(arm_, key);
            if (row == nullptr || row->seconds <= 0 || work.part == "attention") continue;
            if (work.stage == "dispatch" || work.stage == "combine") continue;
            if (work.part == "gradient reduction" && work.wire_bytes <= 0) continue;  // one rank
            result.shares[key] = share_of(work, *row, exchange);
        }
        add_exchange(result, exchange);
        return result;
    }

private:
    double after_wire(const std::string& key) const {
        const MeasuredRow* row = find_row(arm_, key);
        return row == nullptr ? 0 : row->seconds - counts_.at(key).wire_bytes / sheet_.peer_rate;
    }

    double share_of(const Work& work, const MeasuredRow& row, double exchange) const {
        const bool reduction = work.wire == Wire::dense_reduction || work.wire == Wire::expert_reduction;
        const bool waits = work.wire != Wire::none && record_.ranks > 1 && !reduction;
        const double fixed = waits ? std::max(exchange, work.launches * launch_) : work.launches * launch_;
        const double local = std::max(row.seconds - fixed, kLeastWork * row.seconds);
        if (reduction) return work.wire_bytes / sheet_.peer_rate / local;
        return roofline_seconds(work, sheet_, arm_.clock) / local;
    }

    // One GPU shows what moving rows through memory takes; on several it is hidden behind the wire, and rows
    // are taken to move as they do in SwiGLU.
    void add_exchange(RecipeShares& result, double exchange) const {
        for (const char* stage : {"dispatch", "combine"})
            for (const char* direction : {"forward", "backward"}) {
                const std::string key = std::string("moe layer/") + stage + "/" + direction;
                const MeasuredRow* row = find_row(arm_, key);
                if (row == nullptr) continue;
                const auto rows = result.shares.find("moe layer/swiglu/forward");
                result.shares[key] = record_.ranks > 1 && rows != result.shares.end()
                                         ? rows->second
                                         : share_of(counts_.at(key), *row, exchange);
            }
    }

    const MeasuredArm& arm_;
    const ProfileRecord& record_;
    const Datasheet& sheet_;
    double launch_;
    std::map<std::string, Work> counts_;
};

// Serial arms of recipes that have formulas.
std::vector<const MeasuredArm*> plain_arms(const ProfileRecord& record) {
    std::vector<const MeasuredArm*> arms;
    for (const MeasuredArm& arm : record.arms)
        if (arm.name == recipe_name(arm.config.precision.recipe) && knows(arm.config.precision))
            arms.push_back(&arm);
    return arms;
}

void add_shares(const CalibrationSources& sources, const Datasheet& sheet, double launch,
                Calibration& result) {
    const ProfileRecord& record = *sources.shares;
    const auto arms = plain_arms(record);
    require(!arms.empty(), ExitCode::usage, "{}: no recipe that predictions know", record.file);
    double exchange = 0;
    for (const MeasuredArm* arm : arms) {
        require(arm->clock > 0 && arm->layer > 0, ExitCode::usage, "{}: no clock of {} is recorded",
                record.file, arm->name);
        const double own = ArmShares(*arm, record, sheet, launch).exchange_seconds();
        exchange = exchange > 0 ? std::min(exchange, own) : own;
    }
    if (record.ranks == 1) exchange = launch;
    const bool known = record.ranks <= 2 && sources.exchange_seconds > 0;
    if (known) exchange = sources.exchange_seconds;
    result.launch_seconds = launch;
    result.exchange_seconds = exchange;
    result.late_share = 0;
    for (const MeasuredArm* arm : arms) {
        const ArmShares own(*arm, record, sheet, launch);
        const RecipeShares& shares = result.recipes[arm->name] = own.shares(exchange);
        result.late_share += own.late_share(exchange, shares) / static_cast<double>(arms.size());
    }
    if (known) result.late_share = sources.late_share;
}

// The cost of a launch with which the small model's layer takes what it took.
double fit_launch(const CalibrationSources& sources, const Datasheet& sheet) {
    const auto arms = plain_arms(*sources.launches);
    require(!arms.empty() && arms.front()->clock > 0, ExitCode::usage, "{}: no clock is recorded",
            sources.launches->file);
    const MeasuredArm& arm = *arms.front();
    double low = 0, high = 20e-6;
    for (int i = 0; i < 40; ++i) {
        const double middle = (low + high) / 2;
        Gpu gpu{.sheet = sheet, .calibration = {}, .calibrated = true};
        add_shares(sources, sheet, middle, gpu.calibration);
        const StepTime time = predict_step(arm.config, sources.launches->ranks, gpu, {.clock = arm.clock});
        (time.layer < arm.layer ? low : high) = middle;
    }
    return (low + high) / 2;
}

// `bench` states FLOPs and microseconds, not the clock that a short call under no power limit holds: the
// boost clock, with which profiles of small models agree. Of each head size the largest shape.
void add_core_attention(const std::string& text, const std::string& name, const Datasheet& sheet,
                        Calibration& result) {
    const nlohmann::json rows = nlohmann::json::parse(text, nullptr, false);
    const bool objects = rows.is_array() && std::all_of(rows.begin(), rows.end(),
                                                        [](const auto& row) { return row.is_object(); });
    require(objects, ExitCode::usage, "{}: got something other than a result of bench", name);
    struct Best {
        double flops = 0, share = 0;
    };
    std::map<int64_t, std::array<Best, 2>> best;
    for (const nlohmann::json& row : rows) {
        const std::string op = row.value("op", ""), shape = row.value("shape", "");
        std::smatch match;
        if ((op != "attention" && op != "attention_backward") ||
            !std::regex_search(shape, match, std::regex(" D=([0-9]{1,6}) .*S=([0-9]{1,6})")))
            continue;
        const double flops = row.value("flops", 0.0) * (1 + diagonal_share(std::stod(match[2]))),
                     seconds = row.value("us", 0.0) * 1e-6;
        if (seconds <= 0) continue;
        Best& own = best[std::stoll(match[1])][op == "attention" ? 0 : 1];
        if (flops > own.flops) own = {flops, flops / seconds / sheet.peak()};
    }
    for (const auto& [channels, both] : best)
        if (both[0].share > 0 && both[1].share > 0)
            result.core_attention.push_back({channels, both[0].share, both[1].share});
}

}  // namespace

Calibration calibrate(const CalibrationSources& sources, const Datasheet& sheet) {
    const ProfileRecord& record = *sources.shares;
    Calibration result{.gpu = record.device,
                       .source = record.file,
                       .commit = record.commit,
                       .date = record.date.substr(0, 10),
                       .launches_from = {},
                       .attention_from = {},
                       .recipes = {},
                       .core_attention = {},
                       .check = {},
                       .check_other_models = {}};
    const double launch = sources.launches != nullptr ? fit_launch(sources, sheet) : sources.launch_seconds;
    add_shares(sources, sheet, launch, result);
    if (sources.launches != nullptr) {
        result.launches_from = sources.launches->file;
        const MeasuredArm& arm = *plain_arms(*sources.launches).front();
        const Gpu gpu{.sheet = sheet, .calibration = result, .calibrated = true};
        result.host_seconds = arm.host / predict_step(arm.config, sources.launches->ranks, gpu, {}).launches;
    }
    if (!sources.bench_text.empty()) {
        result.attention_from = sources.bench_name;
        add_core_attention(sources.bench_text, sources.bench_name, sheet, result);
    }
    return result;
}

std::optional<std::string> calibration_of_profile(const std::string& profile_json) {
    const ProfileRecord record = parse_profile(profile_json, "profile.json");
    const auto kind = kind_of_device(record.device);
    const auto arms = plain_arms(record);
    const bool clocks = std::all_of(arms.begin(), arms.end(),
                                    [](const auto* arm) { return arm->clock > 0 && arm->layer > 0; });
    if (!kind || arms.empty() || !clocks) return std::nullopt;
    const Gpu shipped = load_gpu(*kind);
    return calibration_json(calibrate({.shares = &record,
                                       .launch_seconds = shipped.calibration.launch_seconds,
                                       .exchange_seconds = shipped.calibration.exchange_seconds,
                                       .late_share = shipped.calibration.late_share},
                                      shipped.sheet));
}

}  // namespace fp8flow::predict
