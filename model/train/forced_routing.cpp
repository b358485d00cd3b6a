// SPDX-License-Identifier: MIT
// Draws every token's experts at random with the wanted loads as weights, then moves single choices from
// experts with too many to experts with too few.
#include "model/train/forced_routing.h"

#include "kernels/core/error.h"
#include "kernels/core/random.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fp8flow {

namespace {

class Draw {
public:
    Draw(uint64_t seed, const char* what) : seed_(seed), stream_(fnv1a64(what)) {}
    double uniform() { return random_uniform(seed_, stream_, next_++); }
    int64_t below(int64_t n) {
        return std::min(n - 1, static_cast<int64_t>(uniform() * static_cast<double>(n)));
    }

private:
    uint64_t seed_, stream_, next_ = 0;
};

// Load of each expert over the mean; sums to the number of experts.
std::vector<double> loads_of(const ForcedRouting& r) {
    if (!r.loads.empty()) return r.loads;
    const auto experts = static_cast<size_t>(r.num_experts);
    std::vector<double> load(experts, 1.0);
    const double top = r.max_over_mean;
    if (top <= 1.0 || experts == 1) return load;
    const double power = std::max(1.0, top - 1.0), low = std::max(0.0, 2.0 - top);
    load[0] = top;
    double sum = 0;
    for (size_t i = 1; i < experts; ++i) {
        const double along = 1.0 - static_cast<double>(i) / static_cast<double>(experts - 1);
        sum += load[i] = low + (top - low) * std::pow(along, power);
    }
    for (size_t i = 1; i < experts; ++i) load[i] *= (static_cast<double>(experts) - top) / sum;
    Draw draw(r.seed, "forced routing: order of loads");
    for (size_t i = experts - 1; i > 0; --i)
        std::swap(load[i], load[static_cast<size_t>(draw.below(static_cast<int64_t>(i) + 1))]);
    return load;
}

class Assignment {
public:
    explicit Assignment(const ForcedRouting& routing)
        : r_(routing),
          load_(loads_of(routing)),
          draw_(routing.seed * 1000003 + static_cast<uint64_t>(routing.rank), "forced routing: tokens"),
          ids_(static_cast<size_t>(routing.tokens * routing.topk)) {
        set_quotas();
        for (int64_t t = 0; t < r_.tokens; ++t) draw_token(ids_.data() + t * r_.topk);
    }

    std::vector<int32_t> balanced() {
        int64_t detours = r_.tokens * r_.topk;  // an upper bound
        for (int64_t from = 0; from < r_.num_experts; ++from)
            while (excess(from) > 0) {
                if (move_one(from)) continue;
                if (--detours < 0) return std::move(ids_);
                take_detour();
            }
        return std::move(ids_);
    }

private:
    int64_t excess(int64_t expert) const {
        return count_[static_cast<size_t>(expert)] - quota_[static_cast<size_t>(expert)];
    }
    bool grouped() const { return r_.num_groups > 0; }
    int64_t group_of(int64_t expert) const { return expert / (r_.num_experts / r_.num_groups); }

    void set_quotas() {
        count_.assign(load_.size(), 0);
        const int64_t total = r_.tokens * r_.topk;
        for (const double load : load_)
            quota_.push_back(std::min(r_.tokens, static_cast<int64_t>(load * static_cast<double>(total) /
                                                                      static_cast<double>(r_.num_experts))));
        int64_t left = total - std::accumulate(quota_.begin(), quota_.end(), int64_t{0});
        for (int64_t i = r_.rank * left; left > 0; ++i) {
            const auto expert = static_cast<size_t>(i % r_.num_experts);
            int64_t& quota = quota_[expert];
            // experts that should get no token take one if the others are full
            const bool empty = !r_.loads.empty() && load_[expert] <= 0 && i < r_.num_experts * r_.tokens;
            if (quota == r_.tokens || empty) continue;
            ++quota;
            --left;
        }
    }

    // K distinct experts, each with a probability that grows with its load; group-limited: out of random
    // groups.
    void draw_token(int32_t* ids) {
        std::vector<double> weight = load_;
        for (double& w : weight) w = std::max(w, 1e-9);
        if (grouped()) {
            std::vector<int64_t> groups(static_cast<size_t>(r_.num_groups));
            std::iota(groups.begin(), groups.end(), int64_t{0});
            for (int64_t i = 0; i < r_.group_topk; ++i)
                std::swap(groups[static_cast<size_t>(i)],
                          groups[static_cast<size_t>(i + draw_.below(r_.num_groups - i))]);
            for (int64_t e = 0; e < r_.num_experts; ++e)
                if (std::find(groups.begin(), groups.begin() + r_.group_topk, group_of(e)) ==
                    groups.begin() + r_.group_topk)
                    weight[static_cast<size_t>(e)] = 0;
        }
        for (int64_t k = 0; k < r_.topk; ++k) {
            double place = draw_.uniform() * std::accumulate(weight.begin(), weight.end(), 0.0);
            size_t expert = 0;
            for (size_t e = 0; e < weight.size() && place >= 0; ++e) {
                if (weight[e] <= 0) continue;
                expert = e;
                place -= weight[e];
            }
            weight[expert] = 0;
            ids[k] = static_cast<int32_t>(expert);
            ++count_[expert];
        }
    }

    // Moves one token from expert `from` to an expert that has too few; false if no token allows it.
    bool move_one(int64_t from) {
        const int64_t start = draw_.below(r_.tokens * r_.topk), total = r_.tokens * r_.topk;
        for (int64_t n = 0; n < total; ++n) {
            int32_t& id = ids_[static_cast<size_t>((start + n) % total)];
            if (id != from) continue;
            const int32_t* token = ids_.data() + (start + n) % total / r_.topk * r_.topk;
            const int64_t first = draw_.below(r_.num_experts);
            for (int64_t e = 0; e < r_.num_experts; ++e) {
                const int64_t to = (first + e) % r_.num_experts;
                if (excess(to) >= 0 || !may_take(token, from, to)) continue;
                id = static_cast<int32_t>(to);
                --count_[static_cast<size_t>(from)];
                ++count_[static_cast<size_t>(to)];
                return true;
            }
        }
        return false;
    }

    // If no token of an expert with too many can take an expert with too few, another token gives up a third
    // expert.
    void take_detour() {
        const int64_t start = draw_.below(r_.num_experts);
        int64_t to = start;
        while (excess(to) >= 0) to = (to + 1) % r_.num_experts;
        const int64_t total = r_.tokens * r_.topk, first = draw_.below(total);
        for (int64_t n = 0; n < total; ++n) {
            int32_t& id = ids_[static_cast<size_t>((first + n) % total)];
            const int32_t* token = ids_.data() + (first + n) % total / r_.topk * r_.topk;
            if (id == to || excess(id) > 0 || !may_take(token, id, to)) continue;
            --count_[static_cast<size_t>(id)];
            ++count_[static_cast<size_t>(to)];
            id = static_cast<int32_t>(to);
            return;
        }
    }

    bool may_take(const int32_t* token, int64_t from, int64_t to) const {
        if (std::find(token, token + r_.topk, to) != token + r_.topk) return false;
        if (!grouped()) return true;
        std::vector<int64_t> groups = {group_of(to)};
        for (int64_t k = 0; k < r_.topk; ++k)
            if (const int64_t group = group_of(token[k]);
                token[k] != from && std::ranges::find(groups, group) == groups.end())
                groups.push_back(group);
        return std::ssize(groups) <= r_.group_topk;
    }

    ForcedRouting r_;
    std::vector<double> load_;
    Draw draw_;
    std::vector<int32_t> ids_;
    std::vector<int64_t> quota_, count_;
};

}  // namespace

std::vector<int32_t> forced_assignment(const ForcedRouting& routing) {
    FP8FLOW_CHECK(routing.topk >= 1 && routing.topk <= routing.num_experts, "top-{} of {} experts",
                  routing.topk, routing.num_experts);
    if (routing.tokens == 0) return {};
    return Assignment(routing).balanced();
}

MoeSpec with_forced_routing(MoeSpec moe) {
    if (!moe.moe_router_force_load_balancing && moe.moe_router_force_biased == 0.0) return moe;
    moe.given_ids = [](const MoeSpec& spec, int layer, int64_t rank, int64_t tokens) {
        // Order invariant: bits must not depend on the expert-parallel size, so the choice depends on the
        // token's index.
        const bool invariant = spec.moe_combine_order == CombineOrder::invariant;
        return forced_assignment(
            {.tokens = tokens,
             .rank = invariant ? 0 : rank,
             .num_experts = spec.num_experts,
             .topk = spec.moe_router_topk,
             .num_groups = spec.moe_router_num_groups,
             .group_topk = spec.moe_router_group_topk,
             .max_over_mean = spec.moe_router_force_load_balancing ? 1.0 : spec.moe_router_force_biased,
             .seed = static_cast<uint64_t>(layer)});
    };
    return moe;
}

}  // namespace fp8flow
