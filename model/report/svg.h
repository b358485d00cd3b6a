// SPDX-License-Identifier: MIT
// Pictures that people look at, written as SVG text: line charts with one or more panels over a common x axis
// (loss curves, relative errors), stacked horizontal bars (memory, time per stage), and dots with their
// spread (ablations). No dependencies, any browser opens them, in its light or dark colours. Text that is too
// long for its place goes on in the next line or is cut with an ellipsis. Read next: output.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow::report {

enum class AxisScale : uint8_t { linear, log };

struct Series {
    std::string name = {};  // one legend entry per name; the same name has the same colour in every panel
    std::vector<double> x = {};
    std::vector<double> y = {};  // a value that is not finite (or not positive on a log axis) leaves a gap
    std::string color = {};      // "#rrggbb"; empty: from the palette
    bool dashed = false;
    double width = 1.8;   // pixels
    bool points = false;  // a dot at each value, too
};

// A horizontal line, e.g. the acceptance threshold or the entropy floor; the axis includes it.
struct ReferenceLine {
    double y = 0.0;
    std::string label = {};
    std::string color = "#6b7280";
};

// From `low` to `high` in a pale colour behind the curves, named in the legend; the axis includes it.
struct Band {
    double low = 0.0, high = 0.0;
    std::string label = {};
    std::string color = "#3f9a75";
};

struct Panel {
    std::string y_label = {};
    std::vector<Series> series = {};
    std::vector<ReferenceLine> lines = {};
    std::vector<Band> bands = {};
    AxisScale y_scale = AxisScale::linear;
    std::optional<double> y_min = {};  // else from the data
    std::optional<double> y_max = {};
    std::string tick_suffix = {};  // e.g. " %"
    double height = 320.0;         // pixels of the plotting area
};

struct LineChart {
    std::string title = {};
    std::string subtitle = {};
    std::string x_label = {};
    std::vector<Panel> panels = {};  // top to bottom
    double width = 960.0;
};

struct Bar {
    std::string label = {};
    std::vector<double> values = {};  // one per category, not negative
    std::string heading = {};         // above this bar and those that follow
    std::string total = {};           // after the bar, in place of its sum
};

struct BarChart {
    std::string title = {};
    std::string subtitle = {};
    std::string x_label = {};
    std::vector<std::string> categories = {};  // legend, left to right in each bar
    std::vector<std::string> colors = {};      // one per category; empty: from the palette
    std::vector<Bar> bars = {};                // top to bottom
    int decimals = 1;                          // of the numbers in and after the bars
    std::string unit = {};                     // after each total, e.g. " GiB"
    double width = 960.0;
};

struct Dot {
    std::string label = {};
    double value = 0.0;
    double low = 0.0, high = 0.0;  // its spread, a thin line
    std::string note = {};         // at the right
};

struct DotChart {
    std::string title = {};
    std::string subtitle = {};
    std::string x_label = {};
    std::string tick_suffix = {};
    std::vector<Dot> dots = {};    // top to bottom; the first is the one to compare with
    std::vector<Band> bands = {};  // along x
    std::string legend = {};       // what dot and line are
    double width = 960.0;
};

// Complete SVG documents. Throw ExitCode::internal on contradictory sizes.
std::string render_svg(const LineChart& chart);
std::string render_svg(const BarChart& chart);
std::string render_svg(const DotChart& chart);

// Round numbers (1, 2 or 5 times a power of ten) inside [low, high], about `count` of them, ascending.
std::vector<double> linear_ticks(double low, double high, int count);
// Powers of ten inside [low, high]; with 2 and 5 between them where the range is below two decades.
std::vector<double> log_ticks(double low, double high);

std::string escape_xml(const std::string& text);  // also drops control characters, which XML cannot hold

}  // namespace fp8flow::report
