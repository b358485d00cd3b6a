// SPDX-License-Identifier: MIT
// Step lines and the estimate of the time left.
#include "model/report/progress.h"

#include "kernels/core/error.h"
#include "model/report/table.h"

#include <cmath>
#include <ctime>

namespace fp8flow::report {

std::string format_timestamp(std::chrono::system_clock::time_point time) {
    const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
    std::tm parts{};
    ::localtime_r(&seconds, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
    return text;
}

std::string format_step_line(const StepLine& line) {
    std::string text = fmt::format(" iteration {:>{}}/{}", line.iteration,
                                   std::to_string(line.train_iters).size(), line.train_iters);
    const auto field = [&text](const std::string& name, const std::string& value) {
        text += " | " + name + (name.empty() ? "" : " ") + value;
    };
    if (!line.losses.empty()) field(line.losses.front().first, format_fixed(line.losses.front().second, 4));
    if (line.grad_norm) field("grad norm", format_fixed(*line.grad_norm, 3));
    if (line.learning_rate) field("lr", format_scientific(*line.learning_rate, 2));
    if (line.elapsed_ms) field("", format_duration(*line.elapsed_ms * 1e-3));
    if (line.tokens_per_second && line.tflops_per_gpu)
        field("", fmt::format("{} tok/s, {:.3g} TFLOP/s per GPU", format_si(*line.tokens_per_second),
                              *line.tflops_per_gpu));
    if (line.load) field("load", format_fixed(*line.load, 2));
    if (line.dead_experts > 0) field("dead", std::to_string(line.dead_experts));
    if (line.eta_seconds) field("ETA", format_clock(*line.eta_seconds));
    return text;
}

std::string format_megatron_line(const StepLine& line) {
    std::string text = fmt::format(" [{}] iteration {:>8}/{:>8}", format_timestamp(line.time), line.iteration,
                                   line.train_iters);
    const auto field = [&text](const std::string& name, const std::string& value) {
        text += " | " + name + ": " + value;
    };
    field("consumed samples", fmt::format("{:>12}", line.consumed_samples));
    if (line.elapsed_ms) field("elapsed time per iteration (ms)", format_fixed(*line.elapsed_ms, 1));
    if (line.tflops_per_gpu) {
        // On a CPU the number would read 0.0: small values keep three significant digits.
        const double value = *line.tflops_per_gpu;
        field("throughput per GPU (TFLOP/s/GPU)",
              value > 0.0 && value < 1.0 ? fmt::format("{:.3g}", value) : format_fixed(value, 1));
    }
    if (line.tokens_per_second)
        field("token throughput per GPU (tokens/s/GPU)", format_fixed(*line.tokens_per_second, 1));
    if (line.learning_rate) field("learning rate", format_scientific(*line.learning_rate, 6));
    if (line.global_batch_size) field("global batch size", fmt::format("{:>5}", *line.global_batch_size));
    for (const auto& [name, value] : line.losses) field(name, format_scientific(value, 6));
    if (line.grad_norm) field("grad norm", format_fixed(*line.grad_norm, 3));
    if (line.skipped_iterations)
        field("number of skipped iterations", fmt::format("{:>3}", *line.skipped_iterations));
    if (line.nan_iterations) field("number of nan iterations", fmt::format("{:>3}", *line.nan_iterations));
    if (line.load) field("load max/mean", format_fixed(*line.load, 2));
    if (line.dead_experts > 0) field("dead experts", std::to_string(line.dead_experts));
    if (line.redone > 0) field("redone", std::to_string(line.redone));
    if (line.eta_seconds) field("ETA", format_clock(*line.eta_seconds));
    return text + " |";
}

EtaEstimator::EtaEstimator(int64_t total_steps, double window)
    : total_(total_steps), decay_(window > 1.0 ? 1.0 - 1.0 / window : 0.0) {}

void EtaEstimator::step_done(double seconds) {
    ++done_;
    if (done_ == 2) sum_ = weight_ = 0.0;
    sum_ = decay_ * sum_ + (1.0 - decay_) * seconds;
    weight_ = decay_ * weight_ + (1.0 - decay_);
}

std::optional<double> EtaEstimator::seconds_per_step() const {
    if (weight_ <= 0.0) return std::nullopt;
    return sum_ / weight_;
}

std::optional<double> EtaEstimator::seconds_left() const {
    const std::optional<double> step = seconds_per_step();
    if (!step) return std::nullopt;
    return *step * static_cast<double>(steps_left());
}

}  // namespace fp8flow::report
