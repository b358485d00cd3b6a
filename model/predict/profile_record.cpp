// SPDX-License-Identifier: MIT
// profile.json to a ProfileRecord.
#include "model/predict/profile_record.h"

#include "kernels/core/error.h"
#include "model/config/check.h"
#include "model/config/fields.h"
#include "model/safetensors/file.h"
#include "model/validate/arms.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace fp8flow::predict {

namespace {

using nlohmann::json;

// dump_config writes "section:" and "  key: value" lines. Lines of unknown keys are dropped.
std::string known_lines(const std::string& dump) {
    std::istringstream lines(dump);
    std::string section, result;
    for (std::string line; std::getline(lines, line);) {
        const size_t colon = line.find(':');
        if (colon == std::string::npos) continue;
        if (line.front() != ' ') {
            section = line.substr(0, colon);
            result += line + "\n";
        } else if (find_field(section, line.substr(2, colon - 2)) != nullptr) {
            result += line + "\n";
        }
    }
    return result;
}

double median_of(const json& from, const char* key) {
    const auto found = from.find(key);
    return found != from.end() && found->is_object() ? found->value("median", 0.0) : 0.0;
}

std::vector<MeasuredRow> rows_of(const json& arm) {
    std::vector<MeasuredRow> rows;
    for (const json& row : arm.at("rows"))
        rows.push_back(
            {.key = fmt::format("{}/{}/{}", row.at("part").get<std::string>(),
                                row.at("stage").get<std::string>(), row.at("direction").get<std::string>()),
             .seconds = median_of(row, "seconds"),
             .bytes = row.at("bytes"),
             .gemm_flops = row.at("product flops"),
             .wire_bytes = row.at("wire bytes")});
    return rows;
}

// The arms of --schedules and of --state-dtypes have names of their own. Absent: a recipe or an arm that this
// program does not have.
std::optional<Config> config_of_arm(const Config& config, const std::string& name, const std::string& recipe,
                                    int ranks) {
    using validate::Ablation;
    const auto known = std::find_if(std::begin(kRecipes), std::end(kRecipes),
                                    [&](Recipe one) { return recipe_name(one) == recipe; });
    if (known == std::end(kRecipes)) return std::nullopt;
    for (const Ablation ablation : {Ablation::none, Ablation::schedules, Ablation::state_dtypes})
        for (const validate::Arm& arm : validate::recipe_arms(config, {*known}, ablation, ranks))
            if (arm.name == name) {
                ConfigProblems problems;
                collect_config_problems(arm.config, ranks, problems);
                return problems.empty() ? std::optional(arm.config) : std::nullopt;
            }
    return std::nullopt;
}

}  // namespace

const MeasuredRow* MeasuredArm::row(const std::string& key) const {
    const auto found =
        std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return row.key == key; });
    return found == rows.end() ? nullptr : &*found;
}

ProfileRecord parse_profile(const std::string& text, const std::string& file) {
    ProfileRecord record{.file = file, .device = "", .commit = "", .date = "", .arms = {}};
    try {
        const json from = json::parse(text);
        record.ranks = from.at("ranks");
        constexpr int64_t kMostRanks = 1 << 20;
        require(record.ranks >= 1 && record.ranks <= kMostRanks, ExitCode::usage, "{}: got {} ranks",
                printable(file), record.ranks);
        record.commit = from.value("commit", "");
        record.date = from.value("date", "");
        record.device = from.at("machine").value("device", "");
        const Config config = parse_config(known_lines(from.at("config")), file);
        for (const json& arm : from.at("recipes")) {
            const std::string name = arm.at("name");
            const auto own = config_of_arm(config, name, arm.at("recipe"), static_cast<int>(record.ranks));
            if (!own) continue;
            record.arms.push_back({.name = name,
                                   .config = *own,
                                   .rows = rows_of(arm),
                                   .layer = median_of(arm, "layer seconds"),
                                   .step = arm.value("step seconds", 0.0),
                                   .clock = median_of(arm, "layer clock hertz")});
        }
    } catch (const json::exception& error) {
        fail(ExitCode::usage, "{}: got something other than a result of profile ({})", printable(file),
             error.what());
    }
    return record;
}

ProfileRecord read_profile(const std::string& path) {
    return parse_profile(read_text_file(path, ExitCode::usage),
                         std::filesystem::path(path).filename().string());
}

bool is_profile(const std::string& path) {
    try {
        const json from = json::parse(read_text_file(path, ExitCode::usage));
        const json& first = from.at("recipes").at(0);
        return from.contains("config") && first.contains("layer seconds") && first.contains("rows");
    } catch (const std::exception&) {  // no JSON, or too large for a profile
        return false;
    }
}

}  // namespace fp8flow::predict
