// SPDX-License-Identifier: MIT
// Layout of the line chart and of the stacked bars.
#include "model/report/svg.h"

#include "kernels/core/error.h"
#include "model/report/svg_canvas.h"
#include "model/report/table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace fp8flow::report {

namespace {

struct Interval {
    double low = std::numeric_limits<double>::infinity();
    double high = -std::numeric_limits<double>::infinity();

    void include(double value) {
        low = std::min(low, value);
        high = std::max(high, value);
    }
    bool empty() const { return low > high; }
};

bool drawable(double value, AxisScale scale) {
    return std::isfinite(value) && (scale == AxisScale::linear || value > 0.0);
}

// From data to pixels along one axis.
struct Axis {
    Interval range;
    double from = 0.0, to = 1.0;  // pixels of range.low and range.high
    AxisScale scale = AxisScale::linear;

    double operator()(double value) const {
        const auto f = [this](double v) { return scale == AxisScale::log ? std::log10(v) : v; };
        return from + (to - from) * (f(value) - f(range.low)) / (f(range.high) - f(range.low));
    }
};

// Room around the data; a single value gets some on both sides.
Interval padded(Interval range, AxisScale scale, double share) {
    if (range.empty()) return scale == AxisScale::log ? Interval{0.1, 1.0} : Interval{0.0, 1.0};
    if (scale == AxisScale::log) {
        const double factor = range.low == range.high ? 2.0 : std::pow(range.high / range.low, share);
        return {range.low / factor, range.high * factor};
    }
    const double spread = range.high - range.low;
    const double room = spread > 1e-12 * std::max(std::abs(range.low), std::abs(range.high))
                            ? spread * share
                            : std::max(std::abs(range.high) * 0.05, 1e-9);
    return {range.low - room, range.high + room};
}

Interval y_range(const Panel& panel) {
    Interval range;
    for (const Series& series : panel.series)
        for (const double y : series.y)
            if (drawable(y, panel.y_scale)) range.include(y);
    for (const ReferenceLine& line : panel.lines)
        if (drawable(line.y, panel.y_scale)) range.include(line.y);
    // Errors, times and the like: an axis that nearly starts at zero starts there.
    const bool from_zero =
        panel.y_scale == AxisScale::linear && range.low >= 0.0 && range.low <= 0.05 * range.high;
    range = padded(range, panel.y_scale, 0.06);
    if (from_zero) range.low = 0.0;
    if (panel.y_min) range.low = *panel.y_min;
    if (panel.y_max) range.high = *panel.y_max;
    FP8FLOW_CHECK(range.low < range.high && drawable(range.low, panel.y_scale), "axis from {} to {}",
                  range.low, range.high);
    return range;
}

// Path of one series. Where many points share a pixel column, only its first, lowest, highest and last are
// drawn.
std::string path_of(const Series& series, const Axis& x_axis, const Axis& y_axis) {
    struct Point {
        double x, y;
    };
    std::string path;
    std::vector<Point> column;
    bool pen_down = false;
    const auto draw = [&](const Point& p) {
        path += fmt::format("{}{:.2f} {:.2f}", pen_down ? "L" : "M", p.x, p.y);
        pen_down = true;
    };
    const auto flush = [&] {
        if (column.size() <= 4) {
            for (const Point& p : column) draw(p);
        } else {
            auto [low, high] =
                std::minmax_element(column.begin(), column.end(), [](auto& a, auto& b) { return a.y < b.y; });
            if (high < low) std::swap(low, high);
            draw(column.front());
            draw(*low);
            draw(*high);
            draw(column.back());
        }
        column.clear();
    };
    for (size_t i = 0; i < series.x.size(); ++i) {
        if (!std::isfinite(series.x[i]) || !drawable(series.y[i], y_axis.scale)) {
            flush();
            pen_down = false;
            continue;
        }
        // Far outside the panel the clip hides the point; keep the number small for renderers.
        const Point p{x_axis(series.x[i]), std::clamp(y_axis(series.y[i]), -1e5, 1e5)};
        if (!column.empty() && std::floor(p.x) != std::floor(column.front().x)) flush();
        column.push_back(p);
    }
    flush();
    return path;
}

double step_of(const std::vector<double>& ticks) { return ticks.size() > 1 ? ticks[1] - ticks[0] : 0.0; }

std::vector<LegendEntry> legend_of(const LineChart& chart, std::map<std::string, std::string>& colors) {
    std::vector<LegendEntry> legend;
    for (const Panel& panel : chart.panels)
        for (const Series& series : panel.series) {
            if (colors.count(series.name) > 0) continue;
            const std::string color =
                series.color.empty() ? std::string(kPalette[colors.size() % kPalette.size()]) : series.color;
            colors[series.name] = color;
            if (!series.name.empty()) legend.push_back({series.name, color, series.dashed});
        }
    return legend;
}

void draw_panel(SvgCanvas& canvas, const Panel& panel, const Axis& x_axis, const Axis& y_axis, size_t index,
                const std::map<std::string, std::string>& colors) {
    const double left = x_axis.from, right = x_axis.to, bottom = y_axis.from, top = y_axis.to;
    const bool log = panel.y_scale == AxisScale::log;
    const std::vector<double> ticks =
        log ? log_ticks(y_axis.range.low, y_axis.range.high)
            : linear_ticks(y_axis.range.low, y_axis.range.high, static_cast<int>(panel.height / 52.0));
    for (const double tick : linear_ticks(x_axis.range.low, x_axis.range.high, 9))
        canvas.line(x_axis(tick), top, x_axis(tick), bottom, kGrid, 1.0);
    for (const double tick : ticks) {
        canvas.line(left, y_axis(tick), right, y_axis(tick), kGrid, 1.0);
        canvas.text(left - 9.0, y_axis(tick) + 4.0,
                    tick_label(tick, log ? 0.0 : step_of(ticks)) + panel.tick_suffix,
                    {.size = 12.0, .anchor = Anchor::end});
    }
    canvas.line(left, bottom, right, bottom, kFrame, 1.2);
    canvas.text(kMargin, (top + bottom) / 2.0, panel.y_label,
                {.size = 13.0, .anchor = Anchor::middle, .rotation = -90.0});

    canvas.raw(fmt::format(
        "<clipPath id=\"panel{}\"><rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\"/>"
        "</clipPath>\n<g clip-path=\"url(#panel{})\" fill=\"none\" stroke-linejoin=\"round\" "
        "stroke-linecap=\"round\">\n",
        index, left, top - 2.0, right - left, bottom - top + 4.0, index));
    bool any = false;
    for (const Series& series : panel.series) {
        const std::string path = path_of(series, x_axis, y_axis);
        if (path.empty()) continue;
        any = true;
        canvas.raw(fmt::format("<path d=\"{}\" stroke=\"{}\" stroke-width=\"{}\"{}/>\n", path,
                               escape_xml(series.color.empty() ? colors.at(series.name) : series.color),
                               series.width, series.dashed ? " stroke-dasharray=\"6 4\"" : ""));
    }
    canvas.raw("</g>\n");
    for (const ReferenceLine& line : panel.lines) {
        if (!drawable(line.y, panel.y_scale) || line.y < y_axis.range.low || line.y > y_axis.range.high)
            continue;
        const double y = y_axis(line.y);
        canvas.line(left, y, right, y, line.color, 1.4, "7 5");
        // On the side where the curves are less likely: they mostly lie between the line and the middle of
        // the panel.
        const bool below = y - top < 18.0 || (y > (top + bottom) / 2.0 && bottom - y > 18.0);
        canvas.text(right - 6.0, below ? y + 15.0 : y - 6.0, line.label,
                    {.size = 12.0, .color = line.color, .anchor = Anchor::end, .halo = true});
    }
    if (!any)
        canvas.text((left + right) / 2.0, (top + bottom) / 2.0, "no data",
                    {.size = 14.0, .anchor = Anchor::middle, .halo = true});
}

}  // namespace

std::vector<double> linear_ticks(double low, double high, int count) {
    if (!(high > low) || !std::isfinite(high - low)) return {low};
    const double raw = (high - low) / std::max(1, count);
    const double power = std::pow(10.0, std::floor(std::log10(raw)));
    const double share = raw / power;
    const double step = power * (share <= 1.0 ? 1.0 : share <= 2.0 ? 2.0 : share <= 5.0 ? 5.0 : 10.0);
    std::vector<double> ticks;
    const double tolerance = 1e-9;  // of a step: an end that is a round number keeps its tick
    for (double k = std::ceil(low / step - tolerance); k <= std::floor(high / step + tolerance); k += 1.0) {
        ticks.push_back(k == 0.0 ? 0.0 : k * step);
        if (ticks.size() > 1000) break;  // low and high differ by a rounding error only
    }
    return ticks;
}

std::vector<double> log_ticks(double low, double high) {
    std::vector<double> ticks;
    if (!(low > 0.0) || !(high > low) || !std::isfinite(high)) return ticks;
    const double first = std::floor(std::log10(low)), last = std::ceil(std::log10(high));
    const bool fine = std::log10(high / low) < 2.0;
    const double stride = std::max(1.0, std::ceil((last - first) / 10.0));
    for (double decade = first; decade <= last; decade += stride)
        for (const double digit : {1.0, 2.0, 5.0}) {
            const double tick = digit * std::pow(10.0, decade);
            if ((digit == 1.0 || fine) && tick >= low * (1.0 - 1e-9) && tick <= high * (1.0 + 1e-9))
                ticks.push_back(tick);
        }
    // Less than a factor of two may hold none of these.
    return ticks.size() >= 2 ? ticks : linear_ticks(low, high, 5);
}

std::string render_svg(const LineChart& chart) {
    Interval x_range;
    for (const Panel& panel : chart.panels)
        for (const Series& series : panel.series) {
            FP8FLOW_CHECK(series.x.size() == series.y.size(), "series {}: {} x, {} y", series.name,
                          series.x.size(), series.y.size());
            for (const double x : series.x)
                if (std::isfinite(x)) x_range.include(x);
        }
    x_range = padded(x_range, AxisScale::linear, 0.0);

    SvgCanvas canvas;
    std::map<std::string, std::string> colors;
    double y = canvas.header(chart.title, chart.subtitle, legend_of(chart, colors), chart.width);
    Axis x_axis{x_range, kMargin + 66.0, chart.width - kMargin, AxisScale::linear};
    for (size_t i = 0; i < chart.panels.size(); ++i) {
        const Panel& panel = chart.panels[i];
        if (i > 0) y += 26.0;
        draw_panel(canvas, panel, x_axis, Axis{y_range(panel), y + panel.height, y, panel.y_scale}, i,
                   colors);
        y += panel.height;
    }
    const std::vector<double> ticks = linear_ticks(x_range.low, x_range.high, 9);
    y += 20.0;
    for (const double tick : ticks)
        canvas.text(x_axis(tick), y, tick_label(tick, step_of(ticks)),
                    {.size = 12.0, .anchor = Anchor::middle});
    y += 24.0;
    canvas.text((x_axis.from + x_axis.to) / 2.0, y, chart.x_label, {.size = 13.0, .anchor = Anchor::middle});
    return canvas.finish(chart.width, y + kMargin - 8.0, chart.title);
}

std::string render_svg(const BarChart& chart) {
    double longest_label = 0.0, longest_total = 0.0, most = 0.0;
    const auto number = [&](double value) { return format_fixed(value, chart.decimals); };
    const auto total_of = [](const Bar& bar) {
        double total = 0.0;
        for (const double value : bar.values) total += std::isfinite(value) ? value : 0.0;
        return total;
    };
    for (const Bar& bar : chart.bars) {
        FP8FLOW_CHECK(bar.values.size() == chart.categories.size(), "bar {}: {} values, {} categories",
                      bar.label, bar.values.size(), chart.categories.size());
        for (const double value : bar.values)
            FP8FLOW_CHECK(!(value < 0.0), "bar {}: value {}", bar.label, value);
        longest_label = std::max(longest_label, text_width(bar.label, 13.0));
        longest_total = std::max(longest_total, text_width(number(total_of(bar)) + chart.unit, 13.0));
        most = std::max(most, total_of(bar));
    }
    SvgCanvas canvas;
    std::vector<LegendEntry> legend;
    for (size_t c = 0; c < chart.categories.size(); ++c)
        legend.push_back({.name = chart.categories[c],
                          .color = std::string(kPalette[c % kPalette.size()]),
                          .filled = true});
    const double top = canvas.header(chart.title, chart.subtitle, legend, chart.width);
    constexpr double kBar = 28.0, kStep = 42.0;
    const double bottom = top + kStep * static_cast<double>(chart.bars.size());
    const Axis x{{0.0, most > 0.0 ? most : 1.0},
                 kMargin + std::min(longest_label, chart.width * 0.4) + 12.0,
                 chart.width - kMargin - longest_total - 14.0,
                 AxisScale::linear};
    const std::vector<double> ticks = linear_ticks(x.range.low, x.range.high, 8);
    for (const double tick : ticks) {
        canvas.line(x(tick), top, x(tick), bottom, kGrid, 1.0);
        canvas.text(x(tick), bottom + 18.0, tick_label(tick, step_of(ticks)),
                    {.size = 12.0, .anchor = Anchor::middle});
    }
    double y = top + (kStep - kBar) / 2.0;
    for (const Bar& bar : chart.bars) {
        canvas.text(x.from - 10.0, y + 18.5, bar.label, {.size = 13.0, .color = kInk, .anchor = Anchor::end});
        double sum = 0.0;
        for (size_t c = 0; c < bar.values.size(); ++c) {
            if (!(bar.values[c] > 0.0) || !std::isfinite(bar.values[c])) continue;
            const double from = x(sum), to = x(sum += bar.values[c]);
            const std::string label = number(bar.values[c]);
            canvas.rect(from, y, std::max(0.5, to - from - 1.0), kBar, legend[c].color,
                        fmt::format("{}: {} {}{}", bar.label, chart.categories[c], label, chart.unit));
            if (to - from > text_width(label, 12.0) + 10.0)
                canvas.text((from + to) / 2.0, y + 18.5, label,
                            {.size = 12.0, .color = "#ffffff", .anchor = Anchor::middle});
        }
        canvas.text(x(sum) + 8.0, y + 18.5, number(sum) + chart.unit,
                    {.size = 13.0, .color = kInk, .bold = true});
        y += kStep;
    }
    canvas.line(x.from, top, x.from, bottom, kFrame, 1.2);
    canvas.text((x.from + x.to) / 2.0, bottom + 42.0, chart.x_label,
                {.size = 13.0, .anchor = Anchor::middle});
    return canvas.finish(chart.width, bottom + 42.0 + kMargin - 8.0, chart.title);
}

}  // namespace fp8flow::report
