// SPDX-License-Identifier: MIT
// Stochastic rounding of FP32 to BF16 with counters in place of state: any element's random bits can be made
// alone, so a step that is done again, another number of ranks and the other backend round alike. Source:
// Gupta et al. 2015; the mixer: Wellons 2018 (lowbias32).
#pragma once

#include "kernels/core/random.h"

namespace fp8flow {

// The key of one use (a gradient of a micro-batch, a moment) of a tensor; and what a step XORs into all of
// them. Two, so that a captured step can read its own from memory.
inline uint64_t rounding_key(uint64_t seed, uint64_t tensor, int64_t use) {
    const auto words = random_words(seed, tensor, static_cast<uint64_t>(use));
    return uint64_t{words[1]} << 32 | words[0];
}
inline int64_t rounding_step(uint64_t seed, int64_t step) {
    constexpr uint64_t kSteps = 0x9E3779B97F4A7C15ull;  // no tensor's
    return static_cast<int64_t>(rounding_key(seed, kSteps, step));
}

// Where the random bits of a BF16 tensor come from. first: the global index of its first row (weight
// gradients), or of its first element (moments). step: a word on the device, rounding_step(); null: 0.
struct StochasticRounding {
    uint64_t key = 0;
    int64_t first = 0;
    const int64_t* step = nullptr;

    FP8FLOW_HD uint64_t step_key() const {
        return step != nullptr ? key ^ static_cast<uint64_t>(*step) : key;
    }
};

FP8FLOW_HD uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}
// The counter of a row; the word of the columns 2 pair (its low half) and 2 pair + 1 (its high half).
FP8FLOW_HD uint32_t rounding_row(uint64_t key, int64_t row) {
    const uint64_t at = static_cast<uint64_t>(row) ^ key;
    return mix32(mix32(static_cast<uint32_t>(at)) + static_cast<uint32_t>(at >> 32));
}
FP8FLOW_HD uint32_t rounding_word(uint32_t row, uint32_t pair) { return mix32(row + pair * 0x9E3779B9u); }

// The 16 random bits of element (row, column).
FP8FLOW_HD uint32_t rounding_bits(uint32_t row, int64_t column) {
    const uint32_t word = rounding_word(row, static_cast<uint32_t>(column / 2));
    return column % 2 != 0 ? word >> 16 : word & 0xFFFFu;
}
// A tensor counted by element: rows of so many.
constexpr int64_t kRoundingRow = 8192;
FP8FLOW_HD uint32_t rounding_bits_of_element(uint64_t key, int64_t element) {
    return rounding_bits(rounding_row(key, element / kRoundingRow), element % kRoundingRow);
}

// The BF16 neighbour of x towards zero, or the other one with the probability of x's distance from it in
// 2^-16: 16 random bits are added below the bits that stay. What BF16 can hold stays; NaN and Inf as in
// to_bf16. A finite value above the largest of BF16 may become Inf, as it may in rounding to nearest.
FP8FLOW_HD Bf16 round_stochastically(float x, uint32_t bits) {
    const uint32_t value = float_bits(x);
    if (is_nan_bits(value)) return to_bf16(x);
    return {static_cast<uint16_t>((value + bits) >> 16)};
}

}  // namespace fp8flow
