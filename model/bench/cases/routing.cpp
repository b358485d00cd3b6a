// SPDX-License-Identifier: MIT
// Routing for bench cases, and what the host can say about its dispatch plan.
#include "model/bench/cases/routing.h"

#include "kernels/core/error.h"
#include "kernels/core/random.h"
#include "kernels/dispatch_plan.h"
#include "model/train/forced_routing.h"

#include <algorithm>

namespace fp8flow::bench {

Routing make_routing(int64_t tokens, int64_t experts, int64_t topk, int64_t distribution, uint64_t seed) {
    require(topk <= experts, ExitCode::usage, "bench: K: got {}, want at most E = {}", topk, experts);
    Routing routing{.tokens = tokens, .experts = experts, .topk = topk};
    ForcedRouting wanted{.tokens = tokens,
                         .num_experts = experts,
                         .topk = topk,
                         .loads = std::vector<double>(to_size(experts), 1.0),
                         .seed = seed};
    if (distribution != 0) {
        constexpr int64_t kFine = 1 << 20;
        const std::vector<int64_t> counts = group_counts(kFine, experts, distribution);
        for (std::size_t e = 0; e < counts.size(); ++e) wanted.loads[e] = f64(counts[e] * experts) / kFine;
    }
    routing.ids = forced_assignment(wanted);
    for (std::size_t i = 0; i < routing.ids.size(); ++i)
        routing.probs.push_back(static_cast<float>(0.05 + 0.9 * random_uniform(seed, 5, i)));
    return routing;
}

Keys routing_keys() {
    return {
        {"T", "4096", "24", "tokens on this rank"},
        {"E", "32", "8", "experts"},
        {"K", "8", "2", "experts of a token (top-k)"},
        {"rows", "balanced", "ragged", "rows of the experts: balanced | ragged | skewed | empty | ragged128"},
        {"align", "128", "128", "multiple of rows that an expert's group is padded to"}};
}

Routing routing_of(const Shape& shape, uint64_t seed) {
    return make_routing(shape.number("T"), shape.positive("E"), shape.positive("K"),
                        shape.choice("rows", distribution_names()), seed);
}

std::vector<Routing> routings_of(const Shape& shape, int64_t ranks) {
    std::vector<Routing> routings;
    for (int64_t rank = 0; rank < ranks; ++rank)
        routings.push_back(routing_of(shape, static_cast<uint64_t>(rank + 1)));
    return routings;
}

PlanCounts plan_counts(const std::vector<Routing>& ranks, int64_t rank, int64_t alignment) {
    const auto num_ranks = static_cast<int64_t>(ranks.size());
    const int64_t local = ranks[0].experts / num_ranks;
    PlanCounts counts;
    counts.rows.assign(to_size(local), 0);
    std::vector<bool> seen(to_size(num_ranks));
    for (int64_t source = 0; source < num_ranks; ++source) {
        const Routing& routing = ranks[to_size(source)];
        for (int64_t t = 0; t < routing.tokens; ++t) {
            seen.assign(seen.size(), false);
            for (int64_t k = 0; k < routing.topk; ++k) {
                const int64_t expert = routing.ids[to_size(t * routing.topk + k)], owner = expert / local;
                if (owner == rank) ++counts.rows[to_size(expert - rank * local)];
                if (source == rank && owner != rank) ++counts.copies_away;
                seen[to_size(owner)] = true;
            }
            if (seen[to_size(rank)]) ++counts.received;
            if (source != rank) continue;
            counts.kept += seen[to_size(rank)] ? 1 : 0;
            counts.sent_away += std::ranges::count(seen, true) - (seen[to_size(rank)] ? 1 : 0);
        }
    }
    for (const int64_t rows : counts.rows) {
        counts.valid += rows;
        counts.padded += round_up(rows, alignment);
    }
    return counts;
}

op::PlanDispatch plan_arguments(Buffers& buffers, const TensorView& all_ids, const TensorView& all_probs,
                                int64_t rank, const PlanCounts& counts, int64_t alignment) {
    const auto local = static_cast<int64_t>(counts.rows.size());
    op::PlanDispatch args{
        .all_ids = all_ids,
        .all_probs = all_probs,
        .rank = rank,
        .first_expert = rank * local,
        .num_local_experts = local,
        .groups = {.row_capacity = counts.padded, .alignment = alignment, .known_rows = counts.valid},
        .overflow = buffers.zeros(DType::i32, {1})};
    allocate_plan(args, [&](DType dtype, Buffers::Dims shape) { return buffers.output(dtype, shape); });
    return args;
}

}  // namespace fp8flow::bench
