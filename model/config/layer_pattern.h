// SPDX-License-Identifier: MIT
// Which layers are MoE: Megatron's moe_layer_freq in its three forms, read without a Python interpreter.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace fp8flow {

constexpr int64_t kMaxLayers = 4096;

// `N` (layers 0, N, 2N, ... are MoE), `[0,1,1]`, or sums of repeated lists such as `([0]*3+[1]*58)`. Returns
// one entry per layer, 1 for MoE and 0 for dense FFN. A list may have a length other than num_layers: the
// caller compares. Nothing is returned for text that is none of the forms, for entries other than 0 and 1, or
// past kMaxLayers entries.
std::optional<std::vector<int>> expand_layer_pattern(std::string_view pattern, int64_t num_layers);

}  // namespace fp8flow
