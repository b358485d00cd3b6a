// SPDX-License-Identifier: MIT
// Multi-latent attention (DeepSeek-AI 2024, DeepSeek-V2): queries, and keys with values, are made from
// latents of low rank. q = Wqb N(Wqa x), or Wq x; [c, kr] = Wkva x; [k, v] = Wkvb N(c) per head; K = [k,
// rope(kr)], with the same kr for all heads. Every head has keys and values of its own.
#pragma once

#include "layers/attention/attention.h"
#include "layers/norm.h"

#include <memory>
#include <optional>

namespace fp8flow {

// What the norms of the latents deliver: FP8 rows where the recipe's norm writes them, without a state.
NormOutput latent_norm_output(const Flow* linears);

class LatentAttention : public Attention {
public:
    // linears: as SelfAttention's. linear_kv_down_proj is BF16 in every recipe: its width is seldom a
    // multiple of 128, and it has about 2 % of the work.
    LatentAttention(ParameterStore& store, Device& device, const BlockSpec& spec, const Flow* linears,
                    const std::string& name);

    void forward(Context& ctx, const TokenRows& xn, const TensorView& residual, AttentionSaved& saved,
                 const TensorView& y) const override;
    void backward(Context& ctx, const TensorView& dy, const TokenRows& xn, AttentionSaved& saved,
                  const TensorView& dxn) const override;

private:
    void down(Context& ctx, const TokenRows& xn, LatentSaved& saved) const;
    void heads(Context& ctx, const TokenRows& xn, AttentionSaved& saved) const;
    void q_backward(Context& ctx, const TensorView& dq, const TokenRows& xn, LatentSaved& saved,
                    const TensorView& dxn) const;
    void kv_backward(Context& ctx, const TensorView& dkv, const TensorView& dk_rope, const TokenRows& xn,
                     LatentSaved& saved, const TensorView& dxn) const;

    ModelSpec model_;
    bool recompute_;
    std::optional<Projection> q_down_;  // absent: q_up_ reads xn
    Projection q_up_, kv_down_, kv_up_;
    AttentionCore core_;
    std::unique_ptr<Norm> q_norm_, kv_norm_;
};

}  // namespace fp8flow
