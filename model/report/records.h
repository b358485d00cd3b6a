// SPDX-License-Identifier: MIT
// The records of metrics.jsonl: flat names, a `type` in each, and reading those of an earlier run, which a
// resumed run continues.
#pragma once

#include <nlohmann/json.hpp>

#include <iosfwd>
#include <string>
#include <vector>

namespace fp8flow::report {

// `record` with one level of names of letters, digits and '_': {"wire bytes": {"fc2 dgrad": 1}} becomes
// {"wire_bytes_fc2_dgrad": 1}.
nlohmann::json flat(const nlohmann::json& record);

// A record as it is written today. Those of version 0.x had no `type`, names with spaces and values in
// levels; docs/usage/train.md has the names of both.
nlohmann::json record_of_today(const nlohmann::json& record);

// The records of `lines` in today's form, up to iteration `steps`. Lines are left out if they are damaged,
// longer than 1 MiB, nested deeply, out of order, or repeat an iteration.
std::vector<nlohmann::json> parse_records(std::istream& lines, int64_t steps);
// The iterations up to `steps` without the record of a step, "7, 9-12"; empty: none. A run that branched off
// another one begins with a record of type `run` that names its first iteration.
std::string missing_iterations(const std::vector<nlohmann::json>& records, int64_t steps);

// A warning up to which iteration the router's losses are those of an earlier version; empty: none is.
std::string note_of_old_losses(const std::vector<nlohmann::json>& records);

}  // namespace fp8flow::report
