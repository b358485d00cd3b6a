// SPDX-License-Identifier: MIT
// The line that a step prints: a short one, and one with Megatron-LM's field names, order and " | "
// separators, so that scripts which grep its logs work on ours; and the estimate of the time left. Read next:
// table.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow::report {

// Fields that are absent are left out of the line.
struct StepLine {
    std::chrono::system_clock::time_point time{};
    int64_t iteration = 0;  // 1-based
    int64_t train_iters = 0;
    int64_t consumed_samples = 0;
    std::optional<double> elapsed_ms = {};         // per iteration
    std::optional<double> tflops_per_gpu = {};     // model FLOPs
    std::optional<double> tokens_per_second = {};  // per GPU (rank)
    std::optional<double> learning_rate = {};
    std::optional<int64_t> global_batch_size = {};
    std::vector<std::pair<std::string, double>> losses =
        {};  // e.g. {"lm loss", 5.5}, {"load_balancing_loss", 1.02}
    std::optional<double> grad_norm = {};
    std::optional<int64_t> skipped_iterations = {};
    std::optional<int64_t> nan_iterations = {};
    std::optional<double> load = {};  // fullest expert over the mean, of the worst layer
    int64_t dead_experts = 0;         // without a token
    int64_t redone = 0;               // times
    std::optional<double> eta_seconds = {};
};

// At most kStepColumns columns with up to 9,999,999 iterations and 99 h left; throughput is that of a GPU.
// " iteration  10/100 | lm loss 4.1234 | grad norm 1.250 | lr 5.00E-05 | 812 ms | 2.52 k tok/s, ..."
constexpr size_t kStepColumns = 160;
std::string format_step_line(const StepLine& line);
std::string format_megatron_line(const StepLine& line);

// "2026-11-20 13:00:00", local time.
std::string format_timestamp(std::chrono::system_clock::time_point time);

// Time left from an exponential mean of the step times, over about `window` steps. The first step (warm-up,
// allocations) is used until there is a second one and forgotten then; the mean is corrected for its start
// (as Adam's moments are).
class EtaEstimator {
public:
    explicit EtaEstimator(int64_t total_steps, double window = 20.0);

    void step_done(double seconds);
    int64_t steps_left() const { return total_ > done_ ? total_ - done_ : 0; }
    std::optional<double> seconds_per_step() const;
    std::optional<double> seconds_left() const;

private:
    int64_t total_;
    int64_t done_ = 0;
    double decay_;
    double sum_ = 0.0;
    double weight_ = 0.0;
};

}  // namespace fp8flow::report
