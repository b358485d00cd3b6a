// SPDX-License-Identifier: MIT
// The plans of two levels by hand: four ranks with an expert each on two hosts, as rank 0 sees them. That
// they move the right rows is what hierarchical_exchange_test.cpp shows.
#include "kernels/comm/levels/level_plans.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/plans.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

template <class T> std::vector<T> values_of(const TensorView& view) {
    return {view.as<T>(), view.as<T>() + view.numel()};
}

using Words = std::vector<int32_t>;
using Sizes = std::vector<int64_t>;

TEST(LevelPlans, OfFourRanksOnTwoHosts) {
    test::Routing routing(4, 2, 2, 4);
    const std::vector<Words> ids{{1, 2, 3, 0}, {0, 1, -1, -1}, {0, 3, 2, 3}, {1, 0, 2, 3}};
    for (int64_t rank = 0; rank < 4; ++rank)
        for (int64_t i = 0; i < 4; ++i)
            routing.id(rank, i / 2, i % 2) = ids[static_cast<std::size_t>(rank)][static_cast<std::size_t>(i)];
    const test::PlanFixture fixture(routing, 0, 8);
    const DispatchPlan plan = plan_of(fixture.args, 2);
    EXPECT_EQ(values_of<int32_t>(plan.recv_source.slice(0, 4)), (Words{1, 2, 4, 6}));

    ReferenceOps ops;
    Arena arena(ops.device(), "plans", true);
    const LevelMap map = make_level_map(HostLayout(std::vector<int>{0, 0, 1, 1}), 0, ops.device(), arena);
    const LevelPlans levels = allocate_level_plans(plan, map, arena);
    derive_level_plans(plan, map, levels, arena, {});

    const DispatchPlan& rail = levels.rail;
    EXPECT_EQ(rail.num_local_experts, 2);
    EXPECT_EQ(values_of<int32_t>(rail.all_ids), (Words{1, 2, 3, 0, 0, 3, 2, 3}));
    EXPECT_EQ(values_of<int32_t>(rail.send_tokens), (Words{0, 1, 0, 1}));
    EXPECT_EQ(values_of<int64_t>(rail.send_counts), (Sizes{2, 2}));
    // both tokens of rank 0 and the first of rank 2 land here
    EXPECT_EQ(values_of<int64_t>(rail.recv_offsets), (Sizes{0, 2, 3}));
    EXPECT_EQ(values_of<int32_t>(rail.recv_source), (Words{0, 1, 2, -1}));
    EXPECT_EQ(values_of<int32_t>(rail.recv_rows), (Words{0, -1, 1, -1, 2, -1, -1, -1}));
    EXPECT_EQ(values_of<int32_t>(rail.prob_rows), (Words{0, -1, 3, -1, 4, -1, -1, -1}));

    const DispatchPlan& inside = levels.inside;
    EXPECT_EQ(inside.num_tokens, 4);
    EXPECT_EQ(values_of<int32_t>(inside.all_ids),
              (Words{1, -1, -1, 0, 0, -1, -1, -1, /* local rank 1 */ 0, 1, 1, 0, -1, -1, -1, -1}));
    EXPECT_EQ(values_of<int32_t>(inside.send_tokens), (Words{1, 2, -1, -1, 0, -1, -1, -1}));
    EXPECT_EQ(values_of<int64_t>(inside.send_counts), (Sizes{2, 1}));
    // by local rank: the tokens of ranks 0 and 2, then those of ranks 1 and 3
    EXPECT_EQ(values_of<int64_t>(inside.recv_offsets), (Sizes{0, 2, 4}));
    EXPECT_EQ(values_of<int32_t>(inside.recv_source), (Words{1, 2, 4, 5, -1, -1, -1, -1}));
    EXPECT_EQ(values_of<int32_t>(levels.inside_row_of), (Words{0, 2, 1, 3, -1, -1, -1, -1}));
    EXPECT_EQ(values_of<int32_t>(inside.recv_rows.slice(0, 4)), (Words{0, -1, 2, -1, 1, -1, 3, -1}));
    EXPECT_EQ(values_of<int32_t>(inside.row_source.slice(0, 8)), (Words{0, 2, 1, 3, -1, -1, -1, -1}));
    EXPECT_EQ(values_of<int64_t>(levels.received.offsets), (Sizes{0, 4}));
}

}  // namespace
}  // namespace fp8flow
