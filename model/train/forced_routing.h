// SPDX-License-Identifier: MIT
// Assigns tokens to experts without the router, for benchmarks; the same on every backend and in every run.
#pragma once

#include "layers/spec.h"

#include <cstdint>
#include <vector>

namespace fp8flow {

struct ForcedRouting {
    int64_t tokens = 0;  // of this rank
    int64_t rank = 0;    // seeds the choice; 0 on all ranks: the choice depends on the token's index alone
    int64_t num_experts = 1, topk = 1;
    int64_t num_groups = 0, group_topk = 0;  // group-limited routing; 0: off
    double max_over_mean = 1.0;              // load of the fullest expert over the mean; 1: equal loads
    std::vector<double> loads = {};          // of each expert over the mean; empty: those of max_over_mean
    uint64_t seed = 0;
};

// ids [tokens, topk], distinct inside a token. Loads are exact up to the remainder of tokens * topk /
// num_experts, which goes to different experts on different ranks. Which experts a token gets is random, so
// that it goes to as many ranks as with uniform routing. Skewed loads fall from max_over_mean times the mean
// along a line (above 2: a power) over the experts in random order, the same on every rank.
std::vector<int32_t> forced_assignment(const ForcedRouting& routing);

// The same spec, with given_ids if its keys force the routing.
MoeSpec with_forced_routing(MoeSpec moe);

}  // namespace fp8flow
