// SPDX-License-Identifier: MIT
// Shards in rounds: every element once, in order, and no round past its limits.
#include "kernels/core/shards.h"

#include "kernels/core/error.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

// What the rounds hold of one rank, neighbouring slices joined.
std::vector<Slice> joined(const std::vector<Shards>& rounds, size_t rank) {
    std::vector<Slice> all;
    for (const Shards& round : rounds)
        for (const Slice& slice : round[rank]) {
            if (!all.empty() && all.back().first + all.back().count == slice.first)
                all.back().count += slice.count;
            else
                all.push_back(slice);
        }
    return all;
}

TEST(Shards, RoundsHoldEveryElementOnceAndKeepTheLimits) {
    const Shards shards = {{{0, 10}, {20, 7}, {30, 0}, {31, 1}}, {}, {{10, 9}}};
    for (const int64_t elements : {1, 3, 7, 10, 100})
        for (const int64_t slices : {1, 2, 100}) {
            const std::vector<Shards> rounds = rounds_of(shards, {elements, slices});
            EXPECT_EQ(joined(rounds, 0), (std::vector<Slice>{{0, 10}, {20, 7}, {31, 1}}));
            EXPECT_TRUE(joined(rounds, 1).empty());
            EXPECT_EQ(joined(rounds, 2), (std::vector<Slice>{{10, 9}}));
            for (const Shards& round : rounds)
                for (const std::vector<Slice>& shard : round) {
                    EXPECT_LE(elements_of(shard), elements);
                    EXPECT_LE(static_cast<int64_t>(shard.size()), slices);
                }
        }
    EXPECT_EQ(rounds_of(shards, {100, 100}).size(), 1u);
    EXPECT_EQ(rounds_of(shards, {6, 100}).size(), 3u);
}

TEST(Shards, NothingTakesNoRound) {
    EXPECT_TRUE(rounds_of({}, {1, 1}).empty());
    EXPECT_TRUE(rounds_of({{}, {{5, 0}}}, {1, 1}).empty());
    EXPECT_THROW(rounds_of({{{0, 1}}}, {0, 1}), Error);
}

}  // namespace
}  // namespace fp8flow
