// SPDX-License-Identifier: MIT
// Predictions beside what profiles measured: every arm of every profile, at the clock that it states. All
// count but those that gave the calibration, those of programs before it, and what the formulas say that they
// leave out.
#pragma once

#include "model/predict/gpu.h"
#include "model/predict/profile_record.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::predict {

struct CheckRow {
    std::string file, arm, commit, recipe;
    int64_t ranks = 1;
    double clock = 0;                      // Hz
    double layer = 0, layer_measured = 0;  // seconds; 0: not compared
    double step = 0, step_measured = 0;
    std::string apart;        // why it is listed apart and counts in no mean; empty: it counts
    bool other_model = true;  // than those that gave the calibration

    double layer_error() const { return layer_measured > 0 ? layer / layer_measured - 1 : 0; }
    double step_error() const { return step_measured > 0 ? step / step_measured - 1 : 0; }
};

struct Check {
    std::vector<CheckRow> rows;
    std::vector<std::string> skipped;          // profiles of other devices, recipes without formulas
    CheckSummary summary;                      // of the rows that count
    std::optional<CheckSummary> other_models;  // of those whose model gave no calibration
};

// Files, or folders whose profiles are all read. Throws Error(usage) where nothing can be compared.
Check check_profiles(const std::vector<std::string>& paths, const Gpu& gpu);

std::string check_text(const Check& check, const Gpu& gpu);
std::string check_json(const Check& check, const Gpu& gpu);

}  // namespace fp8flow::predict
