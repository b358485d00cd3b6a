// SPDX-License-Identifier: MIT
// Shapes, text and legends of the charts.
#include "model/report/svg_canvas.h"

#include "kernels/core/error.h"
#include "model/report/svg.h"
#include "model/report/table.h"

#include <algorithm>
#include <cmath>

namespace fp8flow::report {

namespace {

// A colour or another attribute's value from outside.
std::string attribute(std::string_view value) { return escape_xml(std::string(value)); }

}  // namespace

std::string escape_xml(const std::string& text) {
    std::string out;
    for (const char c : text) {
        switch (c) {
            case '&': out += "&amp;"; break;
            case '<': out += "&lt;"; break;
            case '>': out += "&gt;"; break;
            case '"': out += "&quot;"; break;
            case '\'': out += "&#39;"; break;
            default:
                if (static_cast<unsigned char>(c) >= 0x20) out += c;
        }
    }
    return out;
}

std::string tick_label(double value, double step) {
    if (value == 0.0) return "0";
    const double size = std::abs(value);
    if (size < 1e-4 || size >= 1e7) {
        const std::string text = fmt::format("{:.1e}", value);
        // 1.0e-05 -> 1e-5
        const size_t e = text.find('e');
        std::string mantissa = text.substr(0, e);
        if (mantissa.ends_with(".0")) mantissa.resize(mantissa.size() - 2);
        return fmt::format("{}e{}", mantissa, std::stoi(text.substr(e + 1)));
    }
    const double finest = step > 0.0 ? step : size;
    const int decimals = std::max(0, static_cast<int>(std::ceil(-std::log10(finest) - 1e-9)));
    if (decimals == 0) return format_count(std::llround(value));
    return fmt::format("{:.{}f}", value, decimals);
}

void SvgCanvas::line(double x1, double y1, double x2, double y2, std::string_view color, double width,
                     std::string_view dash) {
    body_ +=
        fmt::format(R"(<line x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}" stroke="{}" stroke-width="{}")",
                    x1, y1, x2, y2, attribute(color), width);
    if (!dash.empty()) body_ += fmt::format(R"( stroke-dasharray="{}")", dash);
    body_ += "/>\n";
}

void SvgCanvas::rect(double x, double y, double width, double height, std::string_view color,
                     std::string_view tooltip) {
    body_ += fmt::format(R"(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}")", x, y,
                         width, height, attribute(color));
    body_ += tooltip.empty() ? "/>\n"
                             : fmt::format("><title>{}</title></rect>\n", escape_xml(std::string(tooltip)));
}

void SvgCanvas::band(double x, double y, double width, double height, std::string_view color) {
    body_ += fmt::format(
        R"(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}" fill-opacity="0.2"/>)", x, y,
        width, height, attribute(color));
    body_ += "\n";
}

void SvgCanvas::circle(double x, double y, double radius, std::string_view color, std::string_view tooltip) {
    body_ += fmt::format(
        "<circle cx=\"{:.2f}\" cy=\"{:.2f}\" r=\"{}\" fill=\"{}\" "
        "fill-opacity=\"0.75\"><title>{}</title></circle>\n",
        x, y, radius, attribute(color), escape_xml(std::string(tooltip)));
}

void SvgCanvas::text(double x, double y, std::string_view content, const TextStyle& style) {
    body_ += fmt::format(R"(<text x="{:.2f}" y="{:.2f}" font-size="{}" fill="{}")", x, y, style.size,
                         attribute(style.color));
    if (style.anchor != Anchor::start)
        body_ += fmt::format(R"( text-anchor="{}")", style.anchor == Anchor::middle ? "middle" : "end");
    if (style.bold) body_ += R"( font-weight="600")";
    if (style.halo)
        body_ += R"( stroke="#ffffff" stroke-width="4" stroke-linejoin="round" paint-order="stroke")";
    if (style.rotation != 0.0)
        body_ += fmt::format(" transform=\"rotate({} {:.2f} {:.2f})\"", style.rotation, x, y);
    body_ += fmt::format(">{}</text>\n", escape_xml(std::string(content)));
}

double SvgCanvas::header(const std::string& title, const std::string& subtitle,
                         const std::vector<LegendEntry>& legend, double width) {
    double y = kMargin - 8.0;
    const double room = width - 2.0 * kMargin;
    for (const std::string& line : wrapped(title, 19.0, room, Weight::bold, 3)) {
        y += 22.0;
        text(kMargin, y, line, {.size = 19.0, .color = kInk, .bold = true});
    }
    if (!title.empty()) y += 8.0;
    for (const std::string& line : wrapped(subtitle, 13.0, room, Weight::regular, 4)) {
        y += 16.0;
        text(kMargin, y, line, {.size = 13.0});
    }
    if (!subtitle.empty()) y += 5.0;
    constexpr double kRow = 24.0, kSwatch = 22.0, kFont = 13.0;
    double x = kMargin;
    if (!legend.empty()) y += kRow;
    for (const LegendEntry& entry : legend) {
        const std::string name = fitted(entry.name, kFont, room - kSwatch - 8.0);
        const double entry_width = kSwatch + 8.0 + text_width(name, kFont) + 22.0;
        if (x > kMargin && x + entry_width - 22.0 > width - kMargin) {
            x = kMargin;
            y += kRow;
        }
        if (entry.band)
            band(x + 2.0, y - 12.0, 18.0, 15.0, entry.color);
        else if (entry.filled)
            rect(x + 4.0, y - 11.0, 13.0, 13.0, entry.color);
        else
            line(x, y - 4.5, x + kSwatch, y - 4.5, entry.color, 2.6, entry.dashed ? "6 4" : "");
        if (entry.points) circle(x + kSwatch / 2.0, y - 4.5, 3.6, entry.color, entry.name);
        text(x + kSwatch + 8.0, y, name, {.size = kFont});
        x += entry_width;
    }
    return y + 18.0;
}

namespace {

// The colours above in a browser that shows dark pages; other programs keep the light ones.
constexpr std::string_view kDark =
    "<style>@media (prefers-color-scheme: dark) {\n"
    ".paper { fill: #111827; }\n"
    "text[stroke=\"#ffffff\"] { stroke: #111827; }\n"
    "[fill=\"#1f2937\"] { fill: #f3f4f6; }\n"
    "[fill=\"#4b5563\"], [fill=\"#6b7280\"] { fill: #cbd5e1; }\n"
    "[stroke=\"#6b7280\"], [stroke=\"#1f2937\"] { stroke: #cbd5e1; }\n"
    "[stroke=\"#e5e7eb\"] { stroke: #2f3a4c; }\n"
    "[stroke=\"#3b6fb6\"] { stroke: #6c9be0; }\n"
    "[fill=\"#2f4a6d\"] { fill: #6f8db5; }\n"
    "[stroke=\"#2f4a6d\"] { stroke: #6f8db5; }\n"
    "}</style>\n";

}  // namespace

std::string SvgCanvas::finish(double width, double height, const std::string& title) const {
    return fmt::format(
               R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" viewBox="0 0 {0:.0f} {1:.0f}" role="img")"
               R"( font-family="Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif">)"
               "\n<title>{2}</title>\n{3}<rect class=\"paper\" width=\"100%\" height=\"100%\" "
               "fill=\"#ffffff\"/>\n",
               width, height, escape_xml(title), kDark) +
           body_ + "</svg>\n";
}

}  // namespace fp8flow::report
