// SPDX-License-Identifier: MIT
// What the runs differ in, then old and new milliseconds of the layer, of the step and of each stage.
#include "kernels/core/error.h"
#include "model/config/fields.h"
#include "model/profile/profile.h"
#include "model/report/page/page.h"
#include "model/report/table.h"
#include "model/safetensors/input.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <vector>

namespace fp8flow::profile {

using namespace report;

namespace {

using nlohmann::json;

constexpr double kSameClock = 0.02;  // clocks that differ by more make times hard to compare

json read_profile(std::string path) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) path += "/profile.json";
    json file = json::parse(read_text_file(path, ExitCode::data, "--compare"), nullptr, false);
    require(file.is_object() && file.contains("recipes") && file["recipes"].is_array() &&
                file.contains("machine"),
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

Spread spread_from(const json& value, int64_t samples) {
    return {value.at("median"), value.at("min"), value.at("max"), samples};
}

// Of a profile.json; nothing where it is not one of this version.
std::optional<Config> config_of(const json& file) {
    try {
        return parse_config(without_old_keys(file.value("config", "")), "config");
    } catch (const Error&) {
        return std::nullopt;
    }
}

// What differs between the runs besides the program.
std::string differences(const json& before, const json& after) {
    std::string text;
    const auto shown = [](const json& from, const char* key) {
        const json value = from.value(key, json());
        return value.is_null() ? "not known"
                               : printable(value.is_string() ? std::string(value) : value.dump());
    };
    const auto compare = [&](std::initializer_list<const char*> keys, const json& one, const json& other) {
        for (const char* key : keys)
            if (one.value(key, json()) != other.value(key, json()))
                text += fmt::format("    {}: {} | {}\n", key, shown(one, key), shown(other, key));
    };
    compare({"device", "gpu", "gpus", "cpu", "host cores"}, before.at("machine"), after.at("machine"));
    compare({"ranks", "routing", "steps"}, before, after);
    const std::optional<Config> old_config = config_of(before), new_config = config_of(after);
    if (!old_config || !new_config) text += "    the configuration of one is not of this version\n";
    if (old_config && new_config)
        for (const std::string& change : diff_configs(*old_config, *new_config))
            if (!change.starts_with("output.out:")) text += "    " + change + "\n";
    const std::string head = fmt::format("  commit: {} | {}\n  date: {} | {}\n", shown(before, "commit"),
                                         shown(after, "commit"), shown(before, "date"), shown(after, "date"));
    if (text.empty()) return head + "  the same machine and configuration\n";
    return head + "  the runs differ in more than the program, and the times below with them:\n" + text;
}

// A stage, or the whole, of one file; absent: it has none.
using Measured = std::optional<Spread>;

std::vector<std::string> cells_of(const Measured& before, const Measured& after) {
    const auto known = [](const Measured& one) { return one ? format_fixed(one->median * 1e3, 3) : "-"; };
    std::vector<std::string> cells = {known(before), known(after), "-", "-"};
    if (!before || !after) return cells;
    cells[2] = format_signed((after->median - before->median) * 1e3, 3);
    if (std::min(before->samples, after->samples) == 0)
        cells[3] = "spread not known";
    else if (!resolved(*before, *after) || before->median <= 0)
        cells[3] = kNotResolved;
    else
        cells[3] = format_fixed(after->median / before->median, 3) + " x";
    return cells;
}

// A row of the table: the layer, the step, or a stage.
struct Line {
    std::string part, stage, direction;
    Measured before = {}, after = {};

    bool same_stage(const json& row) const {
        return row.at("part") == part && row.at("stage") == stage && row.at("direction") == direction;
    }
    double delta() const { return (after ? after->median : 0) - (before ? before->median : 0); }
    bool is_resolved() const { return before && after && resolved(*before, *after); }
};

// Files of earlier programs have the median alone.
Measured of_step(const json& recipe) {
    const double median = recipe.at("step seconds");
    if (!recipe.contains("step seconds by step")) return Spread{median, median, median, 0};
    return spread_of(recipe.at("step seconds by step").get<std::vector<double>>());
}

// Stages of both files, the largest difference first.
std::vector<Line> stages_of(const Pair& pair, int64_t old_steps, int64_t new_steps) {
    std::vector<Line> lines;
    const auto add = [&](const json& recipe, int64_t steps, Measured Line::*side) {
        for (const json& row : recipe.at("rows")) {
            auto line = std::ranges::find_if(lines, [&](const Line& known) { return known.same_stage(row); });
            if (line == lines.end())
                line = lines.insert(lines.end(), {row.at("part"), row.at("stage"), row.at("direction")});
            (*line).*side = spread_from(row.at("seconds"), steps);
        }
    };
    add(*pair.before, old_steps, &Line::before);
    add(*pair.after, new_steps, &Line::after);
    std::ranges::stable_sort(
        lines, [](const Line& a, const Line& b) { return std::abs(a.delta()) > std::abs(b.delta()); });
    return lines;
}

std::vector<Line> lines_of(const Pair& pair, int64_t old_steps, int64_t new_steps) {
    std::vector<Line> lines = stages_of(pair, old_steps, new_steps);
    for (Line& line : lines)
        if (line.stage == line.part) line.stage = "";
    lines.insert(lines.begin(), {{"layer", "", "", spread_from(pair.before->at("layer seconds"), old_steps),
                                  spread_from(pair.after->at("layer seconds"), new_steps)},
                                 {"step", "", "", of_step(*pair.before), of_step(*pair.after)}});
    return lines;
}

std::string table_of(const std::vector<Line>& lines) {
    Table table({"part", "stage", "direction"}, {"old ms", "new ms", "delta ms", "new/old"});
    for (size_t i = 0; i < lines.size(); ++i) {
        std::vector<std::string> row = {lines[i].part, lines[i].stage, lines[i].direction};
        for (std::string& cell : cells_of(lines[i].before, lines[i].after)) row.push_back(std::move(cell));
        table.add_row(std::move(row));
        if (i == 1) table.add_rule();
    }
    return table.text(2);
}

// For the card "New against old" of page.html: milliseconds.
json picture_of(const std::string& name, const std::vector<Line>& lines) {
    json rows = json::array();
    for (const Line& line : lines) {
        std::string label = line.part;
        for (const std::string& word : {line.stage, line.direction})
            label += (word.empty() ? "" : " ") + word;
        rows.push_back({{"label", label},
                        {"delta", line.delta() * 1e3},
                        {"resolved", line.is_resolved()},
                        {"note", cells_of(line.before, line.after).back()}});
    }
    return {{"name", name}, {"rows", rows}};
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

ComparedProfiles compare_profiles(const std::string& old_path, const std::string& new_path,
                                  const Provenance& provenance) {
    const json before = read_profile(old_path), after = read_profile(new_path);
    try {
        const std::vector<Pair> pairs = pairs_of(before, after);
        require(!pairs.empty(), ExitCode::data,
                "--compare: {} and {} have no recipe in common; give both runs of profile the same --recipes",
                old_path, new_path);
        const std::string head = fmt::format("old {} | new {}", old_path, new_path),
                          differ = differences(before, after);
        std::string text = head + "\n" + differ;
        json pictures = json::array();
        for (const Pair& pair : pairs) {
            const std::vector<Line> lines = lines_of(pair, before.at("steps"), after.at("steps"));
            text += fmt::format("\n{}\n{}{}", pair.name, table_of(lines), clocks_of(pair));
            pictures.push_back(picture_of(pair.name, lines));
        }
        Page page("New against old", head, provenance);
        page.fact("runs", differ);
        page.set("compare", std::move(pictures));
        return {text + fmt::format("\n  {}: {}\n", kNotResolved, kResolvedRule), page.html()};
    } catch (const json::exception& problem) {
        fail(ExitCode::data, "--compare: {} or {} is not what this version writes: {}", old_path, new_path,
             problem.what());
    }
}

}  // namespace fp8flow::profile
