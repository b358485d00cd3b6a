// SPDX-License-Identifier: MIT
// The bars that this project holds its memory-bound kernels to, by operation and options: a share of the
// measured ceiling, a time, a number of launches, or a gain over the two passes that a fused kernel replaces.
// Read next: report.h, which judges rows by them.
#pragma once

#include "model/bench/cases/case.h"

#include <optional>
#include <string>

namespace fp8flow::bench {

// Never slower than this, in units of the fastest peer that was measured on the same kind of GPU.
constexpr double kPeerShare = 0.98;

struct Bar {
    std::string name;                 // what it is a bar for: one line of the picture
    double share = 0;                 // of the ceiling, at least
    std::optional<double> gain;       // or so many times as fast as the row with fused=no
    std::optional<double> seconds;    // at most
    std::optional<int64_t> launches;  // at most
    double peer = kPeerShare;         // times as fast as the fastest peer on such a GPU, at least

    std::string text() const;  // ">= 92 %"
};

// Of a row that moves so much on so many ranks; nothing for baselines and for operations without a bar.
// Shares are asked of working sets of kLargeEnough bytes and more: below, launches and latency decide, and
// only peers are compared with.
constexpr double kLargeEnough = 64e6;
std::optional<Bar> bar_of(const Shape& shape, const Work& work, int64_t ranks);
// The same without a look at the size: what a row belongs to.
std::optional<Bar> family_of(const Shape& shape, int64_t ranks);

}  // namespace fp8flow::bench
