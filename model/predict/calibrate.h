// SPDX-License-Identifier: MIT
// From measured stages to shares of a datasheet's rates.
#pragma once

#include "model/predict/gpu.h"
#include "model/predict/profile_record.h"

#include <optional>
#include <string>

namespace fp8flow::predict {

// What one launch costs where no profile of a small model says it.
inline constexpr double kLaunchSeconds = 5e-6;

struct CalibrationSources {
    const ProfileRecord* shares = nullptr;    // of large layers: every recipe's stages
    const ProfileRecord* launches = nullptr;  // of a small model with attention; absent: launch_seconds
    double launch_seconds = kLaunchSeconds;   // where `launches` is absent
    // That ranks wait for each other in a dispatch, where `shares` is of one GPU, or of two: half of the rows
    // stay there, and waiting cannot be told from their passes over memory. 0: a launch; what two say.
    double exchange_seconds = 0;
    double late_share = 0;               // likewise
    std::string bench_text, bench_name;  // of `bench --suite model`: core attention; empty: none
};

// One share for each stage, from arms whose name is a recipe's. Throws Error(usage) where there is none, or
// where the profile states no clock.
Calibration calibrate(const CalibrationSources& sources, const Datasheet& sheet);

// calibration.json of a profile.json; absent where the device is no kind of configs/gpus, states no clock, or
// ran no recipe that predictions know. A launch costs what it costs on the kind that ships.
std::optional<std::string> calibration_of_profile(const std::string& profile_json);

}  // namespace fp8flow::predict
