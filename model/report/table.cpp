// SPDX-License-Identifier: MIT
// Tables and number formatting.
#include "model/report/table.h"

#include "kernels/core/error.h"

#include <algorithm>
#include <array>

namespace fp8flow::report {

namespace {

std::string not_finite(double value) { return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"; }

// `value` scaled by `base` into [1, base), with `digits` significant digits.
std::string scaled(double value, double base, int digits, const auto& units) {
    if (!std::isfinite(value)) return not_finite(value);
    size_t unit = 0;
    const auto decimals = [digits](double size) {
        return std::max(0, digits - (size < 10.0 ? 1 : size < 100.0 ? 2 : size < 1000.0 ? 3 : 4));
    };
    // Decided on the rounded value: 999.96 k is 1.00 M and not 1000 k, 9.999 is 10.0 and not 10.00.
    const auto rounded = [&] {
        return std::stod(fmt::format("{:.{}f}", std::abs(value), decimals(std::abs(value))));
    };
    while (unit + 1 < units.size() && rounded() >= base) {
        value /= base;
        ++unit;
    }
    const int places = decimals(rounded());
    return fmt::format("{:.{}f}{}{}", value, places, units[unit].empty() ? "" : " ", units[unit]);
}

}  // namespace

size_t display_width(std::string_view text) {
    return static_cast<size_t>(std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string pad(std::string_view text, size_t width, Align align) {
    const size_t own = display_width(text);
    const std::string space(own < width ? width - own : 0, ' ');
    return align == Align::left ? std::string(text) + space : space + std::string(text);
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
    FP8FLOW_CHECK(!columns_.empty(), "a table without columns");
}

Table::Table(const Headers& left, const Headers& right, const Headers& last) {
    for (const std::string& header : left) columns_.push_back({header, Align::left});
    for (const std::string& header : right) columns_.push_back({header});
    for (const std::string& header : last) columns_.push_back({header, Align::left});
}

void Table::add_row(std::vector<std::string> cells) {
    FP8FLOW_CHECK(cells.size() == columns_.size(), "{} cells for {} columns", cells.size(), columns_.size());
    rows_.push_back(std::move(cells));
}

void Table::add_rule() { rows_.emplace_back(); }

std::string Table::text(int indent) const {
    std::vector<size_t> width;
    for (size_t c = 0; c < columns_.size(); ++c) {
        width.push_back(display_width(columns_[c].header));
        for (const auto& row : rows_)
            if (!row.empty()) width[c] = std::max(width[c], display_width(row[c]));
    }
    std::string out;
    const auto line = [&](const auto& cell_of) {
        std::string text(static_cast<size_t>(indent), ' ');
        for (size_t c = 0; c < columns_.size(); ++c)
            text += (c > 0 ? "  " : "") + pad(cell_of(c), width[c], columns_[c].align);
        out += text.erase(text.find_last_not_of(' ') + 1) + "\n";
    };
    const auto rule = [&] { line([&](size_t c) { return std::string(width[c], '-'); }); };
    line([&](size_t c) { return columns_[c].header; });
    rule();
    for (const auto& row : rows_)
        if (row.empty())
            rule();
        else
            line([&](size_t c) { return row[c]; });
    return out;
}

std::string Table::markdown() const {
    std::string out = "|", rule = "|";
    const auto cell = [&](const std::string& text) {
        out += " ";
        for (const char c : text) out += c == '|' ? "\\|" : std::string(1, c);
        out += " |";
    };
    for (const Column& column : columns_) {
        cell(column.header);
        rule += column.align == Align::right ? "---:|" : "---|";
    }
    out += "\n" + rule + "\n";
    for (const auto& row : rows_) {
        if (row.empty()) continue;
        out += "|";
        for (const std::string& text : row) cell(text);
        out += "\n";
    }
    return out;
}

std::string format_si(double value, int digits) {
    static constexpr std::array<std::string_view, 7> kUnits = {"", "k", "M", "G", "T", "P", "E"};
    return scaled(value, 1000.0, digits, kUnits);
}

std::string format_bytes(double bytes) {
    static constexpr std::array<std::string_view, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (std::abs(bytes) < 1024.0)
        return std::isfinite(bytes) ? fmt::format("{:.0f} B", bytes) : not_finite(bytes);
    return scaled(bytes, 1024.0, 3, kUnits);
}

std::string format_count(int64_t value) {
    const std::string digits = std::to_string(value);
    std::string out;
    for (size_t i = 0; i < digits.size(); ++i) {
        const bool group_starts = i > 0 && digits[i - 1] != '-' && (digits.size() - i) % 3 == 0;
        if (group_starts) out += ',';
        out += digits[i];
    }
    return out;
}

std::string format_fixed(double value, int decimals) {
    return std::isfinite(value) ? fmt::format("{:.{}f}", value, decimals) : not_finite(value);
}

std::string format_signed(double value, int decimals) {
    if (!std::isfinite(value)) return not_finite(value);
    const std::string text = fmt::format("{:+.{}f}", value, decimals);
    return std::stod(text) == 0 ? fmt::format("{:+.{}f}", 0.0, decimals) : text;
}

std::string format_percent(double ratio, int decimals) {
    return std::isfinite(ratio) ? fmt::format("{:.{}f} %", 100.0 * ratio, decimals) : not_finite(ratio);
}

std::string format_scientific(double value, int decimals) {
    return std::isfinite(value) ? fmt::format("{:.{}E}", value, decimals) : not_finite(value);
}

std::string format_duration(double seconds) {
    if (!std::isfinite(seconds)) return not_finite(seconds);
    const double size = std::abs(seconds);
    if (size == 0.0) return "0 s";
    if (size < 0.9995e-3) return fmt::format("{:.3g} us", seconds * 1e6);
    if (size < 0.9995) return fmt::format("{:.3g} ms", seconds * 1e3);
    if (size < 59.95) return fmt::format("{:.3g} s", seconds);
    const int64_t whole = std::llround(size);
    const std::string_view sign = seconds < 0 ? "-" : "";
    if (whole < 86400) return fmt::format("{}{}", sign, format_clock(size));
    return fmt::format("{}{} d {:02}:{:02}:{:02}", sign, whole / 86400, whole / 3600 % 24, whole / 60 % 60,
                       whole % 60);
}

std::string format_clock(double seconds) {
    if (!std::isfinite(seconds) || seconds < 0.0 || seconds > 1e15) return "?";
    const int64_t whole = std::llround(seconds);
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

Spread spread_of(std::vector<double> values) {
    if (values.empty()) return {};
    std::ranges::sort(values);
    const size_t middle = values.size() / 2;
    const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
    return {median, values.front(), values.back(), static_cast<int64_t>(values.size())};
}

bool resolved(const Spread& a, const Spread& b) {
    return std::min(a.samples, b.samples) >= kFewestSamples &&
           resolved(a.median - b.median, std::max(a.max - a.min, b.max - b.min));
}

std::string ratio_text(const Spread& base, const Spread& own, std::string_view unit) {
    if (!resolved(base, own) || own.median <= 0) return std::string(kNotResolved);
    return format_fixed(base.median / own.median, 2) + std::string(unit);
}

std::string milliseconds(double seconds) {
    const double ms = seconds * 1e3, size = std::abs(ms);
    return format_fixed(ms, size >= 100 ? 1 : size >= 10 ? 2 : 3);
}

}  // namespace fp8flow::report
