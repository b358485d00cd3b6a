// What keeps experts balanced, on the GPU: score sums and gradient of the auxiliary loss, z-loss, and the aux-loss-free bias update. One
// warp works on one token (router_device.h); the last CTA ends a sum over tokens, in its stated order. Bit-equal to the reference.
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/router_device.h"
#include "kernels/hopper/ticket.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

using namespace hopper;

namespace {

struct ScoreArgs {
    const float* logits;
    int64_t tokens;
    int experts, topk;
    op::Score score;
    bool first;  // of the rounds
    float *sums, *counts;
    float* scores;               // [tokens, E]
    float* block_sums;           // [blocks, E]
    unsigned int* block_counts;  // [blocks, E]
    unsigned int* ticket;
};

// Moves: logits in (8.4 MB at T=8192, E=256: 2 us), scores out and in once more (from the L2). A CTA takes a block of 32 tokens, two a warp: its
// normalised scores, then K choices of the best (ties to the lowest id), counted in shared memory by integer atomics. Then a thread
// adds an expert's scores of the block in ascending order, all 32 loads under way. The CTA that finishes last (ticket.h) adds the
// blocks, ascending, 16 at a time. Barriers around the two halves of a block, outside of any branch. One writer a word, fixed orders:
// deterministic. Bound by instructions: some 1000 a warp and token.
constexpr int kScoreWarps = 16;
__global__ __launch_bounds__(kScoreWarps* kWarpSize, 2) void score_sums_kernel(const ScoreArgs args) {
    extern __shared__ float shared[];
    constexpr int kTokens = static_cast<int>(op::kScoreSumsBlock);
    const int experts = args.experts, threads = static_cast<int>(blockDim.x),
              thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize, warps = threads / kWarpSize;
    unsigned int* counts = reinterpret_cast<unsigned int*>(shared);
    float* scores = shared + experts + warp * 2 * experts;
    uint32_t* keys = reinterpret_cast<uint32_t*>(scores + experts);
    const int64_t blocks = (args.tokens + kTokens - 1) / kTokens;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        for (int e = thread; e < experts; e += threads) counts[e] = 0;
        __syncthreads();
        const int64_t first = block * kTokens;
        const int tokens = static_cast<int>(args.tokens - first < kTokens ? args.tokens - first : kTokens);
        for (int i = warp; i < tokens; i += warps) {
            warp_normalized_scores(args.logits + (first + i) * experts, experts, args.score, scores);
            for (int e = warp_lane(); e < experts; e += kWarpSize) {
                args.scores[(first + i) * experts + e] = scores[e];
                keys[e] = to_key(scores[e]);
            }
            __syncwarp();
            warp_choose(keys, experts, args.topk, [&](int, int expert) {
                if (warp_lane() == 0) atomicAdd(&counts[expert], 1u);
            });
            __syncwarp();  // the token's shared memory is free again
        }
        __syncthreads();
        for (int e = thread; e < experts; e += threads) {
            const float* from = args.scores + first * experts + e;
            float values[kTokens], sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kTokens; ++i)
                values[i] = i < tokens ? __ldcg(from + static_cast<int64_t>(i) * experts) : 0.0f;
#pragma unroll
            for (int i = 0; i < kTokens; ++i)
                if (i < tokens) sum += values[i];
            args.block_sums[block * experts + e] = sum;
            args.block_counts[block * experts + e] = counts[e];
        }
        __syncthreads();  // the counts belong to the next block now
    }
    if (!is_last_cta(args.ticket)) return;
    for (int e = thread; e < experts; e += threads) {
        constexpr int kInFlight = 16;
        float sum = args.first ? 0.0f : args.sums[e];
        unsigned int count = 0;
        for (int64_t block = 0; block < blocks; block += kInFlight) {
            float values[kInFlight];
            unsigned int more[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const bool inside = block + i < blocks;
                values[i] = inside ? __ldcg(args.block_sums + (block + i) * experts + e) : 0.0f;
                more[i] = inside ? __ldcg(args.block_counts + (block + i) * experts + e) : 0u;
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (block + i < blocks) sum += values[i];
                count += more[i];
            }
        }
        args.sums[e] = sum;
        args.counts[e] = (args.first ? 0.0f : args.counts[e]) + static_cast<float>(count);
    }
}

struct AuxArgs {
    const float* logits;
    const float* counts;
    int64_t tokens;
    int experts;
    op::Score score;
    float weight;
    float* dlogits;
    const float* score_sums;
    float* loss;  // or null
};

// Moves: logits in, dlogits in and out. A warp takes a token; only __syncwarp; element-wise after the token's own sums. The first warp of
// all also adds the loss, in eight lanes.
__global__ void aux_loss_backward_kernel(const AuxArgs args) {
    extern __shared__ float shared[];
    const int experts = args.experts;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
              warps = static_cast<int>(blockDim.x) / kWarpSize;
    float* scores = shared + warp * experts;
    if (args.loss != nullptr && blockIdx.x == 0 && warp == 0) {
        const float balance = warp_lane_dot(args.counts, args.score_sums, experts);
        if (warp_lane() == 0) *args.loss = fma_float(args.weight, balance, *args.loss);
    }
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

struct ZLossArgs {
    const float* logits;
    int64_t tokens;
    int experts;
    float grad_weight;
    float* dlogits;  // or null
    float* squares;  // [tokens], or null
    float weight;
    float* loss;  // where squares are
    unsigned int* ticket;
};

// Moves: logits in, dlogits in and out, 4 bytes a token. A warp takes a token; only __syncwarp. Then the CTA that finishes last (ticket.h) adds
// the squares in the eight lanes, a tile at a time through shared memory: two barriers a tile, T / 8 additions in a row.
constexpr int kSquaresTile = 2048;
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
    if (args.squares == nullptr || !is_last_cta(args.ticket)) return;
    float* const tile = shared;
    float lane = 0.0f;
    for (int64_t first = 0; first < args.tokens; first += kSquaresTile) {
        const int count =
            static_cast<int>(args.tokens - first < kSquaresTile ? args.tokens - first : kSquaresTile);
#pragma unroll 8
        for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
            tile[i] = __ldcg(args.squares + first + i);
        __syncthreads();
        if (threadIdx.x < kLaneCount) {
#pragma unroll 16
            for (int i = static_cast<int>(threadIdx.x); i < count; i += kLaneCount) lane += tile[i];
        }
        __syncthreads();
    }
    if (threadIdx.x >= kWarpSize) return;
    lane = combine_lanes(lane);
    if (threadIdx.x == 0) *args.loss += args.weight * lane;
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
    const int warps =
        token_warps(3 * experts, kScoreWarps);  // scores and keys of each warp; the CTA's counts
    const std::size_t bytes = static_cast<std::size_t>(experts + warps * 2 * experts) * sizeof(float);
    // The workspace holds the scores, sums and counts of so many blocks of tokens; more are further rounds, which go on with the sums.
    constexpr int64_t kTokens = op::kScoreSumsBlock;
    constexpr int64_t kWords = static_cast<int64_t>(Workspace::kPartialsBytes / sizeof(float));
    const int64_t round_blocks =
        std::max<int64_t>(1, std::min(ceil_div(tokens, kTokens), kWords / (experts * (kTokens + 2))));
    const int64_t round_tokens = round_blocks * kTokens;
    float* scores = workspace_->partials_for<float>(round_blocks * (kTokens + 2) * experts);
    float* block_sums = scores + round_tokens * experts;
    int64_t first = 0;
    do {
        const int64_t count = std::min(round_tokens, tokens - first);
        const ScoreArgs kernel_args{
            .logits = args.logits.as<float>() + first * experts,
            .tokens = count,
            .experts = static_cast<int>(experts),
            .topk = static_cast<int>(args.topk),
            .score = args.score,
            .first = first == 0,
            .sums = args.score_sums.as<float>(),
            .counts = args.counts.as<float>(),
            .scores = scores,
            .block_sums = block_sums,
            .block_counts = reinterpret_cast<unsigned int*>(block_sums + round_blocks * experts),
            .ticket = workspace_->ticket()};
        score_sums_kernel<<<grid_for(ceil_div(count, kTokens), launch, 2), warps * kWarpSize, bytes,
                            stream>>>(kernel_args);
        first += round_tokens;
    } while (first < tokens);
    check_launch("router_score_sums");
}

void HopperOps::do_router_aux_loss_backward(const op::RouterAuxLossBackward& args, const Launch& launch) {
    const int64_t tokens = args.logits.dim(0), experts = args.logits.dim(1);
    if (tokens == 0 && !args.loss) return;
    const AuxArgs kernel_args{.logits = args.logits.as<float>(),
                              .counts = args.counts.as<float>(),
                              .tokens = tokens,
                              .experts = static_cast<int>(experts),
                              .score = args.score,
                              .weight = args.weight,
                              .dlogits = args.dlogits.as<float>(),
                              .score_sums = args.loss ? args.score_sums.as<float>() : nullptr,
                              .loss = args.loss ? args.loss.as<float>() : nullptr};
    const int warps = token_warps(experts);
    aux_loss_backward_kernel<<<grid_for(ceil_div(tokens, warps), launch, kCtasPerSm), warps * kWarpSize,
                               static_cast<std::size_t>(warps * experts) * sizeof(float),
                               stream_of(launch)>>>(kernel_args);
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
                                .squares = squares,
                                .weight = args.weight,
                                .loss = args.loss ? args.loss.as<float>() : nullptr,
                                .ticket = workspace_->ticket()};
    const int warps = token_warps(experts);
    const std::size_t bytes =
        static_cast<std::size_t>(std::max<int64_t>(warps * experts, kSquaresTile)) * sizeof(float);
    z_loss_kernel<<<grid_for(ceil_div(tokens, warps), launch, kCtasPerSm), warps * kWarpSize, bytes,
                    stream_of(launch)>>>(kernel_args);
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
