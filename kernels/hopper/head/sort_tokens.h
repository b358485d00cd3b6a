// SPDX-License-Identifier: MIT
// Tokens in the order of (id, position), for sums over the tokens of an id: the gradient of the embedding.
#pragma once

#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper::head {

struct SortTokens {
    const int32_t* ids;  // [tokens], any values
    int64_t tokens;
    int32_t* sorted_ids;  // out [tokens]
    int32_t* order;       // out [tokens]: the position of the i-th
    void* scratch;        // sort_tokens_scratch(tokens) bytes, 256-byte aligned
};
std::size_t sort_tokens_scratch(int64_t tokens);
void sort_tokens(const SortTokens& job, const Launch& launch);

}  // namespace fp8flow::hopper::head
