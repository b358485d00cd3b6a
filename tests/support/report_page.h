// SPDX-License-Identifier: MIT
// A check of report.html without a browser: its tags nest, its data parse, and nothing is loaded.
#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace fp8flow {

// Tags of everything outside the scripts nest; tags that HTML leaves open are known.
inline void expect_tags_nest(const std::string& html) {
    std::vector<std::string> open;
    for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
        const size_t end = html.find('>', at);
        ASSERT_NE(end, std::string::npos);
        const std::string tag = html.substr(at + 1, end - at - 1);
        const std::string name = tag.substr(0, tag.find(' '));
        if (name == "!doctype" || name == "meta") continue;
        if (tag[0] == '/') {
            ASSERT_FALSE(open.empty()) << tag;
            EXPECT_EQ(open.back(), tag.substr(1));
            open.pop_back();
            continue;
        }
        open.push_back(name);
        if (name == "script" || name == "style") at = html.find("</" + name, end) - 1;
        ASSERT_LT(at, html.size()) << "no end of " << name;
    }
    EXPECT_TRUE(open.empty());
}

// The data of the page.
inline nlohmann::json expect_report_page(const std::string& html) {
    EXPECT_TRUE(html.starts_with("<!doctype html>"));
    expect_tags_nest(html);
    for (const char* loads : {" src=", "<link", "@import", "url(", "fetch(", "https://", "{{"})
        EXPECT_EQ(html.find(loads), std::string::npos) << loads;
    size_t scripts = 0;
    for (size_t at = html.find("</script"); at != std::string::npos; at = html.find("</script", at + 1))
        ++scripts;
    EXPECT_EQ(scripts, 2u) << "the data end a script";
    const std::string begin = "<script type=\"application/json\" id=\"data\">";
    const size_t from = html.find(begin) + begin.size();
    const nlohmann::json data =
        nlohmann::json::parse(html.substr(from, html.find("</script>", from) - from), nullptr, false);
    EXPECT_FALSE(data.is_discarded());
    if (data.is_discarded()) return data;
    EXPECT_EQ(data.at("format"), 2);
    EXPECT_FALSE(data.at("title").get<std::string>().empty());
    for (const char* key : {"subtitle", "facts", "machine"}) EXPECT_TRUE(data.contains(key)) << key;
    return data;
}

}  // namespace fp8flow
