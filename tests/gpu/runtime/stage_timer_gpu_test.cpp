// SPDX-License-Identifier: MIT
// The stage timer on a GPU: spans measured by events, in order, nested, without waiting for the device while
// they are recorded.
#include "kernels/core/stage_timer.h"
#include "kernels/hopper/factory.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

TEST(StageTimerGpu, SpansAreDeviceTimesAndRecordingWaitsForNobody) {
    const auto ops = hopper::make_ops(0);
    const auto probe = hopper::make_probe(*ops);
    StageTimer timer;
    timer.enable(ops->device().make_timeline(), TimerDetail::stages);
    ops->device().synchronize();
    constexpr double kShort = 2e-3, kLong = 20e-3;
    for (int step = 0; step < 2; ++step) {  // the second one uses the events of the first again
        timer.reset();
        const double start = clock_seconds();
        {
            StageTimer::Scope part(timer, StageLevel::part, "moe layer", {});
            {
                StageTimer::Scope stage(timer, StageLevel::stage, "fc1", {});
                probe->delay(kShort);
            }
            StageTimer::Scope stage(timer, StageLevel::stage, "fc2", {});
            probe->delay(kLong);
        }
        const double recording = clock_seconds() - start;
        timer.resolve();
        if (step > 0) {
            EXPECT_LT(recording, kLong / 2) << "the host waited";
        }
        const auto& spans = timer.spans();
        ASSERT_EQ(spans.size(), 3u);
        EXPECT_NEAR(spans[1].seconds, kShort, 1e-3);
        EXPECT_NEAR(spans[2].seconds, kLong, 2e-3);
        EXPECT_GE(spans[0].seconds, spans[1].seconds + spans[2].seconds - 1e-5);
        EXPECT_GE(spans[2].begin, spans[1].begin + spans[1].seconds - 1e-5);
        EXPECT_LT(spans[0].own_seconds, 1e-3);
        EXPECT_EQ(spans[0].clock, 0) << "no cycles are counted between stages";
    }
}

// A second timer reads the clock that the first one reads in the same time, whichever of its marks are
// reused.
TEST(StageTimerGpu, PartsTellTheClockOfTheMultiprocessors) {
    const auto ops = hopper::make_ops(0);
    const auto probe = hopper::make_probe(*ops);
    StageTimer timer, other;
    timer.enable(ops->device().make_timeline(), TimerDetail::parts);
    other.enable(ops->device().make_timeline(), TimerDetail::parts);
    for (int step = 0; step < 3; ++step) {
        timer.reset();
        {
            StageTimer::Scope outer(timer, StageLevel::part, "moe layer", {});
            StageTimer::Scope inner(other, StageLevel::part, "moe layer", {});
            StageTimer::Scope stage(timer, StageLevel::stage, "fc1", {});
            probe->delay(20e-3);
        }
        timer.resolve();
        other.resolve();
        ASSERT_EQ(timer.spans().size(), 1u);
        const double clock = timer.spans()[0].clock;
        EXPECT_GT(clock, 200e6);
        EXPECT_LT(clock, 2.1e9);
        EXPECT_NEAR(other.spans().back().clock, clock, 0.005 * clock);
    }
}

}  // namespace
}  // namespace fp8flow
