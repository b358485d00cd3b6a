// SPDX-License-Identifier: MIT
// Made-up routing for bench cases: which experts each token goes to, by a distribution of their popularity;
// and the dispatch plan of it.
#pragma once

#include "model/bench/cases/case.h"

#include <vector>

namespace fp8flow::bench {

// The routing of one rank's tokens.
struct Routing {
    int64_t tokens = 0, experts = 0, topk = 0;
    std::vector<int32_t> ids;  // [T, K], distinct experts of each token
    std::vector<float> probs;  // [T, K]
};
// Every expert as often as group_counts says, at most once per token.
Routing make_routing(int64_t tokens, int64_t experts, int64_t topk, int64_t distribution, uint64_t seed);

// The keys T, E, K, rows, align.
Keys routing_keys();
Routing routing_of(const Shape& shape, uint64_t seed = 1);
std::vector<Routing> routings_of(const Shape& shape, int64_t ranks);

// Counts of the dispatch plan of one rank, computed on the host from the routing of all ranks.
struct PlanCounts {
    std::vector<int64_t> rows;  // of each local expert
    int64_t valid = 0, padded = 0;
    int64_t received = 0;     // distinct (source rank, token) with an expert here
    int64_t sent_away = 0;    // distinct (own token, other rank)
    int64_t kept = 0;         // own tokens with an expert here
    int64_t copies_away = 0;  // own (token, k) pairs with an expert elsewhere
};
PlanCounts plan_counts(const std::vector<Routing>& ranks, int64_t rank, int64_t alignment);

// The arguments of plan_dispatch with all outputs allocated, exactly as large as this routing needs.
op::PlanDispatch plan_arguments(Buffers& buffers, const TensorView& all_ids, const TensorView& all_probs,
                                int64_t rank, const PlanCounts& counts, int64_t alignment);

}  // namespace fp8flow::bench
