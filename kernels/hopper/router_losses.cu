// What keeps experts balanced, on the GPU: score sums and gradient of the auxiliary loss, z-loss, and the aux-loss-free bias update. One
// warp works on one token (router_device.h); sums over tokens are a second kernel in ascending order. Bit-equal to the reference.
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/router_device.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace {

struct ScoreArgs {
    const float* logits;
    int64_t tokens;
    int experts, topk;
    op::Score score;
    float* scores;               // [tokens, E]
    unsigned long long* chosen;  // [E]
};

// Moves: logits in, scores out. A warp takes a token: normalised scores, then K choices of the best (ties to the lowest id).
// Choices are counted in shared memory and added by integer atomics. Two CTA barriers around the tokens; __syncwarp inside.
__global__ void scores_kernel(const ScoreArgs args) {
    extern __shared__ float shared[];
    const int experts = args.experts, threads = static_cast<int>(blockDim.x);
    unsigned int* counts = reinterpret_cast<unsigned int*>(shared);
    for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) counts[e] = 0;
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize, warps = threads / kWarpSize;
    float* scores = shared + experts + warp * 2 * experts;
    uint32_t* keys = reinterpret_cast<uint32_t*>(scores + experts);
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens;
         t += static_cast<int64_t>(gridDim.x) * warps) {
        warp_normalized_scores(args.logits + t * experts, experts, args.score, scores);
        for (int e = warp_lane(); e < experts; e += kWarpSize) {
            args.scores[t * experts + e] = scores[e];
            keys[e] = to_key(scores[e]);
        }
        __syncwarp();
        warp_choose(keys, experts, args.topk, [&](int, int expert) {
            if (warp_lane() == 0) atomicAdd(&counts[expert], 1u);
        });
        __syncwarp();  // the token's shared memory is free again
    }
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads)
        if (counts[e] != 0) atomicAdd(&args.chosen[e], static_cast<unsigned long long>(counts[e]));
}

// block_sums[b, e] = the scores of expert e over the 64 tokens of block b, ascending. Moves: the scores once. One thread a sum, neighbouring
// threads neighbouring experts; 16 loads in flight. One writer a sum: deterministic.
constexpr int kColumnThreads = 128;
__global__ __launch_bounds__(kColumnThreads) void block_score_sums_kernel(const float* __restrict__ scores,
                                                                          int64_t tokens, int experts,
                                                                          float* block_sums) {
    constexpr int64_t kTokens = op::kScoreSumsBlock;
    const int64_t sums = (tokens + kTokens - 1) / kTokens * experts;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x; i < sums;
         i += static_cast<int64_t>(gridDim.x) * kColumnThreads) {
        const int64_t first = i / experts * kTokens, e = i % experts;
        const int64_t end = first + kTokens < tokens ? first + kTokens : tokens;
        float sum = 0;
#pragma unroll 16
        for (int64_t t = first; t < end; ++t) sum += scores[t * experts + e];
        block_sums[i] = sum;
    }
}

// sums[e] (+)= the block sums of expert e, ascending, and the counts as floats. One thread an expert, in narrow CTAs, so that the experts
// spread over the SMs; a chain of tokens / 64 additions.
constexpr int kExpertThreads = 32;
__global__ __launch_bounds__(kExpertThreads) void score_sums_kernel(const float* __restrict__ block_sums,
                                                                    int64_t blocks, int experts,
                                                                    const unsigned long long* chosen,
                                                                    bool first, float* sums, float* counts) {
    const int e = static_cast<int>(blockIdx.x) * kExpertThreads + static_cast<int>(threadIdx.x);
    if (e >= experts) return;
    float sum = first ? 0.0f : sums[e];
#pragma unroll 16
    for (int64_t b = 0; b < blocks; ++b) sum += block_sums[b * experts + e];
    sums[e] = sum;
    counts[e] = static_cast<float>(static_cast<int64_t>(chosen[e]));
}

struct AuxArgs {
    const float* logits;
    const float* counts;
    int64_t tokens;
    int experts;
    op::Score score;
    float weight;
    float* dlogits;
};

// Moves: logits in, dlogits in and out. A warp takes a token; only __syncwarp; element-wise after the token's own sums.
__global__ void aux_loss_backward_kernel(const AuxArgs args) {
    extern __shared__ float shared[];
    const int experts = args.experts;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              warps = static_cast<int>(blockDim.x) / kWarpSize;
    float* scores = shared + warp * experts;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens;
         t += static_cast<int64_t>(gridDim.x) * warps) {
        const float* logits = args.logits + t * experts;
        float* dlogits = args.dlogits + t * experts;
        warp_normalized_scores(logits, experts, args.score, scores);
        const float mean = warp_lane_dot(args.counts, scores, experts);
        for (int e = warp_lane(); e < experts; e += kWarpSize) {
            // softmax: dP_j/dl_e = P_j (1[j=e] - P_e); normalised sigmoid: the same times 1 - s_e
            float slope = scores[e];
            if (args.score == op::Score::sigmoid) slope *= sigmoid_float(-logits[e]);
            dlogits[e] = fma_float(args.weight * slope, args.counts[e] - mean, dlogits[e]);
        }
        __syncwarp();  // the token's shared memory is free again
    }
}

// loss += weight * sum_e counts[e] * score_sums[e]. One warp, eight lanes.
__global__ void aux_loss_kernel(const float* counts, const float* score_sums, int experts, float weight,
                                float* loss) {
    const float balance = warp_lane_dot(counts, score_sums, experts);
    if (threadIdx.x == 0) *loss = fma_float(weight, balance, *loss);
}

struct ZLossArgs {
    const float* logits;
    int64_t tokens;
    int experts;
    float grad_weight;
    float* dlogits;  // or null
    float* squares;  // [tokens], or null
};

// Moves: logits in, dlogits in and out, 4 bytes a token. A warp takes a token; only __syncwarp.
__global__ void z_loss_kernel(const ZLossArgs args) {
    extern __shared__ float shared[];
    const int experts = args.experts;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              warps = static_cast<int>(blockDim.x) / kWarpSize;
    float* softmax = shared + warp * experts;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp; t < args.tokens;
         t += static_cast<int64_t>(gridDim.x) * warps) {
        const float log_sum = warp_log_sum_exp(args.logits + t * experts, experts, softmax);
        if (args.squares != nullptr && warp_lane() == 0) args.squares[t] = log_sum * log_sum;
        if (args.dlogits != nullptr) {
            float* dlogits = args.dlogits + t * experts;
            const float slope = 2.0f * args.grad_weight * log_sum;
            for (int e = warp_lane(); e < experts; e += kWarpSize)
                dlogits[e] = fma_float(slope, softmax[e], dlogits[e]);
        }
        __syncwarp();  // the token's shared memory is free again
    }
}

// loss += weight * sum of squares in the eight lanes, a tile at a time through shared memory. One CTA; two barriers a tile.
constexpr int kLossThreads = 256;
__global__ __launch_bounds__(kLossThreads) void z_loss_sum_kernel(const float* squares, int64_t tokens,
                                                                  float weight, float* loss) {
    constexpr int kTile = 2048;
    __shared__ float tile[kTile];
    float lane = 0.0f;
    for (int64_t first = 0; first < tokens; first += kTile) {
        const int count = static_cast<int>(tokens - first < kTile ? tokens - first : kTile);
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kLossThreads)
            tile[i] = squares[first + i];
        __syncthreads();
        if (threadIdx.x < kLaneCount) {
#pragma unroll 16
            for (int i = static_cast<int>(threadIdx.x); i < count; i += kLaneCount) lane += tile[i];
        }
        __syncthreads();
    }
    if (threadIdx.x >= kWarpSize) return;
    lane = combine_lanes(lane);
    if (threadIdx.x == 0) *loss += weight * lane;
}

// Moves 16 bytes an expert. Every thread adds all counts itself: integers, a few hundred, from the L1.
constexpr int kBiasThreads = 256;
__global__ __launch_bounds__(kBiasThreads) void expert_bias_kernel(const int64_t* counts, int64_t experts,
                                                                   float rate, const int32_t* status,
                                                                   float* bias) {
    if (status != nullptr && *status != 0) return;
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) total += counts[e];
    for (int64_t e = threadIdx.x; e < experts; e += kBiasThreads) {
        const int64_t surplus = counts[e] * experts - total;  // E times (count - mean), exact
        if (surplus < 0) bias[e] += rate;
        if (surplus > 0) bias[e] -= rate;
    }
}

constexpr int kCtasPerSm = 4;

}  // namespace

void HopperOps::do_router_score_sums(const op::RouterScoreSums& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const cudaStream_t stream = stream_of(launch);
    const int warps = token_warps(3 * experts);  // scores and keys of each warp; the counts of the CTA
    const std::size_t bytes = static_cast<std::size_t>(experts + warps * 2 * experts) * sizeof(float);
    // The workspace holds the counts, and the scores and sums of so many blocks of tokens; more are further rounds, which go on with the sums.
    constexpr int64_t kTokens = op::kScoreSumsBlock;
    const int64_t words = static_cast<int64_t>(Workspace::kPartialsBytes / sizeof(float)) - 2 * experts;
    const int64_t round_blocks =
        std::max<int64_t>(1, std::min(ceil_div(tokens, kTokens), words / (experts * (kTokens + 1))));
    const int64_t round_tokens = round_blocks * kTokens;
    unsigned long long* chosen = workspace_->partials_for<unsigned long long>(
        experts + ceil_div(round_blocks * (kTokens + 1) * experts, 2));
    float* scores = reinterpret_cast<float*>(chosen + experts);
    float* block_sums = scores + round_tokens * experts;
    check_cuda(cudaMemsetAsync(chosen, 0, static_cast<std::size_t>(experts) * sizeof(*chosen), stream),
               "router_score_sums");
    int64_t first = 0;
    do {
        const int64_t count = std::min(round_tokens, tokens - first);
        if (count > 0) {
            const ScoreArgs kernel_args{.logits = args.logits.as<float>() + first * experts,
                                        .tokens = count,
                                        .experts = static_cast<int>(experts),
                                        .topk = static_cast<int>(args.topk),
                                        .score = args.score,
                                        .scores = scores,
                                        .chosen = chosen};
            scores_kernel<<<grid_for(ceil_div(count, warps), launch, kCtasPerSm), warps * kWarpSize, bytes,
                            stream>>>(kernel_args);
        }
        const int64_t blocks = ceil_div(std::max<int64_t>(count, 0), kTokens);
        if (blocks > 0)
            block_score_sums_kernel<<<grid_for(ceil_div(blocks * experts, kColumnThreads), launch,
                                               kCtasPerSm),
                                      kColumnThreads, 0, stream>>>(scores, count, static_cast<int>(experts),
                                                                   block_sums);
        score_sums_kernel<<<static_cast<unsigned>(ceil_div(experts, kExpertThreads)), kExpertThreads, 0,
                            stream>>>(block_sums, blocks, static_cast<int>(experts), chosen, first == 0,
                                      args.score_sums.as<float>(), args.counts.as<float>());
        first += round_tokens;
    } while (first < tokens);
    check_launch("router_score_sums");
}

void HopperOps::do_router_aux_loss_backward(const op::RouterAuxLossBackward& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    const cudaStream_t stream = stream_of(launch);
    if (args.loss)
        aux_loss_kernel<<<1, kWarpSize, 0, stream>>>(args.counts.as<float>(), args.score_sums.as<float>(),
                                                     static_cast<int>(experts), args.weight,
                                                     args.loss.as<float>());
    if (tokens > 0) {
        const AuxArgs kernel_args{.logits = args.logits.as<float>(),
                                  .counts = args.counts.as<float>(),
                                  .tokens = tokens,
                                  .experts = static_cast<int>(experts),
                                  .score = args.score,
                                  .weight = args.weight,
                                  .dlogits = args.dlogits.as<float>()};
        const int warps = token_warps(experts);
        aux_loss_backward_kernel<<<grid_for(ceil_div(tokens, warps), launch, kCtasPerSm), warps * kWarpSize,
                                   static_cast<std::size_t>(warps * experts) * sizeof(float), stream>>>(
            kernel_args);
    }
    check_launch("router_aux_loss_backward");
}

void HopperOps::do_router_z_loss(const op::RouterZLoss& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    if (tokens == 0) return;
    float* squares = args.loss ? workspace_->partials_for<float>(tokens) : nullptr;
    const ZLossArgs kernel_args{.logits = args.logits.as<float>(),
                                .tokens = tokens,
                                .experts = static_cast<int>(experts),
                                .grad_weight = args.grad_weight,
                                .dlogits = args.dlogits ? args.dlogits.as<float>() : nullptr,
                                .squares = squares};
    const int warps = token_warps(experts);
    z_loss_kernel<<<grid_for(ceil_div(tokens, warps), launch, kCtasPerSm), warps * kWarpSize,
                    static_cast<std::size_t>(warps * experts) * sizeof(float), stream_of(launch)>>>(
        kernel_args);
    if (args.loss)
        z_loss_sum_kernel<<<1, kLossThreads, 0, stream_of(launch)>>>(squares, tokens, args.weight,
                                                                     args.loss.as<float>());
    check_launch("router_z_loss");
}

void HopperOps::do_expert_bias_update(const op::ExpertBiasUpdate& args, const Launch& launch) {
    const int64_t experts = args.counts.dim(0);
    if (experts == 0) return;
    expert_bias_kernel<<<1, kBiasThreads, 0, stream_of(launch)>>>(
        args.counts.as<int64_t>(), experts, args.rate, args.status ? args.status.as<int32_t>() : nullptr,
        args.bias.as<float>());
    check_launch("expert_bias_update");
}

}  // namespace fp8flow
