// SPDX-License-Identifier: MIT
// The timing protocol on a device of the test's own: what is called how often, on which set, after which
// pauses; the ceilings; and the random tensors that both work on.
#include "model/measure/measure.h"

#include "kernels/core/random_fill.h"
#include "kernels/reference/host_device.h"
#include "kernels/reference/reference_ops.h"
#include "model/measure/ceilings.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>
#include <thread>

namespace fp8flow {
namespace {

// A machine with a cache of 1 MiB that remembers what was asked of it.
class CountingProbe final : public Probe {
public:
    std::string device_name() const override { return "counting"; }
    int64_t cache_bytes() const override { return cache; }
    void stream_traffic(const Traffic& traffic, const Launch&) override {
        ++traffics[{traffic.bytes_read, traffic.bytes_written}];
        depths.insert(traffic.depth);
    }
    void delay(double seconds, Stream) override { delayed += seconds; }

    int64_t cache = 1 << 20;
    std::map<std::pair<int64_t, int64_t>, int> traffics;
    std::set<int> depths;
    double delayed = 0;
};

const MeasureOptions kQuick = {
    .warmups = 2, .samples = 5, .calls_per_short_sample = 4, .idle_seconds = 0, .sustained_seconds = 0};

class MeterTest : public testing::Test {
protected:
    HostDevice device;
    CountingProbe probe;
    Meter meter{device, probe, kQuick};
};

TEST_F(MeterTest, TimesWhatItCallsAndRotatesTheSets) {
    std::vector<int64_t> sets;
    const Timing timing = meter.time({.call =
                                          [&](int64_t set) {
                                              sets.push_back(set);
                                              std::this_thread::sleep_for(std::chrono::milliseconds(2));
                                          },
                                      .num_sets = 3});
    EXPECT_GE(timing.min, 2e-3);
    EXPECT_LE(timing.min, timing.median);
    EXPECT_LE(timing.median, timing.p90);
    EXPECT_LT(timing.median, 1.0);
    EXPECT_FALSE(timing.sustained.has_value());
    // one to warm up the device, three to estimate, two warm-ups, five samples of one call
    ASSERT_EQ(sets.size(), 11u);
    for (size_t i = 0; i < sets.size(); ++i) EXPECT_EQ(sets[i], static_cast<int64_t>(i % 3));
    EXPECT_GT(probe.delayed, 0.0);
    EXPECT_TRUE(probe.traffics.empty());  // nothing to flush
}

TEST_F(MeterTest, ShortCallsAreTimedSeveralAtOnce) {
    int calls = 0;
    const Timing timing = meter.time({.call = [&](int64_t) { ++calls; }});
    EXPECT_EQ(calls, 1 + 3 + 2 + 5 * 4);
    EXPECT_GT(timing.median, 0.0);
    EXPECT_LT(timing.median, kShortCall);
}

TEST_F(MeterTest, SmallSetsAreEvictedBeforeEachCall) {
    // 3 MiB have to lie between two uses of a set
    EXPECT_EQ(meter.sets_for(1 << 20), 4);
    EXPECT_EQ(meter.cache_of(1 << 20, 4), Subject::Cache::cold_by_rotation);
    EXPECT_EQ(meter.sets_for(1 << 30), 2);
    EXPECT_EQ(meter.cache_of(1 << 30, 2), Subject::Cache::cold_by_rotation);
    EXPECT_EQ(meter.sets_for(100), 64);
    EXPECT_EQ(meter.cache_of(100, 64), Subject::Cache::flush);

    int calls = 0;
    meter.time({.call = [&](int64_t) { ++calls; }, .num_sets = 64, .cache = Subject::Cache::flush});
    EXPECT_EQ(calls, 1 + 3 + 2 + 5);
    ASSERT_EQ(probe.traffics.size(), 1u);
    const auto& [traffic, flushes] = *probe.traffics.begin();
    EXPECT_GE(traffic.first, 3 << 20);
    EXPECT_EQ(traffic.second, 0);
    EXPECT_EQ(flushes, 1 + 5);

    probe.cache = 0;
    EXPECT_EQ(meter.sets_for(100), 1);
}

TEST_F(MeterTest, SustainedIsTheSecondHalf) {
    MeasureOptions options = kQuick;
    options.sustained_seconds = 0.05;
    Meter patient(device, probe, options);
    int calls = 0;
    const Timing timing = patient.time({.call = [&](int64_t) {
        // slower after a while, as a GPU that gets hot
        std::this_thread::sleep_for(std::chrono::milliseconds(++calls < 14 ? 2 : 30));
    }});
    ASSERT_TRUE(timing.sustained.has_value());
    EXPECT_LT(timing.median, 25e-3);
    EXPECT_GE(*timing.sustained, 30e-3);
}

TEST_F(MeterTest, RanksMeetBeforeEachSample) {
    int meetings = 0, calls = 0;
    const Together together{.barrier = [&] { ++meetings; }, .largest = [](double x) { return 2 * x; }};
    meter.time({.call = [&](int64_t) { ++calls; }, .together = &together});
    EXPECT_EQ(meetings, 5);
    EXPECT_EQ(calls, 1 + 3 + 2 + 5);
}

TEST_F(MeterTest, PausesBeforeABurstOnly) {
    MeasureOptions options = kQuick;
    options.idle_seconds = 0.5;
    Meter patient(device, probe, options);
    const auto seconds_of = [&](auto&& measure) {
        const auto start = std::chrono::steady_clock::now();
        measure();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    EXPECT_GE(seconds_of([&] { patient.time({.call = [](int64_t) {}}); }), 0.5);
    EXPECT_LT(seconds_of([&] { patient.time_burst({.call = [](int64_t) {}}); }), 0.5);
}

TEST(Ceilings, EachIsMeasuredOnce) {
    ReferenceOps ops;
    CountingProbe probe;
    Meter meter(ops.device(), probe, kQuick);
    Ceilings ceilings(meter, ops, 64);
    EXPECT_GT(ceilings.traffic_seconds(4 << 20, 2 << 20), 0.0);
    const auto traffics = probe.traffics;
    EXPECT_EQ(traffics.size(), 1u);
    EXPECT_EQ(probe.depths, (std::set<int>{2, 4, 8}));
    EXPECT_GT(ceilings.traffic_seconds(4 << 20, 2 << 20), 0.0);
    EXPECT_EQ(probe.traffics, traffics);
    EXPECT_GT(ceilings.traffic_seconds(0, 100 << 10), 0.0);
    EXPECT_EQ(ceilings.traffic_seconds(0, 0), 0.0);

    EXPECT_GT(ceilings.gemm(GemmKind::bf16), 0.0);
    EXPECT_GT(ceilings.gemm(GemmKind::fp8), 0.0);
    const OpCount products = ops.counts().at("gemm");
    ceilings.gemm(GemmKind::fp8);
    EXPECT_EQ(ops.counts().at("gemm").calls, products.calls);
}

TEST(HostProbe, WritesWhatItReadAndNothingElse) {
    HostProbe host;
    Probe& probe = host;
    test::HostTensor from(DType::f32, {1000}), to(DType::f32, {4000});
    test::fill_normal(from, 1);
    probe.stream_traffic(
        {.from = from.view().data, .bytes_read = 4000, .to = to.view().data, .bytes_written = 8000});
    for (int64_t i = 0; i < 2000; i += 2)  // a word of 8 bytes holds its own number, shifted by the sum
        EXPECT_NE(to.as<float>()[i], to.as<float>()[i + 2]) << i;
    for (int64_t i = 2000; i < 4000; ++i) EXPECT_TRUE(std::isnan(to.as<float>()[i])) << i;  // untouched
    probe.stream_traffic({.from = from.view().data, .bytes_read = 4000, .to = nullptr, .bytes_written = 0});
    EXPECT_FALSE(probe.device_name().empty());
    EXPECT_EQ(probe.cache_bytes(), 0);
}

TEST(RandomFill, DrawsWhatItSays) {
    HostDevice device;
    test::HostTensor values(DType::f32, {3, 400000}), fp8(DType::e4m3, {1000, 40}),
        scales(DType::f32, {5000}), ids(DType::i32, {5000}), none(DType::f32, {0});
    fill_random(device, none);
    fill_random(device, values, {.spread = 2.0});
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < values.numel(); ++i) {
        sum += values(i);
        squares += values(i) * values(i);
    }
    const double count = static_cast<double>(values.numel());
    EXPECT_NEAR(sum / count, 0.0, 0.01);
    EXPECT_NEAR(squares / count, 4.0, 0.05);

    fill_random(device, fp8);
    std::set<int> exponents;
    bool negative = false;
    for (int64_t i = 0; i < fp8.numel(); ++i) {
        EXPECT_FALSE(std::isnan(fp8(i)));
        exponents.insert((fp8.view().bytes_ptr()[i] >> 3) & 15);
        negative = negative || fp8(i) < 0;
    }
    EXPECT_GE(exponents.size(), 14u);
    EXPECT_TRUE(negative);

    fill_random(device, scales, {.distribution = Distribution::pow2, .spread = 3});
    std::set<double> powers;
    for (int64_t i = 0; i < scales.numel(); ++i) powers.insert(scales(i));
    EXPECT_EQ(powers, (std::set<double>{0.125, 0.25, 0.5, 1, 2, 4, 8}));

    fill_random(device, ids, {.distribution = Distribution::integers, .spread = 7});
    std::set<double> drawn;
    for (int64_t i = 0; i < ids.numel(); ++i) drawn.insert(ids(i));
    EXPECT_EQ(drawn, (std::set<double>{0, 1, 2, 3, 4, 5, 6}));

    test::HostTensor again(DType::f32, {5000}), other(DType::f32, {5000});
    fill_random(device, again, {.distribution = Distribution::pow2, .spread = 3});
    EXPECT_TRUE(test::same_bytes(again, scales));
    fill_random(device, other, {.distribution = Distribution::pow2, .spread = 3, .seed = 2});
    EXPECT_FALSE(test::same_bytes(other, scales));
}

}  // namespace
}  // namespace fp8flow
