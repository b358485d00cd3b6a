// SPDX-License-Identifier: MIT
// Reads profiles, predicts each arm, and sums up.
#include "model/predict/check.h"

#include "kernels/core/error.h"
#include "model/predict/time.h"
#include "model/report/table.h"
#include "model/safetensors/header.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>
#include <numeric>

namespace fp8flow::predict {

namespace {

using namespace report;

constexpr const char* kEarlier = "of a program before the calibration";

// The arms that a calibration is made from: see calibrate.cpp.
bool gave(const Calibration& calibration, const ProfileRecord& record, const MeasuredArm& arm) {
    if (arm.name != recipe_name(arm.config.precision.recipe)) return false;
    return record.file == calibration.source ||
           (record.file == calibration.launches_from && &arm == record.arms.data());
}

std::string reason_apart(const ProfileRecord& record, const MeasuredArm& arm, const Gpu& gpu) {
    if (gave(gpu.calibration, record, arm)) return "gave the calibration";
    if (const std::string left_out = not_covered(arm.config); !left_out.empty()) return left_out;
    return record.date.substr(0, 10) < gpu.calibration.date ? kEarlier : "";
}

using Widths = std::pair<int64_t, int64_t>;  // of a model: hidden size, expert width
Widths widths_of(const Config& config) { return {config.model.hidden_size, config.moe.moe_ffn_hidden_size}; }

std::vector<std::string> files_of(const std::vector<std::string>& paths) {
    namespace fs = std::filesystem;
    std::vector<std::string> files;
    for (const std::string& path : paths) {
        std::error_code error;
        if (!fs::is_directory(path, error)) {
            require(fs::is_regular_file(path, error), ExitCode::usage,
                    "--check: got {}, want a file or a folder", printable(path));
            files.push_back(path);
            continue;
        }
        for (const auto& entry : fs::directory_iterator(path, error))
            if (entry.is_regular_file(error) && entry.path().extension() == ".json" &&
                is_profile(entry.path().string()))
                files.push_back(entry.path().string());
    }
    std::sort(files.begin(), files.end());
    return files;
}

CheckRow row_of(const ProfileRecord& record, const MeasuredArm& arm, const Gpu& gpu) {
    const StepTime time = predict_step(arm.config, record.ranks, gpu, {.clock = arm.clock});
    // a layer of two micro-batches in turns lasts as long as both
    const bool turns = arm.config.schedule.overlap_moe_expert_parallel_comm;
    return {.file = record.file,
            .arm = arm.name,
            .commit = record.commit,
            .recipe = std::string(recipe_name(arm.config.precision.recipe)),
            .ranks = record.ranks,
            .clock = arm.clock,
            .layer = turns ? 0 : time.layer,
            .layer_measured = turns ? 0 : arm.layer,
            .step = time.step,
            .step_measured = arm.step,
            .apart = reason_apart(record, arm, gpu)};
}

CheckSummary summary_of(const std::vector<CheckRow>& rows) {
    CheckSummary summary;
    double layers = 0, steps = 0;
    for (const CheckRow& row : rows) {
        ++summary.runs;
        summary.gpus = std::max(summary.gpus, row.ranks);
        const double layer = std::abs(row.layer_error()), step = std::abs(row.step_error());
        summary.worst_layer = std::max(summary.worst_layer, layer);
        summary.worst_step = std::max(summary.worst_step, step);
        summary.mean_layer += layer;
        summary.mean_step += step;
        layers += row.layer_measured > 0 ? 1 : 0;
        steps += row.step_measured > 0 ? 1 : 0;
    }
    summary.mean_layer /= std::max(layers, 1.0);
    summary.mean_step /= std::max(steps, 1.0);
    return summary;
}

std::string summary_text(const CheckSummary& s) {
    return fmt::format("Layer: mean absolute error {}, worst {}. Step: mean {}, worst {}.\n",
                       format_percent(s.mean_layer, 1), format_percent(s.worst_layer, 1),
                       format_percent(s.mean_step, 1), format_percent(s.worst_step, 1));
}

std::vector<CheckRow> rows_where(const std::vector<CheckRow>& rows, const auto& wanted) {
    std::vector<CheckRow> result;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(result), wanted);
    return result;
}
bool counts(const CheckRow& row) { return row.apart.empty(); }

// The same of the runs of each recipe, and of each number of GPUs.
std::string groups_text(const std::vector<CheckRow>& rows) {
    std::map<std::string, std::vector<CheckRow>> groups;
    for (const CheckRow& row : rows) {
        if (!row.apart.empty()) continue;
        groups[row.recipe].push_back(row);
        groups[fmt::format("{} GPU{}", row.ranks, row.ranks == 1 ? "" : "s")].push_back(row);
    }
    std::string out;
    for (const auto& [name, own] : groups)
        out += fmt::format("  {:<14} {:>3} runs. {}", name, own.size(), summary_text(summary_of(own)));
    const auto earlier = rows_where(rows, [](const CheckRow& row) { return row.apart == kEarlier; });
    if (!earlier.empty())
        out += fmt::format("Not counted, of earlier programs: {} runs. {}", earlier.size(),
                           summary_text(summary_of(earlier)));
    return out;
}

std::string milliseconds(double seconds) {
    return seconds > 0 ? format_fixed(seconds * 1e3, seconds < 10e-3 ? 3 : 2) : "-";
}
std::string signed_percent(double error, bool known) {
    return known ? fmt::format("{:+.1f} %", error * 100) : "-";
}

}  // namespace

Check check_profiles(const std::vector<std::string>& paths, const Gpu& gpu) {
    Check check;
    std::vector<ProfileRecord> records;
    std::vector<Widths> calibrated;
    for (const std::string& path : files_of(paths)) {
        records.push_back(read_profile(path));
        const ProfileRecord& record = records.back();
        for (const MeasuredArm& arm : record.arms)
            if (gave(gpu.calibration, record, arm)) calibrated.push_back(widths_of(arm.config));
    }
    for (const ProfileRecord& record : records) {
        if (!is_kind(record.device, gpu.sheet.gpu)) {
            check.skipped.push_back(fmt::format("{}: of {}", record.file, printable(record.device)));
            continue;
        }
        for (const MeasuredArm& arm : record.arms) {
            if (can_predict(arm.config, gpu)) {
                check.rows.push_back(row_of(record, arm, gpu));
                check.rows.back().other_model = std::find(calibrated.begin(), calibrated.end(),
                                                          widths_of(arm.config)) == calibrated.end();
            } else
                check.skipped.push_back(fmt::format("{}: {}", record.file, arm.name));
        }
    }
    require(!check.rows.empty(), ExitCode::usage, "--check: no profile of {} that can be compared",
            gpu.sheet.gpu);
    std::stable_sort(check.rows.begin(), check.rows.end(),
                     [](const auto& a, const auto& b) { return a.apart.empty() && !b.apart.empty(); });
    check.summary = summary_of(rows_where(check.rows, counts));
    const auto others =
        rows_where(check.rows, [](const CheckRow& row) { return counts(row) && row.other_model; });
    if (!calibrated.empty() && !others.empty()) check.other_models = summary_of(others);
    return check;
}

std::string check_text(const Check& check, const Gpu& gpu) {
    Table table({{"profile", Align::left},
                 {"recipe", Align::left},
                 {"commit", Align::left},
                 {"GPUs"},
                 {"MHz"},
                 {"layer ms"},
                 {"measured"},
                 {"error"},
                 {"step ms"},
                 {"measured"},
                 {"error"},
                 {"apart", Align::left}});
    bool apart = false;
    for (const CheckRow& row : check.rows) {
        if (!apart && !row.apart.empty()) table.add_rule();
        apart = !row.apart.empty();
        table.add_row({row.file, row.arm, row.commit, std::to_string(row.ranks),
                       row.clock > 0 ? format_fixed(row.clock * 1e-6, 0) : "-", milliseconds(row.layer),
                       milliseconds(row.layer_measured),
                       signed_percent(row.layer_error(), row.layer_measured > 0), milliseconds(row.step),
                       milliseconds(row.step_measured),
                       signed_percent(row.step_error(), row.step_measured > 0), row.apart});
    }
    std::string out =
        fmt::format("Predicted / measured, {}, calibrated from {} ({}, {})\n\n{}\n", gpu.sheet.gpu,
                    gpu.calibration.source, gpu.calibration.commit, gpu.calibration.date, table.text());
    out += fmt::format("{} runs count. {}", check.summary.runs, summary_text(check.summary));
    if (check.other_models)
        out += fmt::format("Of other models than those that gave the calibration: {} runs. {}",
                           check.other_models->runs, summary_text(*check.other_models));
    out += groups_text(check.rows);
    for (const std::string& one : check.skipped) out += fmt::format("  not compared: {}\n", one);
    return out;
}

std::string check_json(const Check& check, const Gpu& gpu) {
    using nlohmann::ordered_json;
    const CheckSummary& s = check.summary;
    ordered_json json = {{"gpu", gpu.sheet.gpu},
                         {"calibration",
                          {{"source", gpu.calibration.source},
                           {"commit", gpu.calibration.commit},
                           {"date", gpu.calibration.date}}},
                         {"runs", s.runs},
                         {"mean layer error", s.mean_layer},
                         {"worst layer error", s.worst_layer},
                         {"mean step error", s.mean_step},
                         {"worst step error", s.worst_step},
                         {"rows", ordered_json::array()},
                         {"not compared", check.skipped}};
    for (const CheckRow& row : check.rows)
        json["rows"].push_back({{"file", row.file},
                                {"name", row.arm},
                                {"commit", row.commit},
                                {"ranks", row.ranks},
                                {"clock hertz", row.clock},
                                {"layer seconds", row.layer},
                                {"layer seconds measured", row.layer_measured},
                                {"step seconds", row.step},
                                {"step seconds measured", row.step_measured},
                                {"other model", row.other_model},
                                {"apart", row.apart}});
    return json.dump(2) + "\n";
}

}  // namespace fp8flow::predict
