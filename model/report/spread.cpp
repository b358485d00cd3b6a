// SPDX-License-Identifier: MIT
// The rule, and differences as text.
#include "model/report/spread.h"

#include "model/report/table.h"

#include <fmt/format.h>

#include <algorithm>

namespace fp8flow::report {

Spread spread_of(std::vector<double> values) {
    if (values.empty()) return {};
    std::sort(values.begin(), values.end());
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

std::string percent_text(const Spread& base, const Spread& own) {
    if (!resolved(base, own) || base.median <= 0) return std::string(kNotResolved);
    return fmt::format("{:+.1f} %", 100 * (own.median / base.median - 1));
}

std::string milliseconds_text(const Spread& a, const Spread& b, std::string_view unit) {
    if (!resolved(a, b)) return std::string(kNotResolved);
    return milliseconds(a.median - b.median) + std::string(unit);
}

std::string milliseconds(double seconds) {
    const double ms = seconds * 1e3, size = std::abs(ms);
    return format_fixed(ms, size >= 100 ? 1 : size >= 10 ? 2 : 3);
}

}  // namespace fp8flow::report
