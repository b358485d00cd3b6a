// SPDX-License-Identifier: MIT
// Assignments of tokens to experts that ignore the router, for benchmarks: the same on every backend and in
// every run.
#pragma once

#include "layers/spec.h"

#include <cstdint>
#include <vector>

namespace fp8flow {

struct ForcedRouting {
    int64_t tokens = 0;  // of this rank
    int64_t rank = 0;    // ranks differ; 0 on all of them: a token's place in its micro-batch decides alone
    int64_t num_experts = 1, topk = 1;
    int64_t num_groups = 0, group_topk = 0;  // group-limited routing; 0: off
    double max_over_mean =
        1.0;  // load of the fullest expert over the mean; 1: every expert has the same number of tokens
    std::vector<double> loads = {};  // of each expert over the mean; empty: those of max_over_mean
    uint64_t seed = 0;
};

// ids [tokens, topk], distinct inside a token. Loads are exact (up to the remainder of tokens * topk /
// num_experts, which other experts get on other ranks); which experts share a token is random, so that a
// token goes to as many ranks as under uniform routing. Skewed: loads fall from max_over_mean times the mean
// along a line (above 2: a power), over the experts in random order, the same on every rank.
std::vector<int32_t> forced_assignment(const ForcedRouting& routing);

// The same spec, with given_ids where its keys force the routing.
MoeSpec with_forced_routing(MoeSpec moe);

}  // namespace fp8flow
