// SPDX-License-Identifier: MIT
// The step line as scripts grep it. The names of the record: tests/cli/train_test.cpp.
#include "model/report/step_values.h"

#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ctime>

namespace fp8flow {

using namespace report;

namespace {

constexpr auto kVerbose = Detail::verbose, kNormal = Detail::normal;

Config small(int64_t iterations) {
    Config config;
    config.training.train_iters = iterations;
    config.training.global_batch_size = 16;
    return config;
}

StepValues values(const Config& config, const StepResult& result) {
    StepValues values = values_of(config, 1e6, result, 2);
    std::tm local{
        .tm_sec = 0, .tm_min = 0, .tm_hour = 13, .tm_mday = 20, .tm_mon = 10, .tm_year = 126, .tm_isdst = -1};
    values.time = std::chrono::system_clock::from_time_t(std::mktime(&local));
    values.record["tflops_per_gpu"] = 0.01234;
    return values;
}

StepResult first_step() {
    return {.lm_loss = 5.5,
            .router_losses = {{"load_balancing_loss", {1.0, 1.125}}},
            .grad_norm = 1.0,
            .learning_rate = 1e-4,
            .seconds = 0.5,
            .tokens = 1000};
}

TEST(StepLine, HasMegatronsFieldsInMegatronsOrder) {
    StepResult result = first_step();
    EXPECT_EQ(step_line(values(small(100), result), 80.2, kVerbose),
              " [2026-11-20 13:00:00] iteration        1/     100 | consumed samples:           16 | "
              "elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 0.0123 | "
              "token throughput per GPU (tokens/s/GPU): 1000.0 | "
              "learning rate: 1.000000E-04 | global batch size:    16 | lm loss: 5.500000E+00 | "
              "load_balancing_loss: 1.062500E+00 | grad norm: 1.000 | number of skipped iterations:   0 | "
              "number of nan iterations:   0 | ETA: 0:01:20 |");
    result.lm_loss = std::nan("");
    result.skipped = "a reason";
    result.redone = 2;
    result.load = {{.layer = 0, .max = 1.31, .dead_experts = 1}, {.layer = 1, .max = 1.2, .dead_experts = 2}};
    StepValues odd = values(small(100), result);
    odd.record["tflops_per_gpu"] = 294.04;
    const std::string line = step_line(odd, std::nullopt, kVerbose);
    expect_contains(line, "(TFLOP/s/GPU): 294.0 |");
    expect_contains(line, "| lm loss: nan |");
    EXPECT_TRUE(
        line.ends_with("skipped iterations:   1 | number of nan iterations:   1 | load max/mean: 1.31 "
                       "| dead experts: 3 | redone: 2 |"))
        << line;
    result = first_step();
    result.grad_norm = INFINITY;
    result.load = {{.equal_choices = 0.875}, {.equal_choices = 0.625}};
    EXPECT_EQ(values(small(100), result).find("nan_iterations"), 1);
    EXPECT_EQ(values(small(100), result).find("equal_choices_mean"), 0.75);
    result = {.step = 9,
              .lm_loss = 1,
              .grad_norm = 2,
              .learning_rate = 3,
              .seconds = 0.5,
              .tokens = 1000,
              .redone = 10,
              .redo_seconds = 11,
              .load = {{.layer = 12, .max = 13, .min = 14, .cv = 15, .dead_experts = 16, .tokens = {17, 18}}},
              .wire = {.routing = 4, .dispatch = 5, .combine = 6, .between_hosts = 7},
              .casts = 8,
              .peak_bytes = 9,
              .skipped = "why"};
    Config config = small(100);
    config.output.log_interval = 10;
    EXPECT_EQ(values_of(config, 1e6, result, 2).record, nlohmann::json::parse(R"({
        "type": "step", "iteration": 10, "lm_loss": 1.0, "grad_norm": 2.0, "learning_rate": 3.0, "seconds": 0.5,
        "tokens": 1000, "tokens_per_second": 2000.0, "tokens_per_second_per_gpu": 1000.0, "tflops": 0.002,
        "tflops_per_gpu": 0.001, "wire_bytes_routing": 4.0, "wire_bytes_dispatch": 5.0,
        "wire_bytes_combine": 6.0, "wire_bytes_between_hosts": 7.0, "casts": 8, "activation_bytes": 9,
        "redone": 10, "redo_seconds": 11.0, "moe_layers": [12], "load_max": [13.0], "load_min": [14.0],
        "load_cv": [15.0], "dead_experts": [16], "tokens_per_expert": [[17, 18]], "skipped": "why",
        "load_balancing_loss": 0.0, "load_balancing_loss_by_layer": [], "z_loss": 0.0, "z_loss_by_layer": []})"));
}

TEST(StepLine, IsShortAndFitsATerminal) {
    StepResult result = first_step();
    result.step = 6;
    EXPECT_EQ(step_line(values(small(150), result), 80.2, kNormal),
              " iteration   7/150 | lm loss 5.5000 | grad norm 1.000 | lr 1.00E-04 | 500 ms | 1.00 k tok/s, "
              "0.0123 TFLOP/s per GPU | ETA 0:01:20");
    result.lm_loss = std::nan("");
    expect_contains(step_line(values(small(150), result), 80.2, kNormal), "| lm loss nan |");
    result = {.step = 9999998,
              .lm_loss = 11.76581,
              .router_losses = first_step().router_losses,
              .grad_norm = 99.5123,
              .learning_rate = 5e-5,
              .seconds = 99.9,
              .tokens = 19979600,
              .redone = 2,
              .load = {{.layer = 0, .max = 12.204, .dead_experts = 17}}};
    StepValues long_run = values(small(9999999), result);
    long_run.record["tflops_per_gpu"] = 512;
    const std::string line = step_line(long_run, 99 * 3600.0, kNormal);
    EXPECT_LE(line.size(), 160u) << line;
    expect_contains(line, "| load 12.20 | dead 17 | ETA 99:00:00");
}

}  // namespace
}  // namespace fp8flow
