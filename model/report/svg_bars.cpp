// SPDX-License-Identifier: MIT
// Layout of the stacked bars, and of dots with their spread.
#include "kernels/core/error.h"
#include "model/report/svg.h"
#include "model/report/svg_axis.h"
#include "model/report/svg_canvas.h"
#include "model/report/table.h"

#include <algorithm>
#include <cmath>

namespace fp8flow::report {

namespace {

constexpr double kFont = 13.0;
constexpr double kBar = 28.0, kStep = 42.0, kHeading = 34.0, kDotStep = 30.0;
constexpr double kMostLabels = 0.36;  // of the picture's width

double total_of(const Bar& bar) {
    double total = 0.0;
    for (const double value : bar.values) total += std::isfinite(value) ? value : 0.0;
    return total;
}
std::string number(const BarChart& chart, double value) { return format_fixed(value, chart.decimals); }
std::string total_text(const BarChart& chart, const Bar& bar) {
    return bar.total.empty() ? number(chart, total_of(bar)) + chart.unit : bar.total;
}

// Vertical grid with its numbers, as many as have room.
void draw_grid(SvgCanvas& canvas, const Axis& x, double top, double bottom, const std::string& suffix) {
    std::vector<double> ticks;
    for (int count = 8; count > 0; --count) {
        ticks = linear_ticks(x.range.low, x.range.high, count);
        double widest = 0.0;
        for (const double tick : ticks)
            widest = std::max(widest, text_width(tick_label(tick, step_of(ticks)) + suffix, kTickFont));
        if (ticks.size() < 2 || x(ticks[1]) - x(ticks[0]) > widest + 10.0) break;
    }
    for (const double tick : ticks) {
        canvas.line(x(tick), top, x(tick), bottom, kGrid, 1.0);
        canvas.text(x(tick), bottom + 18.0, tick_label(tick, step_of(ticks)) + suffix,
                    {.size = kTickFont, .anchor = Anchor::middle});
    }
}

void draw_x_label(SvgCanvas& canvas, const Axis& x, double y, const std::string& label, double width) {
    // as wide as the picture where the axis is short
    const double middle = (x.from + x.to) / 2.0;
    const double room = 2.0 * std::min(middle - kMargin, width - kMargin - middle);
    canvas.text(middle, y, fitted(label, kFont, room), {.size = kFont, .anchor = Anchor::middle});
}

void draw_bar(SvgCanvas& canvas, const BarChart& chart, const Bar& bar,
              const std::vector<LegendEntry>& legend, const Axis& x, double y) {
    canvas.text(x.from - 10.0, y + 18.5, fitted(bar.label, kFont, x.from - 10.0 - kMargin),
                {.size = kFont, .color = kInk, .anchor = Anchor::end});
    double sum = 0.0;
    for (size_t c = 0; c < bar.values.size(); ++c) {
        if (!(bar.values[c] > 0.0) || !std::isfinite(bar.values[c])) continue;
        const double from = x(sum), to = x(sum += bar.values[c]);
        const std::string label = number(chart, bar.values[c]);
        canvas.rect(from, y, std::max(0.5, to - from - 1.0), kBar, legend[c].color,
                    fmt::format("{}{}{}: {} {}{}", bar.heading, bar.heading.empty() ? "" : ", ", bar.label,
                                chart.categories[c], label, chart.unit));
        if (to - from > text_width(label, kTickFont) + 8.0)
            canvas.text((from + to) / 2.0, y + 18.5, label,
                        {.size = kTickFont, .color = "#ffffff", .anchor = Anchor::middle});
    }
    canvas.text(x(sum) + 8.0, y + 18.5, total_text(chart, bar), {.size = kFont, .color = kInk, .bold = true});
}

}  // namespace

std::string render_svg(const BarChart& chart) {
    double longest_label = 0.0, longest_total = 0.0, most = 0.0, height = 0.0;
    for (const Bar& bar : chart.bars) {
        FP8FLOW_CHECK(bar.values.size() == chart.categories.size(), "bar {}: {} values, {} categories",
                      bar.label, bar.values.size(), chart.categories.size());
        for (const double value : bar.values)
            FP8FLOW_CHECK(!(value < 0.0), "bar {}: value {}", bar.label, value);
        longest_label = std::max(longest_label, text_width(bar.label, kFont));
        longest_total = std::max(longest_total, text_width(total_text(chart, bar), kFont, Weight::bold));
        most = std::max(most, total_of(bar));
        height += kStep + (bar.heading.empty() ? 0.0 : kHeading);
    }
    SvgCanvas canvas;
    std::vector<LegendEntry> legend;
    for (size_t c = 0; c < chart.categories.size(); ++c)
        legend.push_back(
            {.name = chart.categories[c],
             .color = chart.colors.empty() ? std::string(kPalette[c % kPalette.size()]) : chart.colors.at(c),
             .filled = true});
    const double top = canvas.header(chart.title, chart.subtitle, legend, chart.width);
    const double bottom = top + height;
    const Axis x{{0.0, most > 0.0 ? most : 1.0},
                 kMargin + std::min(longest_label, chart.width * kMostLabels) + 12.0,
                 chart.width - kMargin - longest_total - 14.0,
                 AxisScale::linear};
    draw_grid(canvas, x, top, bottom, "");
    canvas.line(x.from, top, x.from, bottom, kFrame, 1.2);
    double y = top;
    for (const Bar& bar : chart.bars) {
        if (!bar.heading.empty()) {
            y += kHeading;
            canvas.text(kMargin, y - 6.0,
                        fitted(bar.heading, 14.0, chart.width - 2.0 * kMargin, Weight::bold),
                        {.size = 14.0, .color = kInk, .bold = true, .halo = true});
        }
        draw_bar(canvas, chart, bar, legend, x, y + (kStep - kBar) / 2.0);
        y += kStep;
    }
    draw_x_label(canvas, x, bottom + 42.0, chart.x_label, chart.width);
    return canvas.finish(chart.width, bottom + 42.0 + kMargin - 8.0, chart.title);
}

std::string render_svg(const DotChart& chart) {
    double longest_label = 0.0, longest_note = 0.0;
    Interval range;
    for (const Dot& dot : chart.dots) {
        longest_label = std::max(longest_label, text_width(dot.label, kFont));
        longest_note = std::max(longest_note, text_width(dot.note, kFont));
        for (const double value : {dot.low, dot.value, dot.high})
            if (std::isfinite(value)) range.include(value);
    }
    std::vector<LegendEntry> legend;
    if (!chart.legend.empty())
        legend.push_back({.name = chart.legend, .color = std::string(kPalette[0]), .points = true});
    for (const Band& band : chart.bands) {
        range.include(band.low);
        range.include(band.high);
        legend.push_back({.name = band.label, .color = band.color, .band = true});
    }
    SvgCanvas canvas;
    const double top = canvas.header(chart.title, chart.subtitle, legend, chart.width);
    const double bottom = top + kDotStep * static_cast<double>(chart.dots.size());
    const double most = chart.width * kMostLabels;
    const Axis x{padded(range, AxisScale::linear, 0.05), kMargin + std::min(longest_label, most) + 14.0,
                 chart.width - kMargin - std::min(longest_note, most) - 14.0, AxisScale::linear};
    for (const Band& band : chart.bands)
        canvas.band(x(band.low), top, x(band.high) - x(band.low), bottom - top, band.color);
    draw_grid(canvas, x, top, bottom, chart.tick_suffix);
    if (!chart.dots.empty() && std::isfinite(chart.dots.front().value))
        canvas.line(x(chart.dots.front().value), top, x(chart.dots.front().value), bottom, "#6b7280", 1.4,
                    "7 5");
    double y = top + kDotStep / 2.0;
    for (const Dot& dot : chart.dots) {
        canvas.text(x.from - 12.0, y + 4.5, fitted(dot.label, kFont, most),
                    {.size = kFont, .color = kInk, .anchor = Anchor::end});
        canvas.text(x.to + 14.0, y + 4.5, fitted(dot.note, kFont, most), {.size = kFont, .color = kInk});
        if (std::isfinite(dot.low) && std::isfinite(dot.high))
            canvas.line(x(dot.low), y, x(dot.high), y, kPalette[0], 2.0);
        if (std::isfinite(dot.value))
            canvas.circle(x(dot.value), y, 5.5, kPalette[0], fmt::format("{}: {}", dot.label, dot.note));
        y += kDotStep;
    }
    canvas.line(x.from, top, x.from, bottom, kFrame, 1.2);
    draw_x_label(canvas, x, bottom + 42.0, chart.x_label, chart.width);
    return canvas.finish(chart.width, bottom + 42.0 + kMargin - 8.0, chart.title);
}

}  // namespace fp8flow::report
