// SPDX-License-Identifier: MIT
// The choice of the next token from logits: greedy, or a draw under temperature, top-k and top-p.
#pragma once

#include <cstdint>
#include <span>

namespace fp8flow {

struct Sampling {
    double temperature = 1;  // 0: the largest logit, the first of several
    int64_t top_k = 0;       // 0: all
    double top_p = 1;        // the most probable tokens that together have this probability
    uint64_t seed = 1;
};

// A function of its arguments alone; `position` numbers the draws of a seed. Filters apply in the order
// temperature, top-k, top-p, as in transformers.
int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t position);

}  // namespace fp8flow
