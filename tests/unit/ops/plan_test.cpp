// SPDX-License-Identifier: MIT
// The dispatch plan against a brute-force oracle (sort everything, then look), conservation over all ranks,
// arenas, and overflow at the exact boundary.
#include "kernels/reference/reference_ops.h"
#include "tests/support/files.h"
#include "tests/support/plans.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

namespace fp8flow::test {
namespace {

// What the plan of one rank must be, by sorting (expert, source) pairs; with several sources, those of one
// source rank after the other.
struct Oracle {
    std::vector<int64_t> counts, offsets{0};
    std::map<int64_t, std::pair<int64_t, float>>
        rows;                       // M-row -> (source, prob); rows missing below the total are pads
    std::vector<int64_t> received;  // sources in order
    std::map<int64_t, std::vector<int64_t>> rows_of;  // source -> its M-rows, ascending
    int64_t wanted = 0;                               // padded, cut or not
    bool overflow = false;

    Oracle(Routing& routing, int64_t rank, int64_t alignment, int64_t capacity, int64_t num_sources) {
        std::vector<std::tuple<int64_t, int64_t, float>> pairs;
        std::set<int64_t> sources;
        for (int64_t g = 0; g < routing.ranks; ++g)
            for (int64_t t = 0; t < routing.slots; ++t)
                for (int64_t k = 0; k < routing.topk; ++k) {
                    const int64_t id = routing.id(g, t, k);
                    if (id < 0 || id / routing.local_experts() != rank) continue;
                    pairs.emplace_back(id, g * routing.slots + t, routing.prob(g, t, k));
                    sources.insert(g * routing.slots + t);
                }
        std::sort(pairs.begin(), pairs.end());
        received.assign(sources.begin(), sources.end());
        for (int64_t g = 0; g < num_sources * routing.local_experts(); ++g) {
            const int64_t expert = rank * routing.local_experts() + g % routing.local_experts(),
                          source = g / routing.local_experts();
            const auto is_mine = [&](const auto& pair) {
                return std::get<0>(pair) == expert &&
                       (num_sources == 1 || std::get<1>(pair) / routing.slots == source);
            };
            int64_t count = std::count_if(pairs.begin(), pairs.end(), is_mine);
            wanted += (count + alignment - 1) / alignment * alignment;
            while (offsets.back() + (count + alignment - 1) / alignment * alignment > capacity) {
                --count;
                overflow = true;
            }
            auto pair = std::find_if(pairs.begin(), pairs.end(), is_mine);
            for (int64_t i = 0; i < count; ++i, ++pair) {
                rows[offsets.back() + i] = {std::get<1>(*pair), std::get<2>(*pair)};
                rows_of[std::get<1>(*pair)].push_back(offsets.back() + i);
            }
            counts.push_back(count);
            offsets.push_back(offsets.back() + (count + alignment - 1) / alignment * alignment);
        }
    }
};

void expect_plan(Routing& routing, int64_t rank, int64_t alignment, int64_t capacity, int64_t base,
                 int64_t num_sources) {
    SCOPED_TRACE(fmt::format(
        "ranks {} slots {} topk {} experts {} rank {} alignment {} capacity {} base {} sources {}",
        routing.ranks, routing.slots, routing.topk, routing.experts, rank, alignment, capacity, base,
        num_sources));
    const PlanFixture plan(routing, rank, alignment, capacity, base, num_sources);
    const Oracle want(routing, rank, alignment, plan.groups.row_capacity, num_sources);
    EXPECT_EQ(plan.overflow.as<int32_t>()[0], want.overflow ? 1 : 0);
    EXPECT_EQ(plan.rows_wanted.as<int64_t>()[0], want.wanted);
    for (int64_t g = 0; g < plan.groups.num_groups; ++g)
        EXPECT_EQ(plan.count(g), want.counts[g]) << "group " << g;
    for (int64_t g = 0; g <= plan.groups.num_groups; ++g)
        EXPECT_EQ(plan.offset(g), want.offsets[g]) << "group " << g;
    ASSERT_LE(plan.total(), plan.groups.row_capacity);
    EXPECT_EQ(plan.next_row_base.as<int64_t>()[0], (base + plan.total() + 127) / 128 * 128);

    ASSERT_EQ(plan.received(), static_cast<int64_t>(want.received.size()));
    for (int64_t i = 0; i < routing.ranks * routing.slots; ++i) {
        const bool present = i < plan.received();
        ASSERT_EQ(plan.recv_source.as<int32_t>()[i], present ? want.received[i] : -1);
        std::vector<int64_t> rows;
        if (present)
            if (const auto found = want.rows_of.find(want.received[i]); found != want.rows_of.end())
                rows = found->second;
        rows.resize(static_cast<std::size_t>(routing.topk), -1);
        for (int64_t k = 0; k < routing.topk; ++k)
            ASSERT_EQ(plan.recv_rows.as<int32_t>()[i * routing.topk + k], rows[k]) << "received row " << i;
    }
    for (int64_t g = 0; g <= routing.ranks; ++g)
        EXPECT_EQ(plan.recv_offsets.as<int64_t>()[g],
                  std::count_if(want.received.begin(), want.received.end(),
                                [&](int64_t source) { return source / routing.slots < g; }));

    const int32_t untouched = 0x11111111;
    for (int64_t row = -base; row < plan.groups.row_capacity; ++row) {
        if (row < 0 || row >= plan.total()) {
            ASSERT_EQ(plan.source_of(row), untouched) << row;
            ASSERT_TRUE(std::isnan(plan.prob_of(row))) << row;
            continue;
        }
        const auto found = want.rows.find(row);
        if (found == want.rows.end()) {
            ASSERT_EQ(plan.source_of(row), -1) << row;
            ASSERT_EQ(plan.prob_of(row), 0.0f) << row;
        } else {
            ASSERT_EQ(want.received[plan.source_of(row)], found->second.first) << row;
            ASSERT_EQ(plan.prob_of(row), found->second.second) << row;
        }
    }
}

void expect_plan(Routing& routing, int64_t rank, int64_t alignment, int64_t capacity = -1, int64_t base = 0) {
    expect_plan(routing, rank, alignment, capacity, base, 1);
    if (routing.ranks > 1) expect_plan(routing, rank, alignment, capacity, base, routing.ranks);
}

// What rank `from` sends to `to`, in order, must be what `to` receives from `from`.
void expect_sends_match(const Routing& routing) {
    std::vector<std::unique_ptr<PlanFixture>> plans;
    for (int64_t g = 0; g < routing.ranks; ++g)
        plans.push_back(std::make_unique<PlanFixture>(routing, g, 16));
    for (int64_t from = 0; from < routing.ranks; ++from) {
        for (int64_t to = 0; to < routing.ranks; ++to) {
            const int64_t* offsets = plans[to]->recv_offsets.as<int64_t>();
            const int64_t sent = plans[from]->send_counts.as<int64_t>()[to];
            ASSERT_EQ(sent, offsets[from + 1] - offsets[from]);
            for (int64_t i = 0; i < routing.slots; ++i) {
                const int32_t token = plans[from]->send_tokens.as<int32_t>()[to * routing.slots + i];
                if (i >= sent) {
                    ASSERT_EQ(token, -1);
                } else {
                    ASSERT_EQ(plans[to]->recv_source.as<int32_t>()[offsets[from] + i],
                              from * routing.slots + token);
                }
            }
        }
    }
}

// Each (token, k) is in exactly one row of exactly one rank, with its probability.
void expect_conservation(Routing& routing, int64_t alignment) {
    std::map<std::pair<int64_t, int64_t>, float> rows;  // (source, expert) -> prob
    for (int64_t rank = 0; rank < routing.ranks; ++rank) {
        const PlanFixture plan(routing, rank, alignment);
        for (int64_t g = 0; g < routing.local_experts(); ++g)
            for (int64_t row = plan.offset(g); row < plan.offset(g) + plan.count(g); ++row) {
                const int64_t source = plan.recv_source.as<int32_t>()[plan.source_of(row)];
                const bool is_new =
                    rows.emplace(std::pair{source, rank * routing.local_experts() + g}, plan.prob_of(row))
                        .second;
                ASSERT_TRUE(is_new) << "source " << source;
            }
    }
    std::size_t wanted = 0;
    for (int64_t g = 0; g < routing.ranks; ++g)
        for (int64_t t = 0; t < routing.slots; ++t)
            for (int64_t k = 0; k < routing.topk; ++k) {
                if (routing.id(g, t, k) < 0) continue;
                ++wanted;
                const auto found = rows.find({g * routing.slots + t, routing.id(g, t, k)});
                ASSERT_NE(found, rows.end());
                ASSERT_EQ(found->second, routing.prob(g, t, k));
            }
    EXPECT_EQ(rows.size(), wanted);
}

void expect_all(Routing routing) {
    for (int64_t alignment : {1, 16, 32, 128}) {
        for (int64_t rank = 0; rank < routing.ranks; ++rank) expect_plan(routing, rank, alignment);
        expect_conservation(routing, alignment);
    }
    expect_sends_match(routing);
}

TEST(Plan, OracleOverRanksExpertsAndTopK) {
    uint64_t seed = 0;
    for (int64_t ranks : {1, 2, 4})
        for (auto [experts, topk] : {std::pair{4, 1}, {4, 4}, {8, 2}, {12, 3}, {32, 6}})
            for (int64_t tokens : {1, 7, 33})
                expect_all(
                    Routing::random(std::vector<int64_t>(ranks, tokens), tokens, topk, experts, ++seed));
}

TEST(Plan, ExpertsNotAPowerOfTwo) {
    expect_all(Routing::random({20, 20, 20}, 20, 2, 6, 1));
    expect_all(Routing::random({20, 20, 20}, 20, 6, 6, 2));
    expect_all(Routing::random({9, 9, 9, 9, 9}, 9, 3, 35, 3));
    expect_all(Routing::random({40}, 40, 1, 1, 4));
}

TEST(Plan, UnevenAndAbsentTokens) {
    expect_all(Routing::random({5, 0, 17, 1}, 17, 2, 8, 1));
    expect_all(Routing::random({0, 3}, 6, 2, 4, 2));  // more slots than tokens anywhere
    expect_all(Routing::random({0, 0}, 4, 2, 4, 3));  // nobody
    expect_all(Routing::random({0, 0}, 0, 2, 4, 4));  // no slots
}

TEST(Plan, OneHotExpertAndOneHotRank) {
    expect_all(Routing::random({30, 30}, 30, 1, 8, 1, 5));  // everything to one expert, the others stay empty
    expect_all(Routing::random({30, 30}, 30, 2, 8, 2, 0));
    Routing routing(4, 10, 2, 8);
    for (int64_t g = 0; g < 4; ++g)
        for (int64_t t = 0; t < 10; ++t)
            for (int64_t k = 0; k < 2; ++k) {
                routing.id(g, t, k) = static_cast<int32_t>(7 - k);  // the last rank, descending expert order
                routing.prob(g, t, k) = 0.25f * static_cast<float>(k + 1);
            }
    expect_all(std::move(routing));
}

TEST(Plan, RowBase) {
    Routing routing = Routing::random({11, 6}, 11, 2, 4, 5);
    for (int64_t base : {128, 384}) {
        for (int64_t alignment : {1, 16, 128}) expect_plan(routing, 1, alignment, -1, base);
    }
}

TEST(Plan, BuffersShorterThanTheCapacityBoundTheRows) {
    const Routing routing = Routing::random({11, 6}, 11, 2, 4, 5);
    PlanFixture plan(routing, 0, 1);
    const int64_t needed = plan.total();
    for (int64_t base :
         {128, 100000}) {  // what the arena holds past its base: one row too few, and nothing at all
        HostTensor prob(DType::f32, {128 + needed - 1}), source(DType::i32, {1000});
        prob.set_row_base(base);
        op::PlanDispatch args = plan.args;
        args.row_prob = prob;
        args.row_source = source;
        plan.overflow.zero();
        ReferenceOps().plan_dispatch(args);
        EXPECT_EQ(plan.overflow.as<int32_t>()[0], 1);
        EXPECT_EQ(plan.total(), base == 128 ? needed - 1 : 0);
    }
}

TEST(Plan, OverflowAtTheExactBoundary) {
    Routing routing = Routing::random({40, 23}, 40, 2, 8, 9);
    for (int64_t alignment : {1, 16, 32}) {
        for (int64_t rank : {0, 1}) {
            for (int64_t sources : {1, 2}) {
                const auto overflows = [&](int64_t capacity) {
                    const PlanFixture plan(routing, rank, alignment, capacity, 0, sources);
                    return plan.overflow.as<int32_t>()[0];
                };
                const int64_t exact = PlanFixture(routing, rank, alignment, -1, 0, sources).total();
                EXPECT_EQ(overflows(exact), 0);
                EXPECT_EQ(overflows(exact - 1), 1);
                for (int64_t capacity : {exact, exact - 1, exact / 2, alignment, int64_t{1}, int64_t{0}})
                    expect_plan(routing, rank, alignment, capacity, 0, sources);
            }
        }
    }
}

TEST(Plan, OverflowIsNeverSetBack) {
    const Routing routing = Routing::random({4}, 4, 1, 2, 1);
    PlanFixture plan(routing, 0, 1);
    plan.overflow.as<int32_t>()[0] = 1;
    ReferenceOps().plan_dispatch(plan.args);
    EXPECT_EQ(plan.overflow.as<int32_t>()[0], 1);
}

TEST(Plan, RowsWantedAreAMaximum) {
    const Routing routing = Routing::random({40}, 40, 1, 2, 1);
    PlanFixture plan(routing, 0, 16);
    const int64_t wanted = plan.rows_wanted.as<int64_t>()[0];
    EXPECT_EQ(wanted, plan.total());
    for (const int64_t before : {wanted - 1, wanted, wanted + 1}) {
        plan.rows_wanted.as<int64_t>()[0] = before;
        ReferenceOps().plan_dispatch(plan.args);
        EXPECT_EQ(plan.rows_wanted.as<int64_t>()[0], std::max(before, wanted));
    }
    plan.args.rows_wanted = {};
    ReferenceOps().plan_dispatch(plan.args);  // optional
}

// Device data in other backends; here a wrong id is an error, not a token without its expert.
TEST(Plan, WrongIdsAreRefused) {
    const auto message = [](int32_t id, int64_t k) {
        Routing routing = Routing::random({4, 4}, 5, 2, 4, 1);  // a slot of each rank is empty
        routing.id(1, 2, 0) = 3, routing.id(1, 2, 1) = 1;
        routing.id(1, 2, k) = id;
        return error_or_none(ExitCode::usage, [&] { const PlanFixture plan(routing, 1, 16); });
    };
    EXPECT_EQ(message(2, 0), "");
    EXPECT_EQ(message(-1, 1), "");
    for (const int32_t id : {4, -2, INT32_MAX, INT32_MIN})
        expect_contains(message(id, 1), fmt::format("token 7 names expert {}, want 0 to 3", id));
    expect_contains(message(3, 1), "token 7 names expert 3 twice");
}

TEST(Plan, WrongArgumentsAreRefusedWithNumbers) {
    const Routing routing = Routing::random({4, 4}, 4, 1, 4, 1);
    PlanFixture plan(routing, 1, 16);
    const auto message = [&](const op::PlanDispatch& args) {
        return error_or_none(ExitCode::internal, [&] { ReferenceOps().plan_dispatch(args); });
    };
    op::PlanDispatch args = plan.args;
    args.groups.alignment = 0;
    expect_contains(message(args), "alignment 0 (moe_row_alignment)");
    args = plan.args;
    args.first_expert = 1;
    expect_contains(message(args), "begins at expert 1, must begin at 2");
    args = plan.args;
    args.num_sources = 3;
    expect_contains(message(args), "3 sources of 2 ranks");
    args = plan.args;
    args.num_sources = 2;
    expect_contains(message(args), "2 groups for 2 local experts of 2 sources");
    args = plan.args;
    args.recv_source = plan.send_counts;
    expect_contains(message(args), "recv_source is i64[2], must be i32[8]");
}

}  // namespace
}  // namespace fp8flow::test
