// SPDX-License-Identifier: MIT
// Shards: which elements of a tensor belong to which rank, for reduce_scatter and all_gather
// (kernels/exchange.h). All ranks pass the same shards.
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
using Shards = std::vector<std::vector<Slice>>;

int64_t elements_of(const std::vector<Slice>& shard);

// The shards cut into rounds, for a buffer of limited size: in a round each rank has at most `elements`
// elements and `slices` slices. All ranks get the same rounds. Where shards have equal sizes, so have the
// parts of a round.
struct RoundLimits {
    int64_t elements = 0, slices = 0;  // at least 1
};
std::vector<Shards> rounds_of(const Shards& shards, const RoundLimits& limits);

}  // namespace fp8flow
