// SPDX-License-Identifier: MIT
// Our FP32 masters as a Hugging Face model: config.json, one safetensors file for each rank that holds
// experts, and an index. Files of an earlier export are replaced or removed.
#pragma once

#include "kernels/comm/process_group.h"
#include "model/base/output.h"
#include "model/weights/load.h"

#include <optional>
#include <string>

namespace fp8flow::weights {

struct ExportChoice {
    HfNames names;
    ExportFormat format = ExportFormat::bf16;
    std::string config_json;                // of the model; empty: no family describes it as a whole
    std::vector<std::string> sources = {};  // folders with the files to carry (kCarriedFiles)
};

// Writes what this rank holds; called by every rank of one expert-parallel group, which together hold
// everything. The index, and so the model, is there when all have written. Fused experts need one rank.
// Rank 0 returns the names of the files that it took over from choice.sources.
std::vector<std::string> export_weights(const OutputFolder& folder, const std::vector<WeightTarget>& targets,
                                        const WeightShapes& shapes, const ExportChoice& choice,
                                        ProcessGroup& expert_parallel, Device& device);

// What output.export_format asks for. Names and config.json are those of the family that was imported, or of
// the first whole one that computes what the configuration says. Without attention there are only the layers'
// names (deepseek_v3 and qwen3_moe agree on them) and no config.json. Throws Error(usage) if no family
// computes what a configuration with attention says. The model of --weights and that of --hf-config, where
// there are some, give special tokens and files.
std::optional<ExportChoice> export_plan(const Config& config, const std::string& hf_config);
HfNames export_names(const Config& config);
const HfFamily& export_family(const Config& config);
// `dense_width`: HfNames::dense_width
std::string hf_config_of(const Config& config, ExportFormat format, int64_t dense_width = 0);

}  // namespace fp8flow::weights
