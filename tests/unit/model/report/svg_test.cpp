// SPDX-License-Identifier: MIT
// Pictures: well-formed text, ticks, positions of points, gaps, and hostile labels.
#include "model/report/svg.h"

#include "kernels/core/error.h"
#include "model/report/svg_canvas.h"
#include "tests/support/text_boxes.h"
#include "tests/support/xml.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

namespace fp8flow {

using namespace report;

namespace {

using Values = std::vector<double>;

void expect_near(const Values& a, const Values& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-12 + 1e-12 * std::abs(b[i])) << i;
}

// The points of the n-th curve, as pixel pairs; 'M' begins a piece.
std::vector<std::vector<std::pair<double, double>>> pieces_of(const std::string& svg, size_t n) {
    size_t at = 0;
    for (size_t i = 0; i <= n; ++i) at = svg.find("<path d=\"", at + 1);
    const std::string path = svg.substr(at + 9, svg.find('"', at + 9) - at - 9);
    std::vector<std::vector<std::pair<double, double>>> pieces;
    const char* next = path.c_str();
    while (*next != '\0') {
        if (*next == 'M') pieces.emplace_back();
        char* end = nullptr;
        const double x = std::strtod(next + 1, &end);
        const double y = std::strtod(end + 1, &end);
        pieces.back().emplace_back(x, y);
        next = end;
    }
    return pieces;
}

TEST(Ticks, AreRoundNumbersInsideTheRange) {
    expect_near(linear_ticks(0, 10, 5), {0, 2, 4, 6, 8, 10});
    expect_near(linear_ticks(1, 2000, 8), {500, 1000, 1500, 2000});
    expect_near(linear_ticks(-0.3, 0.3, 6), {-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3});
    expect_near(linear_ticks(2.051, 2.074, 4), {2.06, 2.07});
    expect_near(linear_ticks(5, 5, 4), {5});
    expect_near(log_ticks(0.005, 300), {0.01, 0.1, 1, 10, 100});
    expect_near(log_ticks(1, 20), {1, 2, 5, 10, 20});
    expect_near(log_ticks(3.1, 3.9), {3.2, 3.4, 3.6, 3.8});
    EXPECT_LE(log_ticks(1e-300, 1e300).size(), 12u);
    for (const double scale : {1e-12, 1.0, 7e9})
        for (int count = 2; count < 12; ++count) {
            const Values ticks = linear_ticks(1.3 * scale, 9.7 * scale, count);
            EXPECT_LE(static_cast<int>(ticks.size()), count + 1);
            EXPECT_GE(ticks.size(), 1u);
        }
}

TEST(Ticks, Labels) {
    EXPECT_EQ(tick_label(0.0, 0.1), "0");
    EXPECT_EQ(tick_label(0.5, 0.25), "0.5");
    EXPECT_EQ(tick_label(-0.30000000000000004, 0.1), "-0.3");
    EXPECT_EQ(tick_label(1500, 500), "1,500");
    EXPECT_EQ(tick_label(0.002, 0), "0.002");
    EXPECT_EQ(tick_label(1e-5, 0), "1e-5");
    EXPECT_EQ(tick_label(2.5e7, 5e6), "2.5e7");
}

// Long names in every place, short ones, numbers that need many digits.
TEST(Pictures, NoTextLeavesThePictureOrLiesOverAnother) {
    const std::string word = "fp8_flow_with_everything_that_can_be_turned_off_turned_off";
    const std::string sentence =
        word + " on 4096 GPUs: 1.42 x as fast as bf16, " + word + ", and so on, and so on";
    for (const std::string& name : {std::string("a"), word, sentence, sentence + sentence + sentence})
        for (const double scale : {1e-9, 1.0, 123456.0}) {
            Panel panel{
                .y_label = name,
                .series = {{.name = name, .x = {1, 2e5}, .y = {-scale, 1.7 * scale}, .points = true},
                           {.name = name + "2", .x = {1, 2e5}, .y = {scale, scale}}},
                .lines = {{scale, name}, {1.01 * scale, name}, {1.02 * scale, name}, {1.7 * scale, name}},
                .bands = {{-scale, scale, name}, {-scale / 2, scale / 2, name}},
                .tick_suffix = " %",
                .height = 200};
            const std::string lines = render_svg(LineChart{
                .title = name, .subtitle = name, .x_label = name, .panels = {panel, panel}, .width = 960});
            expect_well_formed(lines);
            expect_text_fits(lines);
            EXPECT_GT(text_boxes(lines).size(), 10u);
            BarChart bars{.title = name,
                          .subtitle = name,
                          .x_label = name,
                          .categories = {name, name + "2"},
                          .unit = " ms"};
            DotChart dots{
                .title = name, .subtitle = name, .x_label = name, .tick_suffix = " %", .legend = name};
            dots.bands = {{-scale, scale, name}, {-scale / 2, scale / 2, name}};
            for (int i = 0; i < 4; ++i) {
                bars.bars.push_back(
                    {.label = name, .values = {scale * i, scale}, .heading = i % 2 == 0 ? name : ""});
                dots.dots.push_back({name, scale * i, scale * (i - 1), scale * (i + 1), name});
            }
            for (const std::string& svg : {render_svg(bars), render_svg(dots)}) {
                expect_well_formed(svg);
                expect_text_fits(svg);
                EXPECT_GT(text_boxes(svg).size(), 10u);
            }
        }
}

TEST(Pictures, TextIsCutWithAnEllipsisAndBrokenAtSpaces) {
    EXPECT_EQ(fitted("short", 13, 100), "short");
    const std::string cut = fitted("a name that is far too long", 13, 60);
    EXPECT_TRUE(cut.ends_with("\u2026")) << cut;
    EXPECT_LE(text_width(cut, 13), 60);
    EXPECT_EQ(wrapped("one two three", 10, 45, Weight::regular, 9),
              (std::vector<std::string>{"one two", "three"}));
    EXPECT_TRUE(wrapped("", 10, 45, Weight::regular, 9).empty());
    EXPECT_EQ(wrapped("one two three four", 10, 45, Weight::regular, 1).size(), 1u);
    EXPECT_GT(text_width("W", 10, Weight::bold), text_width("i", 10));
    EXPECT_EQ(text_width("\u00e9", 10), 10) << "one character of two bytes";
}

TEST(Pictures, HaveDarkColours) {
    const std::string svg = render_svg(LineChart{.title = "t"});
    EXPECT_NE(svg.find("prefers-color-scheme: dark"), std::string::npos);
    EXPECT_NE(svg.find("class=\"paper\""), std::string::npos);
}

TEST(LineChart, BandsLieWhereTheirValuesAreAndTheAxisHoldsThem) {
    const Panel panel{.series = {{.name = "a", .x = {0, 1}, .y = {0, 0.1}}},
                      .bands = {{-1, 1, "limit", "#123456"}},
                      .height = 224};
    const std::string svg = render_svg(LineChart{.panels = {panel}});
    const size_t legend = svg.find("fill=\"#123456\""), at = svg.rfind("fill=\"#123456\"");
    ASSERT_NE(legend, at);
    const size_t begin = svg.rfind("<rect", at);
    const std::string tag = svg.substr(begin, svg.find('>', at) - begin);
    EXPECT_NEAR(std::atof(attribute_of(tag, "height").c_str()), 200.0,
                0.05);  // 2 of 2.24 with the room around
}

TEST(DotChart, DotsAndSpreadLieWhereTheirValuesAre) {
    const std::string svg = render_svg(DotChart{.dots = {{"a", 1, 1, 1, "1"}, {"b", 2, 1, 3, "2"}}});
    expect_well_formed(svg);
    std::vector<double> x;
    for (size_t at = svg.find("<circle"); at != std::string::npos; at = svg.find("<circle", at + 1))
        x.push_back(std::atof(attribute_of(svg.substr(at, svg.find('>', at) - at), "cx").c_str()));
    ASSERT_EQ(x.size(), 2u);
    const size_t spread = svg.rfind("stroke-width=\"2\"");
    const std::string tag = svg.substr(svg.rfind("<line", spread), spread - svg.rfind("<line", spread));
    EXPECT_NEAR(std::atof(attribute_of(tag, "x1").c_str()), x[0], 0.01);
    EXPECT_NEAR(std::atof(attribute_of(tag, "x2").c_str()) - x[1], x[1] - x[0], 0.02);
}

TEST(BarChart, CategoriesKeepTheColoursThatTheyAreGiven) {
    const std::string svg = render_svg(
        BarChart{.categories = {"a", "b"}, .colors = {"#111111", "#222222"}, .bars = {{"x", {1, 2}}}});
    EXPECT_NE(svg.find("#111111"), std::string::npos);
    EXPECT_NE(svg.find("#222222"), std::string::npos);
    EXPECT_EQ(svg.find(std::string(kPalette[0]) + "\"><title>"), std::string::npos);
}

TEST(LineChart, PutsPointsWhereTheDataAre) {
    const Panel panel{.series = {{.name = "a", .x = {0, 1, 2}, .y = {10, 20, 15}}},
                      .y_min = 0.0,
                      .y_max = 20.0,
                      .height = 200};
    const std::string svg =
        render_svg(LineChart{.title = "t", .x_label = "x", .panels = {panel}, .width = 1000});
    expect_well_formed(svg);
    const auto pieces = pieces_of(svg, 0);
    ASSERT_EQ(pieces.size(), 1u);
    ASSERT_EQ(pieces[0].size(), 3u);
    const auto& p = pieces[0];
    EXPECT_NEAR(p[1].first - p[0].first, p[2].first - p[1].first, 0.02);
    EXPECT_NEAR(p[0].second - p[1].second, 100.0, 0.02);  // half of the axis is 100 pixels, upwards
    EXPECT_NEAR(p[0].second - p[2].second, 50.0, 0.02);
}

TEST(LineChart, UsesDecadesOnALogAxisAndLeavesGaps) {
    const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
    const Panel panel{
        .series = {{.name = "a", .x = {0, 1, 2, 3, 4, 5, 6, 7}, .y = {1, 10, nan, 100, 0.0, 1000, -5, inf}}},
        .y_scale = AxisScale::log,
        .y_min = 1.0,
        .y_max = 1000.0,
        .height = 300};
    const std::string svg = render_svg(LineChart{.panels = {panel}});
    expect_well_formed(svg);
    const auto pieces = pieces_of(svg, 0);
    ASSERT_EQ(pieces.size(), 3u);
    ASSERT_EQ(pieces[0].size(), 2u);
    EXPECT_NEAR(pieces[0][0].second - pieces[0][1].second, 100.0, 0.02);
    EXPECT_NEAR(pieces[0][1].second - pieces[1][0].second, 100.0, 0.02);
    EXPECT_NEAR(pieces[1][0].second - pieces[2][0].second, 100.0, 0.02);
}

TEST(LineChart, PanelsShareTheXAxisColoursAndLegend) {
    const Series a{.name = "bf16", .x = {1, 2, 3}, .y = {3, 2, 1}},
        b{.name = "fp8_flow", .x = {2, 3}, .y = {2, 1}};
    const LineChart chart{
        .panels = {{.series = {a, b}}, {.series = {b}, .lines = {{.y = 4.0, .label = "bar"}}}}};
    const std::string svg = render_svg(chart);
    expect_well_formed(svg);
    EXPECT_EQ(pieces_of(svg, 1)[0][0].first, pieces_of(svg, 2)[0][0].first);
    const std::string color(kPalette[1]);
    size_t uses = 0;
    for (size_t at = svg.find(color); at != std::string::npos; at = svg.find(color, at + 1)) ++uses;
    EXPECT_EQ(uses, 3u);  // legend and two curves
    EXPECT_EQ(svg.find(">fp8_flow</text>"), svg.rfind(">fp8_flow</text>"));
    EXPECT_NE(svg.find(">bar</text>"), std::string::npos);
}

TEST(LineChart, ThinsDenseDataButKeepsItsPeaks) {
    Series dense{.name = "a"};
    for (int i = 0; i < 200000; ++i) {
        dense.x.push_back(i);
        dense.y.push_back(i == 123456 ? 50.0 : i == 77777 ? -50.0 : std::sin(i * 0.01));
    }
    const std::string svg =
        render_svg(LineChart{.panels = {{.series = {dense}, .y_min = -50.0, .y_max = 50.0, .height = 300}}});
    EXPECT_LT(svg.size(), 100000u);
    double top = 1e9, bottom = -1e9;
    const auto pieces = pieces_of(svg, 0);
    for (const auto& [x, y] : pieces[0]) {
        top = std::min(top, y);
        bottom = std::max(bottom, y);
    }
    EXPECT_NEAR(bottom - top, 300.0, 0.02);
}

TEST(LineChart, SurvivesEmptyConstantAndHostileInput) {
    for (const AxisScale scale : {AxisScale::linear, AxisScale::log}) {
        const std::string empty = render_svg(LineChart{.panels = {{.y_scale = scale}}});
        expect_well_formed(empty);
        EXPECT_NE(empty.find("no data"), std::string::npos);
        for (const double value : {0.0, 5.0, -3.0, 1e-300, 1e300})
            expect_well_formed(
                render_svg(LineChart{.panels = {{.series = {{.x = {1}, .y = {value}}}, .y_scale = scale}}}));
    }
    expect_well_formed(render_svg(LineChart{}));
    const std::string evil = "</text><script>\"'&\x01";
    const std::string svg =
        render_svg(LineChart{.title = evil,
                             .subtitle = evil,
                             .x_label = evil,
                             .panels = {{.y_label = evil,
                                         .series = {{.name = evil, .x = {1, 2}, .y = {1, 2}, .color = evil}},
                                         .lines = {{1.5, evil, evil}}}}});
    expect_well_formed(svg);
    EXPECT_EQ(svg.find("<script"), std::string::npos);
    EXPECT_EQ(svg.find('\x01'), std::string::npos);
    EXPECT_THROW(render_svg(LineChart{.panels = {{.series = {{.x = {1, 2}, .y = {1}}}}}}), Error);
}

TEST(BarChart, BarsAreAsLongAsTheirValues) {
    const BarChart chart{.title = "Memory",
                         .categories = {"weights", "moments", "none"},
                         .bars = {{"bf16", {30, 10, 0}}, {"fp8 & flow", {10, 10, 0}}},
                         .unit = " GiB"};
    const std::string svg = render_svg(chart);
    expect_well_formed(svg);
    std::vector<double> widths;
    for (size_t at = svg.find("><title>"); at != std::string::npos; at = svg.find("><title>", at + 1)) {
        const size_t width = svg.rfind("width=\"", at) + 7;
        widths.push_back(std::strtod(svg.c_str() + width, nullptr) + 1.0);  // a pixel separates the segments
    }
    ASSERT_EQ(widths.size(), 4u);  // zero values draw nothing
    EXPECT_NEAR(widths[0], 3.0 * widths[1], 0.1);
    EXPECT_NEAR(widths[1], widths[2], 0.1);
    EXPECT_NE(svg.find(">40.0 GiB</text>"), std::string::npos);
    EXPECT_NE(svg.find(">20.0 GiB</text>"), std::string::npos);
    expect_well_formed(render_svg(BarChart{}));
    EXPECT_THROW(render_svg(BarChart{.categories = {"a"}, .bars = {{"b", {1, 2}}}}), Error);
    EXPECT_THROW(render_svg(BarChart{.categories = {"a"}, .bars = {{"b", {-1}}}}), Error);
}

}  // namespace
}  // namespace fp8flow
