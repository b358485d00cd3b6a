// SPDX-License-Identifier: MIT
// Clock and probe of the GPU: events measure a delay of known length, streaming traffic writes what it should
// and nothing else, and the ceilings are those of a GPU.
#include "kernels/core/error.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/count_launches.h"
#include "model/measure/ceilings.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace fp8flow {
namespace {

TEST(GpuTimeline, MeasuresADelay) {
    const auto ops = hopper::make_ops(0);
    const auto probe = hopper::make_probe(*ops);
    const auto timeline = ops->device().make_timeline();
    for (int round = 0; round < 2; ++round) {  // the second on recycled events
        EXPECT_EQ(timeline->mark({}), 0);
        probe->delay(5e-3);
        EXPECT_EQ(timeline->mark({}), 1);
        EXPECT_EQ(timeline->mark({}), 2);
        EXPECT_GE(timeline->seconds_between(0, 1), 4.9e-3);
        EXPECT_LT(timeline->seconds_between(0, 1), 20e-3);
        EXPECT_LT(timeline->seconds_between(1, 2), 1e-3);
        EXPECT_GE(timeline->seconds_between(0, 2), timeline->seconds_between(0, 1));
        timeline->reset();
        EXPECT_THROW(timeline->seconds_between(0, 1), Error);
    }
}

TEST(GpuProbe, WritesItsBytesAndNoOthers) {
    const auto ops = hopper::make_ops(0);
    Device& device = ops->device();
    const auto probe = hopper::make_probe(*ops);
    EXPECT_NE(probe->device_name(), "");
    EXPECT_GE(probe->cache_bytes(), 1 << 20);
    constexpr int64_t kBuffer = 1 << 20;
    auto* from = static_cast<uint8_t*>(device.allocate(kBuffer));
    auto* to = static_cast<uint8_t*>(device.allocate(kBuffer));
    device.fill(from, 0x5A, kBuffer);
    std::vector<uint8_t> host(kBuffer);
    for (const int depth : {2, 4, 8}) {
        for (const auto& [reads, writes] : std::vector<std::pair<int64_t, int64_t>>{{0, 0},
                                                                                    {16, 0},
                                                                                    {0, 16},
                                                                                    {0, 4096},
                                                                                    {100000, 16},
                                                                                    {16, 100000},
                                                                                    {524288, 524288},
                                                                                    {500000, 250000},
                                                                                    {33, 65552}}) {
            device.fill(to, 0xFF, kBuffer);
            probe->stream_traffic(
                {.from = from, .bytes_read = reads, .to = to, .bytes_written = writes, .depth = depth});
            device.copy_out(host.data(), to, kBuffer);
            const int64_t end = (writes + 15) / 16 * 16;
            int64_t untouched = 0, beyond = 0;
            for (int64_t i = 0; i < kBuffer;
                 i += 16) {  // the third word of what is written is 0 or a pattern of `from`, never all ones
                uint32_t word = 0;
                std::memcpy(&word, host.data() + i + 8, sizeof word);
                if (i < end)
                    untouched += word == 0xFFFFFFFFu;
                else
                    beyond += word != 0xFFFFFFFFu;
            }
            EXPECT_EQ(untouched, 0) << reads << " " << writes << " depth " << depth;
            EXPECT_EQ(beyond, 0) << reads << " " << writes << " depth " << depth;
        }
    }
    device.free(from);
    device.free(to);
}

TEST(GpuLaunches, AreCountedAndTheCallHappensOnce) {
    const auto ops = hopper::make_ops(0);
    Device& device = ops->device();
    const auto probe = hopper::make_probe(*ops);
    constexpr int64_t kBytes = 1 << 20;
    void* first = device.allocate(kBytes);
    void* second = device.allocate(kBytes);
    device.fill(second, 0, kBytes);
    const auto fill_stream_copy = [&](const Launch& launch) {
        device.fill(first, 0x11, kBytes, launch.stream);
        probe->stream_traffic({.from = first, .bytes_read = kBytes, .to = first, .bytes_written = kBytes},
                              launch);
        device.fill(first, 0x22, kBytes, launch.stream);
        device.copy(second, first, kBytes, launch.stream);
    };
    const auto launches = hopper::count_launches(fill_stream_copy);
    ASSERT_TRUE(launches.has_value());
    EXPECT_EQ(launches->kernels, 1);
    EXPECT_EQ(launches->others, 3);
    std::vector<uint8_t> host(kBytes);
    device.copy_out(host.data(), second, kBytes);
    EXPECT_EQ(host, std::vector<uint8_t>(kBytes, 0x22));
    const auto none = hopper::count_launches([](const Launch&) {});
    ASSERT_TRUE(none.has_value());
    EXPECT_EQ(none->all(), 0);
    // calls that cannot be captured: they wait for the device, or use the default stream
    EXPECT_FALSE(hopper::count_launches([&](const Launch&) { device.synchronize(); }).has_value());
    EXPECT_FALSE(hopper::count_launches([&](const Launch&) { device.fill(first, 0, kBytes); }).has_value());
    // and neither leaves an error for the next call
    const auto again = hopper::count_launches(fill_stream_copy);
    ASSERT_TRUE(again.has_value());
    EXPECT_EQ(again->kernels, 1);
    EXPECT_EQ(again->others, 3);
    device.free(first);
    device.free(second);
}

TEST(GpuCeilings, AreThoseOfAGpu) {
    const auto ops = hopper::make_ops(0, {.gemm = GemmBackend::cublaslt});
    const auto probe = hopper::make_probe(*ops);
    MeasureOptions options;
    options.idle_seconds = options.sustained_seconds = 0.05;
    Meter meter(ops->device(), *probe, options);
    Ceilings ceilings(meter, *ops, 4096);
    for (const auto& [reads, writes] : {std::pair<int64_t, int64_t>{512 << 20, 512 << 20},
                                        {512 << 20, 0},
                                        {0, 512 << 20},
                                        {512 << 20, 256 << 20}}) {
        const double rate = static_cast<double>(reads + writes) / ceilings.traffic_seconds(reads, writes);
        std::printf("%lld MiB read, %lld MiB written: %.0f GB/s\n", static_cast<long long>(reads >> 20),
                    static_cast<long long>(writes >> 20), rate * 1e-9);
        EXPECT_GT(rate, 2e12);
        EXPECT_LT(rate, 5e12);
    }
    // 8 MiB fit into the cache, but the measured traffic must come from memory
    const double small = 8e6 / ceilings.traffic_seconds(4000000, 4000000);
    std::printf("4 MB read, 4 MB written: %.0f GB/s\n", small * 1e-9);
    EXPECT_LT(small, 5e12);
    for (const GemmKind kind : {GemmKind::bf16, GemmKind::fp8}) {
        const double rate = ceilings.gemm(kind);
        std::printf("%s product: %.0f TFLOP/s\n", kind == GemmKind::bf16 ? "BF16" : "FP8", rate * 1e-12);
        EXPECT_GT(rate, 2e14);
        EXPECT_LT(rate, 2e15);
    }
}

}  // namespace
}  // namespace fp8flow
