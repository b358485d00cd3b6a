// SPDX-License-Identifier: MIT
// What --tensor-stats found, as tables for people and as files: tensor_stats.jsonl, a line per tensor, layer
// and observed iteration; tensor_stats.json, a list of tensors summed over the run ("saturations": values
// that were clipped, "at maximum": all values of the largest magnitude); transposed_stats.json, the
// transposed copies of every observed iteration; and the picture over layers and iterations.
#pragma once

#include "layers/tensor_stats.h"
#include "model/base/provenance.h"

#include <nlohmann/json.hpp>

#include <array>
#include <string>
#include <vector>

namespace fp8flow::report {

std::string tensor_stats_table(const TensorStats& stats);
nlohmann::json tensor_stats_json(const TensorStats& stats, const Provenance& provenance);

// {"iterations": [{"iteration", "transposed": [{"weight", "tensor", "values", "nonzero", "flushed",
// "flushed share" of nonzero values, "flushed norm share" of the squared norm, "nmse"}]}]}
nlohmann::json transpose_stats_json(const TensorStats& stats, const Provenance& provenance);

// A line of tensor_stats.jsonl: {"type", "iteration", "layer", "tensor", "weight" of a transposed copy,
// "values", the measures, "first_exponent", "scale_exponents": [values with a scale of 2^first_exponent,
// ...]}.
nlohmann::json tensor_stats_record(const TensorStatsRow& row);
// Its numbers that are drawn.
inline constexpr std::array kTensorMeasures = {"nmse", "flushed_share", "clipped_share", "amax",
                                               "scale_exponent"};

// Of those lines, for the heat map of page.html: layers x tensors over iterations.
class TensorHistory {
public:
    void add(const nlohmann::json& record);
    bool empty() const { return records_.empty(); }
    // [{"iteration", "layer", "tensor", measures}]; of many iterations some, evenly, and the last.
    nlohmann::json heat() const;

private:
    std::vector<nlohmann::json> records_;  // iterations ascending
};

}  // namespace fp8flow::report
