// SPDX-License-Identifier: MIT
// SwiGLU FFN without dispatch: the shared expert and dense FFN layers. It follows the recipe and reuses the
// norm's FP8 rows.
#pragma once

#include "layers/flows/flow.h"

namespace fp8flow {

struct FfnSpec {
    std::string name;
    int64_t width = 0;  // F
    op::GluForm form;
    bool gated = false;  // rows times sigmoid(x w^T), w [1, H]: Qwen2-MoE's shared expert
    DType plain_dtype = DType::bf16;
};

struct FfnSaved {
    ExpertsSaved experts;
    TensorView gate_logits, gate_ids;  // [T, 1] f32, i32
};

class Ffn {
public:
    // The flow outlives the layer.
    Ffn(ParameterStore& store, const ModelSpec& model, const Flow& flow, const FfnSpec& spec);

    // y [T, H] = residual (optional) + ffn(x). recompute: keep nothing but x (shared_experts).
    void forward(Context& ctx, const TokenRows& x, const TensorView& residual, bool recompute,
                 FfnSaved& saved, const TensorView& y) const;
    // dx = the gradient with respect to x (overwrites).
    void backward(Context& ctx, const TokenRows& x, const TokenRows& dy, bool recompute, FfnSaved& saved,
                  const TensorView& dx) const;

private:
    void forward_once(Context& ctx, const TokenRows& x, FfnSaved& saved, const TensorView& y) const;
    void gate(Context& ctx, const TensorView& x, FfnSaved& saved) const;
    void gate_backward(Context& ctx, const TensorView& x, const FfnSaved& saved, const TensorView& dx) const;

    const Flow& flow_;
    ExpertWeights weights_;
    op::GluForm form_;
    Parameter* gate_ = nullptr;  // absent: not gated
};

struct ExpertWeightsSpec {
    std::string name;   // prefix: name + ".linear_fc1.weight", name + ".linear_fc2.weight"
    int64_t width = 0;  // F
    int64_t num_experts = 1;
    int64_t first_expert = 0;      // global id of local expert 0
    int64_t sources = 1;           // ParameterSpec::sources
    bool expert_parallel = false;  // different experts on each expert-parallel rank
    WeightFormat format;
    DType plain_dtype = DType::bf16;
};
// The GLU of routed experts, and of shared experts and dense FFNs.
op::GluForm routed_form(const GluSpec& glu);
op::GluForm local_form(const GluSpec& glu);

// The two weights of SwiGLU experts.
ExpertWeights add_expert_weights(ParameterStore& store, const ModelSpec& model,
                                 const ExpertWeightsSpec& spec);

}  // namespace fp8flow
