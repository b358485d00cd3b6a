// SPDX-License-Identifier: MIT
// Dispatch and combine between MPI processes against the same oracle as between threads; groups of 1, 2 and 4
// ranks made by split; ranks on one host, and on two that share no memory.
#include "kernels/comm/group_exchange.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/collective_checks.h"
#include "tests/support/exchange_oracle.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>

namespace fp8flow {
namespace {

using test::ExchangeCase;
using test::Skew;
using test::Wire;

constexpr CombineOrder kOrders[] = {CombineOrder::rank, CombineOrder::invariant};

// What `group` ranks hold of {17, 64, 1, 0} tokens.
std::vector<int64_t> uneven(const ProcessGroup& group) {
    std::vector<int64_t> tokens{17, 64, 1, 0};
    tokens.resize(static_cast<std::size_t>(group.size()));
    return tokens;
}

// The other tests depend on this.
TEST(MpiExchange, RanksAreOnAsManyHostsAsTheTestAskedFor) {
    const char* asked = std::getenv("FP8FLOW_TEST_HOSTS");
    MPI_Comm host = MPI_COMM_NULL;
    int ranks = 0, on_host = 0;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_size(host, &on_host);
    EXPECT_EQ(ranks / on_host, asked != nullptr ? std::atoi(asked) : 1);
    MPI_Comm_free(&host);

    const std::vector<int> hosts = make_mpi_group(60)->hosts();
    const HostLayout layout(hosts);
    EXPECT_EQ(layout.num_ranks(), ranks);
    EXPECT_EQ(layout.num_hosts(), ranks / on_host);
    EXPECT_EQ(static_cast<int>(layout.ranks(0).size()), on_host);
}

// Hosts as launched, or two simulated ones.
TEST(MpiExchange, TwoLevels) {
    const auto group = make_mpi_group(60);
    const int ranks = group->size();
    if (ranks < 2) GTEST_SKIP() << "one rank is on one host";
    const bool launched = std::getenv("FP8FLOW_TEST_HOSTS") != nullptr;
    std::vector<int> host_of = group->hosts();
    for (int r = 0; r < ranks; ++r) {
        int& host = host_of[static_cast<std::size_t>(r)];
        host = launched ? static_cast<int>(host != host_of[0]) : r * 2 / ranks;
    }
    for (CombineOrder order : kOrders)
        for (Skew skew : {Skew::none, Skew::hot_host, Skew::empty_host})
            for (Wire wire : {Wire::plain, Wire::fp8})
                test::check_exchange(*group, {.tokens = uneven(*group),
                                              .topk = 3,
                                              .experts = 4 * ranks,
                                              .wire = wire,
                                              .order = order,
                                              .skew = skew,
                                              .host_of = host_of,
                                              .levels = test::Levels::two});
}

// Over MPI only the transport differs from tests/unit/comm/exchange_test.cpp, which goes through all options.
TEST(MpiExchange, RandomCases) {
    const auto group = make_mpi_group(60);
    for (uint64_t seed = 0; seed < 80; ++seed) {
        auto draw = [&, n = uint64_t{0}](int64_t below) mutable {
            return static_cast<int64_t>(test::mix(seed, n++) % static_cast<uint64_t>(below));
        };
        ExchangeCase c;
        for (int r = 0; r < group->size(); ++r) c.tokens.push_back(draw(3) == 0 ? 0 : draw(12));
        test::draw_shapes(c, draw);
        c.row_base = draw(2) * 128;
        c.skew = static_cast<Skew>(draw(3));
        c.seed = seed;
        test::check_exchange(*group, c);
        if (HasFailure()) FAIL() << c.text();
    }
}

TEST(MpiExchange, SharesAreReducedAndGathered) {
    const auto world = make_mpi_group(60);
    const auto replicas = world->split(world->rank() % 2);
    test::ExchangeRank self({*world, *world, *replicas}, CombineOrder::rank);
    test::check_shards(self.exchange, Ranks::world, 2'200'000);
    test::check_shards(self.exchange, Ranks::expert_replicas, 20'000);
}

// Two expert-parallel groups side by side, two layers under way in each.
TEST(MpiExchange, TwoLayersInFlightInGroupsMadeBySplit) {
    const auto world = make_mpi_group(60);
    const auto group = world->split(world->rank() / 2);
    const auto second_tokens = group->size() == 2 ? std::vector<int64_t>{3, 21} : std::vector<int64_t>{21};
    for (CombineOrder order : kOrders) {
        const auto seed = static_cast<uint64_t>(world->rank() / 2 + 10);
        test::ExchangeRank self(*group, order);
        const test::ExchangeLayer first(
            {.tokens = uneven(*group), .wire = Wire::fp8, .order = order, .seed = seed}, group->rank());
        const test::ExchangeLayer second(
            {.tokens = second_tokens, .topk = 4, .hidden = 384, .order = order, .seed = seed + 1},
            group->rank());
        first.dispatch(self.exchange, self.scratch, 1);
        second.dispatch(self.exchange, self.scratch, 2);
        first.combine(self.exchange, self.scratch, 3, true, true);
        second.combine(self.exchange, self.scratch, 4, false, true);
        second.dispatch(self.exchange, self.scratch, 5);
        first.combine(self.exchange, self.scratch, 6, true, false);
    }
}

// The same 48 tokens on groups of 1, 2, ... ranks: order `invariant` gives the same bits.
TEST(MpiExchange, InvariantOrderDoesNotDependOnTheNumberOfRanks) {
    const auto world = make_mpi_group(60);
    constexpr int64_t kHidden = 128;
    std::vector<std::vector<uint8_t>> results;
    for (int size = 1; size <= world->size(); size *= 2) {
        const auto group = world->split(world->rank() / size);
        std::vector<int64_t> tokens(static_cast<std::size_t>(size), 48 / size);
        if (size > 1) {
            tokens[0] -= 5;
            tokens[1] += 5;
        }
        const ExchangeCase c{.tokens = tokens,
                             .topk = 6,
                             .experts = 8,
                             .hidden = kHidden,
                             .order = CombineOrder::invariant,
                             .seed = 7};
        test::ExchangeRank self(*group, c.order);
        const std::vector<uint8_t> mine =
            test::ExchangeLayer(c, group->rank()).combine(self.exchange, self.scratch, 1, true, true).bytes();
        std::vector<ProcessGroup::Part> send(tokens.size(), {0, mine.size()}), recv;
        for (int64_t rank = 0; rank < size; ++rank) {
            const auto row_bytes = static_cast<std::size_t>(kHidden * 2);
            recv.push_back({static_cast<std::size_t>(c.token(rank, 0)) * row_bytes,
                            static_cast<std::size_t>(tokens[static_cast<std::size_t>(rank)]) * row_bytes});
        }
        results.emplace_back(48 * kHidden * 2, 0xFF);
        group->all_to_all(mine.data(), send, results.back().data(), recv);
        EXPECT_TRUE(results.back() == results.front()) << size << " ranks";
    }
}

}  // namespace
}  // namespace fp8flow
