// SPDX-License-Identifier: MIT
// Performance targets of the memory-bound kernels, by operation and options: a share of the measured ceiling,
// a time, a number of launches, or a gain over the two passes that a fused kernel replaces. Read next:
// report.h, which judges rows by them.
#pragma once

#include "model/bench/cases/case.h"

#include <optional>
#include <string>

namespace fp8flow::bench {

// Speed relative to the fastest peer measured on the same kind of GPU, at least.
constexpr double kPeerShare = 0.98;

struct Target {
    std::string name;                 // family of operations: one line of the picture
    double share = 0;                 // of the ceiling, at least
    std::optional<double> gain;       // or this speed-up over the row with fused=no
    std::optional<double> seconds;    // at most
    std::optional<int64_t> launches;  // at most
    double peer = kPeerShare;         // speed relative to the fastest peer on such a GPU, at least

    std::string text() const;  // ">= 92 %"
};

// The target of a row that does `work` on `ranks` ranks; nothing for baselines and for operations without a
// target. The share applies to working sets of at least kLargeEnough bytes: smaller ones are bound by
// launches and latency, and only peers count.
constexpr double kLargeEnough = 64e6;
std::optional<Target> target_of(const Shape& shape, const Work& work, int64_t ranks);
// The same whatever the size: the family that a row belongs to.
std::optional<Target> family_of(const Shape& shape, int64_t ranks);

}  // namespace fp8flow::bench
