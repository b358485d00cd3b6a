// SPDX-License-Identifier: MIT
// A check that a picture is well-formed XML, as far as ours go: tags nest, quotes pair up, no bare ampersand,
// no NaN in a coordinate.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

namespace fp8flow {

// Every tag is closed, quotes pair up, and only the escapes that XML knows appear.
inline void expect_well_formed(const std::string& svg) {
    std::vector<std::string> open;
    for (size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at)) {
        const size_t end = svg.find('>', at);
        ASSERT_NE(end, std::string::npos);
        const std::string tag = svg.substr(at + 1, end - at - 1);
        EXPECT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
        EXPECT_EQ(tag.find('<'), std::string::npos) << tag;
        if (tag[0] == '/') {
            ASSERT_FALSE(open.empty());
            EXPECT_EQ(open.back(), tag.substr(1));
            open.pop_back();
        } else if (tag.back() != '/') {
            open.push_back(tag.substr(0, tag.find(' ')));
        }
        at = end;
    }
    EXPECT_TRUE(open.empty());
    constexpr std::array<const char*, 5> kEscapes = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    for (size_t at = svg.find('&'); at != std::string::npos; at = svg.find('&', at + 1))
        EXPECT_TRUE(std::any_of(kEscapes.begin(), kEscapes.end(), [&](auto e) {
            return svg.compare(at, std::strlen(e), e) == 0;
        })) << svg.substr(at, 10);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf"), std::string::npos);
}

}  // namespace fp8flow
