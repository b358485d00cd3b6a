// SPDX-License-Identifier: MIT
// The last part of every kind of attention: core attention over q, k and v, and the output projection. Core
// attention is BF16 in every recipe. Read next: layers/attention/attention.h.
#pragma once

#include "layers/norm.h"
#include "layers/projection.h"
#include "layers/spec.h"

#include <string>

namespace fp8flow {

// Of multi-latent attention (layers/attention/latent_attention.h). Recompute mla_up_proj drops the norms'
// outputs and the up projections' operands.
struct LatentSaved {
    NormSaved q_norm, kv_norm;         // of the latents [T, rank]
    TensorView k_rope;                 // [T, qk_pos_emb_head_dim], before rope
    ExpertsSaved q_down, q_up, kv_up;  // FP8 projections
};

struct AttentionSaved {
    TensorView q_raw, k_raw, q_rstd, k_rstd;  // before qk_layernorm, if the model has one
    TensorView q, k, v;                       // [T, heads, D], after rope; dropped under mla_up_proj
    TensorView o, lse;                        // dropped under recompute core_attn
    ExpertsSaved qkv, proj;                   // FP8 projections; proj is dropped with o
    LatentSaved latent;
};

// [T, heads, D] as a projection's rows.
inline TensorView head_columns(const TensorView& heads) {
    return heads.reshape({heads.dim(0), heads.dim(1) * heads.dim(2)});
}

struct HeadGradients {
    TensorView q, k, v;
};

// A projection of attention: a parameter [N, K], in FP8 where linears is not null.
struct AttentionLinear {
    std::string name;
    int64_t n, k;
    double init_std;
    Flow::LinearNames stages;
};
Projection add_projection(ParameterStore& store, const BlockSpec& spec, const Flow* linears,
                          const AttentionLinear& of);

class AttentionCore {
public:
    // v_dim: of a head's values. scale: of the scores.
    AttentionCore(ParameterStore& store, const BlockSpec& spec, const Flow* linears, const std::string& name,
                  int64_t v_dim, float scale);

    // y [T, H] = residual + proj(attention(saved.q, saved.k, saved.v)).
    void forward(Context& ctx, const TensorView& residual, AttentionSaved& saved, const TensorView& y) const;
    // From dy to the gradients of q, k and v, in scratch.
    HeadGradients backward(Context& ctx, const TensorView& dy, AttentionSaved& saved) const;

private:
    void attend(Context& ctx, AttentionSaved& saved, Arena& arena) const;

    bool recompute_;
    Projection proj_;
    float scale_;
};

}  // namespace fp8flow
