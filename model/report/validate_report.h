// SPDX-License-Identifier: MIT
// What `validate` prints and writes of its outcomes: the tables, the statistic in validate.json, the answer.
#pragma once

#include "model/validate/outcome.h"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace fp8flow::report {

// "+0.213 ± 0.024 %" of `base`; without the half-width if it is unknown.
std::string percent_text(const validate::Difference& difference, double base);

// "miss: +0.51 ± 0.02 %, held out +0.49 ± 0.03 %, 620 ms per step"
std::string summary_text(const validate::Outcome& outcome, const Config& config);

// One row per arm, the baseline first: losses, differences with 95 % intervals, verdict.
std::string outcome_table(const validate::Outcomes& outcomes, const Config& config);
// What the columns are, in the line above the table; below it where the intervals come from, and which
// overlap that of the control arm.
std::string table_heading(const validate::Outcomes& outcomes, const Config& config);
std::string noise_text(const validate::Outcomes& outcomes);
std::string control_text(const validate::Outcomes& outcomes);
// The smoothed curves, casts, bytes sent and milliseconds per step, bytes saved.
std::string details_table(const validate::Outcomes& outcomes);
// "fp8_flow +0.213 ± 0.024 % from the loss of bf16 over 3 seeds, limit 0.25 %"
std::string answer_text(const validate::Outcomes& outcomes, const Config& config);

// validate.json without its provenance.
nlohmann::json validate_json(const validate::Outcomes& outcomes, const std::vector<validate::Arm>& arms,
                             const Config& config);

}  // namespace fp8flow::report
