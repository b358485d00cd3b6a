// What keeps experts balanced: score sums and gradient of the auxiliary loss, z-loss, and the aux-loss-free bias update.
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/router_scores.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

using reference::normalized_scores;

void ReferenceOps::do_router_score_sums(const op::RouterScoreSums& args, const Launch&) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const float* logits = args.logits.as<float>();
    float* counts = args.counts.as<float>();
    float* sums = args.score_sums.as<float>();
    std::vector<float> scores(static_cast<std::size_t>(tokens * experts));
    std::vector<int64_t> chosen(static_cast<std::size_t>(experts), 0);
#pragma omp parallel
    {
        std::vector<uint8_t> excluded(static_cast<std::size_t>(experts));
        std::vector<int32_t> ids(static_cast<std::size_t>(args.topk));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            float* token_scores = scores.data() + t * experts;
            normalized_scores(logits + t * experts, experts, args.score, token_scores);
            std::fill(excluded.begin(), excluded.end(), 0);
            reference::choose_largest(token_scores, experts, args.topk, excluded.data(), ids.data());
            for (const int32_t id : ids) {
#pragma omp atomic
                ++chosen[id];
            }
        }
    }
    for (int64_t e = 0; e < experts; ++e) counts[e] = static_cast<float>(chosen[e]);
    std::fill_n(sums, experts, 0.0f);
    std::vector<float> block(static_cast<std::size_t>(experts));
    for (int64_t first = 0; first < tokens; first += op::kScoreSumsBlock) {
        std::fill(block.begin(), block.end(), 0.0f);
        for (int64_t t = first; t < std::min(tokens, first + op::kScoreSumsBlock); ++t)
            for (int64_t e = 0; e < experts; ++e) block[e] += scores[t * experts + e];
        for (int64_t e = 0; e < experts; ++e) sums[e] += block[e];
    }
}

void ReferenceOps::do_router_aux_loss_backward(const op::RouterAuxLossBackward& args, const Launch&) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const float* counts = args.counts.as<float>();
    if (args.loss) {
        float* loss = args.loss.as<float>();
        const float balance = reference::lane_dot(counts, args.score_sums.as<float>(), experts);
        loss[0] = fma_float(args.weight, balance, loss[0]);
    }
#pragma omp parallel
    {
        std::vector<float> scores(static_cast<std::size_t>(experts));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float* logits = args.logits.as<float>() + t * experts;
            float* dlogits = args.dlogits.as<float>() + t * experts;
            normalized_scores(logits, experts, args.score, scores.data());
            const float mean = reference::lane_dot(counts, scores.data(), experts);
            for (int64_t e = 0; e < experts; ++e) {
                // softmax: dP_j/dl_e = P_j (1[j=e] - P_e); normalised sigmoid: the same times 1 - s_e
                float slope = scores[e];
                if (args.score == op::Score::sigmoid) slope *= sigmoid_float(-logits[e]);
                dlogits[e] = fma_float(args.weight * slope, counts[e] - mean, dlogits[e]);
            }
        }
    }
}

void ReferenceOps::do_router_z_loss(const op::RouterZLoss& args, const Launch&) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    std::vector<float> squares(static_cast<std::size_t>(tokens));
#pragma omp parallel
    {
        std::vector<float> softmax(static_cast<std::size_t>(experts));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float log_sum =
                reference::log_sum_exp(args.logits.as<float>() + t * experts, experts, softmax.data());
            squares[t] = log_sum * log_sum;
            if (!args.dlogits) continue;
            float* dlogits = args.dlogits.as<float>() + t * experts;
            const float slope = 2.0f * args.grad_weight * log_sum;
            for (int64_t e = 0; e < experts; ++e) dlogits[e] = fma_float(slope, softmax[e], dlogits[e]);
        }
    }
    if (args.loss) *args.loss.as<float>() += args.weight * reference::lane_sum(squares.data(), tokens);
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
