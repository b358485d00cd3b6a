// SPDX-License-Identifier: MIT
// The runs that `validate` and `profile` compare: the recipes, with --ablate the flow with one optimisation
// off at a time, and validate's control arm.
#pragma once

#include "model/config/config.h"
#include "model/job/backend.h"

#include <string>
#include <vector>

namespace fp8flow::validate {

struct Arm {
    std::string name;
    Config config;
    Arithmetic arithmetic = Arithmetic::stated;
    std::string against = {};            // the arm that its loss is compared with; empty: the first
    std::vector<std::string> keys = {};  // "section.key: first arm | this arm", of make_arms
};

inline constexpr const char* kControlArm = "bf16 control";

// flow_switches: fp8_flow with one optimisation off at a time. schedules: every recipe serial, with work in
// parallel (ScheduleSpec), and as a graph. Parallel work includes the gradient reduction if there are several
// ranks, and interleaved micro-batches if a step has several. state_dtypes: every recipe with FP32 gradients
// and moments, with BF16 gradients, and with all of them in BF16.
enum class Ablation { none, flow_switches, schedules, state_dtypes };

// One arm per recipe, in this order, then the configuration's own flow, if it has one, then those of the
// ablation. Throws Error(usage) if two arms would differ in more than the recipe and its options.
std::vector<Arm> recipe_arms(const Config& config, const std::vector<Recipe>& recipes, Ablation ablation,
                             int ranks);
// Those of validate: the baseline first, the control arm last.
std::vector<Arm> make_arms(const Config& config, Ablation ablation, int ranks);

std::vector<Config> configs_of(const std::vector<Arm>& arms);

}  // namespace fp8flow::validate
