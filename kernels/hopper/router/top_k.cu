// SPDX-License-Identifier: MIT
// Router top-k: choices, group limit, probabilities, and the sums and counts of the balancing losses, in one
// launch. Bit-equal to the reference: the same operations in the same order, ids in a total order (value,
// then lowest index). Lower bound at T = 8192, E = 256: 8 MB, 2 us; the kernel is bound by instructions and
// chains of warp-wide maxima (docs/design_notes.md). Logits are prefetched into L2 before the wait for the
// preceding kernel (PDL).
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/device/warpgroup.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/router/choice.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

#include <cuda/atomic>

namespace fp8flow::hopper::router {

namespace {

constexpr int kTokens = op::kScorePiece;  // of a warp, interleaved
static_assert(kTokens == 2);
constexpr int kWarps = op::kScoreBlock / op::kScorePiece;
constexpr int kTokenThreads = kWarps * kWarpSize,
              kThreads = kTokenThreads + kWarpSize;  // and a warp that counts

struct TopKArgs {
    const float* logits;
    const float* bias;
    const int32_t* forced;
    int32_t* ids;
    float* probs;
    unsigned long long* counts;
    int64_t tokens;
    int topk;
    op::RouterOptions options;
    // balancing
    int64_t set_tokens;
    unsigned int set_blocks;  // of one set, at least 1
    int64_t sets;
    float* plain_counts;  // [sets, E], or null
    float* score_sums;
    float* log_squares;     // or null
    unsigned int* ticket;   // zero between launches, as are the tallies
    unsigned int* tallies;  // [sets, E]
};

// Shared memory of a CTA: column sums of its warps [warps, E], counts of choices and plain choices [2, E],
// and, unless the choice is made on the logits, for each warp the keys and group keys of a token [2 E].
constexpr int64_t shared_words(int64_t experts, bool has_keys) {
    return (kWarps + 2 + (has_keys ? 2 * kWarps : 0)) * experts;
}

// A warp's tokens: their logits and the largest of each.
template <class R> struct WarpTokens {
    int64_t first;
    bool valid[kTokens];
    float x[kTokens][R::kCount];
    float largest[kTokens];
};

// Full scores of a token, added to its warp's column sums. Returns the sum of its softmax terms where
// balancing, z-loss or pre-softmax need it.
template <class R>
__device__ __forceinline__ float add_scores(const R& row, const TopKArgs& args, const float (&x)[R::kCount],
                                            float largest, float* scratch, float (&sums)[R::kCount]) {
    const bool sigmoid = args.options.score == op::Score::sigmoid, balances = args.plain_counts != nullptr;
    float scores[R::kCount], sum = 0.0f, factor = 0.0f;
    if (args.log_squares != nullptr || (!sigmoid && (balances || args.options.pre_softmax))) {
        sum = softmax_terms(row, x, largest, scratch, scores);
        factor = div_float(1.0f, sum);
    }
    if (!balances) return sum;
    if (sigmoid) factor = div_float(1.0f, sigmoid_terms(row, x, scratch, scores) + kScoreSumEps);
#pragma unroll
    for (int j = 0; j < R::kCount; ++j) sums[j] += scores[j] * factor;
    return sum;
}

// Keys of one token where the choice is not made on its logits, into shared memory.
template <class R>
__device__ __forceinline__ void store_keys(const R& row, const TopKArgs& args, const WarpTokens<R>& tokens,
                                           int u, uint32_t* keys) {
    float values[R::kCount];
    float* scratch = reinterpret_cast<float*>(keys);
    if (args.options.score == op::Score::sigmoid) {
        sigmoid_terms(row, tokens.x[u], scratch, values);
    } else if (args.options.pre_softmax) {
        const float factor =
            div_float(1.0f, softmax_terms(row, tokens.x[u], tokens.largest[u], scratch, values));
#pragma unroll
        for (int j = 0; j < R::kCount; ++j) values[j] *= factor;
    } else {
#pragma unroll
        for (int j = 0; j < R::kCount; ++j) values[j] = tokens.x[u][j];
    }
#pragma unroll
    for (int j = 0; j < R::kCount; ++j)
        if (row.has(j))
            keys[row.expert(j)] =
                to_key(args.bias != nullptr ? values[j] + args.bias[row.expert(j)] : values[j]);
    __syncwarp();
    if (args.options.num_groups > 0)
        exclude_groups(static_cast<int>(args.options.num_groups), static_cast<int>(args.options.group_topk),
                       row.experts(), args.topk, keys, keys + row.experts());
}

// Probabilities of the choices of a token in args.ids; own is the choice of k = lane.
__device__ __forceinline__ void choice_probs(const TopKArgs& args, int experts, int64_t t, int own,
                                             float largest, float sum) {
    const int topk = args.topk;
    const float* logits = args.logits + t * experts;
    const auto logit_of = [&](int k) { return logits[args.ids[t * topk + k]]; };
    const float own_logit = warp_lane() < topk ? logits[own] : 0.0f;
    const ChosenProbs probs = chosen_probs(args.options, topk, largest, sum, own_logit, logit_of);
#pragma unroll 1
    for (int k = warp_lane(); k < topk; k += kWarpSize)
        args.probs[t * topk + k] = probs.base_of(k, logit_of) * probs.factor * args.options.scaling_factor;
}

// kPlain: the choice is made on the logits of all experts, so it is also the plain choice.
template <bool kPlain, class R>
__device__ __forceinline__ void choose_experts(const R& row, const TopKArgs& args,
                                               const WarpTokens<R>& tokens, int64_t set_end, uint32_t* keys,
                                               unsigned int* counted, unsigned int* plain,
                                               int (&own)[kTokens]) {
    const int topk = args.topk;
    const auto emit = [&](int u, int k, int index) {
        if (tokens.first + u < set_end) {
            args.ids[(tokens.first + u) * topk + k] = index;
            atomicAdd(&counted[index], 1u);
        }
#pragma unroll
        for (int v = 0; v < kTokens; ++v)
            if (v == u && k < kWarpSize) own[v] = index;
    };
    const auto logit_key = [&](int u, int j) { return to_key(tokens.x[u][j]); };
    const auto logit_key_again = [&](int u, int j) {
        const bool is_logit = row.has(j) && tokens.first + u < args.tokens;
        return is_logit ? to_key(args.logits[(tokens.first + u) * row.experts() + row.expert(j)]) : kNanKey;
    };
    if constexpr (kPlain) {
        choose<kTokens>(row, topk, logit_key, logit_key_again, emit);
    } else {
        if (plain != nullptr)
            choose<kTokens>(row, topk, logit_key, logit_key_again, [&](int u, int, int index) {
                if (tokens.first + u < set_end) atomicAdd(&plain[index], 1u);
            });
#pragma unroll
        for (int u = 0; u < kTokens; ++u) {
            if (args.forced != nullptr) {
                for (int k = warp_lane(); k < topk && tokens.valid[u]; k += kWarpSize)
                    emit(u, k, args.forced[(tokens.first + u) * topk + k]);
                continue;
            }
            __syncwarp();
            store_keys(row, args, tokens, u, keys);
            const auto key = [&](int, int j) { return row.has(j) ? keys[row.expert(j)] : kExcluded; };
            choose<1>(row, topk, key, key, [&](int, int k, int index) { emit(u, k, index); });
        }
    }
}

// Adds the CTA's counts to the global counters; the last CTA to arrive converts the tallies to floats, and
// zeroes everything for the next launch. One warp, in parallel with the others.
__device__ __forceinline__ void flush_counts(const TopKArgs& args, int experts, int64_t set,
                                             const unsigned int* counted, const unsigned int* plain) {
    for (int e = warp_lane(); e < experts; e += kWarpSize) {
        if (counted[e] != 0) atomicAdd(&args.counts[e], static_cast<unsigned long long>(counted[e]));
        if (args.plain_counts != nullptr && plain[e] != 0)
            atomicAdd(&args.tallies[set * experts + e], plain[e]);
    }
    if (args.plain_counts == nullptr) return;
    __syncwarp();
    unsigned int before = 0;
    if (warp_lane() == 0) {
        cuda::atomic_ref<unsigned int, cuda::thread_scope_device> ticket(*args.ticket);
        before = ticket.fetch_add(1u, cuda::memory_order_acq_rel);
    }
    if (__shfl_sync(kFullMask, before, 0) != gridDim.x - 1) return;
#pragma unroll 8
    for (int64_t i = warp_lane(); i < args.sets * experts; i += kWarpSize) {
        args.plain_counts[i] = static_cast<float>(__ldcg(&args.tallies[i]));
        args.tallies[i] = 0;
    }
    if (warp_lane() == 0) *args.ticket = 0;
}

// Traffic: reads logits once, writes ids, probabilities and one row of sums per block. One CTA per block of
// 32 tokens, two tokens per warp, in registers. Column sums of the warps are added in shared memory. Choices
// are counted there and added to global integer counters, so their order does not matter.
template <bool kPlain, class R>
__global__ __launch_bounds__(kThreads,
                             R::kCount <= 8 ? 2 : 1) void top_k_kernel(const __grid_constant__ TopKArgs args,
                                                                       const R row) {
    extern __shared__ float shared[];
    __shared__ float2 largest_and_sum[op::kScoreBlock];
    const int experts = row.experts(), warp = static_cast<int>(threadIdx.x) / kWarpSize;
    float* pieces = shared;
    unsigned int* counted = reinterpret_cast<unsigned int*>(pieces + kWarps * experts);
    unsigned int* plain = counted + experts;
    uint32_t* keys = plain + experts + warp * 2 * experts;
    const bool counts_plain = args.plain_counts != nullptr && !kPlain;

    const int64_t set = blockIdx.x / args.set_blocks,
                  first = set * args.set_tokens + blockIdx.x % args.set_blocks * op::kScoreBlock;
    const int64_t set_end =
        (set + 1) * args.set_tokens < args.tokens ? (set + 1) * args.set_tokens : args.tokens;
    pdl_launch_dependents();
    WarpTokens<R> tokens;
    tokens.first = first + warp * kTokens;
    if (warp < kWarps)
        prefetch_rows(args.logits, tokens.first, min(tokens.first + kTokens, args.tokens), experts);
    for (int e = static_cast<int>(threadIdx.x); e < 2 * experts; e += kThreads) counted[e] = 0;
    pdl_wait();
    if (warp < kWarps) {
#pragma unroll
        for (int u = 0; u < kTokens; ++u) {
            tokens.valid[u] = tokens.first + u < set_end;
            // a token past the end repeats the first one, which is valid
            if (first < set_end)
                row.load(args.logits + (tokens.valid[u] ? tokens.first + u : first) * experts, tokens.x[u]);
        }
    }
    __syncthreads();
    if (warp == kWarps) {
        named_barrier_sync(1, kThreads);
        return flush_counts(args, experts, set, counted, counts_plain ? plain : counted);
    }
#pragma unroll
    for (int u = 0; u < kTokens; ++u) tokens.largest[u] = max_logit(tokens.x[u]);
    int own[kTokens] = {};
    choose_experts<kPlain>(row, args, tokens, set_end, keys, counted, counts_plain ? plain : nullptr, own);
    named_barrier_arrive(1, kThreads);

    float sums[R::kCount] = {};
    float* piece = pieces + warp * experts;
#pragma unroll 1
    for (int u = 0; u < kTokens; ++u) {
        const int64_t t = tokens.first + u;
        if (t >= set_end) break;
        float x[R::kCount];
        row.load(args.logits + t * experts, x);  // again: from the L1
        const float largest = u == 0 ? tokens.largest[0] : tokens.largest[1];
        const float sum = add_scores(row, args, x, largest, piece, sums);
        choice_probs(args, experts, t, u == 0 ? own[0] : own[1], largest, sum);
        if (warp_lane() == 0) largest_and_sum[warp * kTokens + u] = make_float2(largest, sum);
    }
    if (args.plain_counts != nullptr) row.store(sums, piece);
    named_barrier_sync(2, kTokenThreads);

    for (int e = static_cast<int>(threadIdx.x);
         e < experts && args.plain_counts != nullptr && first < set_end; e += kTokenThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += pieces[w * experts + e];
        args.score_sums[static_cast<int64_t>(blockIdx.x) * experts + e] = sum;
    }
    if (args.log_squares != nullptr && warp == kWarps - 1 && first < set_end) {
        static_assert(op::kScoreBlock == kWarpSize);
        const float2 token = largest_and_sum[warp_lane()];
        const float log_sum = token.x + log_float(token.y);
        const float sum = warp_sum(first + warp_lane() < set_end ? log_sum * log_sum : 0.0f);
        if (warp_lane() == 0) args.log_squares[blockIdx.x] = sum;
    }
}

}  // namespace

}  // namespace fp8flow::hopper::router

namespace fp8flow {

using namespace hopper;
using namespace hopper::router;

void HopperOps::do_router_top_k(const op::RouterTopK& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const op::RouterBalance& balance = args.balance;
    const int64_t sets = op::balance_sets(tokens, balance.set_tokens);
    if (tokens == 0 && !balance.counts) return;
    static_assert(sizeof(unsigned long long) == sizeof(int64_t));
    const int64_t set_tokens = sets > 1 ? balance.set_tokens : tokens;
    TopKArgs kernel_args{
        .logits = args.logits.as<float>(),
        .bias = args.expert_bias ? args.expert_bias.as<float>() : nullptr,
        .forced = args.forced_ids ? args.forced_ids.as<int32_t>() : nullptr,
        .ids = args.ids.as<int32_t>(),
        .probs = args.probs.as<float>(),
        .counts = reinterpret_cast<unsigned long long*>(args.counts.as<int64_t>()),
        .tokens = tokens,
        .topk = static_cast<int>(args.ids.dim(1)),
        .options = args.options,
        .set_tokens = set_tokens,
        .set_blocks = static_cast<unsigned>(std::max<int64_t>(1, ceil_div(set_tokens, op::kScoreBlock))),
        .sets = sets};
    if (balance.counts) {
        kernel_args.plain_counts = balance.counts.as<float>();
        kernel_args.score_sums = balance.score_sums.as<float>();
        kernel_args.ticket = workspace(launch).zeros_for<unsigned int>(1 + sets * experts);
        kernel_args.tallies = kernel_args.ticket + 1;
    }
    if (balance.log_squares) kernel_args.log_squares = balance.log_squares.as<float>();
    const bool has_keys = args.expert_bias || args.options.num_groups > 0,
               plain = !has_keys && !args.forced_ids;
    const std::size_t bytes = static_cast<std::size_t>(shared_words(experts, has_keys)) * sizeof(float);
    const auto grid = static_cast<unsigned>(
        std::max<int64_t>(1, op::balance_blocks(tokens, sets > 1 ? balance.set_tokens : 0)));
    with_row(experts, [&](auto row) {
        const auto kernel = plain ? top_k_kernel<true, decltype(row)> : top_k_kernel<false, decltype(row)>;
        launch_pdl(kernel, grid, dim3(kThreads), bytes, launch, "router_top_k", kernel_args, row);
    });
}

}  // namespace fp8flow
