// SPDX-License-Identifier: MIT
// The end of a step: gradients reduced over ranks, clipped by their global norm, AdamW, working copies.
// Nothing is written unless the step status is good on every rank.
#pragma once

#include "layers/context.h"
#include "layers/parameter.h"
#include "model/config/config.h"
#include "model/train/step_inputs.h"

namespace fp8flow {

// Learning rate of an update (0-based, skipped steps are not counted): linear warm-up, then one of the styles
// of Megatron-LM (OptimizerParamScheduler.get_lr).
double learning_rate(const TrainingSpec& training, int64_t update);
// op::AdamW::schedule of an update.
std::array<float, 3> adamw_schedule(const TrainingSpec& training, int64_t update);

class Optimizer {
public:
    Optimizer(const TrainingSpec& training, CombineOrder order, Device& device);

    // Sums main gradients, unless the backward did: dense ones over all ranks, expert ones over the ranks
    // that hold the same experts. Then clips and updates, of sharded state this rank's slice, whose gradients
    // alone are summed here, and gathers the working copies (use_distributed_optimizer). The sums of the
    // inputs are summed over ranks with them; a loss that is not finite or past its limit prevents the
    // update, as such a gradient does.
    void step(Context& ctx, ParameterStore& store, const StepInputs& inputs);
    // Sums the inputs' sums over ranks; the step is bad on all ranks if it is bad on one.
    static void agree_on_status(Context& ctx, const StepInputs& inputs);

    TensorView grad_norm() const { return norm_; }  // [1] f32, before clipping; every rank has the same

private:
    void reduce_gradients(Context& ctx, ParameterStore& store);
    void update(Context& ctx, ParameterStore& store, const StepInputs& inputs);
    void gather_copies(Context& ctx, ParameterStore& store);
    void global_norm(Context& ctx, ParameterStore& store);
    void squares_of_shares(Context& ctx, ParameterStore& store, Ranks ranks, TensorView& blocks,
                           const TensorView& sum);
    void sum_squares_by_expert(Context& ctx, ParameterStore& store);

    TrainingSpec training_;
    CombineOrder order_;
    Arena state_;
    TensorView
        squares_of_experts_;  // order invariant: [parameters of experts, E] f32, made by the first step
    TensorView dense_blocks_, expert_blocks_;  // divided gradients: squares of blocks, made by the first step
    TensorView squares_, dense_squares_, expert_squares_, norm_, factor_;
};

}  // namespace fp8flow
