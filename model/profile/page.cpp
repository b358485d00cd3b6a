// SPDX-License-Identifier: MIT
// report.html of `profile`.
#include "model/report/page/page.h"
#include "model/profile/picture.h"
#include "model/profile/profile.h"
#include "model/report/svg_canvas.h"
#include "model/report/table.h"

namespace fp8flow::profile {

using namespace report;

namespace {

using nlohmann::json;

json timeline_of(const Profile& profile) {
    json result = {{"lanes", json::array()}, {"arms", json::array()}};
    for (const size_t lane : lane_order()) result["lanes"].push_back(name_of_lane(lane));
    for (const ArmProfile& arm : profile.arms) {
        json windows = json::array();
        for (const char* direction : {"forward", "backward"}) {
            const Window window = window_of(arm.trace, direction);
            json boxes = json::array();
            for (const Box& box : window.boxes)
                boxes.push_back({{"lane", name_of_lane(box.lane)},
                                 {"stage", name_of_category(box.category)},
                                 {"begin", box.begin},
                                 {"end", box.end},
                                 {"tooltip", box.tooltip}});
            windows.push_back(
                {{"direction", direction}, {"seconds", window.seconds}, {"boxes", std::move(boxes)}});
        }
        result["arms"].push_back({{"name", arm.name}, {"windows", std::move(windows)}});
    }
    return result;
}

json stages_of(const Profile& profile) {
    std::vector<PageRows> groups;
    for (const ArmProfile& arm : profile.arms) {
        PageRows group{.name = heading_of(profile, arm), .rows = {}};
        for (const char* direction : {"forward", "backward"}) {
            PageRow row{direction, {}};
            const std::vector<double> values = milliseconds_of(arm, direction);
            for (size_t c = 0; c < values.size(); ++c) row.parts.emplace_back(name_of_category(c), values[c]);
            group.rows.push_back(std::move(row));
        }
        groups.push_back(std::move(group));
    }
    return bars_json(groups, "ms");
}

json memory_of(const Profile& profile) {
    std::vector<PageRows> groups;
    for (const ArmProfile& arm : profile.arms)
        groups.push_back({arm.name, memory_rows(arm.parameters, arm.saved, arm.workspace.reserved)});
    return bars_json(groups, "bytes");
}

json routing_of(const Profile& profile) {
    json rows = json::array();
    for (const ArmProfile& arm : profile.arms)
        rows.push_back(
            {arm.name, format_fixed(arm.expert_load, 2) + " x", format_fixed(arm.rank_load, 2) + " x"});
    return {{"groups",
             {{{"name", "First MoE layer, routing " + profile.routing},
               {"columns", {"recipe", "fullest expert over the mean", "fullest rank over the mean"}},
               {"rows", std::move(rows)}}}}};
}

}  // namespace

std::string profile_page(const Profile& profile, const Config& config) {
    Page page(title_of(profile, "one MoE layer"), config, profile.provenance);
    page.fact("routing", profile.routing);
    if (!profile.busy.empty()) page.fact("busy", profile.busy);
    page.fact(std::string(kNotResolved), std::string(kResolvedRule));
    for (const ArmProfile& arm : profile.arms) {
        std::string text = fmt::format("{}; step {:.3f} ms, {} tokens/s a GPU",
                                       heading_of(profile, arm).substr(arm.name.size() + 2),
                                       arm.step_seconds * 1e3, format_si(arm.tokens_per_second()));
        if (arm.by_rank.size() > 1)
            text += fmt::format(", exchange alone {:.3f} ms", arm.wire_alone_seconds() * 1e3);
        if (const auto slowest = slowest_of(arm.by_rank))
            text += ", slowest rank and how far over the median: " + slowest_text(*slowest);
        page.fact(arm.name, text);
    }
    for (size_t c = 0; c < kPalette.size(); ++c) page.color(name_of_category(c), kPalette[c]);
    page.absent("loss", "A profile trains a few steps only: `fp8flow validate` compares losses.");
    page.set("stages", stages_of(profile),
             "One MoE layer from end to end without the stage timer (median), divided as the stages' own "
             "times are.");
    page.set("timeline", timeline_of(profile),
             "Rank 0's last step with marks between stages, which cost time: the middle micro-batch of the "
             "first MoE layer.");
    page.set("memory", memory_of(profile), "Rank 0.");
    page.set("routing", routing_of(profile), "1 is balanced.");
    return page.html();
}

}  // namespace fp8flow::profile
