// SPDX-License-Identifier: MIT
// The choice of a token: filters, ties, and frequencies of the draws.
#include "model/commands/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

namespace fp8flow {
namespace {

const std::vector<float> kLogits = {std::log(1.0f), std::log(4.0f), std::log(3.0f), std::log(2.0f)};

std::map<int32_t, double> shares(const Sampling& sampling, const std::vector<float>& logits = kLogits) {
    constexpr int kDraws = 20000;
    std::map<int32_t, double> share;
    for (int i = 0; i < kDraws; ++i) share[sample_token(logits, sampling, i)] += 1.0 / kDraws;
    return share;
}

TEST(Sampling, GreedyTakesTheFirstOfTheLargest) {
    EXPECT_EQ(sample_token(kLogits, {.temperature = 0}, 7), 1);
    EXPECT_EQ(sample_token(std::vector<float>{1, 2, 2}, {.temperature = 0}, 0), 1);
}

TEST(Sampling, DrawsHaveTheProbabilitiesOfTheSoftmax) {
    const auto share = shares({});
    for (const auto& [id, p] : {std::pair{0, 0.1}, {1, 0.4}, {2, 0.3}, {3, 0.2}})
        EXPECT_NEAR(share.at(id), p, 0.015) << id;
    EXPECT_NEAR(shares({.temperature = 0.5}).at(1), 16.0 / 30, 0.015);
}

TEST(Sampling, FiltersKeepTheMostProbable) {
    EXPECT_EQ(shares({.top_k = 1}).size(), 1u);
    const auto two = shares({.top_k = 2});
    EXPECT_EQ(two.size(), 2u);
    EXPECT_NEAR(two.at(1), 4.0 / 7, 0.015);
    EXPECT_EQ(shares({.top_p = 0.39}).size(), 1u);
    EXPECT_EQ(shares({.top_p = 0.41}).size(), 2u);
    EXPECT_EQ(shares({.top_p = 0}).size(), 1u);
    EXPECT_EQ(shares({.top_k = 1 << 30}).size(), 4u);
    EXPECT_EQ(shares({.top_k = 1}, {5, 5}).count(1), 0u);
}

TEST(Sampling, SeedAndPositionDecide) {
    int same = 0;
    for (int i = 0; i < 200; ++i) {
        EXPECT_EQ(sample_token(kLogits, {.seed = 3}, i), sample_token(kLogits, {.seed = 3}, i));
        same += sample_token(kLogits, {.seed = 3}, i) == sample_token(kLogits, {.seed = 4}, i);
    }
    EXPECT_LT(same, 100);
}

}  // namespace
}  // namespace fp8flow
