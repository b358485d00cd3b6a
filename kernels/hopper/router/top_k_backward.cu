// SPDX-License-Identifier: MIT
// Gradient of the logits from the probabilities, the balancing losses and the z-loss, and the values of these
// losses, in one launch. Bit-equal to the reference. Lower bound at T = 8192, E = 256: 16 MB, 4 us; the
// kernel is bound by instructions and the latency of sums over a warp. No prefetch before the PDL wait: it
// takes 0.5 us longer.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/router/scores.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

#include <cuda/atomic>

namespace fp8flow::hopper::router {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kCtasPerSm = 4;
constexpr int64_t kLossCtas = 32;

struct Term {
    const float* counts;  // [sets, E] or [1, E]; null: none
    bool by_set;
    float weight;
};

struct BackwardArgs {
    const float* logits;
    const int32_t* ids;
    const float* dprobs;
    float* dlogits;
    int64_t tokens;
    int topk;
    op::RouterOptions options;
    Term terms[op::kBalanceTerms];
    float z_weight;
    int set_tokens;
    // the losses' values
    const float* score_sums;   // [blocks, E]
    const float* log_squares;  // [blocks]
    int64_t blocks, set_blocks;
    float* losses;
    unsigned int loss_ctas;  // 0: no loss values
    float* dots;             // [terms, blocks]
    unsigned int* ticket;    // zero between launches
};

// Choice k = lane of a token, loaded together with its logits; d is the scaled gradient of its probability.
struct Choice {
    int id;
    float d;
};
__device__ __forceinline__ Choice load_choice(const BackwardArgs& args, int64_t t) {
    if (warp_lane() >= args.topk) return {0, 0.0f};
    const int64_t at = t * args.topk + warp_lane();
    return {args.ids[at], args.dprobs[at] * args.options.scaling_factor};
}

// dlogits = gradient of one token's logits from its probabilities, through shared memory of the warp, which
// is zero before and after. scores, largest, sum: its softmax over all experts (pre-softmax).
template <class R>
__device__ __forceinline__ void choices_backward(const R& row, const BackwardArgs& args, int64_t t,
                                                 const Choice& own, const float (&scores)[R::kCount],
                                                 float largest, float sum, float* gradient,
                                                 float (&dlogits)[R::kCount]) {
    const int topk = args.topk;
    const float* logits = args.logits + t * row.experts();
    const int32_t* ids = args.ids + t * topk;
    const float* dprobs = args.dprobs + t * topk;
    const auto d_of = [&](int k) { return k < kWarpSize ? own.d : dprobs[k] * args.options.scaling_factor; };
    const auto logit_of = [&](int k) { return logits[ids[k]]; };
    const ChosenProbs probs =
        chosen_probs(args.options, topk, largest, sum, warp_lane() < topk ? logits[own.id] : 0.0f, logit_of);
    float mean = 0.0f;
#pragma unroll 1
    for (int k = warp_lane(); k < topk; k += kWarpSize)
        mean = fma_float(d_of(k), probs.base_of(k, logit_of) * probs.factor, mean);
    mean = warp_sum(mean);
    __syncwarp();
#pragma unroll 1
    for (int k = warp_lane(); k < topk; k += kWarpSize) {
        const float d = d_of(k), base = probs.base_of(k, logit_of);
        float g = d;  // pre-softmax: p_k = s_i of a softmax over all
        if (probs.sigmoid) {
            g = is_normalised(args.options, topk) ? (d - mean) * probs.factor : d;
            g = g * base * (1.0f - base);
        } else if (!args.options.pre_softmax) {
            g = base * probs.factor * (d - mean);
        }
        gradient[k < kWarpSize ? own.id : ids[k]] = g;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < R::kCount; ++j) {
        if (!row.has(j)) continue;
        dlogits[j] = gradient[row.expert(j)];
        gradient[row.expert(j)] = 0.0f;
        if (!probs.sigmoid && args.options.pre_softmax) dlogits[j] = scores[j] * (dlogits[j] - mean);
    }
}

// dlogits += the gradients of the balancing losses; slopes: d score / d logit without the mean.
template <class R>
__device__ __forceinline__ void balance_backward(const R& row, const BackwardArgs& args, int64_t t,
                                                 const float (&scores)[R::kCount],
                                                 const float (&slopes)[R::kCount],
                                                 float (&dlogits)[R::kCount]) {
#pragma unroll 1
    for (int i = 0; i < op::kBalanceTerms; ++i) {
        const Term& term = args.terms[i];
        if (term.counts == nullptr) continue;
        const int set = term.by_set ? static_cast<int>(t) / args.set_tokens : 0;
        float counts[R::kCount], mean = 0.0f;
        row.load(term.counts + static_cast<int64_t>(set) * row.experts(), counts);
#pragma unroll
        for (int j = 0; j < R::kCount; ++j)
            if (row.has(j)) mean = fma_float(counts[j], scores[j], mean);
        mean = warp_sum(mean);
#pragma unroll
        for (int j = 0; j < R::kCount; ++j)
            dlogits[j] = fma_float(term.weight * slopes[j], counts[j] - mean, dlogits[j]);
    }
}

template <class R>
__device__ __forceinline__ void sigmoid_balance_backward(const R& row, const BackwardArgs& args, int64_t t,
                                                         const float (&x)[R::kCount], float* shared,
                                                         float (&dlogits)[R::kCount]) {
    float scores[R::kCount], slopes[R::kCount];
    const float factor = div_float(1.0f, sigmoid_terms(row, x, shared, slopes) + kScoreSumEps);
#pragma unroll
    for (int j = 0; j < R::kCount; ++j) {
        scores[j] = slopes[j] * factor;
        slopes[j] = scores[j] * (1.0f - slopes[j]);
    }
    balance_backward(row, args, t, scores, slopes, dlogits);
}

struct Softmax {
    float largest, sum;
    __device__ __forceinline__ float log_sum() const { return largest + log_float(sum); }
};
template <class R>
__device__ __forceinline__ Softmax softmax(const R& row, const float (&x)[R::kCount], float* shared,
                                           float (&scores)[R::kCount]) {
    const float largest = max_logit(x), sum = softmax_terms(row, x, largest, shared, scores);
    const float factor = div_float(1.0f, sum);
#pragma unroll
    for (int j = 0; j < R::kCount; ++j) scores[j] *= factor;
    return {largest, sum};
}

// losses += the values. Every warp of these CTAs takes blocks and writes the dot products of their sums; the
// last CTA to finish adds them. All threads of a CTA take the same branch to the barriers.
__device__ __forceinline__ void add_losses(const BackwardArgs& args, int experts) {
    __shared__ bool is_last;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    for (int64_t b = blockIdx.x * kWarps + warp; b < args.blocks; b += args.loss_ctas * kWarps) {
#pragma unroll 1
        for (int i = 0; i < op::kBalanceTerms; ++i) {
            const Term& term = args.terms[i];
            if (term.counts == nullptr) continue;
            const float* counts = term.counts + (term.by_set ? b / args.set_blocks * experts : 0);
            float dot = 0.0f;
#pragma unroll 8
            for (int e = warp_lane(); e < experts; e += kWarpSize)
                dot = fma_float(counts[e], args.score_sums[b * experts + e], dot);
            dot = warp_sum(dot);
            if (warp_lane() == 0) args.dots[i * args.blocks + b] = dot;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        cuda::atomic_ref<unsigned int, cuda::thread_scope_device> ticket(*args.ticket);
        is_last = ticket.fetch_add(1u, cuda::memory_order_acq_rel) == args.loss_ctas - 1;
        if (is_last) *args.ticket = 0;
    }
    __syncthreads();
    if (!is_last || warp != 0) return;
    const auto sum_of = [&](const float* values) {
        float lane = 0.0f;
#pragma unroll 4
        for (int64_t b = warp_lane(); b < args.blocks; b += kWarpSize) lane += __ldcg(values + b);
        return warp_sum(lane);
    };
    const auto add = [&](float sum, float weight, float* loss) {
        if (warp_lane() == 0) *loss = fma_float(weight, sum, *loss);
    };
#pragma unroll 1
    for (int i = 0; i < op::kBalanceTerms; ++i) {
        if (args.terms[i].counts == nullptr) continue;
        const float sum = sum_of(args.dots + i * args.blocks);
        add(sum, args.terms[i].weight, &args.losses[0]);
        add(sum, args.terms[i].weight, &args.losses[2 + i]);
    }
    if (args.z_weight != 0.0f) add(sum_of(args.log_squares), args.z_weight, &args.losses[1]);
}

// Traffic: reads logits, ids and dprobs once, writes dlogits once. One warp per token. Gradients of the
// choices go through shared memory; the ids of a token are distinct, so every word has one writer. The first
// `loss_ctas` CTAs compute the losses and no tokens. Barriers: __syncwarp only.
template <class R>
__global__ __launch_bounds__(kThreads, R::kCount <= 8 ? kCtasPerSm : 2) void top_k_backward_kernel(
    const __grid_constant__ BackwardArgs args, const R row) {
    extern __shared__ float shared[];
    pdl_launch_dependents();
    pdl_wait();
    if (blockIdx.x < args.loss_ctas) return add_losses(args, row.experts());
    const int64_t cta = blockIdx.x - args.loss_ctas, ctas = gridDim.x - args.loss_ctas;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    float* gradient = shared + warp * row.experts();
    for (int e = warp_lane(); e < row.experts(); e += kWarpSize) gradient[e] = 0.0f;
    const bool sigmoid = args.options.score == op::Score::sigmoid;
    bool balances = false;
#pragma unroll
    for (const Term& term : args.terms) balances = balances || term.counts != nullptr;
    const bool needs_softmax = args.z_weight != 0.0f || args.options.pre_softmax || balances;
    for (int64_t t = cta * kWarps + warp; t < args.tokens; t += ctas * kWarps) {
        float x[R::kCount], scores[R::kCount], dlogits[R::kCount], log_sum = 0.0f;
        row.load(args.logits + t * row.experts(), x);
        const Choice own = load_choice(args, t);
        if (sigmoid) {
            choices_backward(row, args, t, own, scores, 0.0f, 0.0f, gradient, dlogits);
            if (balances) sigmoid_balance_backward(row, args, t, x, gradient, dlogits);
            if (args.z_weight != 0.0f) log_sum = softmax(row, x, gradient, scores).log_sum();
        } else {
            Softmax of_all{};
            if (needs_softmax) of_all = softmax(row, x, gradient, scores);
            choices_backward(row, args, t, own, scores, of_all.largest, of_all.sum, gradient, dlogits);
            if (balances) balance_backward(row, args, t, scores, scores, dlogits);
            log_sum = of_all.log_sum();
        }
        const float slope = 2.0f * args.z_weight * log_sum;
#pragma unroll
        for (int j = 0; j < R::kCount; ++j)
            if (args.z_weight != 0.0f) dlogits[j] = fma_float(slope, scores[j], dlogits[j]);
        row.store(dlogits, args.dlogits + t * row.experts());
    }
}

}  // namespace

}  // namespace fp8flow::hopper::router

namespace fp8flow {

using namespace hopper;
using namespace hopper::router;

void HopperOps::do_router_top_k_backward(const op::RouterTopKBackward& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    if (tokens == 0) return;
    const int64_t sets = op::balance_sets(tokens, args.balance.set_tokens),
                  set_tokens = sets > 1 ? args.balance.set_tokens : tokens;
    BackwardArgs kernel_args{.logits = args.logits.as<float>(),
                             .ids = args.ids.as<int32_t>(),
                             .dprobs = args.dprobs.as<float>(),
                             .dlogits = args.dlogits.as<float>(),
                             .tokens = tokens,
                             .topk = static_cast<int>(args.ids.dim(1)),
                             .options = args.options,
                             .z_weight = args.z_weight,
                             .set_tokens = static_cast<int>(set_tokens),
                             .blocks = op::balance_blocks(tokens, args.balance.set_tokens),
                             .set_blocks = ceil_div(set_tokens, op::kScoreBlock)};
    bool has_losses = args.z_weight != 0.0f;
    for (int i = 0; i < op::kBalanceTerms; ++i) {
        const op::BalanceTerm& term = args.terms[static_cast<std::size_t>(i)];
        if (!term.counts) continue;
        has_losses = true;
        kernel_args.terms[i] = {term.counts.as<float>(), term.counts.dim(0) > 1, term.weight};
    }
    if (args.losses && has_losses) {
        kernel_args.losses = args.losses.as<float>();
        kernel_args.loss_ctas =
            static_cast<unsigned>(std::clamp<int64_t>(kernel_args.blocks / kWarps, 1, kLossCtas));
        kernel_args.dots = workspace(launch).partials_for<float>(op::kBalanceTerms * kernel_args.blocks);
        kernel_args.ticket = workspace(launch).zeros_for<unsigned int>(1);
        if (args.balance.score_sums) kernel_args.score_sums = args.balance.score_sums.as<float>();
        if (args.balance.log_squares) kernel_args.log_squares = args.balance.log_squares.as<float>();
    }
    const std::size_t bytes = static_cast<std::size_t>(kWarps * experts) * sizeof(float);
    const int64_t wanted = ceil_div(tokens, kWarps);
    const unsigned ctas = grid_of_items(wanted, launch, kCtasPerSm);
    with_row(experts, [&](auto row) {
        launch_pdl(top_k_backward_kernel<decltype(row)>, ctas + kernel_args.loss_ctas, dim3(kThreads), bytes,
                   launch, "router_top_k_backward", kernel_args, row);
    });
}

}  // namespace fp8flow
