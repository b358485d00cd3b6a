// SPDX-License-Identifier: MIT
// Stacked bars: where the time of the MoE layer goes under each recipe. Lanes: what runs beside what in it.
#include "model/profile/picture.h"

#include "model/profile/profile.h"
#include "model/report/run_report.h"
#include "model/report/svg.h"
#include "model/report/svg_canvas.h"
#include "model/report/table.h"
#include "model/report/titles.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

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
std::string where(const Profile& profile) {
    const double tokens = profile.arms.empty() ? 0 : profile.arms.front().tokens;
    const std::string shape = profile.shape.empty() ? "" : profile.shape + "; ";
    const std::string per_rank =
        tokens > 0 ? format_count(std::llround(tokens)) + " tokens of a rank and micro-batch; " : "";
    return fmt::format("{}{}{}, routing {}", shape, per_rank, profile.machine.device, profile.routing);
}

double speed_up(const Profile& profile, const ArmProfile& arm) {
    const double base = profile.arms.front().whole.layer.median, own = arm.whole.layer.median;
    return own > 0 ? base / own : 0;
}

// Rows of the lanes' picture; the second of two micro-batches on the main lane has its own.
constexpr std::array kLaneNames = {"main lane", "side lane", "wire lane", "other micro-batch"};
static_assert(kLaneNames.size() == kNumLanes + 1);
size_t lane_of(const StageSpan& span) {
    return span.lane == Lane::main && span.turn > 0 ? kNumLanes : static_cast<size_t>(span.lane);
}

}  // namespace

std::string name_of_category(size_t category) {
    return category < kStages.size() ? kStages[category] : "other";
}

std::string title_of(const Profile& profile, const std::string& what) {
    std::string title = profile.model.empty() ? what : profile.model + ", " + what;
    title += profile.provenance.ranks > 0 && !profile.provenance.date.empty()
                 ? " on " + device_count(profile.provenance)
                 : " on " + counted(profile.ranks, "rank");
    if (profile.arms.size() < 2 || profile.ablation) return title;
    const ArmProfile &first = profile.arms.front(), *best = &first;
    for (const ArmProfile& arm : profile.arms)
        if (resolved(first.whole.layer, arm.whole.layer) && speed_up(profile, arm) > speed_up(profile, *best))
            best = &arm;
    if (best == &first) return title + ": none faster than " + first.name + " beyond the spread";
    return title +
           fmt::format(": {} {} as fast as {}", best->name, speed_up_text(profile, *best, " x"), first.name);
}

std::string name_of_lane(size_t lane) { return kLaneNames[lane]; }
std::vector<size_t> lane_order() { return {0, kLaneNames.size() - 1, 1, 2}; }

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

std::string heading_of(const Profile& profile, const ArmProfile& arm) {
    std::string heading = fmt::format("{}: {:.3f} ms", arm.name, arm.whole.layer.median * 1e3);
    if (&arm != profile.arms.data()) heading += ", speed-up " + speed_up_text(profile, arm, " x");
    return heading;
}

std::string speed_up_text(const Profile& profile, const ArmProfile& arm, std::string_view unit) {
    const ArmProfile& first = profile.arms.front();
    return &arm == &first ? fmt::format("1.00{}", unit)
                          : ratio_text(first.whole.layer, arm.whole.layer, unit);
}

std::vector<double> milliseconds_of(const ArmProfile& arm, std::string_view direction) {
    std::vector<double> values(kStages.size() + 1, 0.0);
    double sum = 0;
    for (const ProfileRow& row : arm.rows)
        if (row.part == kMoeLayer && row.direction == direction) {
            values[category_of(row.stage)] += row.seconds.median * 1e3;
            sum += row.seconds.median;
        }
    const double whole = (direction == "forward" ? arm.whole.forward : arm.whole.backward).median;
    if (whole > 0 && sum > 0)
        for (double& value : values) value *= whole / sum;
    return values;
}

namespace {

constexpr double kBoxFont = 11.0, kLaneHeight = 26.0, kLabels = 140.0, kGap = 26.0, kWidth = 1280.0;

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
        // a cast inside a stage lies over it
        const bool covered = std::any_of(window.boxes.begin(), window.boxes.end(), [&](const Box& other) {
            return &other != &box && other.lane == box.lane && other.begin >= box.begin &&
                   other.begin < box.end - 1e-9 && other.end - other.begin < box.end - box.begin;
        });
        if (!covered && text_width(name, kBoxFont) + 6 < width)
            canvas.text(left + width / 2, top + 17, name,
                        {.size = kBoxFont, .color = "#ffffff", .anchor = Anchor::middle});
    }
    canvas.line(x, y, x, y + kLaneHeight * static_cast<double>(lanes.size()), kFrame, 1);
}

// Milliseconds below the lanes, as many as have room.
void draw_times(SvgCanvas& canvas, double x, double y, double seconds, double pixels_per_second) {
    const double width = seconds * pixels_per_second;
    const std::vector<double> ticks =
        linear_ticks(0, seconds * 1e3, std::clamp(static_cast<int>(width / 70.0), 1, 6));
    double free_from = 0;
    for (const double tick : ticks) {
        const std::string label = tick_label(tick, ticks.size() > 1 ? ticks[1] - ticks[0] : 0);
        const double middle = x + tick * 1e-3 * pixels_per_second, half = text_width(label, 11.0) / 2;
        if (middle - half < free_from) continue;
        canvas.text(middle, y, label, {.size = 11.0, .anchor = Anchor::middle});
        free_from = middle + half + 6;
    }
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
    for (const size_t lane : lane_order())
        if (has_lane[lane]) lanes.push_back(lane);
    std::vector<LegendEntry> legend;
    for (size_t c = 0; c <= kStages.size(); ++c)
        if (has_category[c]) legend.push_back({name_of_category(c), std::string(kPalette[c]), false, true});

    SvgCanvas canvas;
    const std::string title = title_of(profile, "one MoE layer in time");
    double y = canvas.header(title,
                             where(profile) +
                                 "; forward on the left, backward on the right; rank 0's last step with "
                                 "marks between stages, which cost time",
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
        draw_times(canvas, x, y + 18, seconds, scale);
    canvas.text(kMargin, y + 18, "milliseconds", {.size = 11.0});
    return canvas.finish(kWidth, y + 36, title);
}

std::string profile_picture(const Profile& profile) {
    BarChart chart;
    chart.title = title_of(profile, "one MoE layer");
    chart.subtitle = where(profile);
    chart.x_label = "milliseconds from end to end (median), divided as the stages' own times are";
    chart.unit = " ms";
    double longest = 0;
    for (size_t c = 0; c <= kStages.size(); ++c) {
        chart.categories.push_back(name_of_category(c));
        chart.colors.emplace_back(kPalette[c]);
    }
    for (const ArmProfile& arm : profile.arms) {
        std::string heading = heading_of(profile, arm);
        for (const char* direction : {"forward", "backward"}) {
            Bar bar{.label = direction, .values = milliseconds_of(arm, direction), .heading = heading};
            double total = 0;
            for (const double value : bar.values) total += value;
            longest = std::max(longest, total);
            chart.bars.push_back(std::move(bar));
            heading.clear();
        }
    }
    chart.decimals = longest < 1 ? 3 : longest < 100 ? 2 : 1;
    // categories that no recipe has take no place in the legend; the others keep their colours
    for (size_t c = chart.categories.size(); c-- > 0;) {
        const bool empty = std::all_of(chart.bars.begin(), chart.bars.end(),
                                       [&](const Bar& bar) { return bar.values[c] <= 0; });
        if (!empty) continue;
        const auto at = static_cast<std::ptrdiff_t>(c);
        chart.categories.erase(chart.categories.begin() + at);
        chart.colors.erase(chart.colors.begin() + at);
        for (Bar& bar : chart.bars) bar.values.erase(bar.values.begin() + at);
    }
    return render_svg(chart);
}

std::string ablation_picture(const Profile& profile) {
    DotChart chart;
    chart.title = title_of(profile, "one MoE layer without one optimisation at a time");
    chart.subtitle = where(profile);
    chart.x_label = "milliseconds of the layer, forward and backward, from end to end";
    chart.legend = "median; line: fastest to slowest step; dashed: the first";
    const Spread& first = profile.arms.front().whole.layer;
    for (const ArmProfile& arm : profile.arms) {
        const Spread& layer = arm.whole.layer;
        chart.dots.push_back(
            {.label = arm.name,
             .value = layer.median * 1e3,
             .low = layer.min * 1e3,
             .high = layer.max * 1e3,
             .note = fmt::format("{:.3f} ms{}{}", layer.median * 1e3, &layer == &first ? "" : ", ",
                                 &layer == &first ? "" : percent_text(first, layer))});
    }
    return render_svg(chart);
}

}  // namespace fp8flow::profile
