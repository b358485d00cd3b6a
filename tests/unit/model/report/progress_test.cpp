// SPDX-License-Identifier: MIT
// The step line as scripts grep it, and the estimate of the time left.
#include "model/report/progress.h"

#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ctime>

namespace fp8flow {

using namespace report;

namespace {

std::chrono::system_clock::time_point local_time(int year, int month, int day, int hour, int minute,
                                                 int second) {
    std::tm parts{};
    parts.tm_year = year - 1900;
    parts.tm_mon = month - 1;
    parts.tm_mday = day;
    parts.tm_hour = hour;
    parts.tm_min = minute;
    parts.tm_sec = second;
    parts.tm_isdst = -1;
    return std::chrono::system_clock::from_time_t(std::mktime(&parts));
}

TEST(StepLine, HasMegatronsFieldsInMegatronsOrder) {
    const StepLine line{.time = local_time(2026, 11, 20, 13, 0, 0),
                        .iteration = 1,
                        .train_iters = 100,
                        .consumed_samples = 16,
                        .elapsed_ms = 123.44,
                        .tflops_per_gpu = 294.04,
                        .learning_rate = 1e-4,
                        .global_batch_size = 16,
                        .losses = {{"lm loss", 5.5}, {"load_balancing_loss", 1.0625}},
                        .grad_norm = 1.0,
                        .skipped_iterations = 0,
                        .nan_iterations = 0,
                        .eta_seconds = 80.2};
    EXPECT_EQ(format_megatron_line(line),
              " [2026-11-20 13:00:00] iteration        1/     100 | consumed samples:           16 | "
              "elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 294.0 | "
              "learning rate: 1.000000E-04 | global batch size:    16 | lm loss: 5.500000E+00 | "
              "load_balancing_loss: 1.062500E+00 | grad norm: 1.000 | number of skipped iterations:   0 | "
              "number of nan iterations:   0 | ETA: 0:01:20 |");
}

TEST(StepLine, LeavesOutAbsentFieldsAndShowsOddValues) {
    StepLine line{
        .time = local_time(2026, 1, 2, 3, 4, 5), .iteration = 7, .train_iters = 10, .consumed_samples = 28};
    EXPECT_EQ(format_megatron_line(line),
              " [2026-01-02 03:04:05] iteration        7/      10 | consumed samples:           28 |");
    line.tflops_per_gpu = 0.01234;
    line.tokens_per_second = 1234.56;
    line.losses = {{"lm loss", std::nan("")}};
    line.load = 1.31;
    EXPECT_EQ(format_megatron_line(line),
              " [2026-01-02 03:04:05] iteration        7/      10 | consumed samples:           28 | "
              "throughput per GPU (TFLOP/s/GPU): 0.0123 | token throughput per GPU (tokens/s/GPU): 1234.6 | "
              "lm loss: nan | "
              "load max/mean: 1.31 |");
}

TEST(StepLine, IsShortAndFitsATerminal) {
    StepLine line{.iteration = 7,
                  .train_iters = 150,
                  .elapsed_ms = 812.34,
                  .tflops_per_gpu = 0.01234,
                  .tokens_per_second = 2521.9,
                  .learning_rate = 5e-5,
                  .losses = {{"lm loss", 1.76581}, {"load_balancing_loss", 1.06}},
                  .grad_norm = 0.5123,
                  .load = 1.204,
                  .eta_seconds = 80.2};
    EXPECT_EQ(format_step_line(line),
              " iteration   7/150 | lm loss 1.7658 | grad norm 0.512 | lr 5.00E-05 | 812 ms | 2.52 k tok/s, "
              "0.0123 TFLOP/s per GPU | load 1.20 | ETA 0:01:20");
    line.losses.front().second = std::nan("");
    expect_contains(format_step_line(line), "| lm loss nan |");
    line = {.iteration = 9999999,
            .train_iters = 9999999,
            .elapsed_ms = 99.9e3,
            .tflops_per_gpu = 512,
            .tokens_per_second = 99999,
            .learning_rate = 5e-5,
            .losses = {{"lm loss", 11.76581}, {"load_balancing_loss", 1.06}, {"z_loss", 1}},
            .grad_norm = 99.5123,
            .skipped_iterations = 1,
            .nan_iterations = 1,
            .load = 12.204,
            .dead_experts = 17,
            .redone = 2,
            .eta_seconds = 99 * 3600.0};
    EXPECT_LE(format_step_line(line).size(), kStepColumns) << format_step_line(line);
}

TEST(Eta, IsExactForEqualStepsAndForgetsTheFirst) {
    EtaEstimator eta(10, 5.0);
    EXPECT_FALSE(eta.seconds_left().has_value());
    eta.step_done(30.0);  // warm-up
    EXPECT_DOUBLE_EQ(*eta.seconds_left(), 9 * 30.0);
    for (int i = 2; i <= 10; ++i) {
        eta.step_done(2.0);
        EXPECT_NEAR(*eta.seconds_left(), (10 - i) * 2.0, 1e-12);
    }
    EXPECT_EQ(eta.steps_left(), 0);
    eta.step_done(2.0);
    EXPECT_EQ(eta.steps_left(), 0);
}

TEST(Eta, FollowsAChangeWithinItsWindowAndDampsASinglePeak) {
    EtaEstimator eta(1000, 10.0);
    for (int i = 0; i < 200; ++i) eta.step_done(1.0);
    eta.step_done(11.0);
    EXPECT_NEAR(*eta.seconds_per_step(), 2.0, 1e-6);  // a tenth of the peak
    for (int i = 0; i < 100; ++i) eta.step_done(3.0);
    EXPECT_NEAR(*eta.seconds_per_step(), 3.0, 1e-3);
}

}  // namespace
}  // namespace fp8flow
