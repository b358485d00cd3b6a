// SPDX-License-Identifier: MIT
// Plain-text tables and the numbers in them: what the commands print. Columns line up in a terminal and the
// same rows render as a Markdown table for reports. And the one rule by which every table, picture and page
// decides whether two medians differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::report {

enum class Align : uint8_t { left, right };

class Table {
public:
    struct Column {
        std::string header;
        Align align = Align::right;
    };

    explicit Table(std::vector<Column> columns);
    using Headers = std::vector<std::string>;
    Table(const Headers& left, const Headers& right, const Headers& last = {});  // last: left-aligned

    void add_row(std::vector<std::string> cells);  // one cell per column
    void add_rule();                               // a line before the next row, e.g. above a total

    // Two spaces between columns, a rule under the header, `indent` spaces before each line; ends with a line
    // end.
    std::string text(int indent = 0) const;
    std::string markdown() const;  // '|' inside cells is escaped; rules are left out

private:
    std::vector<Column> columns_;
    std::vector<std::vector<std::string>> rows_;  // an empty row is a rule
};

// Columns that UTF-8 text takes in a terminal, one per character.
size_t display_width(std::string_view text);
// Pads with spaces to `width` columns; longer text stays whole.
std::string pad(std::string_view text, size_t width, Align align);

// All of these show NaN and infinities as "nan", "inf", "-inf".
std::string format_si(double value, int digits = 3);            // 1.23 M, 45.6 k, 7.00
std::string format_bytes(double bytes);                         // 512 B, 1.50 GiB
std::string format_count(int64_t value);                        // 1,234,567
std::string format_fixed(double value, int decimals);           // 3.142
std::string format_signed(double value, int decimals);          // +3.142; +0.000 if it rounds to zero
std::string format_percent(double ratio, int decimals = 2);     // 0.0025 -> 0.25 %
std::string format_scientific(double value, int decimals = 3);  // 1.234E-05, Megatron's spelling
std::string format_duration(double seconds);  // 850 us, 12.3 ms, 4.56 s, 1:02:03, 2 d 03:04:05
std::string format_clock(double seconds);     // 0:01:20, always h:mm:ss; "?" if unknown

// A median with its range.
struct Spread {
    double median = 0, min = 0, max = 0;
    int64_t samples = 0;
};
Spread spread_of(std::vector<double> values);

inline constexpr int64_t kFewestSamples = 3;  // fewer say nothing of their spread
inline constexpr std::string_view kNotResolved = "not resolved";
// What a legend says of it.
inline constexpr std::string_view kResolvedRule =
    "two medians differ by no more than the wider range (min to max), or one has fewer than 3 values";

// A difference is resolved if it exceeds the spread of one thing measured again.
inline bool resolved(double difference, double spread) { return !(std::abs(difference) <= spread); }
bool resolved(const Spread& a, const Spread& b);

// "1.42x" (with `unit` after it) of base over own, or kNotResolved.
std::string ratio_text(const Spread& base, const Spread& own, std::string_view unit = "x");
std::string milliseconds(double seconds);  // "0.123", "12.34", "123.4"

}  // namespace fp8flow::report
