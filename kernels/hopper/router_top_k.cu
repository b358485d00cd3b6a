// router_top_k on the GPU: choice, group limit, probabilities, and what balancing needs of the same logits, in one launch. Bit-equal to the
// reference: the same operations in the same order; ids by a total order of (value, lowest index).
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/router_choice.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kTokens = op::kScorePiece;  // of a warp, side by side
constexpr int kWarps = op::kScoreBlock / op::kScorePiece;
constexpr int kThreads = kWarps * kWarpSize;

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
    int64_t set_tokens, set_blocks;  // of one set
    int64_t sets;
    float* plain_counts;  // [sets, E], or null
    float* score_sums;
    float* log_squares;    // or null
    unsigned int* ticket;  // zero between launches, as are the tallies
    unsigned int* tallies;  // [sets, E]
};

// Shared memory of a CTA: the pieces of its warps [warps, E], choices and plain choices counted [2, E]; of a warp whose choice is not made
// on the logits, keys and group keys of a token [2 E].
constexpr int64_t shared_words(int64_t experts, bool has_keys) {
    return (kWarps + 2 + (has_keys ? 2 * kWarps : 0)) * experts;
}

// A warp's tokens: their logits, the largest, and the sum of a softmax over all experts where somebody wants it.
template <class R> struct WarpTokens {
    int64_t first;
    bool valid[kTokens];
    float x[kTokens][R::kCount];
    float largest[kTokens], sum[kTokens];
};

// Full scores: their piece of the column sums and each softmax's sum, for balancing, z-loss and pre-softmax.
template <class R>
__device__ __forceinline__ void sum_scores(const R& row, const TopKArgs& args, WarpTokens<R>& tokens,
                                           float* piece) {
    const bool sigmoid = args.options.score == op::Score::sigmoid, balances = args.plain_counts != nullptr;
    const bool needs_softmax = args.log_squares != nullptr ||
                               (!sigmoid && (balances || args.options.pre_softmax));
    float sums[R::kCount] = {};
    const auto add = [&](int u, const float(&scores)[R::kCount], float factor) {
#pragma unroll
        for (int j = 0; j < R::kCount; ++j)
            if (tokens.valid[u]) sums[j] += scores[j] * factor;
    };
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
        float scores[R::kCount];
        if (needs_softmax) {
            tokens.sum[u] = softmax_terms(row, tokens.x[u], tokens.largest[u], piece, scores);
            if (!sigmoid && balances) add(u, scores, div_float(1.0f, tokens.sum[u]));
        }
        if (sigmoid && balances) {
            const float sum = sigmoid_terms(row, tokens.x[u], piece, scores);
            add(u, scores, div_float(1.0f, sum + kScoreSumEps));
        }
    }
    if (!balances) return;
#pragma unroll
    for (int j = 0; j < R::kCount; ++j)
        if (row.has(j)) piece[row.expert(j)] = sums[j];
}

// Keys of one token where the choice is not made on its logits, into shared memory.
template <class R>
__device__ __forceinline__ void store_keys(const R& row, const TopKArgs& args, const WarpTokens<R>& tokens, int u,
                                           uint32_t* keys) {
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
                       row.experts, args.topk, keys, keys + row.experts);
}

// Probabilities and choices counted, for tokens whose choices stand in args.ids; own is that of k = lane.
template <class R>
__device__ __forceinline__ void weigh_choices(const R& row, const TopKArgs& args, const WarpTokens<R>& tokens,
                                              const int (&own)[kTokens], unsigned int* counted) {
    const int topk = args.topk;
    const auto logit = [&](int u, int id) { return args.logits[(tokens.first + u) * row.experts + id]; };
    float own_logit[kTokens] = {};
#pragma unroll
    for (int u = 0; u < kTokens; ++u)
        if (tokens.valid[u] && warp_lane() < topk) own_logit[u] = logit(u, own[u]);
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
        if (!tokens.valid[u]) continue;
        const int64_t at = (tokens.first + u) * topk;
        const auto id_of = [&](int k) { return k < kWarpSize ? own[u] : args.ids[at + k]; };
        const auto logit_of = [&](int k) { return logit(u, id_of(k)); };
        const ChosenProbs probs = chosen_probs(args.options, topk, tokens.largest[u], tokens.sum[u], own_logit[u],
                                               logit_of);
        for (int k = warp_lane(); k < topk; k += kWarpSize) {
            args.probs[at + k] = probs.base_of(k, logit_of) * probs.factor * args.options.scaling_factor;
            atomicAdd(&counted[id_of(k)], 1u);
        }
    }
}

// kPlain: the choice is made on the logits of all experts, and so is the plain choice itself.
template <bool kPlain, class R>
__device__ __forceinline__ void choose_experts(const R& row, const TopKArgs& args, const WarpTokens<R>& tokens,
                                               uint32_t* keys, unsigned int* counted, unsigned int* plain) {
    const int topk = args.topk;
    int own[kTokens] = {};
    const auto emit = [&](int u, int k, int index) {
        if (tokens.valid[u]) args.ids[(tokens.first + u) * topk + k] = index;
        if (k < kWarpSize) own[u] = index;
    };
    const auto logit_key = [&](int u, int j) { return to_key(tokens.x[u][j]); };
    const auto logit_key_again = [&](int u, int j) {
        const bool is_logit = row.has(j) && tokens.valid[u];
        return is_logit ? to_key(args.logits[(tokens.first + u) * row.experts + row.expert(j)]) : kNanKey;
    };
    if constexpr (kPlain) {
        choose<kTokens>(row, topk, logit_key, logit_key_again, emit);
    } else {
        if (plain != nullptr)
            choose<kTokens>(row, topk, logit_key, logit_key_again, [&](int u, int, int index) {
                if (tokens.valid[u]) atomicAdd(&plain[index], 1u);
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
    weigh_choices(row, args, tokens, own, counted);
}

// The last CTA to come makes the tallies floats, and everything zero for the next launch. All threads call it; two barriers.
__device__ __forceinline__ void finish_counts(const TopKArgs& args, int experts) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // of what the CTA added, which the barrier puts before it
        is_last = atomicAdd(args.ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int64_t i = threadIdx.x; i < args.sets * experts; i += kThreads) {
        args.plain_counts[i] = static_cast<float>(__ldcg(&args.tallies[i]));
        args.tallies[i] = 0;
    }
    if (threadIdx.x == 0) *args.ticket = 0;
}

// Moves: logits once, ids, probabilities and a row of sums a block. A CTA takes a block of 32 tokens, a warp a piece of two, which stay in its
// registers. The pieces meet in shared memory; choices are counted there and added to global counters, whose order does not matter.
template <bool kPlain, class R>
__global__ __launch_bounds__(kThreads, R::kCount <= 8 ? 2 : 1) void top_k_kernel(const __grid_constant__ TopKArgs args, const R row) {
    extern __shared__ float shared[];
    __shared__ float2 largest_and_sum[op::kScoreBlock];
    const int experts = row.experts, warp = static_cast<int>(threadIdx.x) / kWarpSize;
    float* pieces = shared;
    unsigned int* counted = reinterpret_cast<unsigned int*>(pieces + kWarps * experts);
    unsigned int* plain = counted + experts;
    uint32_t* keys = plain + experts + warp * 2 * experts;
    const bool counts_plain = args.plain_counts != nullptr && !kPlain;

    const int64_t set = args.set_blocks > 0 ? blockIdx.x / args.set_blocks : 0,
                  first = set * args.set_tokens + (blockIdx.x - set * args.set_blocks) * op::kScoreBlock;
    const int64_t set_end = (set + 1) * args.set_tokens < args.tokens ? (set + 1) * args.set_tokens : args.tokens;
    WarpTokens<R> tokens;
    tokens.first = first + warp * kTokens;
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
        tokens.valid[u] = tokens.first + u < set_end;
        if (tokens.valid[u]) row.load(args.logits + (tokens.first + u) * experts, tokens.x[u]);
    }
    for (int e = static_cast<int>(threadIdx.x); e < 2 * experts; e += kThreads) counted[e] = 0;
    __syncthreads();

#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
#pragma unroll
        for (int j = 0; j < R::kCount; ++j)
            if (!tokens.valid[u]) tokens.x[u][j] = 0.0f;
        tokens.largest[u] = largest_logit(tokens.x[u]);
    }
    sum_scores(row, args, tokens, pieces + warp * experts);
    choose_experts<kPlain>(row, args, tokens, keys, counted, counts_plain ? plain : nullptr);
    if (warp_lane() == 0)
#pragma unroll
        for (int u = 0; u < kTokens; ++u)
            largest_and_sum[warp * kTokens + u] = make_float2(tokens.largest[u], tokens.sum[u]);
    __syncthreads();

    for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
        if (counted[e] != 0) atomicAdd(&args.counts[e], static_cast<unsigned long long>(counted[e]));
        if (args.plain_counts == nullptr || first >= set_end) continue;
        const unsigned int tally = counts_plain ? plain[e] : counted[e];
        if (tally != 0) atomicAdd(&args.tallies[set * experts + e], tally);
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += pieces[w * experts + e];
        args.score_sums[static_cast<int64_t>(blockIdx.x) * experts + e] = sum;
    }
    if (args.log_squares != nullptr && warp == kWarps - 1 && first < set_end) {
        static_assert(op::kScoreBlock == kWarpSize);
        const float2 token = largest_and_sum[warp_lane()];
        const float log_sum = token.x + log_float(token.y);
        const float sum = join_lanes(first + warp_lane() < set_end ? log_sum * log_sum : 0.0f);
        if (warp_lane() == 0) args.log_squares[blockIdx.x] = sum;
    }
    if (args.plain_counts != nullptr) finish_counts(args, experts);
}

}  // namespace

void HopperOps::do_router_top_k(const op::RouterTopK& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const op::RouterBalance& balance = args.balance;
    const int64_t sets = op::balance_sets(tokens, balance.set_tokens);
    if (tokens == 0 && !balance.counts) return;
    static_assert(sizeof(unsigned long long) == sizeof(int64_t));
    const int64_t set_tokens = sets > 1 ? balance.set_tokens : tokens;
    TopKArgs kernel_args{.logits = args.logits.as<float>(),
                         .bias = args.expert_bias ? args.expert_bias.as<float>() : nullptr,
                         .forced = args.forced_ids ? args.forced_ids.as<int32_t>() : nullptr,
                         .ids = args.ids.as<int32_t>(),
                         .probs = args.probs.as<float>(),
                         .counts = reinterpret_cast<unsigned long long*>(args.counts.as<int64_t>()),
                         .tokens = tokens,
                         .topk = static_cast<int>(args.ids.dim(1)),
                         .options = args.options,
                         .set_tokens = set_tokens,
                         .set_blocks = ceil_div(set_tokens, op::kScoreBlock),
                         .sets = sets};
    if (balance.counts) {
        kernel_args.plain_counts = balance.counts.as<float>();
        kernel_args.score_sums = balance.score_sums.as<float>();
        kernel_args.ticket = workspace_->zeros_for<unsigned int>(1 + sets * experts);
        kernel_args.tallies = kernel_args.ticket + 1;
    }
    if (balance.log_squares) kernel_args.log_squares = balance.log_squares.as<float>();
    const bool has_keys = args.expert_bias || args.options.num_groups > 0, plain = !has_keys && !args.forced_ids;
    const std::size_t bytes = static_cast<std::size_t>(shared_words(experts, has_keys)) * sizeof(float);
    const auto grid = static_cast<unsigned>(
        std::max<int64_t>(1, op::balance_blocks(tokens, sets > 1 ? balance.set_tokens : 0)));
    with_row(experts, [&](auto row) {
        const auto kernel = plain ? top_k_kernel<true, decltype(row)> : top_k_kernel<false, decltype(row)>;
        if (bytes > kSharedBytes)
            check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(bytes)),
                       "router_top_k");
        kernel<<<grid, kThreads, bytes, stream_of(launch)>>>(kernel_args, row);
    });
    check_launch("router_top_k");
}

}  // namespace fp8flow
