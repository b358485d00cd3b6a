// SPDX-License-Identifier: MIT
// report.html: hostile text stays text, and long runs stay small.
#include "model/report/page/page.h"

#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace fp8flow {

using namespace report;
using nlohmann::json;

namespace {

TEST(ReportPage, HostileTextStaysText) {
    const std::string evil = "</script><script>alert(1)</script><!-- <script> & \" ' {{DATA}} {{TITLE}} \xff";
    Page page(evil, evil, Provenance{.command = evil});
    page.fact(evil, evil);
    page.set("configuration", evil);
    page.set("routing", json::array({{{"name", evil}, {"columns", {evil}}, {"rows", {{evil}}}}}));
    // placeholders of the data are text, too; expect_report_page looks for those of the template
    std::string html = page.html();
    EXPECT_EQ(html.find("<script>alert"), std::string::npos);
    for (size_t at = html.find("{{"); at != std::string::npos; at = html.find("{{"))
        html.replace(at, 2, "((");
    const json data = expect_report_page(html);
    EXPECT_TRUE(data.at("configuration").get<std::string>().starts_with("</script>"));
    EXPECT_EQ(data.at("routing")[0].at("name"), data.at("title"));
}

TEST(ReportPage, LongCurvesAreThinnedAndKeepTheirPeaks) {
    Chart chart{.title = "t", .x_label = "x", .series = {{.name = "a"}}};
    for (int i = 0; i < 300000; ++i) {
        chart.series[0].x.push_back(i);
        chart.series[0].y.push_back(i == 123456 ? 50.0 : i == 77777 ? -50.0 : i == 5 ? std::nan("") : 1.0);
    }
    const json series = chart_json(chart).at("series")[0];
    EXPECT_LE(series.at("y").size(), 2002u);
    EXPECT_EQ(series.at("x").size(), series.at("y").size());
    double low = 0, high = 0;
    for (const json& y : series.at("y")) {
        if (!y.is_number()) continue;
        low = std::min(low, y.get<double>());
        high = std::max(high, y.get<double>());
    }
    EXPECT_EQ(low, -50.0);
    EXPECT_EQ(high, 50.0);
    EXPECT_EQ(series.at("x").back(), 299999.0);
    chart.series[0] = {.name = "b", .x = {1, 2, 3}, .y = {3, std::nan(""), 1}};
    const json few = json::parse(chart_json(chart).dump()).at("series")[0];
    EXPECT_EQ(few.at("y"), json::parse("[3.0, null, 1.0]"));
}

TEST(ReportPage, RoutingOfALongRunIsBoundedAndKeepsTheWorst) {
    RoutingHistory routing;
    EXPECT_TRUE(routing.empty());
    for (int64_t i = 1; i <= 100000; ++i) {
        const std::vector<LayerLoad> load = {{.layer = 1, .max = 1.5, .min = 0.5},
                                             {.layer = 2, .max = i == 4711 ? 9.0 : 2.0, .dead_experts = 3}};
        routing.add(i, load);
    }
    routing.add(99000, std::vector<LayerLoad>{{.layer = 1, .max = 1.0}});  // back to a checkpoint
    const json group = routing.json("run");
    const json& curve = group.at("over").at("series")[0];
    const json &x = curve.at("x"), &y = curve.at("y");
    EXPECT_LE(x.size(), 2002u);
    EXPECT_EQ(x.back(), 99000.0);
    for (size_t i = 1; i < x.size(); ++i) EXPECT_LT(x[i - 1].get<double>(), x[i].get<double>());
    EXPECT_EQ(*std::max_element(y.begin(), y.end()), 9.0);
    ASSERT_EQ(group.at("rows").size(), 2u);
    EXPECT_EQ(group.at("rows")[0][1], "1.00 x");
    EXPECT_EQ(group.at("rows")[1][3], "9.00 x");
    EXPECT_EQ(group.at("rows")[1][5], "3");
}

TEST(ReportPage, RoutingIsReadFromRecords) {
    RoutingHistory routing;
    routing.add(json::parse(R"({"iteration": 3})"));
    routing.add(json::parse(R"({"iteration": 3, "moe_layers": 7})"));
    EXPECT_TRUE(routing.empty());
    routing.add(json::parse(R"({"type": "step", "iteration": 4, "moe_layers": [2], "load_max": [1.25]})"));
    EXPECT_EQ(routing.json("run").at("rows")[0][1], "1.25 x");
}

}  // namespace
}  // namespace fp8flow
