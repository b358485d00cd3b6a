// SPDX-License-Identifier: MIT
// The records of metrics.jsonl: flat names, a `type` in each, and reading those of an earlier run, which a
// resumed run continues.
#pragma once

#include <nlohmann/json.hpp>

#include <iosfwd>
#include <string>
#include <vector>

namespace fp8flow::report {

inline constexpr const char* kMetricsFile = "metrics.jsonl";
inline constexpr const char* kTensorStatsFile = "tensor_stats.jsonl";

// `record` with one level of names of letters, digits and '_': {"wire bytes": {"fc2 dgrad": 1}} becomes
// {"wire_bytes_fc2_dgrad": 1}.
nlohmann::json flat(const nlohmann::json& record);

// The records of `lines` up to iteration `steps`. Lines are left out if they are damaged, without a type,
// nested deeply, or out of order.
std::vector<nlohmann::json> parse_records(std::istream& lines, int64_t steps);
// Those of a file; none where it is absent or for 0 steps. Throws Error(output) if it is no regular file.
std::vector<nlohmann::json> read_records(const std::string& path, int64_t steps);

// How many iterations up to `steps` have no record of a step. A run that branched off another one begins with
// a record of type `run` that names its first iteration.
int64_t missing_iterations(const std::vector<nlohmann::json>& records, int64_t steps);

}  // namespace fp8flow::report
