// SPDX-License-Identifier: MIT
// The tables that `profile` prints.
#include "model/report/table.h"
#include "model/profile/picture.h"
#include "model/profile/profile.h"

#include <fmt/format.h>

#include <algorithm>

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

// A part's own moments: between its stages, or all of it where it has none.
std::string stage_text(const ProfileRow& row, const std::vector<ProfileRow>& rows) {
    if (row.stage != row.part) return row.stage;
    for (const ProfileRow& other : rows)
        if (other.part == row.part && other.stage != row.part) return "between stages";
    return "";
}

bool same_stage(const ProfileRow& a, const ProfileRow& b) {
    return a.part == b.part && a.stage == b.stage && a.direction == b.direction;
}

std::string wire_text(const ArmProfile& arm) {
    const std::string all = format_bytes(arm.wire.total());
    if (arm.num_hosts < 2) return all;
    return fmt::format("{}: {} between hosts, {} inside", all, format_bytes(arm.wire.between_hosts),
                       format_bytes(arm.wire.inside_hosts()));
}

}  // namespace

std::string slowest_text(const SlowestRank& slowest) {
    if (!slowest.resolved) return std::string(kNotResolved);
    return fmt::format("{}, +{}", slowest.rank, format_percent(slowest.over_median, 1));
}

std::string arm_table(const ArmProfile& arm) {
    Table table({{"part", Align::left},
                 {"stage", Align::left},
                 {"direction", Align::left},
                 {"ms"},
                 {"min"},
                 {"max"},
                 {"share"},
                 {"moves"},
                 {"FLOPs"},
                 {"achieved"},
                 {"of ceiling"},
                 {"casts"},
                 {"wire"},
                 {"memory"}});
    std::string part;
    for (const ProfileRow& row : arm.rows) {
        if (!part.empty() && row.part != part) table.add_rule();
        table.add_row({row.part == part ? "" : row.part, stage_text(row, arm.rows), row.direction,
                       milliseconds(row.seconds.median), milliseconds(row.seconds.min),
                       milliseconds(row.seconds.max), format_percent(row.share, 1),
                       or_dash(row.bytes > 0, format_bytes(row.bytes)),
                       or_dash(row.flops > 0, format_si(row.flops)), rate(row),
                       or_dash(row.ideal_seconds > 0 && row.seconds.median > 0,
                               format_percent(row.ideal_seconds / row.seconds.median, 0)),
                       or_dash(row.casts > 0, format_fixed(row.casts, 0)),
                       or_dash(row.wire_bytes > 0, format_bytes(row.wire_bytes)),
                       or_dash(row.peak_bytes > 0, format_bytes(row.peak_bytes))});
        part = row.part;
    }
    return table.text(2);
}

std::string side_by_side_table(const Profile& profile) {
    std::vector<Table::Column> columns = {{"moe layer, ms", Align::left}, {"direction", Align::left}};
    std::vector<ProfileRow> rows;  // in the order of the journey, as far as the recipes share it
    for (const ArmProfile& arm : profile.arms) {
        columns.push_back({arm.name});
        size_t place = 0;
        for (const ProfileRow& row : arm.rows) {
            if (row.part != kMoeLayer) continue;
            const auto found =
                std::find_if(rows.begin(), rows.end(), [&](const auto& r) { return same_stage(r, row); });
            if (found == rows.end()) {
                rows.insert(rows.begin() + static_cast<std::ptrdiff_t>(place), row);
                ++place;
            } else {
                place = static_cast<size_t>(found - rows.begin()) + 1;
            }
        }
    }
    Table table(columns);
    std::string direction;
    for (const ProfileRow& row : rows) {
        if (!direction.empty() && row.direction != direction) table.add_rule();
        direction = row.direction;
        std::vector<std::string> cells = {stage_text(row, rows), row.direction};
        for (const ArmProfile& arm : profile.arms) {
            const auto found = std::find_if(arm.rows.begin(), arm.rows.end(),
                                            [&](const auto& r) { return same_stage(r, row); });
            cells.push_back(found == arm.rows.end() ? "-" : milliseconds(found->seconds.median));
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

std::string summary_table(const Profile& profile) {
    const bool peak_known = profile.machine.bf16_flops > 0;
    Table table({{"recipe", Align::left},
                 {"layer ms"},
                 {"min"},
                 {"max"},
                 {"MHz"},
                 {"speed-up"},
                 {"tokens/s/GPU"},
                 {"TFLOP/s/GPU"},
                 {"of BF16 peak"},
                 {"casts"},
                 {"wire/rank"},
                 {"wire ms"},
                 {"alone ms"},
                 {"slowest rank"},
                 {"saved"},
                 {"step ms"},
                 {"host ms"},
                 {"host stops"},
                 {"J/step"},
                 {"mJ/token"},
                 {"load max/mean"}});
    for (const ArmProfile& arm : profile.arms) {
        const auto slowest = slowest_of(arm.by_rank);
        double saved = 0;
        for (const auto& [category, bytes] : arm.saved) saved += static_cast<double>(bytes);
        const double tflops = arm.flops_per_second() * 1e-12;
        table.add_row(
            {arm.name,
             milliseconds(arm.whole.layer.median),
             milliseconds(arm.whole.layer.min),
             milliseconds(arm.whole.layer.max),
             or_dash(arm.whole.clock.median > 0, format_fixed(arm.whole.clock.median * 1e-6, 0)),
             speed_up_text(profile, arm),
             format_si(arm.tokens_per_second()),
             tflops < 1 ? fmt::format("{:.3g}", tflops) : format_fixed(tflops, 1),
             or_dash(peak_known, format_percent(arm.flops_per_second() / profile.machine.bf16_flops, 1)),
             format_fixed(arm.casts, 0),
             wire_text(arm),
             milliseconds(arm.wire_seconds),
             milliseconds(arm.wire_alone_seconds()),
             slowest ? slowest_text(*slowest) : "-",
             format_bytes(saved),
             milliseconds(arm.step_seconds),
             milliseconds(arm.host_seconds),
             arm.host_stops ? std::to_string(*arm.host_stops) : "-",
             arm.joules_per_step ? fmt::format("{:.4g}", *arm.joules_per_step) : "-",
             arm.joules_per_step ? fmt::format("{:.4g}", *arm.joules_per_step / arm.step_tokens * 1e3) : "-",
             fmt::format("{:.2f} expert, {:.2f} rank", arm.expert_load, arm.rank_load)});
    }
    return table.text(2);
}

}  // namespace fp8flow::profile
