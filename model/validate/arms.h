// SPDX-License-Identifier: MIT
// The runs that `validate` and `profile` compare: the recipes, with --ablate the flow with one optimisation
// off at a time, and validate's control arm.
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
    std::map<std::string, std::string> keys = {};  // with other values than the first arm's; of make_arms
};

inline constexpr const char* kControlArm = "bf16 control";

// flow_switches: fp8_flow with one optimisation off at a time. schedules: every recipe serial, with work in
// parallel (ScheduleSpec), and as a graph. Parallel work includes the gradient reduction if there are several
// ranks, and interleaved micro-batches if a step has several. state_dtypes: every recipe with FP32 gradients
// and moments, with BF16 gradients, and with all of them in BF16.
enum class Ablation { none, flow_switches, schedules, state_dtypes };

// One arm per recipe, in this order, then the configuration's own flow, or without one all that plugins have
// registered, then those of the ablation. Throws Error(usage) if two arms would differ in more than the
// recipe and its options.
std::vector<Arm> recipe_arms(const Config& config, const std::vector<Recipe>& recipes, Ablation ablation,
                             int ranks);
// Those of validate: the baseline first, the control arm last. `own`: "NAME:key=value,key=value" of --arm, or
// "NAME@BASE:..." compared with arm BASE. Where there are some, they take the place of validate.recipes,
// unless the user has set that key too.
std::vector<Arm> make_arms(const Config& config, Ablation ablation, int ranks,
                           const std::vector<std::string>& own = {});

std::vector<Config> configs_of(const std::vector<Arm>& arms);

}  // namespace fp8flow::validate
