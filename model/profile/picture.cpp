// SPDX-License-Identifier: MIT
// Stacked bars: where the time of the MoE layer goes under each recipe.
#include "model/profile/profile.h"
#include "model/report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fp8flow::profile {

using namespace report;

namespace {

constexpr std::array kStages = {"norm", "route",   "plan", "dispatch",  "fc1",          "swiglu",
                                "fc2",  "combine", "cast", "transpose", "shared expert"};

// "fc1 dgrad" counts as "fc1"; what no word of the journey names is "other".
size_t category_of(const ProfileRow& row) {
    const std::string word = row.stage.substr(0, row.stage.starts_with("fc") ? 3 : std::string::npos);
    return static_cast<size_t>(std::find(kStages.begin(), kStages.end(), word) - kStages.begin());
}

}  // namespace

std::string profile_picture(const Profile& profile) {
    BarChart chart;
    chart.title = "Time of one MoE layer, forward and backward";
    chart.subtitle = fmt::format("{}, {} rank{}, routing {}", profile.machine.device, profile.ranks,
                                 profile.ranks == 1 ? "" : "s", profile.routing);
    chart.x_label = "milliseconds (median over steps and ranks, stage by stage)";
    chart.unit = " ms";
    double longest = 0;
    for (const char* stage : kStages) chart.categories.emplace_back(stage);
    chart.categories.emplace_back("other");
    for (const ArmProfile& arm : profile.arms) {
        Bar bar{.label = arm.name, .values = std::vector<double>(kStages.size() + 1, 0.0)};
        for (const ProfileRow& row : arm.rows)
            if (row.part == kMoeLayer) bar.values[category_of(row)] += row.seconds.median * 1e3;
        double total = 0;
        for (const double value : bar.values) total += value;
        longest = std::max(longest, total);
        chart.bars.push_back(std::move(bar));
    }
    chart.decimals = longest < 1 ? 3 : longest < 100 ? 2 : 1;
    // categories that no recipe has take no place in the legend
    for (size_t c = chart.categories.size(); c-- > 0;) {
        const bool empty = std::all_of(chart.bars.begin(), chart.bars.end(),
                                       [&](const Bar& bar) { return bar.values[c] <= 0; });
        if (!empty) continue;
        chart.categories.erase(chart.categories.begin() + static_cast<std::ptrdiff_t>(c));
        for (Bar& bar : chart.bars) bar.values.erase(bar.values.begin() + static_cast<std::ptrdiff_t>(c));
    }
    return render_svg(chart);
}

}  // namespace fp8flow::profile
