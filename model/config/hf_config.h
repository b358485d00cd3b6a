// SPDX-License-Identifier: MIT
// A Hugging Face config.json as settings under our keys. Models that need operations we do not have are
// refused by name, with the reason, and so are options of known models that change what a layer computes.
// Read next: hf_families.h.
#pragma once

#include "model/config/config.h"

#include <string>
#include <string_view>

namespace fp8flow {

// What `config.json` says of the sections model and moe. Where the attention of a family (hf_families.h) is
// foreign, its settings say attention: false, which is enough for its MoE layers. `path`: the file, or a
// folder with config.json. Throws Error(usage) with a line per problem.
ImportedModel read_hf_config(const std::string& path);
ImportedModel parse_hf_config(std::string_view text, const std::string& file);

// Throws Error(usage) where layers of the imported model are foreign and the user has not said
// model.attention.
void require_own_layers(const Config& config);

}  // namespace fp8flow
