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

// One row per arm, the baseline first: losses, differences with 95 % intervals, largest smoothed difference,
// milliseconds per step, verdict. The first row are the headers.
using Cells = std::vector<std::vector<std::string>>;
Cells outcome_cells(const validate::Outcomes& outcomes, const Config& config);
std::string outcome_table(const Cells& cells);
// What the columns are, in the line above the table; below it where the intervals come from, and which
// overlap that of the control arm.
std::string table_heading(const validate::Outcomes& outcomes, const Config& config);
std::string noise_text(const validate::Outcomes& outcomes);
std::string control_text(const validate::Outcomes& outcomes);
// The arm that differs most: "fp8_flow +0.213 ± 0.024 % from the loss of bf16 over 3 seeds, limit 0.25 %"
std::string answer_text(const validate::Outcomes& outcomes, const Config& config);

// validate.json without its provenance.
nlohmann::json validate_json(const validate::Outcomes& outcomes, const std::vector<validate::Arm>& arms,
                             const Config& config);

}  // namespace fp8flow::report
