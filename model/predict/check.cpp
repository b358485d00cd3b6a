// SPDX-License-Identifier: MIT
// Reads profiles, predicts each arm, and sums up.
#include "model/predict/check.h"

#include "kernels/core/error.h"
#include "model/report/run_report.h"
#include "model/report/table.h"
#include "model/safetensors/header.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

namespace fp8flow::predict {

namespace {

using namespace report;
using nlohmann::ordered_json;

constexpr const char* kEarlier = "of a program before the calibration";

// The arms that scripts/calibrate.py takes.
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

// Of a folder all profiles; what else is in it is skipped.
std::vector<ProfileRecord> records_of(const std::vector<std::string>& paths) {
    namespace fs = std::filesystem;
    std::vector<fs::path> files;
    std::error_code error;
    for (const std::string& path : paths) {
        if (fs::is_directory(path, error)) {
            for (const auto& entry : fs::directory_iterator(path, error))
                if (entry.path().extension() == ".json" && is_profile(entry.path())) files.push_back(entry);
        } else {
            require(fs::is_regular_file(path, error), ExitCode::usage,
                    "--check: got {}, want a file or a folder", printable(path));
            files.emplace_back(path);
        }
    }
    std::sort(files.begin(), files.end());
    std::vector<ProfileRecord> records;
    records.reserve(files.size());
    for (const fs::path& file : files) records.push_back(read_profile(file));
    return records;
}

CheckRow row_of(const ProfileRecord& record, const MeasuredArm& arm, const Gpu& gpu) {
    CheckRow row{.file = record.file,
                 .commit = record.commit,
                 .ranks = record.ranks,
                 .arm = arm,
                 .time = predict_step(arm.config, record.ranks, gpu, {.clock = arm.clock}),
                 .apart = reason_apart(record, arm, gpu)};
    // a layer of two interleaved micro-batches lasts as long as both
    row.layer_compared = arm.layer > 0 && !arm.config.schedule.overlap_moe_expert_parallel_comm;
    if (row.layer_compared) row.layer_error = row.time.layer / arm.layer - 1;
    if (arm.step > 0) row.step_error = row.time.step / arm.step - 1;
    return row;
}

CheckSummary summary_of(const std::vector<CheckRow>& rows, const auto& wanted) {
    CheckSummary summary;
    double layers = 0, steps = 0;
    for (const CheckRow& row : rows) {
        if (!wanted(row)) continue;
        ++summary.runs;
        summary.gpus = std::max(summary.gpus, row.ranks);
        const double layer = std::abs(row.layer_error), step = std::abs(row.step_error);
        summary.worst_layer = std::max(summary.worst_layer, layer);
        summary.worst_step = std::max(summary.worst_step, step);
        summary.mean_layer += layer;
        summary.mean_step += step;
        layers += row.layer_compared ? 1 : 0;
        steps += row.arm.step > 0 ? 1 : 0;
    }
    summary.mean_layer /= std::max(layers, 1.0);
    summary.mean_step /= std::max(steps, 1.0);
    return summary;
}
bool counts(const CheckRow& row) { return row.apart.empty(); }

// One line for all runs that count, and for each recipe and number of GPUs.
std::string summaries_text(const Check& check) {
    Table table({{"runs", Align::left}, {"number"}, {"layer, mean"}, {"worst"}, {"step, mean"}, {"worst"}});
    const auto add = [&](const std::string& name, const CheckSummary& s) {
        table.add_row({name, std::to_string(s.runs), format_percent(s.mean_layer, 1),
                       format_percent(s.worst_layer, 1), format_percent(s.mean_step, 1),
                       format_percent(s.worst_step, 1)});
    };
    add("all that count", check.summary);
    if (check.other_models) add("of other models than the calibration", *check.other_models);
    std::map<std::string, std::vector<CheckRow>> groups;
    for (const CheckRow& row : check.rows) {
        if (!counts(row)) continue;
        groups[counted(row.ranks, "GPU")].push_back(row);
        groups[std::string(recipe_name(row.arm.config.precision.recipe))].push_back(row);
    }
    for (const auto& [name, rows] : groups) add(name, summary_of(rows, counts));
    const CheckSummary earlier =
        summary_of(check.rows, [](const CheckRow& row) { return row.apart == kEarlier; });
    if (earlier.runs > 0) add("not counted, of earlier programs", earlier);
    return table.text();
}

std::string milliseconds(double seconds) {
    return seconds > 0 ? format_fixed(seconds * 1e3, seconds < 10e-3 ? 3 : 2) : "-";
}
std::string signed_percent(double error, bool known) {
    return known ? fmt::format("{:+.1f} %", error * 100) : "-";
}

ordered_json json_of(const CheckSummary& s) {
    return {{"runs", s.runs},
            {"gpus", s.gpus},
            {"mean layer error", s.mean_layer},
            {"worst layer error", s.worst_layer},
            {"mean step error", s.mean_step},
            {"worst step error", s.worst_step}};
}

ordered_json stages_of(const CheckRow& row, const Gpu& gpu) {
    ordered_json stages = ordered_json::array();
    for (const StageTime& stage : row.time.stages) {
        const MeasuredRow* measured = row.arm.row(key_of(stage.work));
        stages.push_back({{"key", key_of(stage.work)},
                          {"runs", stage.runs},
                          {"launches", stage.work.launches},
                          {"roofline seconds", roofline_seconds(stage.work, gpu.sheet, row.time.clock)},
                          {"wire bytes", stage.work.wire_bytes},
                          {"seconds", stage.seconds},
                          {"seconds measured", measured != nullptr ? measured->seconds : 0}});
    }
    return stages;
}

}  // namespace

Check check_profiles(const std::vector<std::string>& paths, const Gpu& gpu) {
    Check check;
    const std::vector<ProfileRecord> records = records_of(paths);
    std::vector<Widths> calibrated;
    for (const ProfileRecord& record : records)
        for (const MeasuredArm& arm : record.arms)
            if (gave(gpu.calibration, record, arm)) calibrated.push_back(widths_of(arm.config));
    for (const ProfileRecord& record : records) {
        if (!is_kind(record.device, gpu.sheet.gpu)) {
            check.skipped.push_back(fmt::format("{}: of {}", record.file, printable(record.device)));
            continue;
        }
        for (const MeasuredArm& arm : record.arms) {
            if (!can_predict(arm.config, gpu)) {
                check.skipped.push_back(fmt::format("{}: {}", record.file, arm.name));
                continue;
            }
            check.rows.push_back(row_of(record, arm, gpu));
            check.rows.back().other_model =
                std::find(calibrated.begin(), calibrated.end(), widths_of(arm.config)) == calibrated.end();
        }
    }
    require(!check.rows.empty(), ExitCode::usage, "--check: no profile of {} that can be compared",
            gpu.sheet.gpu);
    std::stable_partition(check.rows.begin(), check.rows.end(), counts);
    check.summary = summary_of(check.rows, counts);
    const CheckSummary others =
        summary_of(check.rows, [](const CheckRow& row) { return counts(row) && row.other_model; });
    if (!calibrated.empty() && others.runs > 0) check.other_models = others;
    return check;
}

std::string check_text(const Check& check, const Gpu& gpu) {
    std::string out = fmt::format("Absolute error of predictions, {}, calibrated from {} ({}, {})\n\n{}",
                                  gpu.sheet.gpu, gpu.calibration.source, gpu.calibration.commit,
                                  gpu.calibration.date, summaries_text(check));
    std::map<std::string, std::vector<const CheckRow*>> parts;  // by why they are apart: "" first
    for (const CheckRow& row : check.rows) parts[row.apart].push_back(&row);
    for (const auto& [apart, rows] : parts) {
        Table table({{"profile", Align::left},
                     {"arm", Align::left},
                     {"GPUs"},
                     {"layer ms"},
                     {"error"},
                     {"step ms"},
                     {"error"}});
        for (const CheckRow* row : rows)
            table.add_row({row->file.substr(0, row->file.rfind(".json")), row->arm.name,
                           std::to_string(row->ranks),
                           row->layer_compared ? milliseconds(row->arm.layer) : "-",
                           signed_percent(row->layer_error, row->layer_compared), milliseconds(row->arm.step),
                           signed_percent(row->step_error, row->arm.step > 0)});
        out += fmt::format("\n{}{}. Milliseconds are measured.\n\n{}",
                           apart.empty() ? "Runs that count" : "Apart: ", apart, table.text());
    }
    for (const std::string& one : check.skipped) out += fmt::format("  not compared: {}\n", one);
    return out;
}

std::string check_json(const Check& check, const Gpu& gpu) {
    ordered_json json = {{"gpu", gpu.sheet.gpu},
                         {"calibration",
                          {{"source", gpu.calibration.source},
                           {"commit", gpu.calibration.commit},
                           {"date", gpu.calibration.date}}}};
    json.update(json_of(check.summary));
    if (check.other_models) json["other models"] = json_of(*check.other_models);
    json["rows"] = ordered_json::array();
    json["not compared"] = check.skipped;
    for (const CheckRow& row : check.rows)
        json["rows"].push_back({{"file", row.file},
                                {"name", row.arm.name},
                                {"commit", row.commit},
                                {"ranks", row.ranks},
                                {"clock hertz", row.arm.clock},
                                {"layer seconds", row.layer_compared ? row.time.layer : 0},
                                {"layer seconds measured", row.layer_compared ? row.arm.layer : 0},
                                {"step seconds", row.time.step},
                                {"step seconds measured", row.arm.step},
                                {"other model", row.other_model},
                                {"apart", row.apart},
                                {"stages", stages_of(row, gpu)}});
    return json.dump(2) + "\n";
}

}  // namespace fp8flow::predict
