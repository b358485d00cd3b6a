// SPDX-License-Identifier: MIT
// Layout of the line chart.
#include "model/report/svg.h"

#include "kernels/core/error.h"
#include "model/report/svg_axis.h"
#include "model/report/svg_canvas.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

namespace fp8flow::report {

namespace {

Interval y_range(const Panel& panel) {
    Interval range;
    for (const Series& series : panel.series)
        for (const double y : series.y)
            if (drawable(y, panel.y_scale)) range.include(y);
    for (const ReferenceLine& line : panel.lines)
        if (drawable(line.y, panel.y_scale)) range.include(line.y);
    for (const Band& band : panel.bands)
        for (const double y : {band.low, band.high})
            if (drawable(y, panel.y_scale)) range.include(y);
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

std::vector<LegendEntry> legend_of(const LineChart& chart, std::map<std::string, std::string>& colors) {
    std::vector<LegendEntry> legend;
    for (const Panel& panel : chart.panels)
        for (const Series& series : panel.series) {
            if (colors.count(series.name) > 0) continue;
            const std::string color =
                series.color.empty() ? std::string(kPalette[colors.size() % kPalette.size()]) : series.color;
            colors[series.name] = color;
            if (!series.name.empty())
                legend.push_back(
                    {.name = series.name, .color = color, .dashed = series.dashed, .points = series.points});
        }
    for (const Panel& panel : chart.panels)
        for (const Band& band : panel.bands)
            legend.push_back({.name = band.label, .color = band.color, .band = true});
    return legend;
}

std::vector<double> ticks_of(const Panel& panel, const Interval& range) {
    return panel.y_scale == AxisScale::log
               ? log_ticks(range.low, range.high)
               : linear_ticks(range.low, range.high, static_cast<int>(panel.height / 52.0));
}
std::string label_of(const Panel& panel, double tick, const std::vector<double>& ticks) {
    return tick_label(tick, panel.y_scale == AxisScale::log ? 0.0 : step_of(ticks)) + panel.tick_suffix;
}

constexpr int kMostTicks = 9;  // along x

// Pixels left of the panels: the labels of all ticks, and the text that stands on its side.
double left_of(const LineChart& chart) {
    double widest = 48.0;
    for (const Panel& panel : chart.panels) {
        const std::vector<double> ticks = ticks_of(panel, y_range(panel));
        for (const double tick : ticks)
            widest = std::max(widest, text_width(label_of(panel, tick, ticks), kTickFont));
    }
    return kMargin + 9.0 + widest + 9.0;
}

// Where the text of a line is written: above it or below, at the right end or the left, where it lies on no
// text of another line and inside the panel.
struct LabelPlace {
    double y;
    Anchor anchor;
};
std::optional<LabelPlace> place_label(double y, double top, double bottom, std::vector<LabelPlace>& taken) {
    // The curves mostly lie between the line and the middle of the panel.
    const double above = y - 6.0, below = y + 15.0;
    const bool lower = y > (top + bottom) / 2.0;
    for (const Anchor anchor : {Anchor::end, Anchor::start})
        for (const double text : lower ? std::array{below, above} : std::array{above, below}) {
            const bool inside = text - kTickFont > top && text + 4.0 < bottom;
            const bool free = std::none_of(taken.begin(), taken.end(), [&](const LabelPlace& other) {
                return other.anchor == anchor && std::abs(other.y - text) < 16.0;
            });
            if (!inside || !free) continue;
            taken.push_back({text, anchor});
            return taken.back();
        }
    return std::nullopt;
}

void draw_lines(SvgCanvas& canvas, const Panel& panel, const Axis& x_axis, const Axis& y_axis) {
    const double left = x_axis.from, right = x_axis.to;
    std::vector<LabelPlace> taken;
    for (const ReferenceLine& line : panel.lines) {
        if (!drawable(line.y, panel.y_scale) || line.y < y_axis.range.low || line.y > y_axis.range.high)
            continue;
        const double y = y_axis(line.y);
        canvas.line(left, y, right, y, line.color, 1.4, "7 5");
        const auto place = place_label(y, y_axis.to, y_axis.from, taken);
        if (!place) continue;
        canvas.text(place->anchor == Anchor::end ? right - 6.0 : left + 6.0, place->y,
                    fitted(line.label, kTickFont, (right - left) / 2.0 - 12.0),
                    {.size = kTickFont, .color = line.color, .anchor = place->anchor, .halo = true});
    }
}

void draw_series(SvgCanvas& canvas, const Series& series, const std::string& color, const Axis& x_axis,
                 const Axis& y_axis) {
    const std::string path = path_of(series, x_axis, y_axis);
    if (path.empty()) return;
    canvas.raw(fmt::format("<path d=\"{}\" stroke=\"{}\" stroke-width=\"{}\"{}/>\n", path, escape_xml(color),
                           series.width, series.dashed ? " stroke-dasharray=\"6 4\"" : ""));
}

void draw_points(SvgCanvas& canvas, const Series& series, const std::string& color, const Axis& x_axis,
                 const Axis& y_axis) {
    for (size_t i = 0; series.points && i < series.x.size(); ++i)
        if (std::isfinite(series.x[i]) && drawable(series.y[i], y_axis.scale) &&
            series.y[i] >= y_axis.range.low && series.y[i] <= y_axis.range.high)
            canvas.circle(x_axis(series.x[i]), y_axis(series.y[i]), 3.6, color,
                          fmt::format("{}, {:.6g}: {:.4f}", series.name, series.x[i], series.y[i]));
}

void draw_panel(SvgCanvas& canvas, const Panel& panel, const Axis& x_axis, const Axis& y_axis, size_t index,
                const std::map<std::string, std::string>& colors) {
    const double left = x_axis.from, right = x_axis.to, bottom = y_axis.from, top = y_axis.to;
    for (const Band& band : panel.bands)
        if (drawable(band.low, panel.y_scale) && drawable(band.high, panel.y_scale)) {
            const double from = std::clamp(y_axis(band.high), top, bottom),
                         to = std::clamp(y_axis(band.low), top, bottom);
            canvas.band(left, from, right - left, to - from, band.color);
        }
    const std::vector<double> ticks = ticks_of(panel, y_axis.range);
    for (const double tick : linear_ticks(x_axis.range.low, x_axis.range.high, kMostTicks))
        canvas.line(x_axis(tick), top, x_axis(tick), bottom, kGrid, 1.0);
    for (const double tick : ticks) {
        canvas.line(left, y_axis(tick), right, y_axis(tick), kGrid, 1.0);
        canvas.text(left - 9.0, y_axis(tick) + 4.0, label_of(panel, tick, ticks),
                    {.size = kTickFont, .anchor = Anchor::end});
    }
    canvas.line(left, bottom, right, bottom, kFrame, 1.2);
    canvas.text(kMargin, (top + bottom) / 2.0, fitted(panel.y_label, 13.0, panel.height),
                {.size = 13.0, .anchor = Anchor::middle, .rotation = -90.0});

    canvas.raw(fmt::format(
        "<clipPath id=\"panel{}\"><rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\"/>"
        "</clipPath>\n<g clip-path=\"url(#panel{})\" fill=\"none\" stroke-linejoin=\"round\" "
        "stroke-linecap=\"round\">\n",
        index, left, top - 2.0, right - left, bottom - top + 4.0, index));
    bool any = false;
    for (const Series& series : panel.series) {
        for (size_t i = 0; i < series.x.size() && !any; ++i)
            any = std::isfinite(series.x[i]) && drawable(series.y[i], panel.y_scale);
        draw_series(canvas, series, series.color.empty() ? colors.at(series.name) : series.color, x_axis,
                    y_axis);
    }
    canvas.raw("</g>\n");
    for (const Series& series : panel.series)
        draw_points(canvas, series, series.color.empty() ? colors.at(series.name) : series.color, x_axis,
                    y_axis);
    draw_lines(canvas, panel, x_axis, y_axis);
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
    Axis x_axis{x_range, left_of(chart), chart.width - kMargin, AxisScale::linear};
    for (size_t i = 0; i < chart.panels.size(); ++i) {
        const Panel& panel = chart.panels[i];
        if (i > 0) y += 26.0;
        draw_panel(canvas, panel, x_axis, Axis{y_range(panel), y + panel.height, y, panel.y_scale}, i,
                   colors);
        y += panel.height;
    }
    const std::vector<double> ticks = linear_ticks(x_range.low, x_range.high, kMostTicks);
    y += 20.0;
    for (const double tick : ticks)
        canvas.text(x_axis(tick), y, tick_label(tick, step_of(ticks)),
                    {.size = kTickFont, .anchor = Anchor::middle});
    y += 24.0;
    canvas.text((x_axis.from + x_axis.to) / 2.0, y, fitted(chart.x_label, 13.0, x_axis.to - x_axis.from),
                {.size = 13.0, .anchor = Anchor::middle});
    return canvas.finish(chart.width, y + kMargin - 8.0, chart.title);
}

}  // namespace fp8flow::report
