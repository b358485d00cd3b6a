// SPDX-License-Identifier: MIT
// Causal self-attention with grouped queries and rotary embedding. Core attention is BF16 in every recipe;
// the projections are FP8 with precision.fp8_attention_linears.
#pragma once

#include "layers/projection.h"
#include "layers/spec.h"

#include <vector>

namespace fp8flow {

struct AttentionSaved {
    TensorView q_raw, k_raw, q_rstd, k_rstd;  // before qk_layernorm, if the model has one
    TensorView q, k, v;                       // [T, heads, D], after rope
    TensorView o, lse;                        // dropped under recompute core_attn
    ExpertsSaved qkv, proj;                   // FP8 projections; proj is dropped with o
};

class SelfAttention {
public:
    // linears: the flow that runs the projections in FP8; it outlives the layer. Null: BF16.
    SelfAttention(ParameterStore& store, const ModelSpec& model, const Flow* linears, DType plain_dtype,
                  const std::string& name);

    // y [T, H] = x + attention(xn).
    void forward(Context& ctx, const TokenRows& xn, const TensorView& residual, bool recompute_core,
                 AttentionSaved& saved, const TensorView& y) const;
    // dxn from dy (the gradient of attention's own output).
    void backward(Context& ctx, const TensorView& dy, const TokenRows& xn, AttentionSaved& saved,
                  const TensorView& dxn) const;
    // [seq_length, D/2, 2] f32 cos/sin (layers/rope.h); owned by the model.
    static std::vector<float> rope_table(const ModelSpec& model);
    void set_rope_table(const TensorView& table) { rope_table_ = table; }

private:
    void core(Context& ctx, AttentionSaved& saved, Arena& arena) const;

    ModelSpec model_;
    Projection qkv_, proj_;
    Parameter *q_norm_ = nullptr, *k_norm_ = nullptr;
    TensorView rope_table_;
    float scale_;
};

}  // namespace fp8flow
