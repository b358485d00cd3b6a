// SPDX-License-Identifier: MIT
// The output of `bench`: JSON in the schema of docs/results, tables.
#pragma once

#include "model/base/provenance.h"
#include "model/bench/runner.h"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace fp8flow::bench {

// provenance: where and how rows were measured, the same for all of them. "date" is its day alone.
nlohmann::json to_json(const Row& row, const Provenance& provenance);

// One table per operation, in order of first appearance; then fused forms next to the two passes that they
// replace.
std::string tables(const std::vector<Row>& rows);

}  // namespace fp8flow::bench
