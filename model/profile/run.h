// SPDX-License-Identifier: MIT
// One recipe under the profiler: warm-up, steps with the stage timer, steps without it. Read next: profile.h.
#pragma once

#include "model/profile/profile.h"
#include "model/train/trainer.h"
#include "model/validate/arms.h"

#include <functional>
#include <memory>

namespace fp8flow::profile {

// The configuration that is run: routing forced as profile.routing says, nothing evaluated; that many steps,
// if said.
Config profiled_config(const Config& config, std::optional<int64_t> measured_steps);
// Steps that one recipe takes.
int64_t profiled_steps(const ProfileSpec& spec);

// Joules that this rank's device has used so far; nothing where it does not count.
using EnergyCounter = std::function<std::optional<double>()>;
// Collective. on_step(phase, step, of, seconds) after every step.
using OnStep = std::function<void(const char* phase, int64_t step, int64_t of, double seconds)>;
ArmProfile profile_arm(const validate::Arm& arm, ProcessGroup& world, const BackendChoice& backend,
                       const std::shared_ptr<const data::TokenSource>& data, MachineCeilings& ceilings,
                       const EnergyCounter& energy, const OnStep& on_step);

}  // namespace fp8flow::profile
