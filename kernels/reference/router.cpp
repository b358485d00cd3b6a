// SPDX-License-Identifier: MIT
// router_top_k and its backward: choice, group limit, probabilities, and the gradient through the same path.
#include "kernels/core/scalar_math.h"
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/router_scores.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace fp8flow {

namespace {

using reference::check_expert_ids;
using reference::choose_largest;
using reference::kScoreSumEps;
using reference::token_sum;

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
        reference::log_sum_exp(logits, experts, scores);
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
        reference::log_sum_exp(work.values.data(), topk, work.chosen.data());
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
    reference::sum_balance(args.logits, options.score, topk, args.balance);
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
            const float mean = reference::token_dot(dchosen.data(), work.chosen.data(), topk);
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
    reference::add_balance_gradients(args);
    reference::add_balance_losses(args);
}

}  // namespace fp8flow
