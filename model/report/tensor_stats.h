// SPDX-License-Identifier: MIT
// What --tensor-stats found, as tables for people and as files: tensor_stats.json, a list of tensors summed
// over the run ("saturations": values that were clipped, "at maximum": all values of the largest magnitude),
// and transposed_stats.json, the transposed copies of every observed iteration.
#pragma once

#include "layers/tensor_stats.h"
#include "model/base/provenance.h"

#include <nlohmann/json.hpp>

#include <string>

namespace fp8flow::report {

std::string tensor_stats_table(const TensorStats& stats);
nlohmann::json tensor_stats_json(const TensorStats& stats, const Provenance& provenance);

// By tensor: over all weights and iterations, and the one with the largest share of the norm flushed.
std::string transpose_stats_table(const TensorStats& stats);
// {"iterations": [{"iteration", "transposed": [{"weight", "tensor", "values", "nonzero", "flushed",
// "flushed share" of nonzero values, "flushed norm share" of the squared norm, "nmse"}]}]}
nlohmann::json transpose_stats_json(const TensorStats& stats, const Provenance& provenance);

}  // namespace fp8flow::report
