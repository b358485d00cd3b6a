// SPDX-License-Identifier: MIT
// A plan as text and as JSON.
#pragma once

#include "model/base/provenance.h"
#include "model/plan/plan.h"

#include <nlohmann/json_fwd.hpp>

#include <string>

namespace fp8flow::report {

// "sequences of 4096 tokens (model.seq_length), experts evenly loaded"; says so if the length is the default.
std::string assumptions_text(const Config& config);
// `prediction` comes before the tables.
std::string plan_text(const Config& config, const plan::RunPlan& plan, const std::string& prediction = "");
nlohmann::ordered_json plan_json(const Config& config, const plan::RunPlan& plan,
                                 const Provenance& provenance);

}  // namespace fp8flow::report
