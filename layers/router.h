// SPDX-License-Identifier: MIT
// The router: logits, top-k, balancing losses and their gradients, expert bias, load statistics.
#pragma once

#include "layers/context.h"
#include "layers/parameter.h"
#include "layers/spec.h"

#include <memory>

namespace fp8flow {

struct RouterSaved {
    TensorView logits;          // [T, E] f32
    TensorView ids;             // [T, K] i32
    TensorView probs;           // [T, K] f32
    op::RouterBalance balance;  // what the losses need; nothing without losses
};

class Router {
public:
    Router(ParameterStore& store, Device& device, const ModelSpec& model, const MoeSpec& moe,
           DType plain_dtype, int layer);

    void forward(Context& ctx, const TensorView& xn, RouterSaved& saved) const;
    // dx = dx_in + the router's part, with the gradients of balancing losses and z-loss.
    void backward(Context& ctx, const TensorView& dprobs, const TensorView& xn, const RouterSaved& saved,
                  const TensorView& dx_in, const TensorView& dx) const;

    // Makes the router use the model's statistics: counts [E] i64, losses() f32, which the model sets to zero
    // for all layers at once at the start of a step. Without this call the router owns them. moe_layer: index
    // among the MoE layers, for Context::Routing.
    void use_model_statistics(int64_t moe_layer, const TensorView& counts, const TensorView& losses);
    void set_global_loss_gradient(GlobalLossGradient rule) { moe_.moe_global_aux_loss_gradient = rule; }

    // Start of a step: begin_step sets statistics to zero. End of a step: reduce_counts sums the counts over
    // all ranks (or the model does, for all layers at once), then update_bias.
    void begin_step(Context& ctx) const;
    void reduce_counts(Context& ctx) const;
    void update_bias(Context& ctx) const;

    // After a step: tokens per expert of the global batch (all micro-batches and ranks), and the losses of
    // this rank.
    TensorView step_counts() const { return counts_; }                 // [E] i64
    TensorView balancing_loss() const { return losses_.slice(0, 1); }  // [1] f32, coefficient included
    TensorView z_loss() const { return losses_.slice(1, 1); }          // [1] f32, coefficient included
    // [op::kRouterLosses] f32: both, then each balancing loss in the order of moe_router_load_balancing_type.
    TensorView losses() const { return losses_; }
    TensorView expert_bias() const { return bias_; }  // [E] f32; absent without moe_router_enable_expert_bias
    const std::string& name() const { return name_; }  // "layers.3.moe.router"

private:
    op::RouterBalance allocate_balance(Context& ctx) const;
    op::BalanceTerm balance_term(Context& ctx, BalancingLoss type, double coeff,
                                 const op::RouterBalance& balance) const;
    TensorView given_ids(Context& ctx) const;
    void record_choice(Context& ctx, op::RouterTopK choice) const;

    MoeSpec moe_;
    int layer_;
    int64_t moe_layer_ = 0;
    std::string name_;
    op::RouterOptions options_;
    Parameter* weight_;
    std::unique_ptr<Arena> state_;
    TensorView counts_, bias_, losses_;
    bool owns_statistics_ = true;
    TensorView global_counts_;  // [E] f32: global_aux_loss, summed over ranks and the micro-batches so far
    mutable TensorView given_;  // [S, K] i32, of MoeSpec::given_ids: made by the first forward
};

}  // namespace fp8flow
