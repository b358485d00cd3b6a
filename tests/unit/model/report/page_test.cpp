// SPDX-License-Identifier: MIT
// report.html: hostile text stays text, and long runs stay small.
#include "model/report/page/page.h"

#include "tests/support/report_page.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace fp8flow {

using namespace report;
using nlohmann::json;

namespace {

TEST(ReportPage, HostileTextStaysText) {
    const std::string evil = "</script><script>alert(1)</script><!-- <script> & \" ' {{DATA}} \xff";
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

// A user's arms have colours of their own, also next to the control arm.
TEST(ReportPage, FurtherColoursAreNotThoseOfRecipes) {
    const std::string html = Page("", "", {}).html();
    const size_t at = html.find("MORE_COLORS = [");
    const std::string more = html.substr(at, html.find(']', at) - at);
    for (const char* name : {"bf16", "bf16 control", "fp8_blockwise", "fp8_flow", "mxfp8", "limit"}) {
        const std::string key = fmt::format("\"{}\": \"", name);
        const size_t color = html.find(key) + key.size();
        EXPECT_EQ(html[color], '#') << name;
        EXPECT_EQ(more.find(html.substr(color, 7)), std::string::npos) << name;
    }
}

TEST(ReportPage, SavedPicturesHaveNoHtml) {
    EXPECT_EQ(Page("", "", {}).html().find("foreignObject"), std::string::npos) << "only browsers draw it";
}

TEST(ReportPage, LongCurvesAreThinnedAndKeepTheirPeaks) {
    Series series;
    for (int i = 0; i < 300000; ++i) {
        series.x.push_back(i);
        series.y.push_back(i == 123456 ? 50.0 : i == 77777 ? -50.0 : i == 5 ? std::nan("") : 1.0);
    }
    const json thin = curve(series, {{"name", "a"}});
    EXPECT_EQ(thin.at("name"), "a");
    EXPECT_LE(thin.at("y").size(), 2002u);
    EXPECT_EQ(thin.at("x").size(), thin.at("y").size());
    double low = 0, high = 0;
    for (const json& y : thin.at("y")) {
        if (!y.is_number()) continue;
        low = std::min(low, y.get<double>());
        high = std::max(high, y.get<double>());
    }
    EXPECT_EQ(low, -50.0);
    EXPECT_EQ(high, 50.0);
    EXPECT_EQ(thin.at("x").back(), 299999.0);
    const json few = curve({.x = {1, 2, 3}, .y = {3, std::nan(""), 1}}, {});
    EXPECT_EQ(json::parse(few.dump()).at("y"), json::parse("[3.0, null, 1.0]"));
}

TEST(ReportPage, RoutingOfALongRunIsBoundedAndKeepsTheWorst) {
    RoutingHistory routing;
    routing.add(json::parse(R"({"iteration": 3})"));
    routing.add(json::parse(R"({"iteration": 3, "moe_layers": 7})"));
    EXPECT_TRUE(routing.empty());
    json record = json::parse(R"({"moe_layers": [1, 2], "load_max": [1.5, 2], "load_min": [0.5], )"
                              R"("dead_experts": [0, 3]})");
    for (int64_t i = 1; i <= 100000; ++i) {
        record["iteration"] = i;
        record["load_max"][1] = i == 4711 ? 9.0 : 2.0;
        routing.add(record);
    }
    const json group = routing.group("run");
    const json& curve = group.at("over").at("series")[0];
    const json &x = curve.at("x"), &y = curve.at("y");
    EXPECT_LE(x.size(), 2002u);
    EXPECT_EQ(x.back(), 100000.0);
    EXPECT_EQ(*std::max_element(y.begin(), y.end()), 9.0);
    EXPECT_EQ(group.at("rows"), json::parse(R"([["1", "1.50 x", "1.50 x", "1.50 x", "0.50 x", "0"],)"
                                            R"(["2", "2.00 x", "2.00 x", "9.00 x", "0.00 x", "3"]])"));
}

}  // namespace
}  // namespace fp8flow
