// SPDX-License-Identifier: MIT
// Merging weights in ascending expert order: the order in which an owner adds the rows of a token.
#include "kernels/hopper/exchange/merging_weights.h"

#include "kernels/core/error.h"
#include "kernels/hopper/runtime/launch.h"

namespace fp8flow::hopper {

namespace {

constexpr int kThreads = 256;

// ids, probs [T, K] -> weights [T, K] f32: the probabilities of a token in ascending order of its expert ids.
// Positions of ids that are no expert come last and get 0.
//
// Lower bound: 12 bytes per (token, k). One thread per (token, k): the position of a choice is the number of
// choices of the token with smaller ids. No shared memory, no barriers. Deterministic: the ids of a token
// differ, so each position has one writer.
__global__ __launch_bounds__(kThreads) void weights_kernel(const int32_t* ids, const float* probs,
                                                           int64_t values, int64_t topk, int64_t experts,
                                                           float* weights) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < values;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const int64_t first = i / topk * topk;
        const int32_t id = ids[i];
        const bool exists = id >= 0 && id < experts;
        // absent choices come after the others, in the order of k
        int64_t position = 0;
        for (int64_t other = first; other < first + topk; ++other) {
            const bool other_exists = ids[other] >= 0 && ids[other] < experts;
            if (exists)
                position += other_exists && ids[other] < id;
            else
                position += other_exists || other < i;
        }
        weights[first + position] = exists ? probs[i] : 0.0f;
    }
}

}  // namespace

TensorView weights_in_expert_order(const DispatchPlan& plan, int64_t rank, Arena& scratch,
                                   const Launch& launch) {
    FP8FLOW_CHECK(plan.all_probs, "a plan without all_probs");
    const int64_t ranks = plan.all_ids.dim(0), slots = plan.all_ids.dim(1), topk = plan.topk,
                  values = plan.num_tokens * topk, own = rank * slots * topk;
    const TensorView weights = scratch.tensor(DType::f32, {plan.num_tokens, topk}, "combine");
    if (values == 0) return weights;
    launch_kernel(weights_kernel, grid_for(ceil_div(values, kThreads), launch), kThreads, launch,
                  "ordering merging weights", plan.all_ids.as<int32_t>() + own,
                  plan.all_probs.as<float>() + own, values, topk, ranks * plan.num_local_experts,
                  weights.as<float>());
    return weights;
}

}  // namespace fp8flow::hopper
