// SPDX-License-Identifier: MIT
// Self-attention as a list of steps: QKV projection, heads (split, norm, rotate), attention, output
// projection. Backward is the same list in reverse. Its stages: qkv, core attention, proj.
#include "layers/attention.h"

#include "layers/rope.h"

#include <cmath>
#include <vector>

namespace fp8flow {

SelfAttention::SelfAttention(ParameterStore& store, const ModelSpec& model, const Flow* linears,
                             DType plain_dtype, const std::string& name)
    : model_(model),
      qkv_(store.add({.name = name + ".linear_qkv.weight",
                      .shape = {(model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels,
                                model.hidden_size, 0},
                      .init_std = model.init_method_std,
                      .format = linears != nullptr ? linears->weight_format() : WeightFormat{},
                      .plain_dtype = plain_dtype}),
           linears, {"qkv", "qkv input", "qkv gradient"}),
      proj_(store.add(
                {.name = name + ".linear_proj.weight",
                 .shape = {model.hidden_size, model.num_attention_heads * model.kv_channels, 0},
                 .init_std = model.init_method_std / std::sqrt(2.0 * static_cast<double>(model.num_layers)),
                 .format = linears != nullptr ? linears->weight_format() : WeightFormat{},
                 .plain_dtype = plain_dtype}),
            linears, {"proj", "proj input", "proj gradient"}),
      scale_(1.0f / std::sqrt(static_cast<float>(model.kv_channels))) {
    if (!model.qk_layernorm) return;
    auto norm = [&](const char* which) {
        return &store.add({.name = name + "." + which + ".weight",
                           .shape = {model.kv_channels, 0, 0},
                           .rank = 1,
                           .init = Init::ones,
                           .weight_decay = false,
                           .plain_dtype = DType::f32});
    };
    q_norm_ = norm("q_layernorm");
    k_norm_ = norm("k_layernorm");
}

namespace {

TensorView gamma_of(const Parameter* norm) { return norm != nullptr ? norm->plain : TensorView{}; }

}  // namespace

std::vector<float> SelfAttention::rope_table(const ModelSpec& model) {
    return fp8flow::rope_table(model, model.seq_length, model.kv_channels, rotated_dims(model));
}

void SelfAttention::forward(Context& ctx, const TokenRows& xn, const TensorView& residual,
                            bool recompute_core, AttentionSaved& saved, const TensorView& y) const {
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
        saved.q_rstd = ctx.saved.tensor(DType::f32, {tokens * heads}, "attention");
        saved.k_rstd = ctx.saved.tensor(DType::f32, {tokens * kv}, "attention");
    }
    ArenaScope scope(ctx.scratch);
    {
        auto timed = ctx.stage("qkv");
        const TensorView qkv =
            ctx.scratch.tensor(ctx.activation, {tokens, (heads + 2 * kv) * dim}, "attention");
        qkv_.forward(ctx, xn, saved.qkv, qkv);
        ctx.ops.qkv_heads({.qkv = qkv,
                           .table = rope_table_,
                           .q_gamma = gamma_of(q_norm_),
                           .k_gamma = gamma_of(k_norm_),
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
    core(ctx, saved, recompute_core ? ctx.scratch : ctx.saved);
    auto timed = ctx.stage("proj");
    const TensorView out = ctx.scratch.tensor(ctx.activation, {tokens, model_.hidden_size}, "attention");
    const Arena::Mark mark = ctx.saved.mark();
    proj_.forward(ctx, {.plain = saved.o.reshape({tokens, heads * dim})}, saved.proj, out);
    ctx.ops.add({.a = residual, .b = out, .y = y}, ctx.launch);
    if (!recompute_core) return;
    ctx.saved.rewind(mark);
    saved.o = {};
    saved.lse = {};
    saved.proj = {};
}

// o and lse in `arena`. Recompute core_attn drops them after the forward and rebuilds them in the backward.
void SelfAttention::core(Context& ctx, AttentionSaved& saved, Arena& arena) const {
    auto timed = ctx.stage("core attention");
    const int64_t tokens = saved.q.dim(0), heads = model_.num_attention_heads;
    saved.o = arena.tensor(ctx.activation, {tokens, heads, model_.kv_channels}, "attention");
    saved.lse = arena.tensor(DType::f32, {tokens, heads}, "attention");
    ctx.ops.attention({.q = saved.q,
                       .k = saved.k,
                       .v = saved.v,
                       .seq_length = ctx.seq_length,
                       .scale = scale_,
                       .o = saved.o,
                       .lse = saved.lse},
                      ctx.launch);
}

void SelfAttention::backward(Context& ctx, const TensorView& dy, const TokenRows& xn, AttentionSaved& saved,
                             const TensorView& dxn) const {
    ArenaScope scope(ctx.scratch);
    const int64_t tokens = dy.rows(), heads = model_.num_attention_heads, kv = model_.num_query_groups,
                  dim = model_.kv_channels;
    if (!saved.o) core(ctx, saved, ctx.scratch);
    auto scratch = [&](int64_t count) {
        return ctx.scratch.tensor(ctx.activation, {tokens, count, dim}, "attention");
    };
    const TensorView dout = scratch(heads), dq = scratch(heads), dk = scratch(kv), dv = scratch(kv);
    const TokenRows dqkv{
        .plain = ctx.scratch.tensor(ctx.activation, {tokens, (heads + 2 * kv) * dim}, "attention"),
        .quantized = qkv_.gradient_rows(ctx)};

    {
        auto timed = ctx.stage("proj");
        proj_.backward(ctx, {.plain = dy}, {.plain = saved.o.reshape({tokens, heads * dim})}, saved.proj,
                       dout.reshape({tokens, heads * dim}));
    }
    {
        auto timed = ctx.stage("core attention");
        ctx.ops.attention_backward({.dout = dout,
                                    .q = saved.q,
                                    .k = saved.k,
                                    .v = saved.v,
                                    .o = saved.o,
                                    .lse = saved.lse,
                                    .seq_length = ctx.seq_length,
                                    .scale = scale_,
                                    .dq = dq,
                                    .dk = dk,
                                    .dv = dv},
                                   ctx.launch);
    }
    auto timed = ctx.stage("qkv");
    ctx.ops.qkv_heads_backward({.dq = dq,
                                .dk = dk,
                                .dv = dv,
                                .table = rope_table_,
                                .q_raw = saved.q_raw,
                                .k_raw = saved.k_raw,
                                .q_gamma = gamma_of(q_norm_),
                                .k_gamma = gamma_of(k_norm_),
                                .q_rstd = saved.q_rstd,
                                .k_rstd = saved.k_rstd,
                                .dgamma_mode = ctx.grad_mode,
                                .scale_format = format_of(dqkv.quantized),
                                .dqkv = dqkv.plain,
                                .rows = dqkv.quantized,
                                .dq_gamma = q_norm_ != nullptr ? q_norm_->main_grad : TensorView{},
                                .dk_gamma = k_norm_ != nullptr ? k_norm_->main_grad : TensorView{}},
                               ctx.launch);
    qkv_.backward(ctx, dqkv, xn, saved.qkv, dxn);
}

}  // namespace fp8flow
