// SPDX-License-Identifier: MIT
// Stacked bars: where the time of the MoE layer goes under each recipe. Lanes: what runs beside what in it.
#include "model/profile/profile.h"
#include "model/report/svg.h"
#include "model/report/svg_canvas.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fp8flow::profile {

using namespace report;

namespace {

constexpr std::array kStages = {"norm", "route",   "plan", "dispatch",  "fc1",          "swiglu",
                                "fc2",  "combine", "cast", "transpose", "shared expert"};

// "fc1 dgrad" counts as "fc1"; what no word of the journey names is "other".
size_t category_of(const std::string& stage) {
    const std::string word = stage.substr(0, stage.starts_with("fc") ? 3 : std::string::npos);
    return static_cast<size_t>(std::find(kStages.begin(), kStages.end(), word) - kStages.begin());
}
std::string name_of_category(size_t category) {
    return category < kStages.size() ? kStages[category] : "other";
}

std::string where(const Profile& profile) {
    return fmt::format("{}, {} rank{}, routing {}", profile.machine.device, profile.ranks,
                       profile.ranks == 1 ? "" : "s", profile.routing);
}

// Rows of the lanes' picture; the second of two micro-batches on the main lane has its own.
constexpr std::array kLaneNames = {"main lane", "side lane", "wire lane", "other micro-batch"};
static_assert(kLaneNames.size() == kNumLanes + 1);
size_t lane_of(const StageSpan& span) {
    return span.lane == Lane::main && span.turn > 0 ? kNumLanes : static_cast<size_t>(span.lane);
}

struct Box {
    size_t lane, category;
    double begin, end;  // seconds in the window
    std::string tooltip;
};

// A MoE layer's way in one direction, and all that ran meanwhile.
struct Window {
    double seconds = 0;
    std::vector<Box> boxes;
};

// Of the middle micro-batch of the first MoE layer.
Window window_of(const std::vector<StageSpan>& trace, std::string_view direction) {
    std::vector<const StageSpan*> ways;
    for (const StageSpan& span : trace)
        if (span.level == StageLevel::part && std::string_view(span.name) == kMoeLayer &&
            span.direction == direction && (ways.empty() || ways.front()->layer == span.layer))
            ways.push_back(&span);
    if (ways.empty()) return {};
    const StageSpan& way = *ways[ways.size() / 2];
    Window window{.seconds = way.seconds, .boxes = {}};
    for (size_t i = 0; i < trace.size(); ++i) {
        const StageSpan& span = trace[i];
        const std::string stage = stage_of(trace, static_cast<int>(i)).stage;
        const bool inner =
            span.parent >= 0 && trace[static_cast<size_t>(span.parent)].level == StageLevel::stage;
        if (span.level != StageLevel::stage || (inner && stage != "cast")) continue;
        const double begin = std::max(span.begin - way.begin, 0.0);
        const double end = std::min(span.begin + span.seconds - way.begin, way.seconds);
        if (end > begin)
            window.boxes.push_back(
                {lane_of(span), category_of(stage), begin, end,
                 fmt::format("{}, {}, {:.3f} ms", span.name, span.direction, span.seconds * 1e3)});
    }
    return window;
}

constexpr double kLaneHeight = 26.0, kLabels = 130.0, kGap = 26.0, kWidth = 1280.0;

// Times from `x`, lanes from `y` downwards.
void draw(SvgCanvas& canvas, const Window& window, const std::vector<size_t>& lanes, double x, double y,
          double pixels_per_second) {
    for (const Box& box : window.boxes) {
        const auto lane = std::find(lanes.begin(), lanes.end(), box.lane) - lanes.begin();
        const double top = y + kLaneHeight * static_cast<double>(lane);
        const double left = x + box.begin * pixels_per_second;
        const double width = (box.end - box.begin) * pixels_per_second;
        canvas.rect(left, top + 2, std::max(width - 0.6, 0.4), kLaneHeight - 4, kPalette[box.category],
                    box.tooltip);
        const std::string name = name_of_category(box.category);
        if (text_width(name, 10.0) + 6 < width)
            canvas.text(left + width / 2, top + 17, name,
                        {.size = 10.0, .color = "#ffffff", .anchor = Anchor::middle});
    }
    canvas.line(x, y, x, y + kLaneHeight * static_cast<double>(lanes.size()), kFrame, 1);
}

}  // namespace

std::string timeline_picture(const Profile& profile) {
    struct Arm {
        std::string name;
        Window forward, backward;
    };
    std::vector<Arm> arms;
    double forward = 0, backward = 0;
    bool has_lane[kLaneNames.size()] = {}, has_category[kStages.size() + 1] = {};
    for (const ArmProfile& arm : profile.arms) {
        arms.push_back({arm.name, window_of(arm.trace, "forward"), window_of(arm.trace, "backward")});
        forward = std::max(forward, arms.back().forward.seconds);
        backward = std::max(backward, arms.back().backward.seconds);
        for (const Window* window : {&arms.back().forward, &arms.back().backward})
            for (const Box& box : window->boxes) has_lane[box.lane] = has_category[box.category] = true;
    }
    std::vector<size_t> lanes;
    for (const size_t lane : {size_t{0}, kLaneNames.size() - 1, size_t{1}, size_t{2}})
        if (has_lane[lane]) lanes.push_back(lane);
    std::vector<LegendEntry> legend;
    for (size_t c = 0; c <= kStages.size(); ++c)
        if (has_category[c]) legend.push_back({name_of_category(c), std::string(kPalette[c]), false, true});

    SvgCanvas canvas;
    const std::string title = "One MoE layer in time: forward on the left, backward on the right";
    double y = canvas.header(title, where(profile) + "; this rank's last step with marks between stages",
                             legend, kWidth);
    const double left = kMargin + kLabels;
    const double scale = (kWidth - left - kGap - kMargin) / std::max(forward + backward, 1e-9);
    const double second = left + forward * scale + kGap;
    for (const Arm& arm : arms) {
        y += 24;
        canvas.text(kMargin, y,
                    fmt::format("{}: {:.3f} + {:.3f} ms", arm.name, arm.forward.seconds * 1e3,
                                arm.backward.seconds * 1e3),
                    {.color = kInk, .bold = true});
        y += 8;
        for (size_t l = 0; l < lanes.size(); ++l)
            canvas.text(kMargin, y + 17 + kLaneHeight * static_cast<double>(l), kLaneNames[lanes[l]],
                        {.size = 12.0});
        draw(canvas, arm.forward, lanes, left, y, scale);
        draw(canvas, arm.backward, lanes, second, y, scale);
        y += kLaneHeight * static_cast<double>(lanes.size());
    }
    for (const auto& [x, seconds] : {std::pair{left, forward}, std::pair{second, backward}})
        for (const double tick : linear_ticks(0, seconds * 1e3, 6))
            canvas.text(x + tick * 1e-3 * scale, y + 18, tick_label(tick, 0),
                        {.size = 11.0, .anchor = Anchor::middle});
    canvas.text(kMargin, y + 18, "milliseconds", {.size = 11.0});
    return canvas.finish(kWidth, y + 36, title);
}

std::string profile_picture(const Profile& profile) {
    BarChart chart;
    chart.title = "Time of one MoE layer, forward and backward";
    chart.subtitle = where(profile);
    chart.x_label = "milliseconds (median over steps and ranks, stage by stage)";
    chart.unit = " ms";
    double longest = 0;
    for (const char* stage : kStages) chart.categories.emplace_back(stage);
    chart.categories.emplace_back("other");
    for (const ArmProfile& arm : profile.arms) {
        Bar bar{.label = arm.name, .values = std::vector<double>(kStages.size() + 1, 0.0)};
        for (const ProfileRow& row : arm.rows)
            if (row.part == kMoeLayer) bar.values[category_of(row.stage)] += row.seconds.median * 1e3;
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
