// SPDX-License-Identifier: MIT
// Every exchange between GPUs against the brute-force oracle and the reference exchange, byte for byte:
// shapes, skews, row types, both combine orders, reductions, layers in flight, an overflowed plan, races, and
// a late and a lost rank. One executable, because memory that stays mapped between tests is part of the test.
#include "tests/gpu_mpi/resident_layers.h"
#include "tests/support/collective_checks.h"
#include "tests/support/exchange_oracle.h"
#include "tests/support/files.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

namespace fp8flow::test {
namespace {

GpuJob* const job =
    static_cast<GpuJob*>(testing::AddGlobalTestEnvironment(new GpuJob));  // NOLINT: gtest owns it

constexpr CombineOrder kOrders[] = {CombineOrder::rank, CombineOrder::invariant};
constexpr Wire kWires[] = {Wire::fp8, Wire::fp8_free_scales, Wire::plain};

class GpuExchange : public testing::TestWithParam<Kind> {
protected:
    // Skips on all ranks if this exchange cannot run: NCCL is not built in, or has fewer GPUs than ranks;
    // NCCL makes no windows; two levels have an odd number of ranks. Peer memory on one host has to work.
    void SetUp() override {
        if (has_two_levels(GetParam()) && ranks() % 2 != 0) GTEST_SKIP() << "two hosts of as many ranks";
        const Rig& rig = job->rig(GetParam(), CombineOrder::rank, ranks());
        if (rig.exchange) return;
        if (GetParam() != Kind::peer && GetParam() != Kind::levels) GTEST_SKIP() << rig.reason;
        FAIL() << rig.reason;
    }

    static int ranks() { return job->world().size(); }
    static int rank() { return job->world().rank(); }
    Rig& rig(CombineOrder order, int expert_ranks = ranks()) {
        return job->rig(GetParam(), order, expert_ranks);
    }
    void check(const ExchangeCase& c, int expert_ranks = ranks()) {
        check_exchange(*rig(c.order, expert_ranks).on_device, unused_, of_kind(GetParam(), c));
    }

private:
    ReferenceOps host_;
    Arena unused_{host_.device(), "unused"};
};

TEST_P(GpuExchange, TokensTopKAndSkew) {
    uint64_t seed = 0;
    for (CombineOrder order : kOrders)
        for (int64_t topk : {1, 2, 6, 8})
            for (const auto& tokens : {on_every_rank(ranks(), 0), on_every_rank(ranks(), 1),
                                       on_every_rank(ranks(), 17), uneven(ranks())})
                for (Skew skew : {Skew::none, Skew::hot_expert, Skew::hot_rank, Skew::empty_rank}) {
                    const ExchangeCase c{.tokens = tokens,
                                         .topk = topk,
                                         .experts = 16,
                                         .alignment = 128,
                                         .wire = kWires[seed % 3],
                                         .order = order,
                                         .skew = skew,
                                         .seed = seed};
                    check(c);
                    if (HasFailure()) FAIL() << c.text();
                    ++seed;
                }
}

TEST_P(GpuExchange, RowTypes) {
    for (CombineOrder order : kOrders)
        for (Wire wire : kWires)
            for (DType dtype : {DType::bf16, DType::f32})
                for (int64_t row_base : {0, 128, 384})
                    for (int64_t hidden : {256, 512})
                        check({.tokens = uneven(ranks()),
                               .topk = 3,
                               .experts = 3 * ranks(),
                               .hidden = hidden,
                               .alignment = row_base == 384 ? 16 : 128,
                               .dtype = dtype,
                               .wire = wire,
                               .order = order,
                               .row_base = row_base,
                               .seed = 3});
}

// Rows that are not whole vectors.
TEST_P(GpuExchange, OddWidths) {
    for (CombineOrder order : kOrders)
        for (int64_t hidden : {3, 100, 505})
            for (DType dtype : {DType::bf16, DType::f32})
                check({.tokens = uneven(ranks()),
                       .topk = 2,
                       .experts = 4 * ranks(),
                       .hidden = hidden,
                       .dtype = dtype,
                       .order = order});
}

// Rows longer than what a thread or a warp keeps in flight: in several pieces, and in more pieces than a
// warp's ring holds.
TEST_P(GpuExchange, WideRows) {
    for (CombineOrder order : kOrders)
        for (Wire wire : kWires)
            for (int64_t hidden : {2304, 18432})
                check({.tokens = hidden == 2304 ? uneven(ranks()) : on_every_rank(ranks(), 5),
                       .topk = 8,
                       .experts = 16,
                       .hidden = hidden,
                       .alignment = 128,
                       .wire = wire,
                       .order = order,
                       .skew = Skew::hot_rank,
                       .seed = 6});
}

// Numbers of tokens next to those with one more chunk of a combine (one for 16 tokens, at most 63), many on
// one rank and few on the others, and rows with a short last piece.
TEST_P(GpuExchange, EdgesOfChunks) {
    for (const int64_t tokens : {31, 32, 127, 128, 129, 1000, 1008}) {
        std::vector<int64_t> all = on_every_rank(ranks(), tokens);
        all.back() = 5;
        for (const Skew skew : {Skew::none, Skew::hot_rank, Skew::empty_rank})
            for (const int64_t hidden : {8, 1032})
                check({.tokens = all,
                       .topk = 2,
                       .experts = 4 * ranks(),
                       .hidden = hidden,
                       .skew = skew,
                       .seed = static_cast<uint64_t>(tokens)});
    }
    // as many chunks of a combine as there can be, and long ones
    check(
        {.tokens = on_every_rank(ranks(), 4095), .topk = 2, .experts = 2 * ranks(), .hidden = 8, .seed = 14});
    std::vector<int64_t> many = on_every_rank(ranks(), 300);
    many.front() = 16500;
    check({.tokens = many, .topk = 1, .experts = 2 * ranks(), .hidden = 16, .seed = 13});
}

TEST_P(GpuExchange, EachRankAloneWithoutTokensAndAllButIt) {
    for (int r = 0; r < ranks(); ++r)
        for (const int64_t others : {0, 6}) {
            std::vector<int64_t> tokens = on_every_rank(ranks(), others);
            tokens[static_cast<std::size_t>(r)] = 6 - others;
            for (CombineOrder order : kOrders)
                check({.tokens = tokens,
                       .experts = at_least_one_each(8, ranks()),
                       .wire = Wire::fp8,
                       .order = order});
        }
}

TEST_P(GpuExchange, ManyTokens) {
    check({.tokens = on_every_rank(ranks(), 4096),
           .topk = 8,
           .experts = 32,
           .alignment = 128,
           .wire = Wire::fp8,
           .seed = 11});
    check({.tokens = on_every_rank(ranks(), 1024),
           .topk = 8,
           .experts = 32,
           .alignment = 128,
           .wire = Wire::fp8,
           .order = CombineOrder::invariant,
           .skew = Skew::hot_rank,
           .seed = 12});
}

TEST_P(GpuExchange, SeveralGroupsAtTheSameTime) {
    for (int expert_ranks = 1; expert_ranks < ranks(); expert_ranks *= 2)
        for (CombineOrder order : kOrders)
            check({.tokens = uneven(expert_ranks),
                   .topk = 4,
                   .experts = 8,
                   .wire = Wire::fp8,
                   .order = order,
                   .seed = static_cast<uint64_t>(20 + rank() / expert_ranks)},
                  expert_ranks);
}

TEST_P(GpuExchange, ReceivedRowsAreThoseOfTheReference) {
    for (Wire wire : kWires) {
        const ExchangeCase c{.tokens = uneven(ranks()),
                             .topk = 2,
                             .experts = at_least_one_each(8, ranks()),
                             .wire = wire,
                             .seed = 9};
        const ExchangeLayer layer(c, rank());
        ExchangeRank reference(*rig(c.order).expert_parallel, c.order);
        const HostScaled rows = layer.wire_rows(1, rank());
        const auto buffer = [&] {
            return HostScaled(rows.data.view().dtype, {ranks() * c.slots(), c.hidden}, rows.layout, 0,
                              wire == Wire::fp8_free_scales ? DType::f32 : DType::e8m0);
        };
        const HostScaled want = buffer(), got = buffer();
        reference.exchange.dispatch_rows(rows, layer.plan(), want, reference.scratch);
        rig(c.order).on_device->dispatch_rows(rows, layer.plan(), got, reference.scratch);
        // Rows past the received ones are poison in both.
        EXPECT_TRUE(same_bytes(got.data, want.data)) << c.text();
        EXPECT_TRUE(wire == Wire::plain || same_bytes(got.scales, want.scales)) << c.text();
    }
}

// Rows that do not fit are cut off on one rank (the step is redone): the others do not know, and nothing is
// read or written outside.
TEST_P(GpuExchange, OverflowedPlan) {
    for (CombineOrder order : kOrders)
        for (Wire wire : {Wire::plain, Wire::fp8}) {
            const ExchangeCase c = of_kind(GetParam(), {.tokens = on_every_rank(ranks(), 40),
                                                        .topk = 4,
                                                        .experts = 4 * ranks(),
                                                        .wire = wire,
                                                        .order = order,
                                                        .seed = 10});
            const Routing routing = make_routing(c);
            const PlanFixture cut(routing, rank(), 16, rank() == 0 ? 32 : -1);
            EXPECT_EQ(cut.overflow(0), rank() == 0 ? 1 : 0);
            const ExchangeLayer layer(c, rank());
            DispatchPlan plan = layer.plan();
            plan.groups = cut.groups;
            plan.row_source = cut.row_source;
            plan.row_prob = cut.row_prob;
            plan.recv_rows = cut.recv_rows;

            const int64_t capacity = cut.groups.row_capacity;
            HostTensor src(c.dtype, {capacity, c.hidden}), drow_prob(DType::f32, {capacity});
            fill_normal(src, 5);
            fill_normal(drow_prob, 6);
            ReferenceOps host;
            Arena scratch(host.device(), "scratch", true);
            const auto reference = make_reference_exchange(*rig(order).expert_parallel, host, c);
            const auto run = [&](Exchange& exchange) {
                HostScaled dst(wire == Wire::plain ? c.dtype : DType::e4m3, {capacity, c.hidden},
                               wire == Wire::plain ? ScaleLayout::none : ScaleLayout::vec128);
                HostTensor y(c.dtype, {40, c.hidden}), dprob(DType::f32, {40, 4});
                exchange.dispatch(layer.wire_rows(1, rank()), plan, dst, scratch);
                exchange.combine({.src = {src}, .drow_prob = drow_prob, .y = {y}, .dprob = dprob}, plan,
                                 scratch);
                std::vector<uint8_t> bytes;
                for (const TensorView& view : {dst.data.view(), dst.scales.view(), y.view(), dprob.view()})
                    if (view.bytes() > 0)
                        bytes.insert(bytes.end(), view.bytes_ptr(), view.bytes_ptr() + view.bytes());
                return bytes;
            };
            EXPECT_TRUE(run(*rig(order).on_device) == run(*reference)) << c.text();
        }
}

// ---- reductions

float summand(int rank, int64_t i) { return value(31, rank, 0, i); }
// NaN on some ranks, on all ranks, on none.
float candidate(int rank, int64_t i, int num_ranks) {
    const bool here = i % 7 == 3 && rank % 2 == 0, everywhere = i % 11 == 5;
    return here || everywhere || (num_ranks == 1 && i % 5 == 0) ? std::numeric_limits<float>::quiet_NaN()
                                                                : value(32, rank, 0, i);
}

TEST_P(GpuExchange, AllReduce) {
    for (int expert_ranks = 1; expert_ranks <= ranks(); expert_ranks *= 2) {
        OnDevice& exchange = *rig(CombineOrder::rank, expert_ranks).on_device;
        EXPECT_EQ(exchange.num_ranks(Ranks::world), ranks());
        EXPECT_EQ(exchange.num_ranks(Ranks::expert_replicas), ranks() / expert_ranks);
        EXPECT_EQ(exchange.holds_first_replica(), rank() < expert_ranks);
        for (Ranks which : {Ranks::world, Ranks::expert_replicas}) {
            std::vector<int> members;
            for (int r = 0; r < ranks(); ++r)
                if (which == Ranks::world || r % expert_ranks == rank() % expert_ranks) members.push_back(r);
            const int count = static_cast<int>(members.size());
            for (int64_t length : {int64_t{1}, int64_t{3}, int64_t{1000}, int64_t{5'000'000}}) {
                if (length > 1000 && expert_ranks != std::min(2, ranks())) continue;  // once is enough
                SCOPED_TRACE(fmt::format("{} values over {} of {} ranks", length, count, ranks()));
                HostTensor sum(DType::f32, {length}), max(DType::f32, {length}), words(DType::i64, {length}),
                    want(DType::f32, {length}), want_max(DType::f32, {length}), narrow(DType::bf16, {length}),
                    want_narrow(DType::bf16, {length}), want_words(DType::i64, {length});
                for (int64_t i = 0; i < length; ++i) {
                    sum.as<float>()[i] = summand(rank(), i);
                    max.as<float>()[i] = candidate(rank(), i, ranks());
                    narrow.as<Bf16>()[i] = to_bf16(summand(rank(), i));
                    words.as<int64_t>()[i] = (int64_t{1} << 40) * (rank() + 1) - i;
                    float total = summand(members[0], i), largest = candidate(members[0], i, ranks());
                    float total_narrow = round_bf16(total);
                    int64_t words_total = 0;
                    for (int m = 0; m < count; ++m) {
                        if (m > 0) {
                            total += summand(members[static_cast<std::size_t>(m)], i);
                            total_narrow += round_bf16(summand(members[static_cast<std::size_t>(m)], i));
                            largest = max_ignore_nan(
                                largest, candidate(members[static_cast<std::size_t>(m)], i, ranks()));
                        }
                        words_total += (int64_t{1} << 40) * (members[static_cast<std::size_t>(m)] + 1) - i;
                    }
                    want.as<float>()[i] = total;
                    want_narrow.as<Bf16>()[i] = to_bf16(total_narrow);
                    want_max.as<float>()[i] = largest;
                    want_words.as<int64_t>()[i] = words_total;
                }
                exchange.all_reduce(Reduce::sum, which, sum);
                EXPECT_TRUE(same_bytes(sum, want));
                exchange.all_reduce(Reduce::sum, which, narrow);
                EXPECT_TRUE(same_bytes(narrow, want_narrow));
                exchange.all_reduce(Reduce::max, which, max);
                EXPECT_TRUE(same_bytes(max, want_max));
                exchange.all_reduce(Reduce::sum, which, words);
                EXPECT_TRUE(same_bytes(words, want_words));
            }
            HostTensor status = HostTensor::of<int32_t>({rank() == members.back() ? 5 : -2});
            exchange.all_reduce(Reduce::max, which, status);
            EXPECT_EQ(status(0), 5);
        }
    }
}

TEST_P(GpuExchange, SharesAreReducedAndGathered) {
    for (int expert_ranks = 1; expert_ranks <= ranks(); expert_ranks *= 2) {
        OnDevice& exchange = *rig(CombineOrder::rank, expert_ranks).on_device;
        // more than a round of i64 over peer memory and NCCL
        check_shards(exchange, Ranks::world, expert_ranks == ranks() ? 4'500'000 : 20'000);
        check_shards(exchange, Ranks::expert_replicas, 20'000);
    }
}

// ---- without the host in between

// As in a training step: all layers forward, all layers backward in reverse order, with the plans made at
// first.
TEST_P(GpuExchange, LayersInFlight) {
    for (CombineOrder order : kOrders) {
        Rig& rig = this->rig(order);
        ResidentLayers all(rig, order);
        for (int round = 0; round < 4; ++round) {
            for (const auto& layer : all.layers) {
                layer->dispatch(*rig.exchange, all.scratch, 0);
                layer->combine(*rig.exchange, all.scratch, 0);
            }
            for (auto layer = all.layers.rbegin(); layer != all.layers.rend(); ++layer) {
                (*layer)->dispatch(*rig.exchange, all.scratch, 1);
                (*layer)->combine(*rig.exchange, all.scratch, 1);
            }
        }
        all.expect_no_difference();
        rig.exchange->check_peers();
    }
}

// The number of SMs that an exchange may use changes which warp moves a row, and nothing else.
TEST_P(GpuExchange, FewMultiprocessors) {
    for (CombineOrder order : kOrders) {
        Rig& rig = this->rig(order);
        ResidentLayers all(rig, order);
        for (const int sms : {1, 5, 6, 24}) {
            const Launch launch{.stream = {}, .sm_limit = sms};
            for (const auto& layer : all.layers) {
                layer->dispatch(*rig.exchange, all.scratch, sms % 2, launch);
                layer->combine(*rig.exchange, all.scratch, sms % 2, launch);
            }
        }
        all.expect_no_difference();
        rig.exchange->check_peers();
    }
}

// Combines alone, on every number of SMs and back to back: few rows, so that most warps and CTAs have nothing
// to do, and shapes in which some ranks send, receive or own nothing. A wait for a signal that is never sent
// deadlocks here.
TEST_P(GpuExchange, SmallCombinesInARow) {
    const int most_sms = GetParam() == Kind::peer ? hopper::kNumSms : 3;
    std::vector<ExchangeCase> cases;
    for (int r = 0; r < ranks(); ++r) {  // without rank r; rank r alone
        std::vector<int64_t> all_but_one = on_every_rank(ranks(), 3), one = on_every_rank(ranks(), 0);
        all_but_one[static_cast<std::size_t>(r)] = 0;
        one[static_cast<std::size_t>(r)] = 2;
        cases.push_back({.tokens = all_but_one, .topk = 1, .experts = 2 * ranks(), .hidden = 2056});
        cases.push_back({.tokens = one, .topk = 2, .experts = 4 * ranks(), .hidden = 8});
    }
    for (const Skew skew : {Skew::hot_rank, Skew::empty_rank})
        cases.push_back({.tokens = on_every_rank(ranks(), 130),
                         .topk = 2,
                         .experts = 4 * ranks(),
                         .hidden = 1032,
                         .skew = skew});
    cases.push_back({.tokens = on_every_rank(ranks(), 40), .topk = 6, .experts = 16, .hidden = 2304});
    Rig& rig = this->rig(CombineOrder::rank);
    ResidentLayers all(rig, CombineOrder::rank, cases);
    for (int sms = 1; sms <= most_sms; ++sms) {
        if (mix(static_cast<uint64_t>(sms), static_cast<uint64_t>(rank())) % 16 == 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        for (const auto& layer : all.layers)
            layer->combine(*rig.exchange, all.scratch, sms % 2, {.stream = {}, .sm_limit = sms});
    }
    all.expect_no_difference();
    rig.exchange->check_peers();
}

// Both legs, captured once as a graph: epochs are counted on the device.
TEST_P(GpuExchange, ReplaysAsAGraph) {
    if (GetParam() != Kind::peer && !has_fixed_messages(GetParam()))
        GTEST_SKIP() << "the host takes part in the others";
    constexpr int kReplays = 20;
    Rig& rig = this->rig(CombineOrder::rank);
    ResidentLayers all(rig, CombineOrder::rank);
    ResidentLayer& layer = *all.layers.back();
    cudaStream_t stream = nullptr;
    hopper::check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    layer.dispatch(*rig.exchange, all.scratch, 0);  // kernels are loaded
    layer.combine(*rig.exchange, all.scratch, 0);
    job->ops().device().synchronize();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    hopper::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    layer.queue_dispatch(*rig.exchange, all.scratch, 0, {.stream = {stream}, .sm_limit = 0});
    layer.queue_combine(*rig.exchange, all.scratch, 0, {.stream = {stream}, .sm_limit = 0});
    hopper::check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
    hopper::check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
    for (int i = 0; i < kReplays; ++i) {
        layer.poison_rows(0);
        layer.poison_sums(0);
        job->ops().device().synchronize();
        hopper::check_cuda(cudaGraphLaunch(executable, stream), "launching a graph");
        hopper::check_cuda(cudaStreamSynchronize(stream), "waiting");
        layer.compare_rows(0);
        layer.compare_sums(0);
    }
    layer.dispatch(*rig.exchange, all.scratch, 1);  // and on the ordinary stream again
    layer.combine(*rig.exchange, all.scratch, 1);
    all.expect_no_difference();
    rig.exchange->check_peers();
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

// 200 rounds in which sizes, data and ranks' speeds change: a buffer that is used again too early shows as a
// difference.
TEST_P(GpuExchange, HuntForRaces) {
    Rig& rig = this->rig(CombineOrder::rank);
    ResidentLayers all(rig, CombineOrder::rank);
    Arena words(job->ops().device(), "words");
    const TensorView word = words.tensor(DType::f32, {1}, "words");
    for (uint64_t round = 0; round < 200; ++round) {
        const uint64_t draw = mix(round, 1);  // the same on every rank
        ResidentLayer& a = *all.layers[draw % all.layers.size()];
        ResidentLayer& b = *all.layers[draw / 16 % all.layers.size()];
        const int leg = static_cast<int>(round % 2);
        if (mix(round, static_cast<uint64_t>(rank())) % 8 == 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        a.dispatch(*rig.exchange, all.scratch, leg);
        b.dispatch(*rig.exchange, all.scratch, 1 - leg);
        b.combine(*rig.exchange, all.scratch, 1 - leg);
        a.combine(*rig.exchange, all.scratch, leg);
        if (round % 10 == 9) {
            job->ops().zero({.y = word});
            rig.exchange->all_reduce(Reduce::sum, Ranks::world, word);
        }
    }
    all.expect_no_difference();
    rig.exchange->check_peers();
}

// ---- peers that are late or lost, in a layer with rows from every rank to every other

TEST_P(GpuExchange, ALateRankIsWaitedFor) {
    if (ranks() == 1) GTEST_SKIP() << "one rank has no peers";
    Rig& rig = this->rig(CombineOrder::rank);
    ResidentLayers all(rig, CombineOrder::rank);
    const auto exchange = [&](ResidentLayer& layer, int late_ms) {
        job->world().barrier();
        if (rank() == ranks() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
        layer.dispatch(*rig.exchange, all.scratch, 0);
        layer.combine(*rig.exchange, all.scratch, 0);
    };
    exchange(*all.layers[2], 3000);
    for (const int late_ms : {0, 1})  // about as long as the first kernel of dispatch waits
        for (const auto& layer : all.layers) exchange(*layer, late_ms);
    all.expect_no_difference();
    rig.exchange->check_peers();
}

TEST_P(GpuExchange, ALostRankIsNamedWithinTheDeadline) {
    if (ranks() == 1) GTEST_SKIP() << "one rank has no peers";
    if (has_fixed_messages(GetParam())) GTEST_SKIP() << "the watchdog finds it";
    if (GetParam() == Kind::levels && ranks() > 2) GTEST_SKIP() << "a rank may name one that waits itself";
    constexpr double kDeadline = 4.5;  // no digit of it is the lost rank's number
    for (const bool in_combine : {false, true}) {
        job->world().barrier();
        Rig lost(GetParam(), CombineOrder::rank, ranks(), kDeadline, job->ops());
        {
            ResidentLayers all(rig(CombineOrder::rank), CombineOrder::rank);
            job->world().barrier();
            all.layers[2]->dispatch(*lost.exchange, all.scratch, 0);
            all.expect_no_difference();
            job->world().barrier();
            if (rank() != ranks() - 1) {
                const auto start = std::chrono::steady_clock::now();
                const std::string message = error_of(ExitCode::peer, [&] {
                    if (in_combine)
                        all.layers[2]->combine(*lost.exchange, all.scratch, 0);
                    else
                        all.layers[2]->dispatch(*lost.exchange, all.scratch, 0);
                    job->ops().device().synchronize();
                    lost.exchange->check_peers();
                });
                EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
                expect_contains(message, fmt::format("rank {}", rank()));
                expect_contains(message, std::to_string(ranks() - 1));
                // the other kinds name the step's stage
                const bool over_peers =
                    GetParam() == Kind::peer || (GetParam() == Kind::levels && !has_own_gpu(job->world()));
                expect_contains(message, in_combine && over_peers ? "combine over peer" : "dispatch");
            }
        }
        job->world().barrier();  // the lost rank is back; every rank abandons the exchange now
    }
}

INSTANTIATE_TEST_SUITE_P(All, GpuExchange,
                         testing::Values(Kind::nccl, Kind::nccl_fixed, Kind::peer, Kind::levels,
                                         Kind::levels_fixed),
                         [](const auto& info) { return name_of(info.param); });

// The kernels are those of Kind::peer; only the mapping of addresses differs.
using ExchangeOverWindow = GpuExchange;
TEST_P(ExchangeOverWindow, MovesTheSameBytes) {
    for (CombineOrder order : kOrders)
        check({.tokens = uneven(ranks()),
               .topk = 6,
               .experts = 16,
               .alignment = 128,
               .wire = Wire::fp8,
               .order = order,
               .skew = Skew::hot_expert,
               .seed = 5});
    check({.tokens = on_every_rank(ranks(), 4096), .topk = 8, .experts = 32, .wire = Wire::fp8, .seed = 11});
}
INSTANTIATE_TEST_SUITE_P(All, ExchangeOverWindow, testing::Values(Kind::window),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace fp8flow::test
