// SPDX-License-Identifier: MIT
// How much room text takes, and what is done where there is less.
#include "model/report/svg_canvas.h"
#include "model/report/table.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace fp8flow::report {

namespace {

// Advance of the characters from ' ' to '~' in thousandths of the font size: the larger one of DejaVu
// Sans 2.37 and of Liberation Sans 2.1, which has Arial's.
constexpr std::array<uint16_t, 95> kRegular = {
    318, 401, 460, 838, 637, 951, 780, 275, 391, 391, 500, 838, 318, 361,  318, 337, 637, 637, 637,
    637, 637, 637, 637, 637, 637, 637, 337, 337, 838, 838, 838, 557, 1016, 685, 687, 723, 771, 667,
    611, 778, 752, 295, 500, 667, 558, 863, 749, 788, 667, 788, 723, 667,  611, 732, 685, 989, 686,
    667, 686, 391, 337, 391, 838, 557, 500, 613, 635, 550, 635, 616, 353,  635, 634, 278, 278, 580,
    278, 975, 634, 612, 635, 635, 412, 521, 393, 634, 592, 818, 592, 592,  525, 637, 337, 637, 838};
constexpr std::array<uint16_t, 95> kBold = {
    349, 457,  521, 838, 696, 1002, 873, 307, 458, 458, 523, 838, 380, 416,  380, 366, 696, 696,  696,
    696, 696,  696, 696, 696, 696,  696, 400, 400, 838, 838, 838, 611, 1000, 774, 763, 734, 831,  684,
    684, 821,  837, 373, 557, 775,  638, 996, 837, 851, 733, 851, 771, 721,  683, 813, 774, 1104, 771,
    725, 726,  458, 366, 458, 838,  557, 500, 675, 716, 593, 716, 679, 436,  716, 712, 343, 343,  666,
    343, 1042, 712, 688, 716, 716,  494, 596, 479, 712, 652, 924, 646, 652,  583, 712, 366, 712,  838};
constexpr double kOther = 1000.0;  // of other characters for each column that they take in a terminal

// Bytes of the UTF-8 character that begins at `at`.
size_t bytes_of(std::string_view text, size_t at) {
    size_t bytes = 1;
    while (at + bytes < text.size() && (static_cast<unsigned char>(text[at + bytes]) & 0xC0) == 0x80) ++bytes;
    return bytes;
}

}  // namespace

double text_width(std::string_view text, double size, Weight weight) {
    const auto& widths = weight == Weight::bold ? kBold : kRegular;
    double sum = 0.0;
    for (size_t at = 0, bytes = 0; at < text.size(); at += bytes) {
        bytes = bytes_of(text, at);
        const auto c = static_cast<unsigned char>(text[at]);
        if (c >= 0x20 && c < 0x7F)
            sum += widths[c - 0x20];
        else if (c >= 0x80)
            sum += kOther * static_cast<double>(display_width(text.substr(at, bytes)));
    }
    return sum * size / 1000.0;
}

std::string fitted(const std::string& text, double size, double width, Weight weight) {
    if (text_width(text, size, weight) <= width) return text;
    const std::string ellipsis = "\u2026";
    const double room = width - text_width(ellipsis, size, weight);
    size_t end = 0;
    for (size_t next = bytes_of(text, 0);
         text_width(std::string_view(text).substr(0, next), size, weight) <= room;
         next += bytes_of(text, next))
        end = next;
    return text.substr(0, end) + ellipsis;
}

std::vector<std::string> wrapped(const std::string& text, double size, double width, Weight weight,
                                 size_t most) {
    std::vector<std::string> lines;
    std::string rest = text;
    while (!rest.empty()) {
        size_t end = rest.size();
        while (end != 0 && text_width(std::string_view(rest).substr(0, end), size, weight) > width) {
            size_t space = rest.rfind(' ', end - 1);
            // a number keeps its unit
            while (space != std::string::npos && space > 0 && rest.compare(space + 1, 1, "%") == 0)
                space = rest.rfind(' ', space - 1);
            end = space == std::string::npos ? 0 : space;
        }
        if (end == 0) end = std::min(rest.find(' ', 1), rest.size());  // one long word
        if (lines.size() + 1 == most) end = rest.size();
        lines.push_back(fitted(rest.substr(0, end), size, width, weight));
        rest.erase(0, end);
        rest.erase(0, std::min(rest.find_first_not_of(' '), rest.size()));
    }
    return lines;
}

}  // namespace fp8flow::report
