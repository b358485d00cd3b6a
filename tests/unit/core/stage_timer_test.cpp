// SPDX-License-Identifier: MIT
// The stage timer on a clock of the test's own: nesting, own times, what is booked under which stage, and
// nothing at all while it is off.
#include "kernels/core/stage_timer.h"

#include "kernels/core/error.h"
#include "kernels/reference/host_device.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

using Texts = std::vector<std::string>;

// Every mark one second after the one before.
class CountingTimeline final : public Timeline {
public:
    explicit CountingTimeline(Texts& log) : log_(log) {}
    int64_t mark(Stream) override { return marks_++; }
    double seconds_between(int64_t a, int64_t b) override { return static_cast<double>(b - a); }
    void reset() override { marks_ = 0; }
    void begin_range(const char* direction, const char* name) override {
        log_.push_back(std::string(direction) + "/" + name);
    }
    void end_range() override { log_.push_back("end"); }

private:
    Texts& log_;
    int64_t marks_ = 0;
};

struct Fixture {
    Texts ranges;
    StageTimer timer;

    explicit Fixture(TimerDetail detail = TimerDetail::stages) {
        if (detail != TimerDetail::off) timer.enable(std::make_unique<CountingTimeline>(ranges), detail);
    }
    StageTimer::Scope stage(const char* name) { return {timer, StageLevel::stage, name, {}}; }
    StageTimer::Scope part(const char* name) { return {timer, StageLevel::part, name, {}}; }

    // marks: part 0..9, norm 1..4, cast in norm 2..3, shared expert 5..8, fc1 in it 6..7
    void layer() {
        auto layer = part("moe layer");
        {
            auto norm = stage("norm");
            auto cast = stage("cast");
            timer.op_called({.op = "quantize_rows", .cost = {.bytes = 8}, .cast = true});
        }
        auto shared = stage("shared expert");
        auto fc1 = stage("fc1");
        timer.op_called({.op = "grouped_gemm", .cost = {.bytes = 1, .flops = 64, .unit = Unit::bf16_mma}});
    }
};

TEST(StageTimer, SpansNestAndOwnTimesAddUpToTheWhole) {
    Fixture f;
    f.timer.set_layer(3);
    f.layer();
    f.timer.resolve();
    const auto& spans = f.timer.spans();
    ASSERT_EQ(spans.size(), 5u);
    const double seconds[] = {9, 3, 1, 3, 1}, own[] = {3, 2, 1, 2, 1}, begin[] = {0, 1, 2, 5, 6};
    const int parents[] = {-1, 0, 1, 0, 3};
    double sum = 0;
    for (size_t i = 0; i < spans.size(); ++i) {
        EXPECT_EQ(spans[i].seconds, seconds[i]) << spans[i].name;
        EXPECT_EQ(spans[i].own_seconds, own[i]) << spans[i].name;
        EXPECT_EQ(spans[i].begin, begin[i]) << spans[i].name;
        EXPECT_EQ(spans[i].parent, parents[i]) << spans[i].name;
        EXPECT_EQ(spans[i].layer, 3);
        sum += spans[i].own_seconds;
    }
    EXPECT_EQ(sum, spans[0].seconds);
    EXPECT_EQ(f.ranges, (Texts{"forward/moe layer", "forward/norm", "forward/cast", "end", "end",
                               "forward/shared expert", "forward/fc1", "end", "end", "end"}));
}

TEST(StageTimer, CastsAreBookedAsCastsAndInnerStagesUnderTheOuterOne) {
    Fixture f;
    f.layer();
    f.timer.resolve();
    EXPECT_EQ(f.timer.seconds(), (std::map<std::string, double>{{"forward/moe layer", 3},
                                                                {"forward/norm", 2},
                                                                {"forward/cast", 1},
                                                                {"forward/shared expert", 3}}));
    ASSERT_EQ(f.timer.calls().size(), 2u);
    EXPECT_STREQ(stage_of(f.timer.spans(), f.timer.calls()[0].span).stage, "cast");
    EXPECT_STREQ(stage_of(f.timer.spans(), f.timer.calls()[0].span).part, "moe layer");
    EXPECT_STREQ(stage_of(f.timer.spans(), f.timer.calls()[1].span).stage, "shared expert");
}

TEST(StageTimer, PartsOnlyLeavesNoMarksBetweenStages) {
    Fixture f(TimerDetail::parts);
    f.timer.set_direction("backward");
    f.layer();
    f.timer.resolve();
    ASSERT_EQ(f.timer.spans().size(), 1u);
    EXPECT_EQ(f.timer.spans()[0].seconds, 1);  // two marks in all
    EXPECT_STREQ(f.timer.spans()[0].direction, "backward");
}

TEST(StageTimer, OffRecordsNothing) {
    Fixture f(TimerDetail::off);
    f.layer();
    f.timer.resolve();
    EXPECT_TRUE(f.timer.spans().empty());
    EXPECT_TRUE(f.timer.calls().empty());
    EXPECT_TRUE(f.timer.seconds().empty());
    f.timer.enable(std::make_unique<CountingTimeline>(f.ranges), TimerDetail::stages);
    f.layer();
    f.timer.disable();
    f.timer.reset();
    f.layer();
    EXPECT_TRUE(f.timer.spans().empty());
}

TEST(StageTimer, AnExchangeIsOneCallAndItsBytesBelongToTheStage) {
    Fixture f;
    {
        auto dispatch = f.stage("dispatch");
        f.timer.exchange_began({.op = "dispatch", .cost = {.bytes = 100}});
        f.timer.op_called({.op = "permute_pad", .cost = {.bytes = 60}});
        f.timer.exchange_ended(40);
        f.timer.op_called({.op = "pad_rows", .cost = {.bytes = 5}});
    }
    ASSERT_EQ(f.timer.calls().size(), 2u);
    EXPECT_STREQ(f.timer.calls()[0].call.op, "dispatch");
    EXPECT_STREQ(f.timer.calls()[1].call.op, "pad_rows");
    EXPECT_EQ(f.timer.spans()[0].wire_bytes, 40);
}

TEST(StageTimer, KnowsTheMemoryInUseDuringEachStage) {
    HostDevice device;
    Arena arena(device, "test");
    Fixture f;
    f.timer.watch({&arena});
    arena.tensor(DType::f32, {256}, "before");  // 1 KiB
    {
        auto outer = f.stage("outer");
        {
            auto inner = f.stage("inner");
            ArenaScope scope(arena);
            arena.tensor(DType::f32, {1024}, "inner");  // 4 KiB
        }
        auto last = f.stage("last");
    }
    const auto& spans = f.timer.spans();
    EXPECT_EQ(spans[0].peak_bytes, 5 * 1024);
    EXPECT_EQ(spans[1].peak_bytes, 5 * 1024);
    EXPECT_EQ(spans[2].peak_bytes, 1024);
}

// What the ops of one stage must move and do, against counts by hand.
TEST(StageTimer, OpsReportTheirCostsByRowsThatAreKnown) {
    ReferenceOps ops;
    Fixture f;
    ops.observe(&f.timer);
    const int64_t hidden = 256, width = 128, capacity = 512;
    test::HostTensor counts = test::HostTensor::of(std::vector<int64_t>{100, 30}),
                     offsets = test::HostTensor::of(std::vector<int64_t>{0, 128, 256});
    RowGroups groups{
        .num_groups = 2, .counts = counts, .offsets = offsets, .row_capacity = capacity, .alignment = 128};
    test::HostTensor a(DType::bf16, {capacity, hidden}), b(DType::bf16, {2, width, hidden}),
        d(DType::bf16, {capacity, width});
    const auto product = [&] {
        auto fc1 = f.stage("fc1");
        ops.grouped_gemm({.a = {.data = a}, .b = {.data = b}, .groups = groups, .d = d});
    };
    test::fill(a, [](int64_t) { return 0.0; });
    test::fill(b, [](int64_t) { return 0.0; });
    product();
    groups.known_rows = 256;
    product();
    ops.observe(nullptr);
    product();
    ASSERT_EQ(f.timer.calls().size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
        const OpCost& cost = f.timer.calls()[i].call.cost;
        const double rows = i == 0 ? 512 : 256;
        EXPECT_EQ(cost.flops, 2 * rows * 128 * 256);
        EXPECT_EQ(cost.bytes, 2 * (rows * 256 + 2 * 128 * 256 + rows * 128));
        EXPECT_EQ(cost.written, 2 * rows * 128);
        EXPECT_EQ(cost.unit, Unit::bf16_mma);
        EXPECT_FALSE(f.timer.calls()[i].call.cast);
    }
}

}  // namespace
}  // namespace fp8flow
