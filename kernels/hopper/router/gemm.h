// SPDX-License-Identifier: MIT
// The router's three GEMMs of BF16 rows on tensor cores: logits, dx and dweight. logits.cu launches them if
// types and alignment allow: wgmma for many experts (gemm_wgmma.cu), mma.sync for everything else
// (gemm_mma.cu).
#pragma once

#include "kernels/hopper/device/view.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/ops/router.h"

namespace fp8flow::hopper::router {

constexpr int64_t kFewExperts = 32;  // up to so many the GEMMs are memory-bound

// logits[t, e] = sum over h of x[t, h] * weight[e, h]: split along h, then the splits added in ascending
// order.
struct LogitsGemm {
    const void* x;       // bf16 [tokens, hidden], 16-byte aligned, hidden a multiple of 8
    const void* weight;  // bf16 [experts, hidden], the same
    int64_t tokens, hidden, experts;
    float* logits;
};
void launch_logits(const LogitsGemm& job, const Launch& launch);
bool wgmma_supports_logits(const LogitsGemm& job);
int64_t logit_splits(int64_t hidden);
// sums [logit_splits, tokens, experts]: the splits before they are added.
void launch_wgmma_logits(const LogitsGemm& job, float* sums, const Launch& launch);

// The blocks of tokens that dweight is summed over: `count` blocks of `length` tokens; the last one may be
// shorter.
struct TokenBlocks {
    int64_t length = 0, count = 0;
};
TokenBlocks token_blocks(int64_t tokens, int64_t hidden, int64_t experts);

// dlogits, each element as the sum of two BF16 values: [tokens, 2, pitch], the larger parts of a token before
// its smaller ones, zeros past the experts. 16 of the 24 bits of a significand remain.
struct SplitGradient {
    uint16_t* data;  // 16-byte aligned
    int64_t tokens, experts;
    TokenBlocks blocks{};
    int64_t *block_tokens = nullptr, *block_offsets = nullptr;  // device: [count], [count + 1]
    static int64_t pitch_of(int64_t experts) { return (experts + 7) / 8 * 8; }
    static int64_t elements(int64_t tokens, int64_t experts) { return 2 * tokens * pitch_of(experts); }
};
// Writes data, and block_tokens and block_offsets.
void launch_split_gradient(const float* dlogits, const SplitGradient& parts, const Launch& launch);

// dweight[e, h] (+)= sum over t of dlogits[t, e] * x[t, h]: blocks of tokens, then the block sums in
// ascending order.
struct WeightGradient {
    SplitGradient dlogits;
    const void* x;  // bf16 [tokens, hidden], 16-byte aligned, hidden a multiple of 8
    int64_t hidden;
    Gradient mode;
    float* dweight;
};
// sums [ceil(tokens / op::kRouterBlock), experts, hidden]: one sum per block, before they are added; null:
// dweight.
void launch_weight_gradient(const WeightGradient& job, float* sums, const Launch& launch);
bool wgmma_supports_weight_gradient(const WeightGradient& job);
// Scratch for the sums of `blocks` blocks: [blocks, 2, pitch, hidden], 16-byte aligned. More blocks are
// computed in rounds.
struct WeightSums {
    float* data;
    int64_t blocks;
};
void launch_wgmma_weight_gradient(const WeightGradient& job, const WeightSums& sums, const Launch& launch);

// dx[t, h] = bf16(sum over e of dlogits[t, e] * weight[e, h], + dx_in[t, h]).
struct InputGradient {
    SplitGradient dlogits;
    const void* weight;  // bf16 [experts, hidden], 16-byte aligned, hidden a multiple of 8
    const void* dx_in;   // bf16, the same alignment, or null; may be dx
    void* dx;            // bf16, the same alignment
    int64_t hidden;
};
constexpr int64_t kMaxInputExperts = 256;  // both parts of 128 tokens fit in shared memory
void launch_input_gradient(const InputGradient& job, const Launch& launch);
bool wgmma_supports_input_gradient(const InputGradient& job);
void launch_wgmma_input_gradient(const InputGradient& job, const Launch& launch);

}  // namespace fp8flow::hopper::router
