// SPDX-License-Identifier: MIT
// Shares: which rank of a group has which elements of a tensor. What reduce_scatter and all_gather
// (kernels/exchange.h) move; all ranks state the same.
#pragma once

#include <cstdint>
#include <vector>

namespace fp8flow {

// Elements [first, first + count) of a tensor of one dimension.
struct Slice {
    int64_t first = 0, count = 0;
    bool operator==(const Slice&) const = default;
};

// The slices of every rank, ascending. No two slices of any ranks overlap. Empty slices are legal.
using Shares = std::vector<std::vector<Slice>>;

int64_t elements_of(const std::vector<Slice>& share);

// The same shares in rounds, in each at most `elements` elements and `slices` slices of a rank: what a buffer
// takes at a time. All ranks get the same rounds, and the ranks of a round have equal parts where their
// shares are equal.
struct RoundLimits {
    int64_t elements = 0, slices = 0;  // at least 1
};
std::vector<Shares> rounds_of(const Shares& shares, const RoundLimits& limits);

}  // namespace fp8flow
