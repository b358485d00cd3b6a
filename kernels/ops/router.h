// SPDX-License-Identifier: MIT
// The router: logits, top-k with Megatron's options, balancing losses, their gradients, load statistics.
// Sources: Megatron-LM's moe_utils and router; DeepSeek-V3 (aux-loss-free bias); ST-MoE (z-loss). Formulas:
// docs/numerics.md.
#pragma once

#include "kernels/core/scaled_tensor.h"

#include <algorithm>
#include <array>

namespace fp8flow::op {

enum class Score { softmax, sigmoid };

// logits[t, e] = sum_h bf16(x[t, h]) * bf16(w[e, h]) (f32 inputs are not rounded): blocks of 256 columns by
// fp32 fma in ascending h, then the block sums in ascending order. Where every factor is BF16, a backend may
// add as its tensor cores do (products exact, sums fp32) within parts of up to 4096 terms, cut by the number
// of terms alone, which fp32 additions then join in ascending order. The result then lies within 1e-5
// (norm-wise) of the exact sum (5e-5 where all terms have one sign and a part is longer than 2048: tensor
// cores truncate), and a token's logits depend on that token only.
constexpr int64_t kRouterBlock = 256, kRouterPart = 4096;
struct RouterLogits {
    TensorView x;       // [T, H]
    TensorView weight;  // [E, H] bf16 | f32
    TensorView logits;  // out [T, E] f32
};
// dx = dlogits W (fma, ascending e; then + dx_in, optional, in fp32 before the one rounding), dW (+)=
// dlogits^T x (blocks of 256 tokens by fma in ascending t, then the block sums in ascending order; accumulate
// adds the finished sum). Tensor cores as above. They may also take dlogits as two BF16 parts (16 bits) and
// join the sums of the parts at the end; accumulate may then add these sums one after the other. dW within
// 1e-5 (norm-wise) of the exact sum (5e-5 as above), dx within its rounding to BF16.
struct RouterLogitsBackward {
    TensorView dlogits;  // [T, E] f32
    TensorView x;
    TensorView weight;
    TensorView dx_in;  // [T, H], optional; may be dx
    Gradient dweight_mode = Gradient::overwrite;
    TensorView dx;       // out [T, H]
    TensorView dweight;  // out [E, H] f32
};

struct RouterOptions {
    Score score = Score::softmax;
    bool pre_softmax = false;  // softmax over E before the choice, no renormalisation
    bool normalise = true;     // sigmoid, K > 1: the chosen scores are divided by their sum
    int64_t num_groups = 0;    // 0: not group-limited
    int64_t group_topk = 0;
    float scaling_factor = 1.0f;
};

// Sums over a token's experts or over its choices go into 32 lanes (i % 32), each in ascending i; then the
// lanes are added to each other at distance 16, 8, 4, 2, 1. Whatever is normalised is multiplied by the
// rounded reciprocal of its sum.
//
// What balancing needs of a micro-batch. Its tokens lie in sets of set_tokens (sequences; 0: one set), the
// last one may be shorter. The plain choice is the K largest logits, without bias, groups or forced ids. Full
// scores are the softmax over E, or sigmoids normalised over E. Scores are added in ascending t over pieces
// of 2 tokens, then the pieces of a block of 32 in ascending order; a set begins with a new block.
constexpr int64_t kScorePiece = 2, kScoreBlock = 32;
struct RouterBalance {
    int64_t set_tokens = 0;
    TensorView counts;      // out [S, E] f32, optional: plain choices by set (exact integers)
    TensorView score_sums;  // out [B, E] f32, with counts: full scores of a block
    TensorView
        log_squares;  // out [B] f32, optional: sum (as over experts) of logsumexp(logits_t)^2 over a block
};
inline int64_t balance_sets(int64_t tokens, int64_t set_tokens) {  // S, at least 1
    return set_tokens > 0 ? std::max<int64_t>(1, ceil_div(tokens, set_tokens)) : 1;
}
inline int64_t balance_blocks(int64_t tokens, int64_t set_tokens) {  // B
    if (set_tokens <= 0 || set_tokens >= tokens) return ceil_div(tokens, kScoreBlock);
    const int64_t whole = tokens / set_tokens;
    return whole * ceil_div(set_tokens, kScoreBlock) + ceil_div(tokens - whole * set_tokens, kScoreBlock);
}

// Choice: the largest first, ties to the lowest id; NaN counts as the lowest value, so ids stay distinct and
// in range. It is made on the logits, which rise with the scores and tie less; with groups or a bias on the
// full scores (pre-softmax), scores + expert_bias (sigmoid) or logits (softmax, post). Group-limited: group
// score = sum of the top K/group_topk (rounded down) of these values in the group, one after the other,
// largest first; all but group_topk groups are excluded, whatever their values. Probabilities: softmax over
// the K chosen (post), the chosen full scores (pre), or s/(sum s + 1e-20) for K > 1 (sigmoid; s itself
// without normalise); times scaling_factor. ids are in order of choice. Also: counts += how often each expert
// was chosen (a step's micro-batches add up).
struct RouterTopK {
    TensorView logits;       // [T, E] f32
    TensorView expert_bias;  // [E] f32, optional (sigmoid only)
    RouterOptions options;
    // [T, K] i32, optional: given ids, used instead of choosing (distinct per token, in order). Probabilities
    // and their gradient come from the live logits all the same. A captured step reads this buffer when it
    // runs: write the ids before the replay.
    TensorView forced_ids;
    TensorView ids;     // out [T, K] i32
    TensorView probs;   // out [T, K] f32
    TensorView counts;  // in/out [E] i64
    RouterBalance balance;
};

// One balancing loss: weight * sum over sets of sum_e counts[s, e] * P_se, P_se = the full scores of e in set
// s: coeff * E/(K n^2) times this, where n tokens are counted. Its own counts, so that they may first be
// summed over ranks (global_aux_loss) or taken by sequence.
struct BalanceTerm {
    TensorView counts;  // [S, E] f32 by set, or [1, E] for all; absent: no such loss
    float weight = 0.0f;
};
constexpr int kBalanceTerms = 3, kRouterLosses = 2 + kBalanceTerms;

// dlogits = the gradient from dprobs through the same path (expert_bias and the choices get none); then by
// fma, in this order, that of every balancing loss with its counts held constant, and that of z_weight *
// sum_t logsumexp(logits_t)^2. By fma losses[0] += the value of every term, losses[1] += that of the z-loss
// and losses[2 + i] += that of terms[i] alone, from score_sums and log_squares as router_top_k wrote them:
// dot products of blocks' sums with their counts, and the log_squares themselves, added over blocks as other
// values are over experts.
struct RouterTopKBackward {
    TensorView logits;
    TensorView ids;
    TensorView dprobs;  // [T, K] f32
    RouterOptions options;
    std::array<BalanceTerm, kBalanceTerms> terms = {};
    float z_weight = 0.0f;  // coeff / num_tokens; 0: no z-loss
    RouterBalance balance;  // set_tokens for terms by set; the sums with losses
    TensorView losses;      // in/out [kRouterLosses] f32, optional
    TensorView dlogits;     // out [T, E] f32
};

// Aux-loss-free balancing: bias += rate * sign(mean(counts) - counts). counts are of the whole global batch.
// Skipped when *status != 0.
struct ExpertBiasUpdate {
    TensorView counts;  // [E] i64
    float rate = 1e-3f;
    TensorView status;  // [1] i32, optional
    TensorView bias;    // in/out [E] f32
};

}  // namespace fp8flow::op
