// SPDX-License-Identifier: MIT
// From measured stages to shares of a datasheet's rates.
#pragma once

#include "model/predict/gpu.h"
#include "model/predict/profile_record.h"

#include <string>

namespace fp8flow::predict {

struct CalibrationSources {
    const ProfileRecord* shares = nullptr;    // of large layers: every recipe's stages
    const ProfileRecord* launches = nullptr;  // of a small model with attention; absent: kLaunchSeconds
    std::string bench_text, bench_name;       // of `bench --suite model`: core attention; empty: none
};

// What one launch costs where no profile of a small model says it.
inline constexpr double kLaunchSeconds = 5e-6;

// One share for each stage, from arms whose name is a recipe's. Throws Error(usage) where there is none, or
// where the profile states no clock.
Calibration calibrate(const CalibrationSources& sources, const Datasheet& sheet);

}  // namespace fp8flow::predict
