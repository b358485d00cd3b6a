// SPDX-License-Identifier: MIT
// The MoE layer: route, plan, then the recipe's flow (dispatch, fc1, swiglu, fc2, combine), plus the shared
// expert.
#pragma once

#include "layers/ffn.h"
#include "layers/flows/flow.h"
#include "layers/router.h"

#include <memory>

namespace fp8flow {

struct MoeSaved {
    RouterSaved route;
    FlowPlan plan;
    ExpertsSaved experts;
    FfnSaved shared;
    int64_t depth = 0;  // of the row arena before this layer
};

class MoeLayer {
public:
    // spec.precision is this layer's.
    MoeLayer(ParameterStore& store, Device& device, const BlockSpec& spec);

    NormOutput norm_output() const { return flow_->norm_output(); }
    Rule input_rule() const { return flow_->rule_of(Quantized::x); }
    // y [T, H] = x.residual + experts(x) + shared expert(x)
    void forward(Context& ctx, const TokenRows& x, const TensorView& residual, MoeSaved& saved,
                 const TensorView& y) const;
    // dx: gradient with respect to x (the norm's output).
    void backward(Context& ctx, const TokenRows& x, const TensorView& dy, MoeSaved& saved,
                  const TensorView& dx) const;

    const Router& router() const { return *router_; }
    Router& router() { return *router_; }
    // Initial row capacity of a rank in this layer for the given slots per rank; and the rows that the worst
    // routing needs.
    static int64_t row_capacity(const MoeSpec& moe, int64_t tokens_per_rank, int64_t expert_parallel_size);
    static int64_t worst_rows(MoeSpec moe, int64_t tokens_per_rank, int64_t expert_parallel_size);

private:
    void forward_once(Context& ctx, const TokenRows& x, const TensorView& residual, MoeSaved& saved,
                      const TensorView& y) const;
    SideStream* side_of(const Context& ctx) const;
    template <class Work> Event on_side(Context& ctx, Work work) const;
    void make_plan(Context& ctx, MoeSaved& saved) const;
    // routed: rows of the row arena, for the experts' tensors; layer: rows of this layer only, for the plan
    // without padding.
    enum class PlanRows { routed, layer };
    DispatchPlan plan_for(Context& ctx, const TensorView& all_ids, const TensorView& all_probs,
                          int64_t alignment, PlanRows rows, const Launch& launch) const;

    MoeSpec moe_;
    PrecisionSpec precision_;
    RecomputeSpec recompute_;
    std::unique_ptr<Flow> flow_, shared_flow_;
    std::unique_ptr<Router> router_;
    ExpertWeights experts_;
    std::unique_ptr<Ffn> shared_;
    int layer_;
    int64_t first_expert_, local_experts_, sources_;
    op::GluForm form_;
};

}  // namespace fp8flow
