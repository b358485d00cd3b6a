// router_top_k and its backward on the GPU: choice, group limit, probabilities, and the gradient through the same path. Bit-equal to the
// reference: the same operations in the same order; ids by a total order of (value, lowest index).
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/router_device.h"

namespace fp8flow {

using namespace hopper;

namespace {

struct TopKArgs {
    const float* logits;
    const float* bias;
    const int32_t* forced;
    int32_t* ids;
    float* probs;
    unsigned long long* counts;
    int64_t tokens;
    int experts, topk;
    op::RouterOptions options;
};

__device__ __forceinline__ bool is_post_softmax(const op::RouterOptions& options) {
    return options.score == op::Score::softmax && !options.pre_softmax;
}

// Full scores of one token into shared memory; unused by post-softmax.
__device__ __forceinline__ void full_scores(const float* logits, int experts,
                                            const op::RouterOptions& options, float* scores) {
    if (is_post_softmax(options)) return;
    if (options.score == op::Score::softmax) {
        warp_log_sum_exp(logits, experts, scores);
        return;
    }
    for (int e = warp_lane(); e < experts; e += kWarpSize) scores[e] = sigmoid_float(logits[e]);
    __syncwarp();
}

// Excludes the experts of all groups but the group_topk best; a group's score is the sum of its best values, largest first.
__device__ __forceinline__ void exclude_groups(const op::RouterOptions& options, int experts, int topk,
                                               uint32_t* keys, uint32_t* group_keys) {
    const int groups = static_cast<int>(options.num_groups),
              group_topk = static_cast<int>(options.group_topk);
    const int group_size = experts / groups, counted = topk / group_topk;
    for (int g = 0; g < groups; ++g) {
        float sum = 0.0f;
        uint64_t best = kNothingChosen;
        for (int i = 0; i < counted; ++i) {
            best = warp_next_best(keys + g * group_size, group_size, best);
            sum += from_key(key_of(best));
        }
        if (warp_lane() == 0) group_keys[g] = to_key(sum);
    }
    __syncwarp();
    for (int i = 0; i < group_topk; ++i) {  // a chosen group's key becomes 0
        const uint64_t best = warp_next_best(group_keys, groups, kNothingChosen);
        __syncwarp();
        if (warp_lane() == 0) group_keys[index_of(best)] = kExcluded;
        __syncwarp();
    }
    for (int e = warp_lane(); e < experts; e += kWarpSize)
        if (group_keys[e / group_size] != kExcluded) keys[e] = kExcluded;
    __syncwarp();
}

// Probabilities of the chosen before scaling, into `chosen` (shared memory, visible to the warp). Returns what sigmoid scores were
// divided by (1 where they were not).
__device__ __forceinline__ float chosen_probs(const float* logits, const int32_t* ids, int topk,
                                              const op::RouterOptions& options, const float* scores,
                                              float* chosen) {
    if (is_post_softmax(options)) {
        for (int k = warp_lane(); k < topk; k += kWarpSize) chosen[k] = logits[ids[k]];
        __syncwarp();
        warp_log_sum_exp(chosen, topk, chosen);
        return 1.0f;
    }
    for (int k = warp_lane(); k < topk; k += kWarpSize) chosen[k] = scores[ids[k]];
    __syncwarp();
    if (options.score == op::Score::softmax || topk == 1) return 1.0f;
    float sum = 0.0f;  // in order of choice, by every thread alike
    for (int k = 0; k < topk; ++k) sum += chosen[k];
    sum += kScoreSumEps;
    __syncwarp();
    for (int k = warp_lane(); k < topk; k += kWarpSize) chosen[k] = div_float(chosen[k], sum);
    __syncwarp();
    return sum;
}

// Words of shared memory: per warp scores [E], keys [E], group keys [E], chosen [K], ids [K]; per CTA counts [E].
__host__ __device__ constexpr int64_t top_k_words(int64_t experts, int64_t topk) {
    return 3 * experts + 2 * topk;
}

// Moves: logits once, ids and probs once. A warp takes one token at a time and keeps it in shared memory: scores, then their order keys,
// then K choices of the best pair (key, index) by warp reductions, so ties and NaN are decided as in the reference. The CTA counts choices
// in shared memory and adds them to counts at its end by integer atomics, whose order does not matter. __syncwarp between a warp's steps;
// two CTA barriers around the tokens, outside of any branch.
__global__ __launch_bounds__(kMaxTokenWarps* kWarpSize, 4) void top_k_kernel(const TopKArgs args) {
    extern __shared__ float shared[];
    const int experts = args.experts, topk = args.topk;
    unsigned int* counts = reinterpret_cast<unsigned int*>(shared);
    for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) counts[e] = 0;
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              warps = static_cast<int>(blockDim.x) / kWarpSize;
    float* scores = shared + experts + warp * top_k_words(experts, topk);
    uint32_t* keys = reinterpret_cast<uint32_t*>(scores + experts);
    uint32_t* group_keys = keys + experts;
    float* chosen = reinterpret_cast<float*>(group_keys + experts);
    int32_t* ids = reinterpret_cast<int32_t*>(chosen + topk);
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens;
         t += static_cast<int64_t>(gridDim.x) * warps) {
        const float* logits = args.logits + t * experts;
        full_scores(logits, experts, args.options, scores);
        if (args.forced != nullptr) {
            for (int k = warp_lane(); k < topk; k += kWarpSize) ids[k] = args.forced[t * topk + k];
        } else {
            const float* values = is_post_softmax(args.options) ? logits : scores;
            for (int e = warp_lane(); e < experts; e += kWarpSize)
                keys[e] = to_key(args.bias != nullptr ? values[e] + args.bias[e] : values[e]);
            __syncwarp();
            if (args.options.num_groups > 0) exclude_groups(args.options, experts, topk, keys, group_keys);
            warp_choose(keys, experts, topk, [&](int k, int expert) {
                if (warp_lane() == 0) ids[k] = expert;
            });
        }
        __syncwarp();
        chosen_probs(logits, ids, topk, args.options, scores, chosen);
        for (int k = warp_lane(); k < topk; k += kWarpSize) {
            args.ids[t * topk + k] = ids[k];
            args.probs[t * topk + k] = chosen[k] * args.options.scaling_factor;
            atomicAdd(&counts[ids[k]], 1u);
        }
        __syncwarp();  // the token's shared memory is free again
    }
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x))
        if (counts[e] != 0) atomicAdd(&args.counts[e], static_cast<unsigned long long>(counts[e]));
}

struct TopKBackwardArgs {
    const float* logits;
    const int32_t* ids;
    const float* dprobs;
    float* dlogits;
    int64_t tokens;
    int experts, topk;
    op::RouterOptions options;
};

// Words of shared memory per warp: scores [E], gradient row [E], chosen [K], gradient of the chosen [K].
constexpr int64_t top_k_backward_words(int64_t experts, int64_t topk) { return 2 * experts + 2 * topk; }

// Moves: logits, ids and dprobs once, dlogits once. A warp takes one token: recomputes its probabilities, builds the gradient row in shared
// memory (ids of a token are distinct, so every word has one writer) and stores it whole. Only __syncwarp; fixed order.
__global__ void top_k_backward_kernel(const TopKBackwardArgs args) {
    extern __shared__ float shared[];
    const int experts = args.experts, topk = args.topk;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              warps = static_cast<int>(blockDim.x) / kWarpSize;
    float* scores = shared + warp * top_k_backward_words(experts, topk);
    float* row = scores + experts;
    float* chosen = row + experts;
    float* dchosen = chosen + topk;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens;
         t += static_cast<int64_t>(gridDim.x) * warps) {
        const float* logits = args.logits + t * experts;
        const int32_t* ids = args.ids + t * topk;
        full_scores(logits, experts, args.options, scores);
        const float divisor = chosen_probs(logits, ids, topk, args.options, scores, chosen);
        for (int k = warp_lane(); k < topk; k += kWarpSize)
            dchosen[k] = args.dprobs[t * topk + k] * args.options.scaling_factor;
        for (int e = warp_lane(); e < experts; e += kWarpSize) row[e] = 0.0f;
        __syncwarp();
        const float mean = warp_lane_dot(dchosen, chosen, topk);
        for (int k = warp_lane(); k < topk; k += kWarpSize) {
            const int id = ids[k];
            if (is_post_softmax(args.options)) {  // p_k = softmax over the chosen
                row[id] = chosen[k] * (dchosen[k] - mean);
            } else if (args.options.score == op::Score::softmax) {  // p_k = s_i of a softmax over all
                row[id] = dchosen[k];
            } else {  // p_k = s_k / divisor, where the divisor is their sum if K > 1
                const float dscore = topk > 1 ? div_float(dchosen[k] - mean, divisor) : dchosen[k];
                row[id] = dscore * scores[id] * sigmoid_float(-logits[id]);
            }
        }
        __syncwarp();
        const bool over_all = args.options.score == op::Score::softmax && args.options.pre_softmax;
        for (int e = warp_lane(); e < experts; e += kWarpSize)
            args.dlogits[t * experts + e] = over_all ? scores[e] * (row[e] - mean) : row[e];
        __syncwarp();  // the token's shared memory is free again
    }
}

}  // namespace

void HopperOps::do_router_top_k(const op::RouterTopK& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1), topk = args.ids.dim(1);
    if (tokens == 0) return;
    static_assert(sizeof(unsigned long long) == sizeof(int64_t));
    const TopKArgs kernel_args{.logits = args.logits.as<float>(),
                               .bias = args.expert_bias ? args.expert_bias.as<float>() : nullptr,
                               .forced = args.forced_ids ? args.forced_ids.as<int32_t>() : nullptr,
                               .ids = args.ids.as<int32_t>(),
                               .probs = args.probs.as<float>(),
                               .counts = reinterpret_cast<unsigned long long*>(args.counts.as<int64_t>()),
                               .tokens = tokens,
                               .experts = static_cast<int>(experts),
                               .topk = static_cast<int>(topk),
                               .options = args.options};
    // the counts of the CTA are charged to every warp, which is more than they take
    const int warps = token_warps(top_k_words(experts, topk) + experts);
    const std::size_t bytes =
        static_cast<std::size_t>(experts + warps * top_k_words(experts, topk)) * sizeof(float);
    top_k_kernel<<<grid_for(ceil_div(tokens, warps), launch, 4), warps * kWarpSize, bytes,
                   stream_of(launch)>>>(kernel_args);
    check_launch("router_top_k");
}

void HopperOps::do_router_top_k_backward(const op::RouterTopKBackward& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1), topk = args.ids.dim(1);
    if (tokens == 0) return;
    const TopKBackwardArgs kernel_args{.logits = args.logits.as<float>(),
                                       .ids = args.ids.as<int32_t>(),
                                       .dprobs = args.dprobs.as<float>(),
                                       .dlogits = args.dlogits.as<float>(),
                                       .tokens = tokens,
                                       .experts = static_cast<int>(experts),
                                       .topk = static_cast<int>(topk),
                                       .options = args.options};
    const int warps = token_warps(top_k_backward_words(experts, topk));
    const std::size_t bytes =
        static_cast<std::size_t>(warps * top_k_backward_words(experts, topk)) * sizeof(float);
    top_k_backward_kernel<<<grid_for(ceil_div(tokens, warps), launch, 4), warps * kWarpSize, bytes,
                            stream_of(launch)>>>(kernel_args);
    check_launch("router_top_k_backward");
}

}  // namespace fp8flow
