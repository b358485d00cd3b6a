// SPDX-License-Identifier: MIT
// A check that the text of a picture stays inside it and that no two texts overlap, by the widths that the
// text takes at most in Arial and DejaVu Sans (model/report/svg_text.cpp). No browser is needed.
#pragma once

#include "model/report/svg_canvas.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace fp8flow {

struct TextBox {
    std::string text;
    double left = 0, right = 0, top = 0, bottom = 0;
};

inline std::string attribute_of(const std::string& tag, const std::string& name) {
    const size_t at = tag.find(" " + name + "=\"");
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size() + 3;
    return tag.substr(begin, tag.find('"', begin) - begin);
}

inline std::string without_escapes(std::string text) {
    for (const auto& [escape, plain] :
         {std::pair{"&lt;", "<"}, std::pair{"&gt;", ">"}, std::pair{"&quot;", "\""}, std::pair{"&#39;", "'"},
          std::pair{"&amp;", "&"}})
        for (size_t at = text.find(escape); at != std::string::npos; at = text.find(escape, at + 1))
            text.replace(at, std::string(escape).size(), plain);
    return text;
}

inline std::vector<TextBox> text_boxes(const std::string& svg) {
    std::vector<TextBox> boxes;
    for (size_t at = svg.find("<text "); at != std::string::npos; at = svg.find("<text ", at + 1)) {
        const size_t end = svg.find('>', at), close = svg.find("</text>", end);
        const std::string tag = svg.substr(at, end - at);
        TextBox box{.text = without_escapes(svg.substr(end + 1, close - end - 1))};
        if (box.text.empty()) continue;
        const auto number = [&](const char* name) { return std::atof(attribute_of(tag, name).c_str()); };
        const double x = number("x"), y = number("y"), size = number("font-size");
        const double width = report::text_width(
            box.text, size,
            attribute_of(tag, "font-weight").empty() ? report::Weight::regular : report::Weight::bold);
        const std::string anchor = attribute_of(tag, "text-anchor");
        const double before = anchor == "end" ? width : anchor == "middle" ? width / 2 : 0;
        const double up = 0.76 * size, down = 0.24 * size;  // ascent and descent of most letters
        if (attribute_of(tag, "transform").find("rotate(-90") == 0)
            box = {box.text, x - up, x + down, y - (width - before), y + before};
        else
            box = {box.text, x - before, x - before + width, y - up, y + down};
        boxes.push_back(box);
    }
    return boxes;
}

inline void expect_text_fits(const std::string& svg) {
    const std::string tag = svg.substr(0, svg.find('>'));
    const double width = std::atof(attribute_of(tag, "width").c_str());
    const double height = std::atof(attribute_of(tag, "height").c_str());
    const std::vector<TextBox> boxes = text_boxes(svg);
    for (size_t i = 0; i < boxes.size(); ++i) {
        const TextBox& a = boxes[i];
        EXPECT_TRUE(a.left >= 0 && a.right <= width && a.top >= 0 && a.bottom <= height)
            << a.text << ": " << a.left << " to " << a.right << " of " << width << ", " << a.top << " to "
            << a.bottom << " of " << height;
        for (size_t j = i + 1; j < boxes.size(); ++j) {
            const TextBox& b = boxes[j];
            EXPECT_FALSE(a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
                << a.text << " lies over " << b.text;
        }
    }
}

}  // namespace fp8flow
