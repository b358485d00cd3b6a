// SPDX-License-Identifier: MIT
// The values of a step and their names.
#include "model/report/step_values.h"

#include "model/report/records.h"
#include "model/report/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>

namespace fp8flow::report {

namespace {

using nlohmann::json;

template <int kDecimals> std::string fixed(double value) { return format_fixed(value, kDecimals); }
template <int kWidth> std::string whole(double value) { return fmt::format("{:>{}.0f}", value, kWidth); }
std::string scientific(double value) { return format_scientific(value, 6); }
std::string milliseconds_of(double seconds) { return format_fixed(seconds * 1e3, 1); }
// On a CPU the number would read 0.0: small values keep three significant digits.
std::string teraflops(double value) {
    return value > 0.0 && value < 1.0 ? fmt::format("{:.3g}", value) : format_fixed(value, 1);
}

// In the order of Megatron-LM's line.
constexpr std::array kFields = {
    StepField{"seconds", "elapsed time per iteration (ms)", milliseconds_of, "iteration-time"},
    StepField{"tflops_per_gpu", "throughput per GPU (TFLOP/s/GPU)", teraflops, "throughput"},
    StepField{"tokens_per_second_per_gpu", "token throughput per GPU (tokens/s/GPU)", fixed<1>},
    StepField{"learning_rate", "learning rate", scientific, "learning-rate"},
    StepField{"global_batch_size", "global batch size", whole<5>, "batch-size"},
    StepField{"lm_loss", "lm loss", scientific, "lm loss"},
    StepField{"load_balancing_loss", "load_balancing_loss", scientific, "load_balancing_loss", true},
    StepField{"seq_load_balancing_loss", "seq_load_balancing_loss", scientific, "seq_load_balancing_loss",
              true},
    StepField{"global_load_balancing_loss", "global_load_balancing_loss", scientific,
              "global_load_balancing_loss", true},
    StepField{"z_loss", "z_loss", scientific, "z_loss", true},
    StepField{"grad_norm", "grad norm", fixed<3>, "grad-norm"},
    StepField{"skipped_iterations", "number of skipped iterations", whole<3>},
    StepField{"nan_iterations", "number of nan iterations", whole<3>},
    StepField{"load", "load max/mean", fixed<2>},
    StepField{"equal_choices_mean", "equal top-k choices", fixed<4>, "equal-top-k-choices"},
    StepField{"dead", "dead experts", whole<0>, nullptr, true},
    StepField{"redone", "redone", whole<0>, nullptr, true},
    StepField{"world_size", nullptr, nullptr, "world-size"},
    StepField{"allocated_bytes", nullptr, nullptr, "mem-max-allocated-bytes"}};

std::string short_line(const StepValues& values) {
    const auto number = [&](const char* name) { return values.find(name).value_or(0); };
    const int64_t all = values.others.at("train_iters");
    std::string text = fmt::format(
        " iteration {:>{}}/{} | lm loss {} | grad norm {} | lr {} | {} | {} tok/s, {:.3g} TFLOP/s per GPU",
        values.iteration(), std::to_string(all).size(), all, format_fixed(number("lm_loss"), 4),
        format_fixed(number("grad_norm"), 3), format_scientific(number("learning_rate"), 2),
        format_duration(number("seconds")), format_si(number("tokens_per_second_per_gpu")),
        number("tflops_per_gpu"));
    if (values.find("load")) text += " | load " + format_fixed(number("load"), 2);
    if (const auto equal = values.find("equal_choices_mean"))
        text += fmt::format(" | equal top-k {:.2f} %", *equal * 100);
    if (number("dead") > 0) text += fmt::format(" | dead {:.0f}", number("dead"));
    return text;
}

std::string megatron_line(const StepValues& values) {
    const std::time_t seconds = std::chrono::system_clock::to_time_t(values.time);
    std::tm local{};
    ::localtime_r(&seconds, &local);
    std::array<char, 32> time{};
    std::strftime(time.data(), time.size(), "%Y-%m-%d %H:%M:%S", &local);
    std::string text = fmt::format(" [{}] iteration {:>8}/{:>8} | consumed samples: {:>12}", time.data(),
                                   values.iteration(), values.others.at("train_iters").get<int64_t>(),
                                   values.others.at("consumed_samples").get<int64_t>());
    for (const StepField& field : kFields)
        if (const auto value = shown(field, values); value && field.megatron != nullptr)
            text += fmt::format(" | {}: {}", field.megatron, field.text(*value));
    return text;
}

}  // namespace

std::span<const StepField> step_fields() { return kFields; }

std::optional<double> StepValues::find(const char* name) const {
    const json& in = record.contains(name) ? record : others;
    const auto at = in.find(name);
    return at != in.end() && at->is_number() ? std::optional(at->get<double>()) : std::nullopt;
}

std::optional<double> shown(const StepField& field, const StepValues& values) {
    const std::optional<double> value = values.find(field.name);
    return value && field.only_above_zero && *value <= 0 ? std::nullopt : value;
}

StepValues values_of(const Config& config, double flops_per_token, const StepResult& result, int world_size,
                     int64_t allocated_bytes) {
    const double tokens = f64(result.tokens) / result.seconds;
    const double tflops = tokens * flops_per_token * 1e-12;
    StepValues values;
    values.record = {{"type", "step"},
                     {"iteration", result.step + 1},
                     {"lm_loss", result.lm_loss},
                     {"load_balancing_loss", 0.0},
                     {"load_balancing_loss_by_layer", json::array()},
                     {"z_loss", 0.0},
                     {"z_loss_by_layer", json::array()},
                     {"grad_norm", result.grad_norm},
                     {"learning_rate", result.learning_rate},
                     {"seconds", result.seconds},
                     {"tokens", result.tokens},
                     {"tokens_per_second", tokens},
                     {"tokens_per_second_per_gpu", tokens / world_size},
                     {"tflops", tflops},
                     {"tflops_per_gpu", tflops / world_size},
                     {"wire_bytes_routing", result.wire.routing},
                     {"wire_bytes_dispatch", result.wire.dispatch},
                     {"wire_bytes_combine", result.wire.combine},
                     {"casts", result.casts},
                     {"activation_bytes", result.peak_bytes},
                     {"redone", result.redone},
                     {"redo_seconds", result.redo_seconds}};
    json& record = values.record;
    for (const RouterLoss& loss : result.router_losses) {
        record[loss.name] = loss.mean();
        record[loss.name + "_by_layer"] = loss.by_layer;
    }
    record.update(flat({{"stage_seconds", result.stage_seconds}}));
    if (result.wire.between_hosts > 0) record["wire_bytes_between_hosts"] = result.wire.between_hosts;
    if (!result.skipped.empty()) record["skipped"] = result.skipped;
    const bool finite = std::isfinite(result.lm_loss) && std::isfinite(result.grad_norm);
    values.others = {{"train_iters", config.training.train_iters},
                     {"consumed_samples", (result.batch + 1) * config.training.global_batch_size},
                     {"global_batch_size", config.training.global_batch_size},
                     {"skipped_iterations", result.skipped.empty() ? 0 : 1},
                     {"nan_iterations", finite ? 0 : 1},
                     {"dead", 0},
                     {"world_size", world_size},
                     {"allocated_bytes", allocated_bytes}};
    const bool logged = (result.step + 1) % config.output.log_interval == 0;
    double worst = 0, equal = 0;
    int64_t dead = 0;
    for (const LayerLoad& load : result.load) {
        record["moe_layers"].push_back(load.layer);
        record["load_max"].push_back(load.max);
        record["load_min"].push_back(load.min);
        record["load_cv"].push_back(load.cv);
        record["dead_experts"].push_back(load.dead_experts);
        if (logged) record["tokens_per_expert"].push_back(load.tokens);
        if (load.equal_choices) {
            record["equal_choices"].push_back(*load.equal_choices);
            equal += *load.equal_choices / f64(result.load.size());
            values.others["equal_choices_mean"] = equal;
        }
        values.others["load"] = worst = std::max(worst, load.max);
        values.others["dead"] = dead += load.dead_experts;
    }
    return values;
}

std::string step_line(const StepValues& values, std::optional<double> eta_seconds, Detail detail) {
    const bool verbose = detail == Detail::verbose;
    std::string text = verbose ? megatron_line(values) : short_line(values);
    if (eta_seconds) text += fmt::format(" | ETA{} {}", verbose ? ":" : "", format_clock(*eta_seconds));
    return text + (verbose ? " |" : "");
}

}  // namespace fp8flow::report
