// SPDX-License-Identifier: MIT
// The host's timeline: marks count from 0, time between them is what a clock says, unknown marks are refused.
#include "kernels/core/timeline.h"

#include "kernels/core/error.h"
#include "kernels/reference/host_device.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fp8flow {
namespace {

TEST(Timeline, MeasuresTheTimeBetweenMarks) {
    HostDevice device;
    const auto timeline = device.make_timeline();
    EXPECT_EQ(timeline->mark({}), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(timeline->mark({}), 1);
    EXPECT_EQ(timeline->mark({}), 2);
    EXPECT_GE(timeline->seconds_between(0, 1), 0.020);
    EXPECT_LT(timeline->seconds_between(0, 1), 5.0);
    EXPECT_GE(timeline->seconds_between(0, 2), timeline->seconds_between(0, 1));
    EXPECT_EQ(timeline->seconds_between(1, 1), 0.0);
}

TEST(Timeline, ResetForgetsAllMarks) {
    HostDevice device;
    const auto timeline = device.make_timeline();
    timeline->mark({});
    timeline->mark({});
    timeline->reset();
    EXPECT_EQ(timeline->mark({}), 0);
    EXPECT_THROW(timeline->seconds_between(0, 1), Error);
    EXPECT_THROW(timeline->seconds_between(-1, 0), Error);
}

}  // namespace
}  // namespace fp8flow
