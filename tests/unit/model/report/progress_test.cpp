// SPDX-License-Identifier: MIT
// The estimate of the time left.
#include "model/report/progress.h"

#include <gtest/gtest.h>

namespace fp8flow {

using namespace report;

namespace {

TEST(Eta, IsExactForEqualStepsAndForgetsTheFirst) {
    EtaEstimator eta(10, 5.0);
    EXPECT_FALSE(eta.seconds_left().has_value());
    eta.step_done(30.0);  // warm-up
    EXPECT_DOUBLE_EQ(*eta.seconds_left(), 9 * 30.0);
    for (int i = 2; i <= 10; ++i) {
        eta.step_done(2.0);
        EXPECT_NEAR(*eta.seconds_left(), (10 - i) * 2.0, 1e-12);
    }
    eta.step_done(2.0);
    EXPECT_EQ(*eta.seconds_left(), 0);
}

TEST(Eta, FollowsAChangeWithinItsWindowAndDampsASinglePeak) {
    EtaEstimator eta(400, 10.0);
    for (int i = 0; i < 200; ++i) eta.step_done(1.0);
    eta.step_done(11.0);
    EXPECT_NEAR(*eta.seconds_left(), 199 * 2.0, 1e-4);  // a tenth of the peak
    for (int i = 0; i < 100; ++i) eta.step_done(3.0);
    EXPECT_NEAR(*eta.seconds_left(), 99 * 3.0, 1e-1);
}

TEST(Eta, CountsWhatComesBetweenTheSteps) {
    EtaEstimator eta(27);
    eta.leave_out(7);
    double now = 1000.0;  // of the first step
    eta.step_done(9.0, now);
    for (int i = 2; i <= 11; ++i) {
        now += 2.0 + (i % 5 == 0 ? 5.0 : 0.0);  // an evaluation every five steps
        eta.step_done(2.0, now);
    }
    EXPECT_NEAR(*eta.seconds_left(), 9 * (2.0 + 1.0), 1e-9);
}

}  // namespace
}  // namespace fp8flow
