// SPDX-License-Identifier: MIT
// Expert balancing: sums of the scores, auxiliary losses and z-loss with their gradients, and the
// aux-loss-free bias update.
#include "kernels/core/scalar_math.h"
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/router_scores.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

namespace reference {

namespace {

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

}  // namespace

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
#pragma omp parallel
    {
        std::vector<float> scores(static_cast<std::size_t>(experts));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float* logits = args.logits.as<float>() + t * experts;
            float* dlogits = args.dlogits.as<float>() + t * experts;
            normalized_scores(logits, experts, score, scores.data());
            for (const op::BalanceTerm& term : args.terms) {
                if (!term.counts) continue;
                const int64_t set = term.counts.dim(0) > 1 ? t / args.balance.set_tokens : 0;
                const float* counts = term.counts.as<float>() + set * experts;
                const float mean = token_dot(counts, scores.data(), experts);
                for (int64_t e = 0; e < experts; ++e) {
                    // softmax: dP_j/dl_e = P_j (1[j=e] - P_e); normalised sigmoid: the same times 1 - s_e
                    float slope = scores[e];
                    if (score == op::Score::sigmoid) slope *= 1.0f - sigmoid_float(logits[e]);
                    dlogits[e] = fma_float(term.weight * slope, counts[e] - mean, dlogits[e]);
                }
            }
            if (args.z_weight == 0.0f) continue;
            const float slope = 2.0f * args.z_weight * log_sum_exp(logits, experts, scores.data());
            for (int64_t e = 0; e < experts; ++e) dlogits[e] = fma_float(slope, scores[e], dlogits[e]);
        }
    }
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

}  // namespace reference

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
