// SPDX-License-Identifier: MIT
// The values of one step, collected once. One table of fields gives the step line of the terminal (short, or
// with Megatron-LM's names, order and separators, so that scripts which grep its logs work on ours) and
// TensorBoard's scalars; the record goes to metrics.jsonl (docs/usage/train.md). Read next: tensorboard.h.
#pragma once

#include "model/report/log.h"
#include "model/train/trainer.h"

#include <nlohmann/json.hpp>

#include <chrono>
#include <optional>
#include <span>
#include <string>

namespace fp8flow::report {

struct StepValues {
    std::chrono::system_clock::time_point time = std::chrono::system_clock::now();
    nlohmann::json record;  // of metrics.jsonl
    nlohmann::json others;  // numbers that are only printed, or only TensorBoard's

    int64_t iteration() const { return record.at("iteration"); }
    // A number of the record or of the others.
    std::optional<double> find(const char* name) const;
};
// `flops_per_token`: forward and backward (plan::count_flops). `allocated_bytes`: memory of rank 0 at the
// peak of the step.
StepValues values_of(const Config& config, double flops_per_token, const StepResult& result, int world_size,
                     int64_t allocated_bytes = 0);

struct StepField {
    const char* name;              // in StepValues
    const char* megatron;          // in Megatron-LM's step line; null: not there
    std::string (*text)(double);   // its value there
    const char* tag = nullptr;     // TensorBoard's, as Megatron-LM names it; null: not there
    bool only_above_zero = false;  // 0 means that there is none
};
std::span<const StepField> step_fields();
// The value, if the field shows it.
std::optional<double> shown(const StepField& field, const StepValues& values);

// " iteration  10/100 | lm loss 4.1234 | grad norm 1.250 | lr 5.00E-05 | 812 ms | 2.52 k tok/s, ..." in at
// most 160 columns; verbose: Megatron-LM's line.
std::string step_line(const StepValues& values, std::optional<double> eta_seconds, Detail detail);

}  // namespace fp8flow::report
