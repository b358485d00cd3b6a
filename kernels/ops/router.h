// The router: logits, top-k with Megatron's options, balancing losses, their gradients, load statistics.
// Sources: Megatron-LM's moe_utils/router semantics (recipe.md section 5); DeepSeek-V3 (aux-loss-free bias); ST-MoE (z-loss).
#pragma once

#include "kernels/core/fp8_tensor.h"

namespace fp8flow::op {

enum class Score { softmax, sigmoid };

// logits[t, e] = sum_h bf16(x[t, h]) * bf16(w[e, h]) (f32 inputs are not rounded): blocks of 256 columns by fp32 fma in ascending h, then
// the block sums in ascending order. Where every factor is BF16, a backend may add as its tensor cores do (products exact, sums fp32) within
// parts of up to 4096 terms, cut by the number of terms alone, which fp32 additions then join in ascending order. The result then lies within
// 1e-5 (norm-wise) of the exact sum (5e-5 where all terms have one sign and a part is longer than 2048: tensor cores truncate), and a
// token's logits depend on that token only.
constexpr int64_t kRouterBlock = 256, kRouterPart = 4096;
struct RouterLogits {
    TensorView x;       // [T, H]
    TensorView weight;  // [E, H] bf16 | f32
    TensorView logits;  // out [T, E] f32
};
// dx = dlogits W (fma, ascending e; then + dx_in, optional, in fp32 before the one rounding), dW (+)= dlogits^T x (blocks of 256 tokens by
// fma in ascending t, then the block sums in ascending order; accumulate adds the finished sum). Tensor cores as above, and dlogits may go
// in as two BF16 parts (16 bits), whose sums may be joined at the end; accumulate may then add the parts of the sum one after the other. dW
// within 1e-5 (norm-wise) of the exact sum (5e-5 as above), dx within its rounding to BF16.
struct RouterLogitsBackward {
    TensorView dlogits;  // [T, E] f32
    TensorView x;
    TensorView weight;
    TensorView dx_in;  // [T, H], optional
    Gradient dweight_mode = Gradient::overwrite;
    TensorView dx;       // out [T, H]
    TensorView dweight;  // out [E, H] f32
};

struct RouterOptions {
    Score score = Score::softmax;
    bool pre_softmax = false;  // softmax over E before the choice, no renormalisation
    int64_t num_groups = 0;    // 0: not group-limited
    int64_t group_topk = 0;
    float scaling_factor = 1.0f;
};

// Choice: on logits (softmax, post), full scores (pre-softmax) or scores + expert_bias (sigmoid), largest first, ties to the lowest id;
// NaN counts as the lowest value, so ids stay distinct and in range. Group-limited: group score = sum of the top K/group_topk (rounded
// down) of these values in the group, largest first; all but group_topk groups are excluded, whatever their values. Probabilities:
// softmax over the K chosen (post), the chosen full scores (pre), or s/(sum s + 1e-20) for K > 1 (sigmoid); times scaling_factor. ids
// are in order of choice. Also: counts += how often each expert was chosen (a step's micro-batches add up).
struct RouterTopK {
    TensorView logits;       // [T, E] f32
    TensorView expert_bias;  // [E] f32, optional (sigmoid only)
    RouterOptions options;
    TensorView forced_ids;  // [T, K] i32, optional: benchmark/replay: use these ids instead of choosing
    TensorView ids;         // out [T, K] i32
    TensorView probs;       // out [T, K] f32
    TensorView counts;      // in/out [E] i64
};

// dlogits from dprobs through the same path (expert_bias and the choice itself get no gradient); overwrites dlogits.
struct RouterTopKBackward {
    TensorView logits;
    TensorView ids;
    TensorView dprobs;  // [T, K] f32
    RouterOptions options;
    TensorView dlogits;  // out [T, E] f32
};

// Balancing loss over a set of `num_tokens` tokens: coeff * E/(K * n^2) * sum_e P_e * c_e, P_e = column sum of the full scores
// (softmax over E, or sigmoid normalised over E), c_e = how often e is among the plain top-K of those scores (unbiased, ungrouped).
// Split in two so that counts can be reduced over ranks (global_aux_loss) or taken per sequence (seq_aux_loss).
constexpr int64_t kScoreSumsBlock = 64;
struct RouterScoreSums {
    TensorView logits;  // [T, E]
    Score score = Score::softmax;
    int64_t topk = 1;
    TensorView counts;  // out [E] f32: plain top-K counts (exact integers)
    TensorView
        score_sums;  // out [E] f32: blocks of 64 tokens in ascending t, then the block sums in ascending order
};
// dlogits += d/dlogits of weight * sum_e counts[e] * P_e: the loss's gradient with the counts held constant.
struct RouterAuxLossBackward {
    TensorView logits;
    TensorView counts;  // [E] f32
    Score score = Score::softmax;
    float weight = 0.0f;
    TensorView score_sums;  // [E] f32, with loss
    TensorView loss;        // in/out [1] f32, optional: += weight * sum_e counts[e] * score_sums[e]
    TensorView dlogits;     // in/out [T, E] f32
};
// loss += weight * sum_t logsumexp(logits_t)^2; dlogits += the gradient of the same with grad_weight. Forward only if dlogits is absent.
struct RouterZLoss {
    TensorView logits;
    float weight = 0.0f;       // coeff / num_tokens, for the loss value
    float grad_weight = 0.0f;  // the same times the gradient scale
    TensorView loss;           // in/out [1] f32, optional
    TensorView dlogits;        // in/out, optional
};

// Aux-loss-free balancing: bias += rate * sign(mean(counts) - counts). counts are of the whole global batch. Skipped when *status != 0.
struct ExpertBiasUpdate {
    TensorView counts;  // [E] i64
    float rate = 1e-3f;
    TensorView status;  // [1] i32, optional
    TensorView bias;    // in/out [E] f32
};

}  // namespace fp8flow::op
