// SPDX-License-Identifier: MIT
// Shared by the charts: ranges of data, and from data to pixels along one axis. Read next: svg.h.
#pragma once

#include "model/report/svg.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace fp8flow::report {

constexpr double kTickFont = 12.0;  // pixels

struct Interval {
    double low = std::numeric_limits<double>::infinity();
    double high = -std::numeric_limits<double>::infinity();

    void include(double value) {
        low = std::min(low, value);
        high = std::max(high, value);
    }
    bool empty() const { return low > high; }
};

inline bool drawable(double value, AxisScale scale) {
    return std::isfinite(value) && (scale == AxisScale::linear || value > 0.0);
}

// From data to pixels along one axis.
struct Axis {
    Interval range;
    double from = 0.0, to = 1.0;  // pixels of range.low and range.high
    AxisScale scale = AxisScale::linear;

    double operator()(double value) const {
        const auto f = [this](double v) { return scale == AxisScale::log ? std::log10(v) : v; };
        return from + (to - from) * (f(value) - f(range.low)) / (f(range.high) - f(range.low));
    }
};

// Room around the data; a single value gets some on both sides.
inline Interval padded(Interval range, AxisScale scale, double share) {
    if (range.empty()) return scale == AxisScale::log ? Interval{0.1, 1.0} : Interval{0.0, 1.0};
    if (scale == AxisScale::log) {
        const double factor = range.low == range.high ? 2.0 : std::pow(range.high / range.low, share);
        return {range.low / factor, range.high * factor};
    }
    const double spread = range.high - range.low;
    const double room = spread > 1e-12 * std::max(std::abs(range.low), std::abs(range.high))
                            ? spread * share
                            : std::max(std::abs(range.high) * 0.05, 1e-9);
    return {range.low - room, range.high + room};
}

inline double step_of(const std::vector<double>& ticks) {
    return ticks.size() > 1 ? ticks[1] - ticks[0] : 0.0;
}

}  // namespace fp8flow::report
