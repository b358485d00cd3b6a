// SPDX-License-Identifier: MIT
// The picture of a suite: shares of the ceiling as dots, one line for each kind of operation.
#include "model/bench/report.h"
#include "model/report/svg_canvas.h"
#include "model/report/table.h"

#include <fmt/core.h>

#include <algorithm>

namespace fp8flow::bench {

using namespace report;

namespace {

constexpr double kWidth = 960.0, kLine = 27.0, kLabel = 246.0, kCount = 76.0, kMost = 1.10;
constexpr std::string_view kMet = "#3b6fb6", kMissed = "#d9703a", kNone = "#9ca3af", kTargetMark = "#1f2937";

struct Line {
    std::string name;
    std::vector<const Row*> rows;
    std::optional<double> share;  // the target
};

std::vector<Line> lines_of(const std::vector<Row>& rows) {
    std::vector<Line> lines;
    for (const Row& row : rows) {
        if (row.family.empty() || !row.ceiling_seconds) continue;
        auto line = std::find_if(lines.begin(), lines.end(), [&](auto& l) { return l.name == row.family; });
        if (line == lines.end()) line = lines.insert(lines.end(), {row.family, {}, {}});
        line->rows.push_back(&row);
        if (row.target && row.target->share > 0) line->share = row.target->share;
    }
    return lines;
}

std::string_view color_of(const Row& row) {
    return !row.meets_target ? kNone : *row.meets_target ? kMet : kMissed;
}

}  // namespace

std::string suite_picture(const std::vector<Row>& rows, const Provenance& provenance) {
    const std::vector<Line> lines = lines_of(rows);
    SvgCanvas canvas;
    const std::string subtitle = fmt::format(
        "{}, {}, commit {}; a dot is a shape, a mark the target; right: shapes that meet their target",
        provenance.machine.gpu.empty() ? "reference backend" : provenance.machine.gpu, day_of(provenance),
        provenance.commit);
    const double top =
        canvas.header("Share of a streaming kernel with the same bytes, mix and cold cache", subtitle,
                      {{.name = "target met", .color = std::string(kMet), .filled = true},
                       {.name = "target missed", .color = std::string(kMissed), .filled = true},
                       {.name = "no target (less than 64 MB)", .color = std::string(kNone), .filled = true}},
                      kWidth);
    const double left = kMargin + kLabel, right = kWidth - kMargin - kCount;
    const double bottom = top + kLine * static_cast<double>(lines.size());
    const auto x = [&](double share) {
        return left + (right - left) * std::clamp(share, 0.0, kMost) / kMost;
    };
    for (int percent = 0; percent <= 110; percent += 10) {
        canvas.line(x(percent / 100.0), top, x(percent / 100.0), bottom, percent == 100 ? kFrame : kGrid,
                    1.0);
        if (percent % 20 == 0)
            canvas.text(x(percent / 100.0), bottom + 18.0, fmt::format("{} %", percent),
                        {.size = 12.0, .anchor = Anchor::middle});
    }
    double y = top + kLine / 2.0;
    for (const Line& line : lines) {
        canvas.text(left - 12.0, y + 4.5, line.name, {.size = 13.0, .color = kInk, .anchor = Anchor::end});
        int64_t judged = 0, met = 0;
        for (const Row* row : line.rows) {
            judged += row->meets_target ? 1 : 0;
            met += row->meets_target.value_or(false) ? 1 : 0;
            const double share = *row->ceiling_seconds / row->timing.median;
            canvas.circle(x(share), y, 4.2, color_of(*row),
                          fmt::format("{}: {}", row->short_shape, format_percent(share, 1)));
        }
        if (line.share) canvas.line(x(*line.share), y - 10.0, x(*line.share), y + 10.0, kTargetMark, 2.4);
        if (judged > 0)
            canvas.text(right + 12.0, y + 4.5, fmt::format("{} of {}", met, judged),
                        {.size = 12.0, .color = met == judged ? kMet : kMissed});
        y += kLine;
    }
    canvas.line(left, top, left, bottom, kFrame, 1.2);
    return canvas.finish(kWidth, bottom + 18.0 + kMargin - 8.0, "Share of the ceiling by operation");
}

}  // namespace fp8flow::bench
