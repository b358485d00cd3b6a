// SPDX-License-Identifier: MIT
// The end of a step: gradients reduced over ranks, clipped by their global norm, AdamW, working copies.
// Nothing is written unless the step status is good on every rank.
#pragma once

#include "layers/context.h"
#include "layers/parameter.h"
#include "model/config/config.h"
#include "model/train/step_inputs.h"

namespace fp8flow {

// Learning rate of an update (0-based, without skipped steps): linear warm-up, then a decay style of
// Megatron-LM (OptimizerParamScheduler.get_lr).
double learning_rate(const TrainingSpec& training, int64_t update);
// op::AdamW::schedule of an update.
std::array<float, 3> adamw_schedule(const TrainingSpec& training, int64_t update);

class Optimizer {
public:
    Optimizer(const TrainingSpec& training, CombineOrder order, Device& device);

    // Sums main gradients over ranks, unless the backward did: dense ones over all ranks, expert ones over
    // the ranks that hold the same experts. Then clips and updates. With sharded state
    // (use_distributed_optimizer) it sums and updates this rank's slices only, and gathers the working
    // copies. The sums of the inputs are reduced with the gradients. A loss or gradient that is not finite or
    // past its limit prevents the update.
    void step(Context& ctx, ParameterStore& store, const StepInputs& inputs);
    // Reduces the sums of the inputs over ranks. If the step is bad on one rank, it is bad on all.
    static void agree_on_status(Context& ctx, const StepInputs& inputs);

    TensorView grad_norm() const { return norm_; }  // [1] f32, before clipping; every rank has the same

private:
    void update(Context& ctx, ParameterStore& store, const StepInputs& inputs);
    void global_norm(Context& ctx, ParameterStore& store);
    void squares_of_shares(Context& ctx, ParameterStore& store, Ranks ranks, TensorView& blocks,
                           const TensorView& sum);
    void sum_squares_by_expert(Context& ctx, ParameterStore& store);

    TrainingSpec training_;
    CombineOrder order_;
    Arena state_;
    // Made by the first step: with order invariant [parameters of experts, E] f32; with sharded gradients the
    // squares of blocks.
    TensorView squares_of_experts_, dense_blocks_, expert_blocks_;
    TensorView squares_, dense_squares_, expert_squares_, norm_, factor_;
};

}  // namespace fp8flow
