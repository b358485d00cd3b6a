// SPDX-License-Identifier: MIT
// Self-attention as a list of steps: QKV projection, heads (split, norm, rotate), then core.h.
// Backward is the same list in reverse. Its stage: qkv.
#include "layers/attention/attention.h"

#include <cmath>

namespace fp8flow {

SelfAttention::SelfAttention(ParameterStore& store, const BlockSpec& spec, const Flow* linears,
                             const std::string& name)
    : model_(spec.model),
      qkv_(add_projection(store, spec, linears,
                          {.name = name + ".linear_qkv.weight",
                           .n = model_.qkv_rows(),
                           .k = model_.hidden_size,
                           .init_std = model_.init_method_std,
                           .stages = {"qkv", "qkv input", "qkv gradient"}})),
      core_(store, spec, linears, name, model_.kv_channels,
            1.0f / std::sqrt(static_cast<float>(model_.kv_channels))) {
    auto vector = [&](const char* which, int64_t size, Init init) {
        return &store.add({.name = name + "." + which,
                           .shape = {size, 0, 0},
                           .rank = 1,
                           .init = init,
                           .weight_decay = false,
                           .gradient_with_dx = true,
                           .plain_dtype = DType::f32});
    };
    if (model_.add_qkv_bias) qkv_bias_ = vector("linear_qkv.bias", model_.qkv_rows(), Init::zeros);
    if (!model_.qk_layernorm) return;
    auto norm = [&](const char* which, int64_t heads) {
        return vector(which, model_.heads_per_norm(heads) * model_.kv_channels, Init::ones);
    };
    q_norm_ = norm("q_layernorm.weight", model_.num_attention_heads);
    k_norm_ = norm("k_layernorm.weight", model_.num_query_groups);
}

namespace {

TensorView plain_of(const Parameter* p) { return p != nullptr ? p->plain : TensorView{}; }
TensorView gradient_of(const Parameter* p) { return p != nullptr ? p->main_grad : TensorView{}; }

}  // namespace

void SelfAttention::forward(Context& ctx, const TokenRows& xn, const TensorView& residual,
                            AttentionSaved& saved, const TensorView& y) const {
    const int64_t tokens = xn.plain.rows(), heads = model_.num_attention_heads, kv = model_.num_query_groups,
                  dim = model_.kv_channels;
    auto keep = [&](int64_t count) {
        return ctx.saved.tensor(ctx.activation, {tokens, count, dim}, "attention");
    };
    saved.q = keep(heads);
    saved.k = keep(kv);
    saved.v = keep(kv);
    if (q_norm_ != nullptr) {
        saved.q_raw = keep(heads);
        saved.k_raw = keep(kv);
        saved.q_rstd =
            ctx.saved.tensor(DType::f32, {tokens * heads / model_.heads_per_norm(heads)}, "attention");
        saved.k_rstd = ctx.saved.tensor(DType::f32, {tokens * kv / model_.heads_per_norm(kv)}, "attention");
    }
    ArenaScope scope(ctx.scratch);
    {
        auto timed = ctx.stage("qkv");
        const TensorView qkv = ctx.scratch.tensor(ctx.activation, {tokens, model_.qkv_rows()}, "attention");
        qkv_.forward(ctx, xn, saved.qkv, qkv);
        ctx.ops.qkv_heads({.qkv = qkv,
                           .bias = plain_of(qkv_bias_),
                           .table = rope_table_,
                           .q_gamma = plain_of(q_norm_),
                           .k_gamma = plain_of(k_norm_),
                           .eps = static_cast<float>(model_.norm_epsilon),
                           .q = saved.q,
                           .k = saved.k,
                           .v = saved.v,
                           .q_raw = saved.q_raw,
                           .k_raw = saved.k_raw,
                           .q_rstd = saved.q_rstd,
                           .k_rstd = saved.k_rstd},
                          ctx.launch);
    }
    core_.forward(ctx, residual, saved, y);
}

void SelfAttention::backward(Context& ctx, const TensorView& dy, const TokenRows& xn, AttentionSaved& saved,
                             const TensorView& dxn) const {
    ArenaScope scope(ctx.scratch);
    const HeadGradients d = core_.backward(ctx, dy, saved);
    const TokenRows dqkv{
        .plain = ctx.scratch.tensor(ctx.activation, {dy.rows(), model_.qkv_rows()}, "attention"),
        .quantized = qkv_.gradient_rows(ctx)};
    auto timed = ctx.stage("qkv");
    ctx.ops.qkv_heads_backward({.dq = d.q,
                                .dk = d.k,
                                .dv = d.v,
                                .table = rope_table_,
                                .q_raw = saved.q_raw,
                                .k_raw = saved.k_raw,
                                .q_gamma = plain_of(q_norm_),
                                .k_gamma = plain_of(k_norm_),
                                .q_rstd = saved.q_rstd,
                                .k_rstd = saved.k_rstd,
                                .dgamma_mode = ctx.grad_mode,
                                .scale_format = format_of(dqkv.quantized),
                                .dqkv = dqkv.plain,
                                .rows = dqkv.quantized,
                                .dq_gamma = gradient_of(q_norm_),
                                .dk_gamma = gradient_of(k_norm_),
                                .dbias = gradient_of(qkv_bias_)},
                               ctx.launch);
    qkv_.backward(ctx, dqkv, xn, saved.qkv, dxn);
}

}  // namespace fp8flow
