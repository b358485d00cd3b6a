// SPDX-License-Identifier: MIT
// Forced assignments: exact loads, distinct experts, as many ranks per token as uniform routing reaches, the
// same every time.
#include "model/train/forced_routing.h"
#include "model/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace fp8flow {

using namespace plan;

namespace {

struct Shape {
    int64_t experts, topk, groups, group_topk;
};
const Shape kShapes[] = {{4, 1, 0, 0},   {8, 2, 0, 0},   {6, 3, 0, 0},
                         {128, 8, 0, 0}, {256, 8, 8, 4}, {64, 6, 0, 0}};

ForcedRouting routing(const Shape& shape, int64_t tokens, double skew, int64_t rank = 0) {
    return {.tokens = tokens,
            .rank = rank,
            .num_experts = shape.experts,
            .topk = shape.topk,
            .num_groups = shape.groups,
            .group_topk = shape.group_topk,
            .max_over_mean = skew,
            .seed = 7};
}

std::vector<int64_t> counts_of(const std::vector<int32_t>& ids, int64_t experts) {
    std::vector<int64_t> counts(static_cast<size_t>(experts));
    for (const int32_t id : ids) ++counts.at(static_cast<size_t>(id));
    return counts;
}

TEST(ForcedRouting, BalancedGivesEveryExpertTheSameNumberOfDistinctTokens) {
    for (const Shape& shape : kShapes) {
        for (const int64_t rank : {0, 3}) {
            const auto ids = forced_assignment(routing(shape, 512, 1.0, rank));
            ASSERT_EQ(ids.size(), static_cast<size_t>(512 * shape.topk));
            const auto counts = counts_of(ids, shape.experts);
            EXPECT_LE(*std::max_element(counts.begin(), counts.end()) -
                          *std::min_element(counts.begin(), counts.end()),
                      512 * shape.topk % shape.experts == 0 ? 0 : 1)
                << shape.experts << " experts";
            for (size_t t = 0; t < 512; ++t) {
                const auto* token = ids.data() + t * static_cast<size_t>(shape.topk);
                EXPECT_EQ(std::set<int32_t>(token, token + shape.topk).size(),
                          static_cast<size_t>(shape.topk));
                if (shape.groups == 0) continue;
                std::set<int64_t> groups;
                for (int64_t k = 0; k < shape.topk; ++k)
                    groups.insert(token[k] / (shape.experts / shape.groups));
                EXPECT_LE(groups.size(), static_cast<size_t>(shape.group_topk));
            }
        }
    }
}

// What is left after an equal share goes to other experts on each rank.
TEST(ForcedRouting, AllRanksTogetherAreBalanced) {
    for (const Shape& shape : kShapes) {
        std::vector<int32_t> ids;
        for (int64_t rank = 0; rank < 4; ++rank) {
            const auto own = forced_assignment(routing(shape, 511, 1.0, rank));
            ids.insert(ids.end(), own.begin(), own.end());
        }
        const auto counts = counts_of(ids, shape.experts);
        EXPECT_LE(*std::ranges::max_element(counts) - *std::ranges::min_element(counts), 1)
            << shape.experts << " experts";
    }
}

TEST(ForcedRouting, TokensReachAsManyRanksAsUnderUniformRouting) {
    for (const Shape& shape : kShapes) {
        for (const int64_t ranks : {2, 4}) {
            if (shape.experts % ranks != 0) continue;
            const int64_t tokens = 4096, local = shape.experts / ranks;
            const auto ids = forced_assignment(routing(shape, tokens, 1.0));
            double distinct = 0;
            for (int64_t t = 0; t < tokens; ++t) {
                std::set<int64_t> hosts;
                for (int64_t k = 0; k < shape.topk; ++k)
                    hosts.insert(ids[static_cast<size_t>(t * shape.topk + k)] / local);
                distinct += static_cast<double>(hosts.size());
            }
            MoeSpec moe;
            moe.num_experts = shape.experts;
            moe.moe_router_topk = shape.topk;
            moe.moe_router_num_groups = shape.groups;
            moe.moe_router_group_topk = shape.group_topk;
            const double expected = expected_distinct_ranks(moe, ranks);
            // standard error of the mean of 4096 tokens is below 0.012 ranks
            EXPECT_NEAR(distinct / static_cast<double>(tokens), expected, 0.05)
                << shape.experts << " experts, " << ranks << " ranks";
        }
    }
}

TEST(ForcedRouting, SkewedReachesTheWantedMaximumOnTheSameExpertsOfEveryRank) {
    for (const Shape& shape : kShapes) {
        for (const double skew : {1.25, 2.0, 3.0}) {
            if (skew * static_cast<double>(shape.topk) > static_cast<double>(shape.experts)) continue;
            const int64_t tokens = 2048;
            std::vector<std::vector<int64_t>> by_rank;
            for (const int64_t rank : {0, 1}) {
                const auto ids = forced_assignment(routing(shape, tokens, skew, rank));
                const auto counts = counts_of(ids, shape.experts);
                const auto most = std::max_element(counts.begin(), counts.end());
                const double mean =
                    static_cast<double>(tokens * shape.topk) / static_cast<double>(shape.experts);
                EXPECT_NEAR(static_cast<double>(*most) / mean, skew, 2.0 / mean + 0.01)
                    << shape.experts << " experts, skew " << skew;
                by_rank.push_back(counts);
                for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
                    const auto* token = ids.data() + t * static_cast<size_t>(shape.topk);
                    ASSERT_EQ(std::set<int32_t>(token, token + shape.topk).size(),
                              static_cast<size_t>(shape.topk));
                }
            }
            // a remainder of less than one token per expert goes elsewhere on every rank
            for (size_t e = 0; e < by_rank[0].size(); ++e)
                EXPECT_LE(std::abs(by_rank[0][e] - by_rank[1][e]), 1) << "expert " << e;
        }
    }
}

TEST(ForcedRouting, IsTheSameEveryTimeAndDiffersBetweenRanksAndSeeds) {
    const Shape shape = {64, 6, 0, 0};
    const auto base = routing(shape, 100, 1.0);
    EXPECT_EQ(forced_assignment(base), forced_assignment(base));
    EXPECT_NE(forced_assignment(base), forced_assignment(routing(shape, 100, 1.0, 1)));
    ForcedRouting other = base;
    other.seed = 8;
    EXPECT_NE(forced_assignment(base), forced_assignment(other));
    EXPECT_TRUE(forced_assignment(routing(shape, 0, 1.0)).empty());
    MoeSpec moe;
    moe.moe_router_force_load_balancing = true;
    moe = with_forced_routing(moe);
    EXPECT_NE(moe.given_ids(moe, 0, 0, 100), moe.given_ids(moe, 1, 0, 100));  // layers
}

}  // namespace
}  // namespace fp8flow
