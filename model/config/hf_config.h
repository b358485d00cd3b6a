// SPDX-License-Identifier: MIT
// A Hugging Face config.json as settings under our keys. Models that need operations we do not have are
// refused by name, with the reason, and so are options of known models that change what a layer computes.
// Read next: hf_names.h.
#pragma once

#include "model/config/config.h"

#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

// What `config.json` of deepseek_v3, qwen3_moe or mixtral says, as settings of the sections model and
// moe. Attention of deepseek_v3 (MLA) is not implemented: its settings say attention: false, which is
// enough for its MoE layers. `path`: the file, or a folder with config.json. Throws Error(usage) with a line
// per problem.
std::vector<ConfigSetting> read_hf_config(const std::string& path);
std::vector<ConfigSetting> parse_hf_config(std::string_view text, const std::string& file);

// Throws Error(usage) if a model type is not one of ours: with the reason where we know it.
void require_known_model_type(const std::string& model_type, const std::string& file);

}  // namespace fp8flow
