// SPDX-License-Identifier: MIT
// The tables in the log of `profile`. Read next: answer.cpp, what it prints.
#include "model/report/table.h"
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
                 {"waiting"},
                 {"wire"},
                 {"memory"}});
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

// One line per quantity, one column per recipe.
std::string summary_table(const Profile& profile) {
    std::vector<Table::Column> columns = {{"whole run", Align::left}};
    for (const ArmProfile& arm : profile.arms) columns.push_back({arm.name});
    Table table(columns);
    const auto add = [&](std::string name, auto text_of) {
        std::vector<std::string> cells = {std::move(name)};
        for (const ArmProfile& arm : profile.arms) cells.push_back(text_of(arm));
        table.add_row(cells);
    };
    const auto megahertz = [](const Spread& clock) {
        return or_dash(clock.median > 0, format_fixed(clock.median * 1e-6, 0));
    };
    const double peak = profile.machine.bf16_flops;
    add("layer, forward + backward, ms",
        [](const ArmProfile& arm) { return milliseconds(arm.whole.layer.median); });
    add("  fastest step", [](const ArmProfile& arm) { return milliseconds(arm.whole.layer.min); });
    add("  slowest step", [](const ArmProfile& arm) { return milliseconds(arm.whole.layer.max); });
    add("  clock, MHz", [&](const ArmProfile& arm) { return megahertz(arm.whole.clock); });
    add("  cycles, M", [](const ArmProfile& arm) { return cycles_text(arm.whole.cycles); });
    add("speed-up", [&](const ArmProfile& arm) { return speed_up_text(profile, arm); });
    add("tokens/s/GPU", [](const ArmProfile& arm) { return format_si(arm.tokens_per_second()); });
    add("TFLOP/s/GPU, without padding and recomputation",
        [](const ArmProfile& arm) { return fmt::format("{:.4g}", arm.flops_per_second() * 1e-12); });
    add(fmt::format("  of the BF16 peak measured here, {}FLOP/s", format_si(peak)),
        [&](const ArmProfile& arm) {
            return or_dash(peak > 0, format_percent(arm.flops_per_second() / peak, 1));
        });
    add("casts per layer", [](const ArmProfile& arm) { return format_fixed(arm.casts, 0); });
    add("sent by rank 0 per step", wire_text);
    add("plan, dispatch, combine, ms", [](const ArmProfile& arm) { return milliseconds(arm.wire_seconds); });
    add("  alone: no compute in parallel",
        [](const ArmProfile& arm) { return milliseconds(arm.wire_alone_seconds()); });
    add("  waiting for other ranks, mean",
        [](const ArmProfile& arm) { return milliseconds(arm.waiting_seconds()); });
    add("slowest rank, its work over the median rank's", [](const ArmProfile& arm) {
        const auto slowest = slowest_of(arm.by_rank);
        return slowest ? slowest_text(*slowest) : "-";
    });
    add("saved for the backward, rank 0",
        [](const ArmProfile& arm) { return format_bytes(arm.saved_total()); });
    add("step, ms", [](const ArmProfile& arm) { return milliseconds(arm.step_seconds); });
    add("  ns per token of a GPU", [&](const ArmProfile& arm) {
        return format_fixed(arm.step_seconds_per_token(profile.ranks) * 1e9, 0);
    });
    add("  host busy launching it, ms", [](const ArmProfile& arm) { return milliseconds(arm.host_seconds); });
    add("  waits of the host for the GPU",
        [](const ArmProfile& arm) { return arm.host_stops ? std::to_string(*arm.host_stops) : "-"; });
    add("energy of all GPUs, J/step", [](const ArmProfile& arm) {
        return arm.joules_per_step ? fmt::format("{:.4g}", *arm.joules_per_step) : "-";
    });
    add("  mJ/token", [](const ArmProfile& arm) {
        return arm.joules_per_step ? fmt::format("{:.4g}", *arm.joules_per_step / arm.step_tokens * 1e3)
                                   : "-";
    });
    add("  of forward and backward alone, mJ/token", energy_text);
    add("    over the first recipe's", [&](const ArmProfile& arm) {
        const auto own = arm.passes_joules_per_token(),
                   first = profile.arms.front().passes_joules_per_token();
        return own && first ? fmt::format("{:.2f}x", *own / *first) : "-";
    });
    add("    W per GPU", [&](const ArmProfile& arm) {
        const double watts = arm.passes_watts(profile.ranks);
        return or_dash(watts > 0, format_fixed(watts, 0));
    });
    add("padding rows in the grouped GEMMs",
        [](const ArmProfile& arm) { return format_percent(arm.padding_share, 1); });
    add("rows of the fullest expert over the mean",
        [](const ArmProfile& arm) { return fmt::format("{:.2f}", arm.expert_load); });
    add("rows of the fullest rank over the mean",
        [](const ArmProfile& arm) { return fmt::format("{:.2f}", arm.rank_load); });
    return table.text(2);
}

}  // namespace fp8flow::profile
