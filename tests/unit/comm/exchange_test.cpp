// SPDX-License-Identifier: MIT
// Dispatch and combine between thread ranks against the brute-force oracle, at every shape and skew that has
// broken others.
#include "kernels/comm/group_exchange.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/collective_checks.h"
#include "tests/support/exchange_oracle.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <chrono>

namespace fp8flow {
namespace {

using test::ExchangeCase;
using test::Skew;
using test::Wire;

void run(const ExchangeCase& c) {
    run_thread_ranks(static_cast<int>(c.ranks()), 60,
                     [&](ProcessGroup& group) { test::check_exchange(group, c); });
}

std::vector<int64_t> uneven(int64_t ranks) {  // the last of several ranks has none
    std::vector<int64_t> tokens{17, 64, 1, 0};
    tokens.resize(static_cast<std::size_t>(ranks));
    return tokens;
}

constexpr CombineOrder kOrders[] = {CombineOrder::rank, CombineOrder::invariant};

class ExchangeRanks : public testing::TestWithParam<int64_t> {};

TEST_P(ExchangeRanks, TokenCounts) {
    const int64_t ranks = GetParam();
    std::vector<std::vector<int64_t>> all_tokens{uneven(ranks)};
    for (int64_t tokens : {1, 17, 64})
        all_tokens.push_back(std::vector<int64_t>(static_cast<std::size_t>(ranks), tokens));
    for (int64_t empty = 0; empty < ranks; ++empty) {  // each rank alone without tokens, and all but it
        all_tokens.push_back(std::vector<int64_t>(static_cast<std::size_t>(ranks), 5));
        all_tokens.back()[static_cast<std::size_t>(empty)] = 0;
        all_tokens.push_back(std::vector<int64_t>(static_cast<std::size_t>(ranks), 0));
        all_tokens.back()[static_cast<std::size_t>(empty)] = 5;
    }
    all_tokens.push_back(std::vector<int64_t>(static_cast<std::size_t>(ranks), 0));
    for (const auto& tokens : all_tokens)
        for (CombineOrder order : kOrders) run({.tokens = tokens, .experts = ranks * 3, .order = order});
}

TEST_P(ExchangeRanks, TopK) {
    const int64_t experts = 4 * GetParam();
    for (int64_t topk : {int64_t{1}, int64_t{2}, int64_t{6}, int64_t{8}, experts})
        for (CombineOrder order : kOrders)
            if (topk <= experts)
                run({.tokens = uneven(GetParam()),
                     .topk = topk,
                     .experts = experts,
                     .order = order,
                     .seed = 2});
}

TEST_P(ExchangeRanks, RowTypes) {
    for (CombineOrder order : kOrders)
        for (Wire wire : {Wire::plain, Wire::fp8, Wire::fp8_free_scales})
            for (DType dtype : {DType::bf16, DType::f32})
                for (int64_t row_base : {0, 128})
                    run({.tokens = uneven(GetParam()),
                         .topk = 3,
                         .experts = 2 * GetParam() + GetParam(),
                         .hidden = 256,
                         .alignment = row_base == 0 ? 1 : 128,
                         .dtype = dtype,
                         .wire = wire,
                         .order = order,
                         .row_base = row_base,
                         .seed = 3});
}

TEST_P(ExchangeRanks, Skew) {
    for (CombineOrder order : kOrders)
        for (Skew skew : {Skew::hot_expert, Skew::hot_rank})
            for (int64_t topk : {1, 2, 5})
                run({.tokens = uneven(GetParam()),
                     .topk = topk,
                     .experts = 5 * GetParam(),
                     .wire = Wire::fp8,
                     .order = order,
                     .skew = skew,
                     .seed = 4});
}

// Shapes, skews and options drawn at random; hidden sizes that are no multiple of anything where rows are
// plain.
TEST_P(ExchangeRanks, RandomCases) {
    for (uint64_t seed = 0; seed < 120; ++seed) {
        auto draw = [&, n = uint64_t{0}](int64_t below) mutable {
            return static_cast<int64_t>(test::mix(seed * 8 + static_cast<uint64_t>(GetParam()), n++) %
                                        static_cast<uint64_t>(below));
        };
        ExchangeCase c;
        for (int64_t r = 0; r < GetParam(); ++r) c.tokens.push_back(draw(3) == 0 ? 0 : draw(12));
        test::draw_shapes(c, draw);
        c.skew = static_cast<Skew>(draw(3));
        c.row_base = draw(2) * 128;
        c.seed = seed;
        run(c);
        if (HasFailure()) FAIL() << c.text();
    }
}

INSTANTIATE_TEST_SUITE_P(Threads, ExchangeRanks, testing::Values<int64_t>(1, 2, 3, 4));

// Two layers under way at once: their messages and buffers must not meet.
TEST(Exchange, TwoLayersInFlight) {
    for (CombineOrder order : kOrders) {
        const ExchangeCase a{
            .tokens = {9, 0, 31, 4}, .topk = 3, .wire = Wire::fp8, .order = order, .seed = 5};
        const ExchangeCase b{
            .tokens = {2, 40, 1, 8}, .topk = 2, .experts = 12, .hidden = 384, .order = order, .seed = 6};
        run_thread_ranks(4, 60, [&](ProcessGroup& group) {
            test::ExchangeRank self(group, order);
            const test::ExchangeLayer first(a, group.rank()), second(b, group.rank());
            for (uint64_t repeat = 0; repeat < 10; ++repeat) {
                first.dispatch(self.exchange, self.scratch, 1 + 10 * repeat);
                second.dispatch(self.exchange, self.scratch, 2 + 10 * repeat);
                first.combine(self.exchange, self.scratch, 3 + 10 * repeat, true, true);
                second.combine(self.exchange, self.scratch, 4 + 10 * repeat, false, true);
                second.dispatch(self.exchange, self.scratch, 5 + 10 * repeat);
                first.dispatch(self.exchange, self.scratch, 6 + 10 * repeat);
                first.combine(self.exchange, self.scratch, 7 + 10 * repeat, true, true);
                second.combine(self.exchange, self.scratch, 8 + 10 * repeat, true, false);
            }
            EXPECT_EQ(self.scratch.num_growths(), 1) << "scratch grows once";
        });
    }
}

// The same 48 tokens on 1, 2 and 4 ranks: order `invariant` gives the same bits, order `rank` (which rounds
// once per rank) does not.
TEST(Exchange, InvariantOrderDoesNotDependOnTheNumberOfRanks) {
    for (CombineOrder order : kOrders) {
        std::vector<std::vector<uint8_t>> results;
        for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{48}, {20, 28}, {5, 15, 0, 28}}) {
            results.push_back(
                test::combined({.tokens = tokens, .topk = 6, .experts = 8, .order = order, .seed = 7}));
        }
        EXPECT_EQ(results[0] == results[1] && results[0] == results[2], order == CombineOrder::invariant);
    }
}

// Values that BF16 holds exactly: token t of rank r is (64 r + t) / 256 in every column, its sum over k
// experts k times that.
TEST(Exchange, ClosedForm) {
    constexpr int64_t kRanks = 4, kTokens = 64, kHidden = 128, kTopk = 2;
    for (CombineOrder order : kOrders) {
        const ExchangeCase c{
            .tokens = std::vector<int64_t>(kRanks, kTokens), .topk = kTopk, .order = order, .seed = 8};
        run_thread_ranks(kRanks, 60, [&](ProcessGroup& group) {
            test::ExchangeRank self(group, order);
            const test::ExchangeLayer layer(c, group.rank());
            const auto number = [&](int64_t t) { return static_cast<double>(64 * group.rank() + t) / 256; };
            test::HostTensor x(DType::bf16, {kTokens, kHidden}), y(DType::bf16, {kTokens, kHidden});
            test::fill(x, [&](int64_t i) { return number(i / kHidden); });
            const DispatchPlan plan = layer.plan();
            test::HostTensor rows(DType::bf16, {plan.groups.row_capacity, kHidden});
            self.exchange.dispatch({.data = x}, plan, {.data = rows}, self.scratch);
            self.exchange.combine({.src = {rows}, .y = {y}}, plan, self.scratch);
            int64_t wrong = 0;
            for (int64_t i = 0; i < y.numel(); ++i) wrong += y(i) != kTopk * number(i / kHidden);
            EXPECT_EQ(wrong, 0);
        });
    }
}

TEST(Exchange, ReceivedRowsStandInSourceOrder) {
    const ExchangeCase c{.tokens = {6, 3, 11}, .topk = 2, .experts = 6, .seed = 9};
    run_thread_ranks(3, 60, [&](ProcessGroup& group) {
        test::ExchangeRank self(group, CombineOrder::rank);
        const test::ExchangeLayer layer(c, group.rank());
        const DispatchPlan plan = layer.plan();
        test::HostScaled rows(DType::e5m2, {layer.num_tokens(), 128}, ScaleLayout::vec128_wire);
        test::HostScaled received(DType::e5m2, {3 * c.slots(), 128}, ScaleLayout::vec128_wire);
        for (int64_t t = 0; t < layer.num_tokens(); ++t) {
            std::memset(rows.data.view().bytes_ptr() + t * 128, static_cast<int>(group.rank() * 16 + t), 128);
            rows.scales.view().bytes_ptr()[t] = static_cast<uint8_t>(100 + group.rank() * 16 + t);
        }
        self.exchange.dispatch_rows(rows, plan, received, self.scratch);
        const int64_t count = plan.recv_offsets.as<int64_t>()[3];
        EXPECT_GT(count, 0);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t source = plan.recv_source.as<int32_t>()[i],
                          want = source / c.slots() * 16 + source % c.slots();
            EXPECT_EQ(received.data.view().bytes_ptr()[i * 128 + 127], want);
            EXPECT_EQ(received.scales.view().bytes_ptr()[i], 100 + want);
        }
        EXPECT_EQ(self.exchange.num_dispatches(), 1);
        self.exchange.reset_counts();
        EXPECT_EQ(self.exchange.num_dispatches() + self.exchange.wire_bytes().total(), 0);
    });
}

// Rows that do not fit are cut off (the step is redone): the exchange still ends, on every rank.
TEST(Exchange, OverflowNeitherHangsNorReadsWild) {
    for (CombineOrder order : kOrders) {
        const ExchangeCase c{.tokens = {20, 20}, .topk = 4, .experts = 4, .seed = 10};
        run_thread_ranks(2, 20, [&](ProcessGroup& group) {
            test::ExchangeRank self(group, order);
            const test::Routing routing = test::make_routing(c);
            const test::PlanFixture cut(routing, group.rank(), 16, group.rank() == 0 ? 32 : -1);
            EXPECT_EQ(cut.overflow(0), group.rank() == 0 ? 1 : 0);
            const test::ExchangeLayer layer(c, group.rank());
            DispatchPlan plan = layer.plan();
            plan.groups = cut.groups;
            plan.row_source = cut.row_source;
            plan.recv_rows = cut.recv_rows;
            test::HostTensor x(DType::f32, {20, 8}), y(DType::f32, {20, 8}),
                rows(DType::f32, {cut.groups.row_capacity, 8}),
                drow_prob(DType::f32, {cut.groups.row_capacity}), dprob(DType::f32, {20, 4});
            test::fill(x, [](int64_t) { return 1.0; });
            drow_prob.zero();
            self.exchange.dispatch({.data = x}, plan, {.data = rows}, self.scratch);
            self.exchange.combine({.src = {rows}, .drow_prob = drow_prob, .y = {y}, .dprob = dprob}, plan,
                                  self.scratch);
            for (int64_t i = 0; i < y.numel(); ++i) EXPECT_TRUE(y(i) >= 2 && y(i) <= 4) << y(i);
        });
    }
}

TEST(Exchange, AllReduceRunsOverTheNamedRanks) {
    run_thread_ranks(4, 60, [](ProcessGroup& world) {
        const auto experts = world.split(world.rank() / 2), replicas = world.split(world.rank() % 2);
        test::ExchangeRank alone(*experts, CombineOrder::rank);
        float value = static_cast<float>(world.rank() + 1);
        const TensorView view = make_view(&value, DType::f32, {1});
        alone.exchange.all_reduce(Reduce::sum, Ranks::expert_replicas, view);
        EXPECT_EQ(value, static_cast<float>(world.rank() + 1))
            << "nobody else is known to hold the same experts";
        EXPECT_EQ(alone.exchange.num_ranks(Ranks::world), 2) << "the group of the exchange is all there is";
        EXPECT_TRUE(alone.exchange.holds_first_replica());

        test::ExchangeRank self({world, *experts, *replicas}, CombineOrder::rank);
        self.exchange.all_reduce(Reduce::sum, Ranks::expert_replicas, view);
        EXPECT_EQ(value, world.rank() % 2 == 0 ? 4.0f : 6.0f);
        self.exchange.all_reduce(Reduce::max, Ranks::world, view);
        EXPECT_EQ(value, 6.0f);
        int64_t count = world.rank();
        self.exchange.all_reduce(Reduce::sum, Ranks::world, make_view(&count, DType::i64, {1}));
        EXPECT_EQ(count, 6);
        int32_t status = world.rank() == 2 ? 5 : 0;
        self.exchange.all_reduce(Reduce::max, Ranks::world, make_view(&status, DType::i32, {1}));
        EXPECT_EQ(status, 5);
        EXPECT_EQ(self.exchange.num_ranks(Ranks::world), 4);
        EXPECT_EQ(self.exchange.num_ranks(Ranks::expert_replicas), 2);
        EXPECT_EQ(self.exchange.holds_first_replica(), world.rank() < 2);
    });
}

TEST(Exchange, SharesAreReducedAndGathered) {
    for (const int ranks : {1, 2, 3, 4})
        run_thread_ranks(ranks, 60, [&](ProcessGroup& world) {
            const auto replicas = world.split(world.rank() % 2);
            test::ExchangeRank self({world, world, *replicas}, CombineOrder::rank);
            // more than a round of i64
            test::check_shards(self.exchange, Ranks::world, ranks == 3 ? 2'200'000 : 20'000);
            test::check_shards(self.exchange, Ranks::expert_replicas, 20'000);
        });
}

TEST(Exchange, SharesCrossTheWireOnce) {
    struct Counter final : OpObserver {
        void op_called(const OpCall&) override {}
        void exchange_began(const OpCall& call) override { name = call.op; }
        void exchange_ended(double wire_bytes) override { sent[name] += wire_bytes; }
        std::string name;
        std::map<std::string, double> sent;
    };
    run_thread_ranks(2, 60, [](ProcessGroup& group) {
        test::ExchangeRank self(group, CombineOrder::rank);
        Counter counter;
        self.exchange.observe(&counter);
        test::HostTensor values(DType::f32, {1000});
        test::fill_summand(values, group.rank());
        const Shards shards = {{{0, 600}}, {{600, 300}}};
        self.exchange.all_reduce(Reduce::sum, Ranks::world, values);
        self.exchange.reduce_scatter(Ranks::world, values, shards);
        self.exchange.all_gather(Ranks::world, values, shards);
        self.exchange.observe(nullptr);
        EXPECT_EQ(counter.sent["all_reduce"], 4000);
        EXPECT_EQ(counter.sent["reduce_scatter"], group.rank() == 0 ? 1200 : 2400);
        EXPECT_EQ(counter.sent["all_gather"], group.rank() == 0 ? 2400 : 1200);
    });
}

TEST(Exchange, ARankThatNeverDispatchesIsNamedWithinTheDeadline) {
    auto groups = make_thread_groups(2, 0.3);
    groups[0]->set_activity("step 12, stage dispatch");
    const ExchangeCase c{.tokens = {4, 4}};
    test::ExchangeRank self(*groups[0], CombineOrder::rank);
    const test::ExchangeLayer layer(c, 0);
    const auto start = std::chrono::steady_clock::now();
    const std::string message =
        error_of(ExitCode::peer, [&] { layer.dispatch(self.exchange, self.scratch, 1); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    expect_contains(message, "step 12, stage dispatch");
    expect_contains(message, "rank 1");
    EXPECT_EQ(self.scratch.bytes_in_use(), 0);
}

TEST(Exchange, WrongShapesAreRefused) {
    const auto group = std::move(make_thread_groups(1, 1)[0]);
    test::ExchangeRank self(*group, CombineOrder::rank);
    const test::ExchangeLayer layer({.tokens = {4}}, 0);
    const DispatchPlan plan = layer.plan();
    const int64_t rows = plan.groups.row_capacity;
    const test::HostTensor x(DType::bf16, {4, 128}), short_x(DType::bf16, {3, 128}), y(DType::bf16, {4, 128}),
        m(DType::bf16, {rows, 128}), wide(DType::bf16, {rows, 256}), few(DType::bf16, {rows - 1, 128}),
        probs(DType::f32, {rows});
    const auto dispatch = [&](const TensorView& from, const TensorView& to) {
        return error_of(ExitCode::internal,
                        [&] { self.exchange.dispatch({.data = from}, plan, {.data = to}, self.scratch); });
    };
    expect_contains(dispatch(short_x, m), "must have 4 rows");
    expect_contains(dispatch(x, wide), "cannot become");
    expect_contains(dispatch(x, few), "too few rows");
    const auto combine = [&](const Exchange::Combine& args) {
        return error_of(ExitCode::internal, [&] { self.exchange.combine(args, plan, self.scratch); });
    };
    expect_contains(combine({.src = {few}, .y = {y}}), "too few rows");
    expect_contains(combine({.src = {m}, .y = {short_x}}), "y is");
    expect_contains(combine({.src = {m}, .residual = short_x, .y = {y}}), "residual is");
    expect_contains(combine({.src = {m}, .addend = y, .y = {y}}), "without a residual");
    expect_contains(combine({.src = {m}, .residual = y, .addend = short_x, .y = {y}}), "addend is");
    expect_contains(combine({.src = {m}, .drow_prob = probs, .y = {y}}), "dprob absent");
    const test::HostScaled scaled(DType::e4m3, {rows, 128}, ScaleLayout::vec128);
    expect_contains(combine({.src = scaled, .y = {y}}), "src has scales vec128, must be none");

    const auto scatter = [&](const TensorView& values, const Shards& shards) {
        return error_of(ExitCode::internal,
                        [&] { self.exchange.reduce_scatter(Ranks::world, values, shards); });
    };
    expect_contains(scatter(x, {{}}), "one dimension");
    expect_contains(scatter(probs, {{}, {}}), "2 shards for 1 ranks");
    expect_contains(scatter(probs, {{{0, rows + 1}}}), "elements 0 to");
    expect_contains(scatter(probs, {{{8, 8}, {0, 8}}}), "after those before 16");
    expect_contains(scatter(make_view(nullptr, DType::i32, {4}), {{}}), "no sum of");

    const test::HostTensor ids(DType::i32, {4, 2}), route(DType::f32, {4, 2}), all_ids(DType::i32, {1, 3, 2}),
        all_probs(DType::f32, {1, 3, 2});
    expect_contains(
        error_of(ExitCode::internal, [&] { self.exchange.gather_routing(ids, route, all_ids, all_probs); }),
        "3 slots");
    EXPECT_EQ(self.exchange.num_dispatches() + self.exchange.num_combines(), 0);
}

}  // namespace
}  // namespace fp8flow
