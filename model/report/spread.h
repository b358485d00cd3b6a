// SPDX-License-Identifier: MIT
// Medians with their spread, and the one rule by which every table, picture and page decides whether two of
// them differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::report {

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

// A difference says something where it is larger than what the same thing differs from itself.
inline bool resolved(double difference, double spread) { return !(std::abs(difference) <= spread); }
bool resolved(const Spread& a, const Spread& b);

// "1.42x" (`unit` behind it) of base over own; "+1.2 %" of own over base; "1.500" ms of a - b; or
// kNotResolved.
std::string ratio_text(const Spread& base, const Spread& own, std::string_view unit = "x");
std::string percent_text(const Spread& base, const Spread& own);
std::string milliseconds_text(const Spread& a, const Spread& b, std::string_view unit = "");
std::string milliseconds(double seconds);  // "0.123", "12.34", "123.4"

}  // namespace fp8flow::report
