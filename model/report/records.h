// SPDX-License-Identifier: MIT
// metrics.jsonl of an earlier run, which a resumed run continues.
#pragma once

#include <nlohmann/json.hpp>

#include <iosfwd>
#include <vector>

namespace fp8flow::report {

// The records of `lines` up to iteration `steps`. Reading ends before the first line that is none: damaged,
// longer than 1 MiB, nested deeply, out of order, or one too many of its iteration.
std::vector<nlohmann::json> parse_records(std::istream& lines, int64_t steps);

}  // namespace fp8flow::report
