// SPDX-License-Identifier: MIT
// Two levels of exchange between thread ranks: bytes of dispatch, sums in the stated orders and bytes on each
// wire against the oracle, over hosts, ranks, skews and empty hosts; where the bits of one level are due.
#include "kernels/comm/levels/hierarchical_exchange.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/collective_checks.h"
#include "tests/support/exchange_oracle.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

using test::combined;
using test::ExchangeCase;
using test::Levels;
using test::Skew;
using test::Wire;

constexpr CombineOrder kOrders[] = {CombineOrder::rank, CombineOrder::invariant};

void run(const ExchangeCase& c) {
    run_thread_ranks(static_cast<int>(c.ranks()), 60,
                     [&](ProcessGroup& group) { test::check_exchange(group, c); });
}

std::vector<int> consecutive(int64_t ranks, int64_t hosts) {
    std::vector<int> host_of;
    for (int64_t r = 0; r < ranks; ++r) host_of.push_back(static_cast<int>(r * hosts / ranks));
    return host_of;
}

// Uneven; no tokens on the last host; none at all.
std::vector<std::vector<int64_t>> token_counts(const std::vector<int>& host_of) {
    const auto ranks = host_of.size();
    std::vector<int64_t> uneven{9, 16, 1, 0, 7, 3, 0, 12}, one_host_empty(ranks, 6);
    uneven.resize(ranks);
    for (std::size_t r = 0; r < ranks; ++r)
        if (host_of[r] == host_of.back()) one_host_empty[r] = 0;
    return {uneven, one_host_empty, std::vector<int64_t>(ranks, 0)};
}

// One exchange over the groups `flat`, and one on each level.
HierarchicalExchange::Parts parts_of(ProcessGroup& group, const ExchangeGroups& flat, ReferenceOps& ops,
                                     ExchangeCase c) {
    HierarchicalExchange::Parts parts{make_level_groups(group, HostLayout(c.host_of)), {}, {}, {}};
    c.levels = Levels::one;
    parts.flat = test::make_reference_exchange(flat, ops, c);
    c.order = CombineOrder::rank;
    c.host_of = {0, 1};
    parts.rail = test::make_reference_exchange(*parts.groups.rail, ops, c);
    c.host_of = {};
    parts.inside = test::make_reference_exchange(*parts.groups.inside, ops, c);
    return parts;
}

struct Shape {
    int64_t ranks, hosts;
};

class TwoLevels : public testing::TestWithParam<Shape> {};

TEST_P(TwoLevels, AgreeWithTheOracle) {
    const auto [ranks, hosts] = GetParam();
    const std::vector<int> host_of = consecutive(ranks, hosts);
    uint64_t seed = 0;
    for (Levels levels : {Levels::one, Levels::two})
        for (CombineOrder order : kOrders)
            for (Skew skew : {Skew::none, Skew::hot_expert, Skew::hot_host, Skew::empty_host})
                for (const std::vector<int64_t>& tokens : token_counts(host_of))
                    run({.tokens = tokens,
                         .topk = 3,
                         .experts = 2 * std::max<int64_t>(ranks, 2),
                         .wire = seed % 2 == 0 ? Wire::fp8 : Wire::plain,
                         .order = order,
                         .skew = skew,
                         .seed = ++seed,
                         .host_of = host_of,
                         .levels = levels});
}

// Order `invariant` on any hosts; order `rank` with one rank on each, where no sum is rounded that one level
// does not round. Elsewhere it is another order, with other bits.
TEST_P(TwoLevels, GiveTheBitsOfOneWhereTheyAreDue) {
    const auto [ranks, hosts] = GetParam();
    for (CombineOrder order : kOrders) {
        ExchangeCase c{.tokens = std::vector<int64_t>(static_cast<std::size_t>(ranks), 24),
                       .topk = std::min<int64_t>(8, 2 * ranks),
                       .experts = 2 * ranks,
                       .order = order,
                       .seed = 7,
                       .host_of = consecutive(ranks, hosts)};
        const std::vector<uint8_t> one = combined(c);
        c.levels = Levels::two;
        const bool due = order == CombineOrder::invariant || hosts == ranks;
        EXPECT_EQ(combined(c) == one, due) << c.text();
    }
}

INSTANTIATE_TEST_SUITE_P(Hosts, TwoLevels,
                         testing::Values(Shape{2, 1}, Shape{2, 2}, Shape{4, 1}, Shape{4, 2}, Shape{4, 4},
                                         Shape{8, 1}, Shape{8, 2}, Shape{8, 4}),
                         [](const auto& instance) {
                             return fmt::format("{}RanksOn{}Hosts", instance.param.ranks,
                                                instance.param.hosts);
                         });

// Shapes, skews, hosts and options drawn at random; ranks placed on hosts in any order.
TEST(HierarchicalExchange, RandomCases) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
        auto draw = [&, n = uint64_t{0}](int64_t below) mutable {
            return static_cast<int64_t>(test::mix(seed + 1000, n++) % static_cast<uint64_t>(below));
        };
        const std::vector<std::vector<int>> layouts = {
            {0, 1, 0, 1}, {0, 1, 1, 0}, {0, 1, 2, 2, 1, 0}, {0, 0, 0, 1, 1, 1}, {0, 1, 2}};
        ExchangeCase c{.tokens = {}, .host_of = layouts[static_cast<std::size_t>(draw(5))]};
        const auto ranks = static_cast<int64_t>(c.host_of.size());
        for (int64_t r = 0; r < ranks; ++r) c.tokens.push_back(draw(3) == 0 ? 0 : draw(12));
        test::draw_shapes(c, draw);
        c.skew = static_cast<Skew>(draw(6));
        c.row_base = draw(2) * 128;
        c.levels = Levels::two;
        c.seed = seed;
        run(c);
        if (HasFailure()) FAIL() << c.text();
    }
}

// Rows are received where one level receives them: in order (source rank, token).
TEST(HierarchicalExchange, ReceivedRowsAreThoseOfOneLevel) {
    for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}}) {
        const ExchangeCase c{.tokens = {6, 3, 11, 2},
                             .topk = 3,
                             .wire = Wire::fp8,
                             .seed = 9,
                             .host_of = host_of,
                             .levels = Levels::two};
        run_thread_ranks(4, 60, [&](ProcessGroup& group) {
            test::ExchangeRank one(group, c.order);
            const auto two = test::make_reference_exchange(group, one.ops, c);
            const test::ExchangeLayer layer(c, group.rank());
            const test::HostScaled rows = layer.wire_rows(1, group.rank());
            test::HostScaled want(DType::e4m3, {4 * c.slots(), c.hidden}, ScaleLayout::vec128_wire),
                got(DType::e4m3, {4 * c.slots(), c.hidden}, ScaleLayout::vec128_wire);
            one.exchange.dispatch_rows(rows, layer.plan(), want, one.scratch);
            two->dispatch_rows(rows, layer.plan(), got, one.scratch);
            EXPECT_TRUE(test::same_bytes(got.data, want.data) && test::same_bytes(got.scales, want.scales));
        });
    }
}

TEST(HierarchicalExchange, IsMadeOfItsPartsAndReduces) {
    for (CombineOrder order : kOrders) {
        const ExchangeCase c{.tokens = {20, 0, 8, 5},
                             .topk = 3,
                             .wire = Wire::fp8,
                             .order = order,
                             .seed = 14,
                             .host_of = {0, 0, 1, 1},
                             .levels = Levels::two};
        run_thread_ranks(4, 60, [&](ProcessGroup& group) {
            ReferenceOps ops;
            Arena scratch(ops.device(), "scratch", true);
            const auto replicas = group.split(group.rank() % 2);
            HierarchicalExchange exchange(ops, order, HostLayout(c.host_of),
                                          parts_of(group, {group, group, *replicas}, ops, c),
                                          derive_level_plans);
            test::check_exchange(exchange, scratch, c);
            test::check_shards(exchange, Ranks::world, 20'000);
            test::check_shards(exchange, Ranks::expert_replicas, 20'000);
            EXPECT_EQ(exchange.num_ranks(Ranks::expert_replicas), 2);
            expect_contains(error_of(ExitCode::usage, [&] { exchange.require_capturable(); }),
                            "moe_token_dispatcher_type");
            uint64_t words[Exchange::kMostWireSets][Exchange::kWireWords] = {};
            exchange.copy_wire_counters(words[0], {});
            EXPECT_EQ(static_cast<double>(words[0][1] + words[1][1] + words[2][1]),
                      exchange.wire_bytes().dispatch);
            EXPECT_EQ(static_cast<double>(words[0][3] + words[1][3] + words[2][3]),
                      exchange.wire_bytes().between_hosts);
            exchange.reset_counts();
            EXPECT_EQ(exchange.wire_bytes().total() + exchange.wire_bytes().between_hosts, 0);
        });
    }
}

// Groups on one host each: rows stay inside, and only reductions cross hosts.
TEST(HierarchicalExchange, WithoutARailAllRowsStayInside) {
    for (CombineOrder order : kOrders) {
        const ExchangeCase c{.tokens = {20, 7}, .topk = 3, .wire = Wire::fp8, .order = order, .seed = 15};
        run_thread_ranks(4, 60, [&](ProcessGroup& world) {
            ReferenceOps ops;
            Arena scratch(ops.device(), "scratch", true);
            const auto sharing = world.split(world.rank() / 2), replicas = world.split(world.rank() % 2);
            HierarchicalExchange::Parts parts;
            parts.inside = test::make_reference_exchange(*sharing, ops, c);
            parts.flat = test::make_reference_exchange({world, world, *replicas}, ops, c);
            HierarchicalExchange exchange(ops, order, HostLayout::consecutive(0, 2, 2), std::move(parts),
                                          derive_level_plans);
            EXPECT_EQ(exchange.size(), 2);
            EXPECT_EQ(exchange.num_ranks(Ranks::world), 4);
            test::check_exchange(exchange, scratch, c);
            test::check_shards(exchange, Ranks::world, 20'000);
            test::check_shards(exchange, Ranks::expert_replicas, 20'000);
        });
    }
}

// Derivations are counted on rank 0.
int derivations = 0;
void count_derivations(const DispatchPlan& plan, const LevelMap& map, const LevelPlans& levels,
                       Arena& scratch, const Launch& launch) {
    if (map.rank == 0) ++derivations;
    derive_level_plans(plan, map, levels, scratch, launch);
}

TEST(HierarchicalExchange, PlansAreDerivedOnceForEachRouting) {
    const ExchangeCase c{.tokens = {9, 5},
                         .topk = 2,
                         .experts = 4,
                         .wire = Wire::fp8,
                         .seed = 31,
                         .host_of = {0, 1},
                         .levels = Levels::two};
    ExchangeCase other = c;
    other.seed = 32;
    run_thread_ranks(2, 60, [&](ProcessGroup& group) {
        ReferenceOps ops;
        Arena scratch(ops.device(), "scratch", true);
        HierarchicalExchange exchange(ops, c.order, HostLayout(c.host_of), parts_of(group, group, ops, c),
                                      count_derivations);
        const test::ExchangeLayer first(c, group.rank()), second(other, group.rank());
        const auto pass = [&](const test::ExchangeLayer& layer, uint64_t leg) {
            layer.dispatch(exchange, scratch, leg);
            layer.combine(exchange, scratch, leg + 1, true, true);
        };
        const auto expect = [&](int wanted) {
            group.barrier();
            EXPECT_EQ(derivations, wanted);
            group.barrier();
        };
        if (group.rank() == 0) derivations = 0;
        first.gather(exchange);
        pass(first, 1);
        second.gather(exchange);
        pass(second, 3);
        expect(2);
        pass(second, 5);  // the backward of the last layer
        expect(2);
        pass(first, 7);
        expect(3);
        first.gather(exchange);  // another step, other contents in the same memory
        pass(first, 9);
        expect(4);
    });
}

TEST(HierarchicalExchange, TwoLayersInFlightUseScratchThatGrowsOnce) {
    for (CombineOrder order : kOrders) {
        const ExchangeCase a{.tokens = {9, 0, 31, 4},
                             .topk = 3,
                             .wire = Wire::fp8,
                             .order = order,
                             .seed = 5,
                             .host_of = {0, 0, 1, 1},
                             .levels = Levels::two};
        ExchangeCase b = a;
        b.tokens = {2, 40, 1, 8};
        b.experts = 12;
        b.hidden = 384;
        run_thread_ranks(4, 60, [&](ProcessGroup& group) {
            test::ExchangeRank self(group, a);
            const test::ExchangeLayer first(a, group.rank()), second(b, group.rank());
            for (uint64_t repeat = 0; repeat < 3; ++repeat) {
                first.dispatch(self.exchange, self.scratch, 1 + 10 * repeat);
                second.dispatch(self.exchange, self.scratch, 2 + 10 * repeat);
                first.combine(self.exchange, self.scratch, 3 + 10 * repeat, true, true);
                second.combine(self.exchange, self.scratch, 4 + 10 * repeat, false, true);
                second.dispatch(self.exchange, self.scratch, 5 + 10 * repeat);
                first.combine(self.exchange, self.scratch, 7 + 10 * repeat, true, false);
            }
            EXPECT_EQ(self.scratch.bytes_in_use(), 0);
            EXPECT_EQ(self.scratch.num_growths(), 1);
        });
    }
}

TEST(HierarchicalExchange, HostsWithDifferentNumbersOfRanksAreRefused) {
    const ExchangeCase c{.tokens = {4, 4, 4}, .experts = 6, .host_of = {0, 0, 1}, .levels = Levels::two};
    const std::string message = error_of(ExitCode::usage, [&] { run(c); });
    expect_contains(message, "parallel.moe_token_dispatcher_type: hierarchical");
    expect_contains(message, "of 3 ranks 2 are on the host of rank 0, 2 hosts in all");
}

TEST(HierarchicalExchange, ALostRankFailsTheOthers) {
    const ExchangeCase c{.tokens = {4, 4, 4, 4}, .host_of = {0, 0, 1, 1}, .levels = Levels::two};
    const std::string message = error_of(ExitCode::peer, [&] {
        run_thread_ranks(4, 60, [&](ProcessGroup& group) {
            test::ExchangeRank self(group, c);
            group.barrier();
            if (group.rank() == 3) return;
            test::ExchangeLayer(c, group.rank()).dispatch(self.exchange, self.scratch, 1);
        });
    });
    expect_contains(message, "rank 3");
}

TEST(HostLayout, NumbersHostsByTheirLowestRank) {
    const HostLayout hosts(std::vector<int>{7, 2, 7, 2, 5, 5});
    EXPECT_EQ(hosts.num_hosts(), 3);
    EXPECT_EQ(hosts.host(3), 1);
    EXPECT_EQ(hosts.ranks(1), (std::vector<int>{1, 3}));
    EXPECT_EQ(hosts.local_rank(3), 1);
    EXPECT_TRUE(hosts.same_host(4, 5) && !hosts.same_host(0, 1) && hosts.hosts_have_equal_sizes());
    EXPECT_FALSE(HostLayout(std::vector<int>{0, 0, 1}).hosts_have_equal_sizes());
    EXPECT_EQ(HostLayout().num_hosts(), 1);
    EXPECT_TRUE(HostLayout().same_host(0, 5));
    // ranks 4 to 7 of a job of two hosts with six each
    const HostLayout part = HostLayout::consecutive(4, 4, 6);
    EXPECT_EQ(part.ranks(0), (std::vector<int>{0, 1}));
    EXPECT_EQ(part.num_hosts(), 2);
}

}  // namespace
}  // namespace fp8flow
