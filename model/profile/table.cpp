// SPDX-License-Identifier: MIT
// The tables in the log of `profile`. Read next: answer.cpp, what it prints.
#include "model/report/table.h"
#include "model/profile/profile.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>

namespace fp8flow::profile {

using namespace report;

namespace {

std::string or_dash(bool known, const std::string& text) { return known ? text : "-"; }

std::string rate(const ProfileRow& row) {
    const double seconds = row.seconds.median;
    if (seconds <= 0) return "-";
    if (row.gemm_flops > 0) return format_si(row.flops / seconds) + "FLOP/s";
    return or_dash(row.bytes > 0, format_si(row.bytes / seconds) + "B/s");
}

// The time of a part that is in none of its stages, or all of it if it has none.
std::string stage_text(const ProfileRow& row, const std::vector<ProfileRow>& rows) {
    if (row.stage != row.part) return row.stage;
    for (const ProfileRow& other : rows)
        if (other.part == row.part && other.stage != row.part) return "between stages";
    return "";
}

// A number of profile.json, in the unit that its key names.
std::string in_unit(const std::string& key, double value) {
    const auto has = [&](const char* word) { return key.find(word) != std::string::npos; };
    if (has("seconds per token")) return format_fixed(value * 1e9, 0) + " ns";
    if (has("seconds")) return milliseconds(value) + " ms";
    if (has("bytes")) return format_bytes(value);
    if (has("joules per token")) return fmt::format("{:.4g} mJ", value * 1e3);
    if (has("share")) return format_percent(value, 1);
    return has("flops") || has("hertz") || has("cycles") || has("tokens") ? format_si(value, 4)
                                                                          : fmt::format("{:.4g}", value);
}

}  // namespace

std::string ceiling_text(const ProfileRow& row) {
    return or_dash(row.ideal_seconds > 0 && row.seconds.median > 0,
                   format_percent(row.ideal_seconds / row.seconds.median, 0));
}

std::string cycles_text(const Spread& cycles) {
    return or_dash(cycles.median > 0, fmt::format("{:.4g}", cycles.median * 1e-6));
}

std::string energy_text(const ArmProfile& arm) {
    const std::optional<double> joules = arm.passes_joules_per_token();
    return joules ? fmt::format("{:.4g}", *joules * 1e3) : "-";
}

std::string slowest_text(const SlowestRank& slowest) {
    if (!slowest.resolved) return std::string(kNotResolved);
    return fmt::format("{}, +{}", slowest.rank, format_percent(slowest.over_median, 1));
}

std::string arm_table(const ArmProfile& arm) {
    Table table({"part", "stage", "direction"}, {"ms", "min", "max", "share", "moves", "FLOPs", "achieved",
                                                 "of ceiling", "casts", "waiting", "wire", "memory"});
    std::string part;
    for (const ProfileRow& row : arm.rows) {
        if (!part.empty() && row.part != part) table.add_rule();
        table.add_row({row.part == part ? "" : row.part, stage_text(row, arm.rows), row.direction,
                       milliseconds(row.seconds.median), milliseconds(row.seconds.min),
                       milliseconds(row.seconds.max), format_percent(row.share, 1),
                       or_dash(row.bytes > 0, format_bytes(row.bytes)),
                       or_dash(row.flops > 0, format_si(row.flops)), rate(row), ceiling_text(row),
                       or_dash(row.casts > 0, format_fixed(row.casts, 0)),
                       or_dash(row.wait_seconds > 0, milliseconds(row.wait_seconds)),
                       or_dash(row.wire_bytes > 0, format_bytes(row.wire_bytes)),
                       or_dash(row.peak_bytes > 0, format_bytes(row.peak_bytes))});
        part = row.part;
    }
    return table.text(2);
}

std::string side_by_side_table(const Profile& profile) {
    Table::Headers names;
    std::vector<ProfileRow> rows;
    for (const ArmProfile& arm : profile.arms) {
        names.push_back(arm.name);
        for (const ProfileRow& row : arm.rows)
            if (row.part == kMoeLayer && find_stage(rows, row.stage, row.direction) == nullptr)
                rows.push_back(row);
    }
    std::stable_partition(rows.begin(), rows.end(), [](const auto& r) { return r.direction == "forward"; });
    Table table({"moe layer, ms", "direction"}, names);
    std::string direction;
    for (const ProfileRow& row : rows) {
        if (!direction.empty() && row.direction != direction) table.add_rule();
        direction = row.direction;
        std::vector<std::string> cells = {stage_text(row, rows), row.direction};
        for (const ArmProfile& arm : profile.arms) {
            const ProfileRow* own = find_stage(arm.rows, row.stage, row.direction);
            cells.push_back(own == nullptr ? "-" : milliseconds(own->seconds.median));
        }
        table.add_row(cells);
    }
    table.add_rule();
    const auto add = [&](const char* name, const char* which, auto value) {
        std::vector<std::string> cells = {name, which};
        for (const ArmProfile& arm : profile.arms) cells.push_back(milliseconds(value(arm)));
        table.add_row(cells);
    };
    add("sum of stages", "both", [](const ArmProfile& arm) {
        double sum = 0;
        for (const ProfileRow& row : arm.rows) sum += row.part == kMoeLayer ? row.seconds.median : 0;
        return sum;
    });
    add("end to end", "forward", [](const ArmProfile& arm) { return arm.whole.forward.median; });
    add("end to end", "backward", [](const ArmProfile& arm) { return arm.whole.backward.median; });
    add("end to end", "both", [](const ArmProfile& arm) { return arm.whole.layer.median; });
    return table.text(2);
}

std::string numbers_table(const nlohmann::json& profile_json) {
    Table::Headers names;
    std::map<std::string, std::vector<std::string>> cells;  // by the path of its keys
    const auto& recipes = profile_json.at("recipes");
    for (size_t i = 0; i < recipes.size(); ++i) {
        const auto& recipe = recipes[i];
        names.push_back(recipe.at("name"));
        nlohmann::json numbers = nlohmann::json::object();
        for (const auto& [key, value] : recipe.items())
            if (!value.is_array()) numbers[key] = value;
        numbers = numbers.flatten();
        for (const auto& [path, value] : numbers.items()) {
            if (!value.is_number()) continue;
            auto& row = cells.try_emplace(path, recipes.size(), "-").first->second;
            const bool noise = path == "/speed-up" && i > 0 && !recipe.at("speed-up resolved").get<bool>();
            row[i] = noise ? std::string(kNotResolved) : in_unit(path, value.get<double>());
        }
    }
    Table table({"every number of profile.json but lists"}, names);
    for (auto& [path, row] : cells) {
        std::string name = path.substr(1);
        std::ranges::replace(name, '/', ' ');
        row.insert(row.begin(), name);
        table.add_row(row);
    }
    return table.text(2);
}

}  // namespace fp8flow::profile
