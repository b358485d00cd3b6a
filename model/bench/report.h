// SPDX-License-Identifier: MIT
// The output of `bench`: JSON in the schema of docs/results, tables, verdicts by the targets,
// a picture.
#pragma once

#include "model/base/provenance.h"
#include "model/bench/peers.h"
#include "model/bench/runner.h"
#include "model/report/table.h"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace fp8flow::bench {

// provenance: where and how rows were measured, the same for all of them. "date" is its day alone.
nlohmann::json to_json(const Row& row, const Provenance& provenance);

std::string day_of(const Provenance& provenance);  // "2026-11-20"

std::string microseconds(double seconds);  // "1.23", "12.3", "1234"

// min to p90. A figure of another run has no spread: it counts as exact.
report::Spread spread_of(const Timing& timing);
report::Spread spread_of_peer(const Row& row);

// The rows as CSV, one column for each of bench.json's values; and as one Markdown table.
std::string rows_csv(const nlohmann::json& rows);
std::string rows_markdown(const std::vector<Row>& rows);

// One table per operation, in order of first appearance; GEMMs that two backends computed are shown side by
// side.
std::string tables(const std::vector<Row>& rows);

// Adds the fastest peer measured at the row's shape; a peer that the row already has stays.
void add_peer(Row& row, const Peers& peers, const std::string& gpu, int64_t ranks);
// Compares each row with its target and with its peers on such a GPU; a row with fused=no is the baseline of
// the same row with fused=yes.
void judge(std::vector<Row>& rows);
// The row with fused=no of the same shape; null: none was measured.
const Row* baseline_of(const Row& row, const std::vector<Row>& rows);

// All rows in one table with targets, peers and launches; fused forms next to their baselines, with the
// memory of both; how many targets are met.
std::string suite_table(const std::vector<Row>& rows);
// One line for each kind of operation, one dot for each row: its share of the ceiling, and the target.
std::string suite_picture(const std::vector<Row>& rows, const Provenance& provenance);

}  // namespace fp8flow::bench
