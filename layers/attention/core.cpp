// SPDX-License-Identifier: MIT
// Core attention and the output projection, forward and backward. Stages: core attention, proj.
#include "layers/attention/core.h"

#include <cmath>

namespace fp8flow {

Projection add_projection(ParameterStore& store, const BlockSpec& spec, const Flow* linears,
                          const AttentionLinear& of) {
    return {store.add({.name = of.name,
                       .shape = {of.n, of.k, 0},
                       .init_std = of.init_std,
                       .format = linears != nullptr ? linears->weight_format() : WeightFormat{},
                       .plain_dtype = spec.plain_dtype}),
            linears, of.stages};
}

AttentionCore::AttentionCore(ParameterStore& store, const BlockSpec& spec, const Flow* linears,
                             const std::string& name, int64_t v_dim, float scale)
    : recompute_(spec.recompute.core_attn),
      proj_(add_projection(store, spec, linears,
                           {.name = name + ".linear_proj.weight",
                            .n = spec.model.hidden_size,
                            .k = spec.model.num_attention_heads * v_dim,
                            .init_std = spec.model.init_method_std /
                                        std::sqrt(2.0 * static_cast<double>(spec.model.num_layers)),
                            .stages = {"proj", "proj input", "proj gradient"}})),
      scale_(scale) {}

void AttentionCore::forward(Context& ctx, const TensorView& residual, AttentionSaved& saved,
                            const TensorView& y) const {
    attend(ctx, saved, recompute_ ? ctx.scratch : ctx.saved);
    auto timed = ctx.stage("proj");
    const TensorView out = ctx.scratch.tensor(ctx.activation, {y.rows(), y.cols()}, "attention");
    const Arena::Mark mark = ctx.saved.mark();
    proj_.forward(ctx, {.plain = head_columns(saved.o)}, saved.proj, out);
    ctx.ops.add({.a = residual, .b = out, .y = y}, ctx.launch);
    if (!recompute_) return;
    ctx.saved.rewind(mark);
    saved.o = {};
    saved.lse = {};
    saved.proj = {};
}

// o and lse in `arena`. Recompute core_attn drops them after the forward and rebuilds them in the backward.
void AttentionCore::attend(Context& ctx, AttentionSaved& saved, Arena& arena) const {
    auto timed = ctx.stage("core attention");
    const int64_t tokens = saved.q.dim(0), heads = saved.q.dim(1);
    saved.o = arena.tensor(ctx.activation, {tokens, heads, saved.v.dim(2)}, "attention");
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

HeadGradients AttentionCore::backward(Context& ctx, const TensorView& dy, AttentionSaved& saved) const {
    if (!saved.o) attend(ctx, saved, ctx.scratch);
    const auto like = [&](const TensorView& heads) {
        return ctx.scratch.tensor(ctx.activation, {heads.dim(0), heads.dim(1), heads.dim(2)}, "attention");
    };
    const TensorView dout = like(saved.o);
    const HeadGradients d{.q = like(saved.q), .k = like(saved.k), .v = like(saved.v)};
    {
        auto timed = ctx.stage("proj");
        proj_.backward(ctx, {.plain = dy}, {.plain = head_columns(saved.o)}, saved.proj, head_columns(dout));
    }
    auto timed = ctx.stage("core attention");
    ctx.ops.attention_backward({.dout = dout,
                                .q = saved.q,
                                .k = saved.k,
                                .v = saved.v,
                                .o = saved.o,
                                .lse = saved.lse,
                                .seq_length = ctx.seq_length,
                                .scale = scale_,
                                .dq = d.q,
                                .dk = d.k,
                                .dv = d.v},
                               ctx.launch);
    return d;
}

}  // namespace fp8flow
