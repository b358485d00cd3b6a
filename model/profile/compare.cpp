// SPDX-License-Identifier: MIT
// Old and new milliseconds of each stage, of the layer and of the step; what makes them hard to compare.
#include "model/profile/compare.h"

#include "kernels/core/error.h"
#include "model/profile/profile.h"
#include "model/report/table.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

namespace fp8flow::profile {

using namespace report;

namespace {

using nlohmann::json;

constexpr std::uintmax_t kMostBytes = std::uintmax_t{64} << 20;
constexpr double kSameClock = 0.02;  // clocks that differ by more make times hard to compare

json read_profile(const std::string& path) {
    std::error_code error;
    require(std::filesystem::is_regular_file(path, error) &&
                std::filesystem::file_size(path, error) <= kMostBytes,
            ExitCode::data, "--compare: {} is no file of at most 64 MiB", path);
    std::ifstream in(path);
    json file = json::parse(in, nullptr, false);
    require(!file.is_discarded() && file.is_object() && file.contains("recipes") &&
                file["recipes"].is_array() && file.contains("machine"),
            ExitCode::data, "--compare: {} is no profile.json of `fp8flow profile`", path);
    return file;
}

struct Pair {
    const json *before, *after;
    std::string name;
};
std::vector<Pair> pairs_of(const json& before, const json& after) {
    const json &old_recipes = before.at("recipes"), &new_recipes = after.at("recipes");
    std::vector<Pair> pairs;
    for (const json& one : new_recipes)
        for (const json& other : old_recipes)
            if (other.at("name") == one.at("name")) pairs.push_back({&other, &one, one.at("name")});
    if (pairs.empty() && old_recipes.size() == 1 && new_recipes.size() == 1)
        pairs.push_back({&old_recipes[0], &new_recipes[0],
                         fmt::format("{} | {}", old_recipes[0].at("name").get<std::string>(),
                                     new_recipes[0].at("name").get<std::string>())});
    return pairs;
}

std::string known_milliseconds(double seconds) { return seconds < 0 ? "-" : format_fixed(seconds * 1e3, 3); }
std::string ratio(double before, double after) {
    return before > 0 && after >= 0 ? format_fixed(after / before, 3) + " x" : "-";
}

// What differs between the runs besides the program.
std::string differences(const json& before, const json& after) {
    std::string text;
    const auto line = [&](const char* what, const std::string& one, const std::string& other) {
        text += fmt::format("  {:<8}  {} | {}\n", what, one, other);
    };
    const auto value = [](const json& file, const char* key) {
        return file.contains(key) && file[key].is_string() ? file[key].get<std::string>() : "not known";
    };
    line("commit", value(before, "commit"), value(after, "commit"));
    line("date", value(before, "date"), value(after, "date"));
    line("machine", value(before.at("machine"), "device"), value(after.at("machine"), "device"));
    for (const char* key : {"ranks", "routing"})
        if (before.value(key, json()) != after.value(key, json()))
            line(key, before.value(key, json()).dump(), after.value(key, json()).dump());
    return text;
}

std::string table_of(const Pair& pair) {
    using Stage = std::tuple<std::string, std::string, std::string>;  // part, stage, direction
    const auto stage_of_row = [](const json& row) {
        return Stage{row.at("part"), row.at("stage"), row.at("direction")};
    };
    const auto seconds_of = [&](const json& recipe, const Stage& stage) {
        for (const json& row : recipe.at("rows"))
            if (stage_of_row(row) == stage) return row.at("seconds").at("median").get<double>();
        return -1.0;
    };
    std::vector<Stage> stages;
    for (const json* recipe : {pair.before, pair.after})
        for (const json& row : recipe->at("rows")) {
            const Stage stage = stage_of_row(row);
            if (std::find(stages.begin(), stages.end(), stage) == stages.end()) stages.push_back(stage);
        }
    // parts together, in the order of their first stage
    std::vector<std::string> parts;
    for (const Stage& stage : stages)
        if (std::find(parts.begin(), parts.end(), std::get<0>(stage)) == parts.end())
            parts.push_back(std::get<0>(stage));
    Table table({{"part", Align::left},
                 {"stage", Align::left},
                 {"direction", Align::left},
                 {"old ms"},
                 {"new ms"},
                 {"new/old"}});
    for (const std::string& part : parts) {
        std::string shown = part;
        const bool has_stages = std::any_of(stages.begin(), stages.end(), [&](const Stage& stage) {
            return std::get<0>(stage) == part && std::get<1>(stage) != part;
        });
        for (const Stage& stage : stages) {
            if (std::get<0>(stage) != part) continue;
            const double before = seconds_of(*pair.before, stage), after = seconds_of(*pair.after, stage);
            const std::string& name = std::get<1>(stage);
            table.add_row({shown,
                           name != part ? name
                           : has_stages ? "between stages"
                                        : "",
                           std::get<2>(stage), known_milliseconds(before), known_milliseconds(after),
                           ratio(before, after)});
            shown.clear();
        }
        table.add_rule();
    }
    const auto total = [&](const char* name, const auto& get) {
        const double before = get(*pair.before), after = get(*pair.after);
        table.add_row(
            {name, "", "", known_milliseconds(before), known_milliseconds(after), ratio(before, after)});
    };
    total("layer", [](const json& r) { return r.at("layer seconds").at("median").get<double>(); });
    total("step", [](const json& r) { return r.at("step seconds").get<double>(); });
    return table.text(2);
}

std::string clocks_of(const Pair& pair) {
    const auto clock = [](const json& recipe) {
        return recipe.at("layer clock hertz").at("median").get<double>() * 1e-6;
    };
    const double before = clock(*pair.before), after = clock(*pair.after);
    if (before <= 0 || after <= 0) return {};
    return fmt::format("  clocks in the layer: {:.0f} | {:.0f} MHz{}\n", before, after,
                       std::abs(after / before - 1) > kSameClock
                           ? ": more than 2 % apart, so times of compute-bound stages do not compare"
                           : "");
}

}  // namespace

std::string compare_profiles(const std::string& old_path, const std::string& new_path) {
    const json before = read_profile(old_path), after = read_profile(new_path);
    try {
        const std::vector<Pair> pairs = pairs_of(before, after);
        require(!pairs.empty(), ExitCode::data,
                "--compare: {} and {} have no recipe in common; give both runs of profile the same --recipes",
                old_path, new_path);
        std::string text = fmt::format("old {} | new {}\n{}", old_path, new_path, differences(before, after));
        for (const Pair& pair : pairs)
            text += fmt::format("\n{}\n{}{}", pair.name, table_of(pair), clocks_of(pair));
        return text;
    } catch (const json::exception& problem) {
        fail(ExitCode::data, "--compare: {} or {} is not what this version writes: {}", old_path, new_path,
             problem.what());
    }
}

}  // namespace fp8flow::profile
