// SPDX-License-Identifier: MIT
// Predictions next to measured profiles: every arm of every profile, at the clock that it states. A run is
// listed apart, and counts in no mean, if it gave the calibration, if its program is older than that, or if
// the formulas leave out a part of it.
#pragma once

#include "model/predict/profile_record.h"
#include "model/predict/time.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::predict {

struct CheckRow {
    std::string file, commit;
    int64_t ranks = 1;
    MeasuredArm arm;
    StepTime time;
    double layer_error = 0, step_error = 0;  // relative; 0 where nothing is compared
    bool layer_compared = true;
    std::string apart;        // why it counts in no mean; empty: it counts
    bool other_model = true;  // than those that gave the calibration
};

struct Check {
    std::vector<CheckRow> rows;        // those that count first
    std::vector<std::string> skipped;  // profiles of other devices, recipes without formulas
    CheckSummary summary;              // of the rows that count
    std::optional<CheckSummary> other_models;
};

// Files, or folders: then all profiles in them. Throws Error(usage) if nothing can be compared.
Check check_profiles(const std::vector<std::string>& paths, const Gpu& gpu);

std::string check_text(const Check& check, const Gpu& gpu);
// Next to each arm its stages as counted and as measured: scripts/calibrate.py makes shares from them.
std::string check_json(const Check& check, const Gpu& gpu);

}  // namespace fp8flow::predict
