// SPDX-License-Identifier: MIT
// Causal self-attention with grouped queries and rotary embedding. Core attention is BF16 in every recipe;
// the projections are FP8 with precision.fp8_attention_linears.
#pragma once

#include "layers/attention/core.h"

#include <string>

namespace fp8flow {

// What a block calls: self-attention, or multi-latent attention (layers/attention/latent_attention.h).
class Attention {
public:
    virtual ~Attention() = default;
    // y [T, H] = x + attention(xn).
    virtual void forward(Context& ctx, const TokenRows& xn, const TensorView& residual, AttentionSaved& saved,
                         const TensorView& y) const = 0;
    // dxn from dy (the gradient of attention's own output).
    virtual void backward(Context& ctx, const TensorView& dy, const TokenRows& xn, AttentionSaved& saved,
                          const TensorView& dxn) const = 0;
    // [seq_length, rope_dims / 2, 2] f32 cos/sin (layers/rope.h); owned by the model.
    void set_rope_table(const TensorView& table) { rope_table_ = table; }

protected:
    TensorView rope_table_;
};

class SelfAttention : public Attention {
public:
    // linears: the flow that runs the projections in FP8; it outlives the layer. Null: BF16.
    SelfAttention(ParameterStore& store, const BlockSpec& spec, const Flow* linears, const std::string& name);

    void forward(Context& ctx, const TokenRows& xn, const TensorView& residual, AttentionSaved& saved,
                 const TensorView& y) const override;
    void backward(Context& ctx, const TensorView& dy, const TokenRows& xn, AttentionSaved& saved,
                  const TensorView& dxn) const override;

private:
    ModelSpec model_;
    Projection qkv_;
    AttentionCore core_;
    Parameter *qkv_bias_ = nullptr, *q_norm_ = nullptr, *k_norm_ = nullptr;
};

}  // namespace fp8flow
