// SPDX-License-Identifier: MIT
// The router's three products of BF16 rows on tensor cores: logits, dx and dweight. What logits.cu launches
// where types and alignment allow it: many experts on warpgroup instructions (gemm/sm90/tensor_maps.cu), few
// on mma.sync, and whatever those do not take (gemm/fallback/mma.cu).
#pragma once

#include "kernels/hopper/device/view.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/ops/router.h"

namespace fp8flow::hopper {

constexpr int64_t kNarrowExperts = 32;  // up to here the bytes count, not the products

// logits[t, e] = the sum over h of x[t, h] * weight[e, h]: parts of the columns, then the parts in ascending
// order.
struct LogitProduct {
    const void* x;       // bf16 [tokens, hidden], 16-byte aligned, hidden a multiple of 8
    const void* weight;  // bf16 [experts, hidden], the same
    int64_t tokens, hidden, experts;
    float* logits;
};
void launch_logits(const LogitProduct& job, const Launch& launch);
bool wgmma_takes_logits(const LogitProduct& job);
int64_t logit_parts(int64_t hidden);
// sums [logit_parts, tokens, experts]: the parts, not added up.
void launch_wgmma_logits(const LogitProduct& job, float* sums, const Launch& launch);

// The blocks of tokens that dweight is added up from: `count` blocks of `length` tokens, the last one the
// rest.
struct TokenBlocks {
    int64_t length = 0, count = 0;
};
TokenBlocks token_blocks(int64_t tokens, int64_t hidden, int64_t experts);

// dlogits as the sum of two BF16 numbers an element, a token's larger parts before its smaller ones: [tokens,
// 2, pitch]; zeros past the experts. 16 of the 24 bits of a significand stay.
struct GradientParts {
    uint16_t* data;  // 16-byte aligned
    int64_t tokens, experts;
    TokenBlocks blocks{};
    int64_t *block_tokens = nullptr, *block_offsets = nullptr;  // of the device: [count], [count + 1]
    static int64_t pitch_of(int64_t experts) { return (experts + 7) / 8 * 8; }
    static int64_t elements(int64_t tokens, int64_t experts) { return 2 * tokens * pitch_of(experts); }
};
// Writes data, and block_tokens and block_offsets.
void launch_gradient_parts(const float* dlogits, const GradientParts& parts, const Launch& launch);

// dweight[e, h] (+)= the sum over t of dlogits[t, e] * x[t, h]: blocks of tokens, then the block sums in
// ascending order.
struct WeightGradient {
    GradientParts dlogits;
    const void* x;  // bf16 [tokens, hidden], 16-byte aligned, hidden a multiple of 8
    int64_t hidden;
    Gradient mode;
    float* dweight;
};
void launch_weight_gradient(const WeightGradient& job, const Launch& launch);
bool wgmma_takes_weight_gradient(const WeightGradient& job);
// Scratch for the products of `blocks` blocks: [blocks, 2, pitch, hidden], 16-byte aligned. More blocks are
// further rounds.
struct WeightSums {
    float* data;
    int64_t blocks;
};
void launch_wgmma_weight_gradient(const WeightGradient& job, const WeightSums& sums, const Launch& launch);

// dx[t, h] = bf16(the sum over e of dlogits[t, e] * weight[e, h], + dx_in[t, h]).
struct InputGradient {
    GradientParts dlogits;
    const void* weight;  // bf16 [experts, hidden], 16-byte aligned, hidden a multiple of 8
    const void* dx_in;   // bf16, the same alignment, or null; may be dx
    void* dx;            // bf16, the same alignment
    int64_t hidden;
};
constexpr int64_t kMostInputExperts = 256;  // both parts of 128 tokens stand in shared memory
void launch_input_gradient(const InputGradient& job, const Launch& launch);
bool wgmma_takes_input_gradient(const InputGradient& job);
void launch_wgmma_input_gradient(const InputGradient& job, const Launch& launch);

}  // namespace fp8flow::hopper
