// SPDX-License-Identifier: MIT
// Multi-latent attention as a list of steps: latents, their norms, heads, then core.h. Backward is
// the same list in reverse. Its stages: qkv, norm.
#include "layers/attention/latent_attention.h"

#include "layers/rope.h"

#include <cmath>
#include <numeric>

namespace fp8flow {

namespace {

constexpr double kLatentEpsilon = 1e-6;  // as the published models, whatever norm_epsilon says

std::unique_ptr<Norm> latent_norm(ParameterStore& store, Device& device, const BlockSpec& spec,
                                  const Flow* linears, int64_t rank, const std::string& name) {
    ModelSpec model = spec.model;
    model.hidden_size = rank;
    model.norm_epsilon = kLatentEpsilon;
    const NormOutput output = latent_norm_output(linears);
    const Rule rule = output == NormOutput::gemm_rows ? linears->rule_of(Quantized::x) : Rule{};
    return std::make_unique<Norm>(store, device, model, spec.precision, output, rule, name);
}

// The latent's columns [T, kv_lora_rank] and those that rotate [T, qk_pos_emb_head_dim] as the q and k of
// split_qkv and merge_qkv, which cut rows between heads of one width.
struct DownColumns {
    TensorView q, k;
    DownColumns(const TensorView& latent, const TensorView& rope) {
        const int64_t dim = std::gcd(latent.dim(1), rope.dim(1));
        q = latent.reshape({latent.dim(0), latent.dim(1) / dim, dim});
        k = rope.reshape({rope.dim(0), rope.dim(1) / dim, dim});
    }
};

}  // namespace

NormOutput latent_norm_output(const Flow* linears) {
    const NormOutput output = linears != nullptr ? linears->norm_output() : NormOutput::plain;
    return output == NormOutput::wire_rows || output == NormOutput::gemm_rows ? NormOutput::gemm_rows
                                                                              : NormOutput::plain;
}

LatentAttention::LatentAttention(ParameterStore& store, Device& device, const BlockSpec& spec,
                                 const Flow* linears, const std::string& name)
    : model_(spec.model),
      recompute_(spec.recompute.mla_up_proj),
      q_down_(model_.q_lora_rank > 0
                  ? std::optional(add_projection(store, spec, linears,
                                                 {.name = name + ".linear_q_down_proj.weight",
                                                  .n = model_.q_lora_rank,
                                                  .k = model_.hidden_size,
                                                  .init_std = model_.init_method_std,
                                                  .stages = {"qkv", "q_down input", "q_down gradient"}}))
                  : std::nullopt),
      q_up_(add_projection(store, spec, linears,
                           {.name = name + (q_down_ ? ".linear_q_up_proj.weight" : ".linear_q_proj.weight"),
                            .n = model_.num_attention_heads * model_.qk_dim(),
                            .k = q_down_ ? model_.q_lora_rank : model_.hidden_size,
                            .init_std = model_.init_method_std,
                            .stages = {"qkv", "q input", "q gradient"}})),
      kv_down_(add_projection(store, spec, nullptr,
                              {.name = name + ".linear_kv_down_proj.weight",
                               .n = model_.kv_lora_rank + model_.qk_pos_emb_head_dim,
                               .k = model_.hidden_size,
                               .init_std = model_.init_method_std,
                               .stages = {}})),
      kv_up_(add_projection(store, spec, linears,
                            {.name = name + ".linear_kv_up_proj.weight",
                             .n = model_.num_attention_heads * (model_.qk_head_dim + model_.v_head_dim),
                             .k = model_.kv_lora_rank,
                             .init_std = model_.init_method_std,
                             .stages = {"qkv", "kv_up input", "kv_up gradient"}})),
      core_(store, spec, linears, name, model_.v_head_dim,
            static_cast<float>(rope_softmax_factor(model_.rope) /
                               std::sqrt(static_cast<double>(model_.qk_dim())))),
      q_norm_(q_down_ ? latent_norm(store, device, spec, linears, model_.q_lora_rank, name + ".q_layernorm")
                      : nullptr),
      kv_norm_(latent_norm(store, device, spec, linears, model_.kv_lora_rank, name + ".kv_layernorm")) {}

void LatentAttention::forward(Context& ctx, const TokenRows& xn, const TensorView& residual,
                              AttentionSaved& saved, const TensorView& y) const {
    ArenaScope scope(ctx.scratch);
    {
        auto timed = ctx.stage("qkv");
        down(ctx, xn, saved.latent);
        heads(ctx, xn, saved);
    }
    core_.forward(ctx, residual, saved, y);
    if (!recompute_) return;
    saved.q = saved.k = saved.v = {};
    saved.latent.q_norm.out = saved.latent.kv_norm.out = {};
}

// The latents with their norms, and the columns that rotate.
void LatentAttention::down(Context& ctx, const TokenRows& xn, LatentSaved& saved) const {
    const int64_t tokens = xn.plain.rows(), rank = model_.kv_lora_rank, rope = model_.qk_pos_emb_head_dim;
    const auto keep = [&](int64_t columns) {
        return ctx.saved.tensor(ctx.activation, {tokens, columns}, "attention");
    };
    Arena& arena = recompute_ ? ctx.scratch : ctx.saved;
    if (q_down_) {
        const TensorView q = keep(model_.q_lora_rank);
        q_down_->forward(ctx, xn, saved.q_down, q);
        q_norm_->forward(ctx, q, arena, saved.q_norm);
    }
    const TensorView kv = keep(rank);
    saved.k_rope = keep(rope);
    {
        ArenaScope scope(ctx.scratch);
        const TensorView both = ctx.scratch.tensor(ctx.activation, {tokens, rank + rope}, "attention");
        kv_down_.forward(ctx, xn.plain, both);
        const DownColumns columns(kv, saved.k_rope);
        ctx.ops.split_qkv({.qkv = both, .q = columns.q, .k = columns.k}, ctx.launch);
    }
    kv_norm_->forward(ctx, kv, arena, saved.kv_norm);
}

// q, k and v from the latents. Recompute mla_up_proj drops them after the forward and rebuilds them in the
// backward.
void LatentAttention::heads(Context& ctx, const TokenRows& xn, AttentionSaved& saved) const {
    LatentSaved& latent = saved.latent;
    const int64_t tokens = xn.plain.rows(), count = model_.num_attention_heads;
    const auto tensor = [&](Arena& arena, int64_t dim) {
        return arena.tensor(ctx.activation, {tokens, count, dim}, "attention");
    };
    Arena& arena = recompute_ ? ctx.scratch : ctx.saved;
    saved.q = tensor(arena, model_.qk_dim());
    saved.k = tensor(arena, model_.qk_dim());
    saved.v = tensor(arena, model_.v_head_dim);
    const Arena::Mark mark = ctx.saved.mark();
    ArenaScope scope(ctx.scratch);
    const TensorView kv = tensor(ctx.scratch, model_.qk_head_dim + model_.v_head_dim);
    q_up_.forward(ctx, q_down_ ? latent.q_norm.out : xn, latent.q_up, head_columns(saved.q));
    kv_up_.forward(ctx, latent.kv_norm.out, latent.kv_up, head_columns(kv));
    ctx.ops.latent_heads(
        {.kv = kv, .k_rope = latent.k_rope, .table = rope_table_, .q = saved.q, .k = saved.k, .v = saved.v},
        ctx.launch);
    if (!recompute_) return;
    ctx.saved.rewind(mark);
    latent.q_up = {};
    latent.kv_up = {};
}

void LatentAttention::backward(Context& ctx, const TensorView& dy, const TokenRows& xn, AttentionSaved& saved,
                               const TensorView& dxn) const {
    ArenaScope scope(ctx.scratch);
    if (!saved.q) {
        auto timed = ctx.stage("qkv");
        const RecomputeScope again(ctx);
        if (q_down_) q_norm_->recompute(ctx, ctx.scratch, saved.latent.q_norm);
        kv_norm_->recompute(ctx, ctx.scratch, saved.latent.kv_norm);
        heads(ctx, xn, saved);
    }
    const HeadGradients d = core_.backward(ctx, dy, saved);
    auto timed = ctx.stage("qkv");
    const TensorView dkv = ctx.scratch.tensor(ctx.activation,
                                              {dy.rows(), d.v.dim(1), model_.qk_head_dim + model_.v_head_dim},
                                              "attention"),
                     dk_rope = ctx.scratch.tensor(ctx.activation, {dy.rows(), model_.qk_pos_emb_head_dim},
                                                  "attention");
    ctx.ops.latent_heads_backward(
        {.dk = d.k, .dv = d.v, .table = rope_table_, .dq = d.q, .dkv = dkv, .dk_rope = dk_rope}, ctx.launch);
    q_backward(ctx, head_columns(d.q), xn, saved.latent, dxn);
    kv_backward(ctx, head_columns(dkv), dk_rope, xn, saved.latent, dxn);
}

// dxn: the part of the queries.
void LatentAttention::q_backward(Context& ctx, const TensorView& dq, const TokenRows& xn, LatentSaved& saved,
                                 const TensorView& dxn) const {
    if (!q_down_) return q_up_.backward(ctx, {.plain = dq}, xn, saved.q_up, dxn);
    ArenaScope scope(ctx.scratch);
    const auto like_latent = [&] {
        return ctx.scratch.tensor(ctx.activation, {dq.rows(), model_.q_lora_rank}, "attention");
    };
    const TensorView dnormed = like_latent(), dlatent = like_latent();
    q_up_.backward(ctx, {.plain = dq}, saved.q_norm.out, saved.q_up, dnormed);
    q_norm_->backward(ctx, dnormed, {}, saved.q_norm, dlatent);
    q_down_->backward(ctx, {.plain = dlatent}, xn, saved.q_down, dxn);
}

// dxn += the part of keys and values, rounded before and after the sum.
void LatentAttention::kv_backward(Context& ctx, const TensorView& dkv, const TensorView& dk_rope,
                                  const TokenRows& xn, LatentSaved& saved, const TensorView& dxn) const {
    ArenaScope scope(ctx.scratch);
    const int64_t tokens = dkv.rows(), rank = model_.kv_lora_rank, rope = model_.qk_pos_emb_head_dim;
    const auto tensor = [&](int64_t columns) {
        return ctx.scratch.tensor(ctx.activation, {tokens, columns}, "attention");
    };
    const TensorView dnormed = tensor(rank), dlatent = tensor(rank), both = tensor(rank + rope),
                     dx = tensor(dxn.cols());
    kv_up_.backward(ctx, {.plain = dkv}, saved.kv_norm.out, saved.kv_up, dnormed);
    kv_norm_->backward(ctx, dnormed, {}, saved.kv_norm, dlatent);
    const DownColumns columns(dlatent, dk_rope);
    ctx.ops.merge_qkv({.q = columns.q, .k = columns.k, .qkv = both}, ctx.launch);
    kv_down_.backward(ctx, both, xn.plain, ctx.grad_mode, dx);
    ctx.ops.add({.a = dxn, .b = dx, .y = dxn}, ctx.launch);
}

}  // namespace fp8flow
