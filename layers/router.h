// The router: logits, top-k, balancing losses and their gradients, expert bias, load statistics.
#pragma once

#include "layers/context.h"
#include "layers/parameter.h"
#include "layers/spec.h"

#include <memory>

namespace fp8flow {

struct RouterSaved {
    TensorView logits;  // [T, E] f32
    TensorView ids;     // [T, K] i32
    TensorView probs;   // [T, K] f32
};

class Router {
public:
    Router(ParameterStore& store, Device& device, const ModelSpec& model, const MoeSpec& moe,
           DType plain_dtype, int layer);

    void forward(Context& ctx, const TensorView& xn, RouterSaved& saved) const;
    // dx = dx_in + the router's part; balancing and z-loss gradients are added here, once per micro-batch.
    void backward(Context& ctx, const TensorView& dprobs, const TensorView& xn, const RouterSaved& saved,
                  const TensorView& dx_in, const TensorView& dx) const;

    // Start of a step: statistics to zero. End of a step: counts summed over all ranks, expert bias moved.
    void begin_step(Context& ctx) const;
    void end_step(Context& ctx) const;

    // Read by the host after end_step: tokens per expert of the global batch (all micro-batches and ranks), and the losses.
    TensorView step_counts() const { return counts_; }       // [E] i64
    TensorView balancing_loss() const { return aux_loss_; }  // [1] f32, coefficient included
    TensorView z_loss() const { return z_loss_; }            // [1] f32, coefficient included
    TensorView expert_bias() const { return bias_; }  // [E] f32; absent without moe_router_enable_expert_bias

private:
    void balancing_gradients(Context& ctx, const TensorView& logits, const TensorView& dlogits) const;
    void balance(Context& ctx, BalancingLoss type, double coeff, const TensorView& logits,
                 const TensorView& dlogits) const;
    TensorView forced_ids(Context& ctx) const;

    ModelSpec model_;
    MoeSpec moe_;
    int layer_;
    op::RouterOptions options_;
    op::Score score_;
    Parameter* weight_;
    std::unique_ptr<Arena> state_;
    TensorView counts_, bias_, aux_loss_, z_loss_;
    TensorView global_counts_;  // [E] f32: global_aux_loss, summed over ranks and the micro-batches so far
};

// Assignments for benchmarks, the same on every backend: round robin (max_over_mean <= 1), or skewed so that the fullest expert gets
// max_over_mean times the mean load. ids [tokens, topk], distinct inside a token.
std::vector<int32_t> forced_assignment(int64_t tokens, int64_t first_token, int64_t num_experts, int64_t topk,
                                       double max_over_mean, uint64_t seed);

}  // namespace fp8flow
