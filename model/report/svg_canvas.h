// SPDX-License-Identifier: MIT
// Shared by the charts: palette, text and shapes appended to an SVG document. Read next: svg.h.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::report {

inline constexpr std::string_view kInk = "#1f2937";   // titles
inline constexpr std::string_view kSoft = "#4b5563";  // labels
inline constexpr std::string_view kGrid = "#e5e7eb";
inline constexpr std::string_view kFrame = "#9ca3af";
inline constexpr double kMargin = 28.0;  // to the edge of the picture

// Muted, told apart by people with the common colour deficiencies (blue first, orange second), readable on
// white.
inline constexpr std::array<std::string_view, 12> kPalette = {"#3b6fb6", "#d9703a", "#3f9a75", "#8c62aa",
                                                              "#c2992b", "#4fa3b8", "#c25679", "#7f7f7f",
                                                              "#6b8e3d", "#8b5e4b", "#2f4a6d", "#b3a589"};

enum class Anchor { start, middle, end };

struct TextStyle {
    double size = 13.0;
    std::string_view color = kSoft;
    Anchor anchor = Anchor::start;
    bool bold = false;
    bool halo = false;      // white outline, for text over curves
    double rotation = 0.0;  // degrees around its own position
};

struct LegendEntry {
    std::string name;
    std::string color;
    bool dashed = false;
    bool filled = false;  // a square instead of a line
    bool band = false;    // a pale square
    bool points = false;  // a dot on the line
};

enum class Weight { regular, bold };

// Pixels that the text takes at most in Arial and DejaVu Sans, the widest of the fonts that are named.
double text_width(std::string_view text, double size, Weight weight = Weight::regular);
// The text, cut with an ellipsis where it takes more than `width`.
std::string fitted(const std::string& text, double size, double width, Weight weight = Weight::regular);
// Lines of at most `width`, broken at spaces; of the last of `most` lines the rest is cut.
std::vector<std::string> wrapped(const std::string& text, double size, double width, Weight weight,
                                 size_t most);

class SvgCanvas {
public:
    void line(double x1, double y1, double x2, double y2, std::string_view color, double width,
              std::string_view dash = "");
    void rect(double x, double y, double width, double height, std::string_view color,
              std::string_view tooltip = "");
    void band(double x, double y, double width, double height, std::string_view color);  // pale
    void circle(double x, double y, double radius, std::string_view color, std::string_view tooltip);
    void text(double x, double y, std::string_view content, const TextStyle& style);
    void raw(std::string_view markup) { body_ += markup; }

    // Title, subtitle and legend from the top; returns the y below them.
    double header(const std::string& title, const std::string& subtitle,
                  const std::vector<LegendEntry>& legend, double width);
    std::string finish(double width, double height, const std::string& title) const;

private:
    std::string body_;
};

// Labels of ticks that are `step` apart (0: chosen per value), with thousands separators.
std::string tick_label(double value, double step);

}  // namespace fp8flow::report
