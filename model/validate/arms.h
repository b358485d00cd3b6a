// SPDX-License-Identifier: MIT
// The arms that `validate` and `profile` compare: the recipes, with --ablate also the flow with one
// optimisation off at a time, and the control arm of `validate`.
#pragma once

#include "model/config/config.h"
#include "model/job/backend.h"

#include <map>
#include <string>
#include <vector>

namespace fp8flow::validate {

struct Arm {
    std::string name;
    Config config;
    Arithmetic arithmetic = Arithmetic::stated;
    std::string against = {};                      // the arm that its loss is compared with; empty: the first
    bool moves_start = false;                      // its initial weights are one unit in the last place away
    std::map<std::string, std::string> keys = {};  // that differ from the first arm's; make_arms fills them
};

inline constexpr const char* kControlArm = "bf16 control";

// flow_switches: fp8_flow with one optimisation off at a time. schedules: every recipe serial, with work in
// parallel (ScheduleSpec), and as a graph. Parallel work includes the gradient reduction if there are several
// ranks, and interleaved micro-batches if a step has several. state_dtypes: every recipe with FP32 gradients
// and moments, with BF16 gradients, and with all of them in BF16.
enum class Ablation { none, flow_switches, schedules, state_dtypes };

// One arm per recipe, in this order, then the flow that the configuration names (if none: every flow of the
// plugins), then the arms of the ablation. Throws Error(usage) if two arms differ in more than the recipe and
// its options.
std::vector<Arm> recipe_arms(const Config& config, const std::vector<Recipe>& recipes, Ablation ablation,
                             int ranks);
// The arms of validate: the baseline first, the control arm last. `options`: the texts of --arm,
// "NAME:key=value,key=value", or "NAME@BASE:..." to compare it with arm BASE. They replace validate.recipes,
// unless the user has set that key too.
std::vector<Arm> make_arms(const Config& config, Ablation ablation, int ranks,
                           const std::vector<std::string>& options = {});

std::vector<Config> configs_of(const std::vector<Arm>& arms);

}  // namespace fp8flow::validate
