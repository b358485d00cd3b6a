// SPDX-License-Identifier: MIT
// The self-test of the wire: each two ranks meet once, slow pairs are named, and the ranks of two hosts are
// measured level by level.
#include "model/base/wire_speed.h"

#include "kernels/reference/reference_ops.h"
#include "model/base/backend.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <thread>

namespace fp8flow {
namespace {

TEST(WireSpeed, EachTwoRanksArePartnersOnce) {
    for (int ranks = 2; ranks <= 9; ++ranks) {
        std::set<std::pair<int, int>> pairs;
        for (int round = 0; round < num_rounds(ranks); ++round)
            for (int rank = 0; rank < ranks; ++rank) {
                const int partner = partner_of(rank, round, ranks);
                if (partner < 0) continue;
                ASSERT_LT(partner, ranks);
                ASSERT_NE(partner, rank);
                EXPECT_EQ(partner_of(partner, round, ranks), rank);
                EXPECT_TRUE(rank > partner || pairs.emplace(rank, partner).second) << rank << " " << partner;
            }
        EXPECT_EQ(pairs.size(), static_cast<size_t>(ranks * (ranks - 1) / 2));
    }
}

// A transport on which one rank is slow to another; that one does not notice.
class SlowTraffic final : public PairTraffic {
public:
    SlowTraffic(int rank, int slow_a, int slow_b) : rank_(rank), a_(slow_a), b_(slow_b) {}
    int64_t bytes() const override { return 1'000'000; }
    void start(int partner) override {
        const bool slow = rank_ == a_ && partner == b_;
        std::this_thread::sleep_for(std::chrono::milliseconds(slow ? 20 : 2));
    }

private:
    int rank_, a_, b_;
};

std::vector<std::string> names_of(int ranks) {
    std::vector<std::string> names;
    for (int r = 0; r < ranks; ++r) names.push_back("rank " + std::to_string(r));
    return names;
}

TEST(WireSpeed, TheSlowPairIsNamedOnEveryRank) {
    run_thread_ranks(5, 60, [](ProcessGroup& world) {
        ReferenceOps ops;
        SlowTraffic traffic(world.rank(), 1, 3);
        const auto pairs =
            gather_pairs(measure_pairs(traffic, world, ops.device(), {.seconds = 60}), world, world);
        ASSERT_EQ(pairs.size(), 10u);
        const std::string text = wire_speed_text("here", pairs, names_of(5));
        expect_contains(text, "wire here: 10 pairs each way");
        expect_contains(text,
                        "GB/s: rank 1 and rank 3\nwarning: wire here: less than half of the median: "
                        "rank 1 and rank 3 (");
    });
}

TEST(WireSpeed, PairsPastTheLimitAreLeftOut) {
    run_thread_ranks(4, 60, [](ProcessGroup& world) {
        ReferenceOps ops;
        SlowTraffic traffic(world.rank(), 0, 1);
        const auto pairs =
            gather_pairs(measure_pairs(traffic, world, ops.device(), {.seconds = 0.001}), world, world);
        EXPECT_EQ(pairs.size(), 2u);  // of the first round
    });
    EXPECT_EQ(wire_speed_text("here", {}, {}), "wire here: no pair was measured");
}

TEST(WireSpeed, TextsNameTheSlowestAndTheFirstSlowOnes) {
    std::vector<WirePair> pairs;
    for (int b = 1; b < 7; ++b) pairs.push_back({0, b, 1e9 * b});
    EXPECT_EQ(wire_speed_text("x", {{0, 1, 2e9}}, names_of(2)),
              "wire x: 1 pair each way, median 2 GB/s, slowest 2 GB/s: rank 0 and rank 1");
    expect_contains(
        wire_speed_text("x", pairs, names_of(7)),
        "median 3.5 GB/s, slowest 1 GB/s: rank 0 and rank 1\nwarning: wire x: less than half of the "
        "median: rank 0 and rank 1 (1 GB/s)");
    for (int b = 1; b < 7; ++b) pairs.push_back({1, b + 6, 100e9});
    pairs.push_back({1, 13, 100e9});
    expect_contains(wire_speed_text("x", pairs, names_of(14)), "rank 0 and rank 4 (4 GB/s); 2 more");
}

// Two hosts of two ranks: rails between hosts, and the ranks of a host.
TEST(WireSpeed, TheExchangeIsChosenWithAlineForEachLevel) {
    run_thread_ranks(4, 60, [](ProcessGroup& world) {
        Config config;
        config.parallel.expert_model_parallel_size = 4;
        config.parallel.hosts = config.parallel.ranks_per_host = 2;
        config.model.seq_length = 8;
        const BackendChoice backend = choose_backend(BackendKind::reference);
        const auto ops = make_ops(backend, Arithmetic::stated);
        const RankGroups groups = make_rank_groups(world, 4);
        const std::string without = make_exchange(backend, groups, *ops, config).note;
        EXPECT_EQ(without.find('\n'), std::string::npos);
        config.parallel.wire_self_test = true;
        for (TokenDispatcher dispatcher : {TokenDispatcher::alltoall, TokenDispatcher::hierarchical}) {
            config.parallel.moe_token_dispatcher_type = dispatcher;
            const std::string note = make_exchange(backend, groups, *ops, config).note;
            expect_contains(note, "exchange: messages between processes");
            expect_contains(
                note,
                "\nwire between hosts (messages between processes, 1 MiB a message): 2 pairs each "
                "way, median ");
            expect_contains(note,
                            "\nwire inside hosts (messages between processes, 1 MiB a message): 2 pairs each "
                            "way, median ");
            expect_contains(note, "on host 1 (");
        }
    });
}

}  // namespace
}  // namespace fp8flow
