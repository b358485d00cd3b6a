// SPDX-License-Identifier: MIT
// router_top_k and its backward: choice, group limit, probabilities, and the gradient through the same path.
// Balancing: sums of the scores, auxiliary losses and z-loss with their gradients, and the update of the
// expert bias.
#include "kernels/core/scalar_math.h"
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

namespace {

using reference::check_expert_ids;

// ---- sums, softmax and scores of a token, and the choice of the largest values

// Keeps s / sum(s) finite if every sigmoid underflows (Megatron-LM).
constexpr float kScoreSumEps = 1e-20f;

bool is_better(float a, float b) {
    return a > b || (is_nan_bits(float_bits(b)) && !is_nan_bits(float_bits(a)));
}

constexpr int64_t kStrands = 32;

// The router's sums over experts or choices (kernels/ops/router.h): 32 strands, then halves added to each
// other.
float token_sum(const float* values, int64_t count) {
    float strands[kStrands] = {};
    for (int64_t i = 0; i < count; ++i) strands[i % kStrands] += values[i];
    return reference::sum_in_halves<kStrands>(strands);
}

float token_dot(const float* a, const float* b, int64_t count) {
    float strands[kStrands] = {};
    for (int64_t i = 0; i < count; ++i) strands[i % kStrands] = fma_float(a[i], b[i], strands[i % kStrands]);
    return reference::sum_in_halves<kStrands>(strands);
}

// log(sum exp(values)); softmax receives exp(values - that). NaN anywhere, or +Inf, makes all of it NaN.
float log_sum_exp(const float* values, int64_t count, float* softmax) {
    float largest = values[0];
    for (int64_t i = 1; i < count; ++i) largest = max_ignore_nan(largest, values[i]);
    for (int64_t i = 0; i < count; ++i) softmax[i] = exp_float(values[i] - largest);
    const float sum = token_sum(softmax, count), factor = div_float(1.0f, sum);
    for (int64_t i = 0; i < count; ++i) softmax[i] *= factor;
    return largest + log_float(sum);
}

// Scores as the balancing losses see them: softmax, or sigmoid / (sum + eps); the sum over e is 1.
void normalized_scores(const float* logits, int64_t experts, op::Score score, float* scores) {
    if (score == op::Score::softmax) {
        log_sum_exp(logits, experts, scores);
        return;
    }
    for (int64_t e = 0; e < experts; ++e) scores[e] = sigmoid_float(logits[e]);
    const float factor = div_float(1.0f, token_sum(scores, experts) + kScoreSumEps);
    for (int64_t e = 0; e < experts; ++e) scores[e] *= factor;
}

// The `chosen` largest of the values with an `excluded` flag of 0, in descending order. Ties go to the lowest
// index, NaN counts as the lowest value. Sets the flags of what it chose. At least `chosen` values must not
// be excluded.
void choose_largest(const float* values, int64_t count, int64_t chosen, uint8_t* excluded, int32_t* ids) {
    for (int64_t k = 0; k < chosen; ++k) {
        int64_t best = 0;
        while (excluded[best]) ++best;
        for (int64_t i = best + 1; i < count; ++i)
            if (!excluded[i] && is_better(values[i], values[best])) best = i;
        excluded[best] = 1;
        ids[k] = static_cast<int32_t>(best);
    }
}

// ---- balancing: sums of the scores, gradients into the logits, losses

// The tokens of a set, and the first of its blocks.
struct TokenSet {
    int64_t first, end, block;
};
TokenSet token_set(int64_t s, int64_t tokens, int64_t set_tokens) {
    if (set_tokens <= 0) return {0, tokens, 0};
    return {s * set_tokens, std::min(tokens, (s + 1) * set_tokens),
            s * ceil_div(set_tokens, op::kScoreBlock)};
}

// The plain choices of a set, counted.
void count_choices(const TensorView& logits, const TokenSet& set, int64_t topk, float* counts) {
    const int64_t experts = logits.dim(1);
    std::vector<int64_t> chosen(static_cast<std::size_t>(experts), 0);
#pragma omp parallel
    {
        std::vector<uint8_t> excluded(static_cast<std::size_t>(experts));
        std::vector<int32_t> ids(static_cast<std::size_t>(topk));
#pragma omp for schedule(static)
        for (int64_t t = set.first; t < set.end; ++t) {
            std::fill(excluded.begin(), excluded.end(), 0);
            choose_largest(logits.as<float>() + t * experts, experts, topk, excluded.data(), ids.data());
            for (const int32_t id : ids) {
#pragma omp atomic
                ++chosen[id];
            }
        }
    }
    for (int64_t e = 0; e < experts; ++e) counts[e] = static_cast<float>(chosen[e]);
}

// sums[e] = the scores of tokens [first, end) of one block: pieces in ascending order, tokens in ascending
// order in each.
void sum_block(const TensorView& logits, op::Score score, int64_t first, int64_t end, float* sums) {
    const int64_t experts = logits.dim(1);
    std::vector<float> scores(static_cast<std::size_t>(experts)), piece(scores.size());
    std::fill_n(sums, experts, 0.0f);
    for (int64_t start = first; start < end; start += op::kScorePiece) {
        std::fill(piece.begin(), piece.end(), 0.0f);
        for (int64_t t = start; t < std::min(end, start + op::kScorePiece); ++t) {
            normalized_scores(logits.as<float>() + t * experts, experts, score, scores.data());
            for (int64_t e = 0; e < experts; ++e) piece[e] += scores[e];
        }
        for (int64_t e = 0; e < experts; ++e) sums[e] += piece[e];
    }
}

float sum_log_squares(const TensorView& logits, int64_t first, int64_t end) {
    const int64_t experts = logits.dim(1);
    std::vector<float> softmax(static_cast<std::size_t>(experts)), squares;
    for (int64_t t = first; t < end; ++t) {
        const float log_sum = log_sum_exp(logits.as<float>() + t * experts, experts, softmax.data());
        squares.push_back(log_sum * log_sum);
    }
    return token_sum(squares.data(), end - first);
}

void sum_balance(const TensorView& logits, op::Score score, int64_t topk, const op::RouterBalance& balance) {
    const int64_t tokens = logits.dim(0), experts = logits.dim(1);
    for (int64_t s = 0; s < op::balance_sets(tokens, balance.set_tokens); ++s) {
        const TokenSet set = token_set(s, tokens, balance.set_tokens);
        if (balance.counts) count_choices(logits, set, topk, balance.counts.as<float>() + s * experts);
#pragma omp parallel for schedule(static)
        for (int64_t first = set.first; first < set.end; first += op::kScoreBlock) {
            const int64_t end = std::min(set.end, first + op::kScoreBlock),
                          block = set.block + (first - set.first) / op::kScoreBlock;
            if (balance.score_sums)
                sum_block(logits, score, first, end, balance.score_sums.as<float>() + block * experts);
            if (balance.log_squares)
                balance.log_squares.as<float>()[block] = sum_log_squares(logits, first, end);
        }
    }
}

void add_balance_gradients(const op::RouterTopKBackward& args) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const op::Score score = args.options.score;
    reference::for_each_row(tokens, experts, [&](int64_t t, float* scores) {
        const float* logits = args.logits.as<float>() + t * experts;
        float* dlogits = args.dlogits.as<float>() + t * experts;
        normalized_scores(logits, experts, score, scores);
        for (const op::BalanceTerm& term : args.terms) {
            if (!term.counts) continue;
            const int64_t set = term.counts.dim(0) > 1 ? t / args.balance.set_tokens : 0;
            const float* counts = term.counts.as<float>() + set * experts;
            const float mean = token_dot(counts, scores, experts);
            for (int64_t e = 0; e < experts; ++e) {
                // softmax: dP_j/dl_e = P_j (1[j=e] - P_e); normalised sigmoid: the same times 1 - s_e
                float slope = scores[e];
                if (score == op::Score::sigmoid) slope *= 1.0f - sigmoid_float(logits[e]);
                dlogits[e] = fma_float(term.weight * slope, counts[e] - mean, dlogits[e]);
            }
        }
        if (args.z_weight == 0.0f) return;
        const float slope = 2.0f * args.z_weight * log_sum_exp(logits, experts, scores);
        for (int64_t e = 0; e < experts; ++e) dlogits[e] = fma_float(slope, scores[e], dlogits[e]);
    });
}

void add_balance_losses(const op::RouterTopKBackward& args) {
    if (!args.losses) return;
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const int64_t set_tokens = args.balance.set_tokens, blocks = op::balance_blocks(tokens, set_tokens);
    float* losses = args.losses.as<float>();
    std::vector<float> dots(static_cast<std::size_t>(blocks));
    for (size_t i = 0; i < args.terms.size(); ++i) {
        const op::BalanceTerm& term = args.terms[i];
        if (!term.counts) continue;
        const int64_t set_blocks = term.counts.dim(0) > 1 ? ceil_div(set_tokens, op::kScoreBlock) : blocks;
        for (int64_t b = 0; b < blocks; ++b)
            dots[b] = token_dot(term.counts.as<float>() + b / set_blocks * experts,
                                args.balance.score_sums.as<float>() + b * experts, experts);
        const float sum = token_sum(dots.data(), blocks);
        for (float* loss : {&losses[0], &losses[2 + i]}) *loss = fma_float(term.weight, sum, *loss);
    }
    if (args.z_weight != 0.0f)
        losses[1] =
            fma_float(args.z_weight, token_sum(args.balance.log_squares.as<float>(), blocks), losses[1]);
}

// ---- choice and probabilities

// Buffers of one thread.
struct Workspace {
    std::vector<float> scores;      // [E] full scores: softmax (pre) or sigmoid
    std::vector<float> values;      // [E] the values compared for the choice
    std::vector<float> chosen;      // [K] scores of the chosen, then probabilities before scaling
    std::vector<uint8_t> excluded;  // [E]
    std::vector<float> group_scores;
    std::vector<uint8_t> group_excluded;
    std::vector<int32_t> best;

    Workspace(int64_t experts, int64_t topk)
        : scores(static_cast<std::size_t>(experts)),
          values(scores.size()),
          chosen(static_cast<std::size_t>(topk)),
          excluded(scores.size()),
          group_scores(scores.size()),
          group_excluded(scores.size()),
          best(scores.size()) {}
};

bool is_post_softmax(const op::RouterOptions& options) {
    return options.score == op::Score::softmax && !options.pre_softmax;
}

// Full scores of one token; unused by post-softmax.
void full_scores(const float* logits, int64_t experts, const op::RouterOptions& options, float* scores) {
    if (is_post_softmax(options)) return;
    if (options.score == op::Score::softmax) {
        log_sum_exp(logits, experts, scores);
    } else {
        for (int64_t e = 0; e < experts; ++e) scores[e] = sigmoid_float(logits[e]);
    }
}

// Excludes all groups but the group_topk best; a group's score is the sum of its best values, largest first.
void exclude_groups(const op::RouterOptions& options, int64_t experts, int64_t topk, Workspace& work) {
    const int64_t group_size = experts / options.num_groups, counted = topk / options.group_topk;
    std::fill(work.excluded.begin(), work.excluded.end(), 0);
    for (int64_t g = 0; g < options.num_groups; ++g) {
        const float* values = work.values.data() + g * group_size;
        choose_largest(values, group_size, counted, work.excluded.data() + g * group_size, work.best.data());
        float sum = 0.0f;
        for (int64_t i = 0; i < counted; ++i) sum += values[work.best[i]];
        work.group_scores[g] = sum;
    }
    std::fill(work.group_excluded.begin(), work.group_excluded.end(), 0);
    choose_largest(work.group_scores.data(), options.num_groups, options.group_topk,
                   work.group_excluded.data(), work.best.data());
    // the flags now say which groups were chosen
    for (int64_t e = 0; e < experts; ++e) work.excluded[e] = work.group_excluded[e / group_size] ? 0 : 1;
}

// Sigmoid scores of the chosen are divided by their sum.
bool is_normalised(const op::RouterOptions& options, int64_t topk) { return options.normalise && topk > 1; }

// Probabilities of the chosen before scaling, into work.chosen; work.scores holds the full scores. Returns
// what sigmoid scores were multiplied by (1 where they were not).
float chosen_probs(const float* logits, const int32_t* ids, int64_t topk, const op::RouterOptions& options,
                   Workspace& work) {
    if (is_post_softmax(options)) {
        for (int64_t k = 0; k < topk; ++k) work.values[k] = logits[ids[k]];
        log_sum_exp(work.values.data(), topk, work.chosen.data());
        return 1.0f;
    }
    for (int64_t k = 0; k < topk; ++k) work.chosen[k] = work.scores[ids[k]];
    if (options.score == op::Score::softmax || !is_normalised(options, topk)) return 1.0f;
    const float factor = div_float(1.0f, token_sum(work.chosen.data(), topk) + kScoreSumEps);
    for (int64_t k = 0; k < topk; ++k) work.chosen[k] *= factor;
    return factor;
}

}  // namespace

void ReferenceOps::do_router_top_k(const op::RouterTopK& args, const Launch&) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1), topk = args.ids.dim(1);
    const op::RouterOptions& options = args.options;
    const float* bias = args.expert_bias ? args.expert_bias.as<float>() : nullptr;
    if (args.forced_ids) check_expert_ids(args.forced_ids, "forced_ids", 0, experts);
    const int32_t* forced = args.forced_ids ? args.forced_ids.as<int32_t>() : nullptr;
    int64_t* counts = args.counts.as<int64_t>();
#pragma omp parallel
    {
        Workspace work(experts, topk);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float* logits = args.logits.as<float>() + t * experts;
            int32_t* ids = args.ids.as<int32_t>() + t * topk;
            float* probs = args.probs.as<float>() + t * topk;
            full_scores(logits, experts, options, work.scores.data());
            if (forced != nullptr) {
                std::copy_n(forced + t * topk, topk, ids);
            } else {
                const bool plain = options.num_groups == 0 && bias == nullptr;
                const float* scores = plain || is_post_softmax(options) ? logits : work.scores.data();
                for (int64_t e = 0; e < experts; ++e) work.values[e] = bias ? scores[e] + bias[e] : scores[e];
                std::fill(work.excluded.begin(), work.excluded.end(), 0);
                if (options.num_groups > 0) exclude_groups(options, experts, topk, work);
                choose_largest(work.values.data(), experts, topk, work.excluded.data(), ids);
            }
            chosen_probs(logits, ids, topk, options, work);
            for (int64_t k = 0; k < topk; ++k) {
                probs[k] = work.chosen[k] * options.scaling_factor;
#pragma omp atomic
                ++counts[ids[k]];
            }
        }
    }
    sum_balance(args.logits, options.score, topk, args.balance);
}

void ReferenceOps::do_router_top_k_backward(const op::RouterTopKBackward& args, const Launch&) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1), topk = args.ids.dim(1);
    const op::RouterOptions& options = args.options;
#pragma omp parallel
    {
        Workspace work(experts, topk);
        std::vector<float> dchosen(static_cast<std::size_t>(topk));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float* logits = args.logits.as<float>() + t * experts;
            const int32_t* ids = args.ids.as<int32_t>() + t * topk;
            const float* dprobs = args.dprobs.as<float>() + t * topk;
            float* dlogits = args.dlogits.as<float>() + t * experts;
            full_scores(logits, experts, options, work.scores.data());
            const float factor = chosen_probs(logits, ids, topk, options, work);
            for (int64_t k = 0; k < topk; ++k) dchosen[k] = dprobs[k] * options.scaling_factor;
            const float mean = token_dot(dchosen.data(), work.chosen.data(), topk);
            std::fill_n(dlogits, experts, 0.0f);
            if (is_post_softmax(options)) {  // p_k = softmax over the chosen
                for (int64_t k = 0; k < topk; ++k) dlogits[ids[k]] = work.chosen[k] * (dchosen[k] - mean);
            } else if (options.score == op::Score::softmax) {  // p_k = s_i of a softmax over all
                for (int64_t k = 0; k < topk; ++k) dlogits[ids[k]] = dchosen[k];
                for (int64_t e = 0; e < experts; ++e) dlogits[e] = work.scores[e] * (dlogits[e] - mean);
            } else {  // p_k = s_k / sum of the chosen, or s_k
                for (int64_t k = 0; k < topk; ++k) {
                    const float dscore =
                        is_normalised(options, topk) ? (dchosen[k] - mean) * factor : dchosen[k];
                    const float score = work.scores[ids[k]];
                    dlogits[ids[k]] = dscore * score * (1.0f - score);
                }
            }
        }
    }
    add_balance_gradients(args);
    add_balance_losses(args);
}

void ReferenceOps::do_expert_bias_update(const op::ExpertBiasUpdate& args, const Launch&) {
    if (args.status && *args.status.as<int32_t>() != 0) return;
    const int64_t experts = args.counts.dim(0);
    const int64_t* counts = args.counts.as<int64_t>();
    float* bias = args.bias.as<float>();
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) total += counts[e];
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t surplus = counts[e] * experts - total;  // E times (count - mean), exact
        if (surplus < 0) bias[e] += args.rate;
        if (surplus > 0) bias[e] -= args.rate;
    }
}

}  // namespace fp8flow
