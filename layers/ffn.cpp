// SPDX-License-Identifier: MIT
// The FFN as a flow with one group of rows and no dispatch.
#include "layers/ffn.h"

#include <cmath>

namespace fp8flow {

op::GluForm routed_form(const GluSpec& glu) {
    constexpr float kQuick = 1.702f;  // Hendrycks and Gimpel 2016: x sigmoid(1.702 x) is near GELU
    return {.alpha = glu.quick_geglu ? kQuick : 1.0f,
            .offset = static_cast<float>(glu.glu_linear_offset),
            .limit = static_cast<float>(glu.activation_func_clamp_value)};
}
op::GluForm local_form(const GluSpec& glu) {
    op::GluForm form = routed_form(glu);
    if (glu.activation_func_clamp_routed_only) form.limit = 0.0f;
    return form;
}

ExpertWeights add_expert_weights(ParameterStore& store, const ModelSpec& model,
                                 const ExpertWeightsSpec& spec) {
    const double output_std = model.init_method_std / std::sqrt(2.0 * static_cast<double>(model.num_layers));
    auto add = [&](const char* which, int64_t rows, int64_t cols, double std) {
        return &store.add({.name = spec.name + "." + which,
                           .shape = {spec.num_experts, rows, cols},
                           .rank = 3,
                           .init_std = std,
                           .expert = spec.expert_parallel,
                           .first_expert = spec.first_expert,
                           .sources = spec.sources,
                           .format = spec.format,
                           .plain_dtype = spec.plain_dtype});
    };
    return {.w1 = add("linear_fc1.weight", 2 * spec.width, model.hidden_size, model.init_method_std),
            .w2 = add("linear_fc2.weight", model.hidden_size, spec.width, output_std)};
}

Ffn::Ffn(ParameterStore& store, const ModelSpec& model, const Flow& flow, const FfnSpec& spec)
    : flow_(flow),
      weights_(add_expert_weights(store, model,
                                  {.name = spec.name,
                                   .width = spec.width,
                                   .format = flow.weight_format(),
                                   .plain_dtype = spec.plain_dtype})),
      form_(spec.form) {
    if (spec.gated)
        gate_ = &store.add({.name = spec.name + ".gate_weight",
                            .shape = {1, model.hidden_size, 0},
                            .init_std = model.init_method_std,
                            .gradient_with_dx = true,
                            .plain_dtype = spec.plain_dtype});
}

void Ffn::forward(Context& ctx, const TokenRows& x, const TensorView& residual, bool recompute,
                  FfnSaved& saved, const TensorView& y) const {
    const Arena::Mark mark = ctx.saved.mark();
    ArenaScope scope(ctx.scratch);
    const TensorView out =
        residual ? ctx.scratch.tensor(ctx.activation, {ctx.tokens, x.plain.cols()}, "shared expert") : y;
    forward_once(ctx, x, saved, out);
    if (residual) ctx.ops.add({.a = residual, .b = out, .y = y}, ctx.launch);
    if (!recompute) return;
    ctx.saved.rewind(mark);
    saved = {};
}

void Ffn::forward_once(Context& ctx, const TokenRows& x, FfnSaved& saved, const TensorView& y) const {
    saved.experts.form = form_;
    if (gate_ != nullptr) gate(ctx, x.plain, saved);
    flow_.dense_forward(ctx, x, weights_, saved.experts, y);
}

void Ffn::backward(Context& ctx, const TokenRows& x, const TokenRows& dy, bool recompute, FfnSaved& saved,
                   const TensorView& dx) const {
    const Arena::Mark mark = ctx.saved.mark();
    ArenaScope scope(ctx.scratch);
    if (recompute) {
        const RecomputeScope again(ctx);
        const TensorView out =
            ctx.scratch.tensor(ctx.activation, {ctx.tokens, x.plain.cols()}, "shared expert");
        forward_once(ctx, x, saved, out);
    }
    if (gate_ != nullptr) saved.experts.dprob = ctx.scratch.tensor(DType::f32, {ctx.tokens}, "shared expert");
    flow_.dense_backward(ctx, x, dy, weights_, saved.experts, dx);
    if (gate_ != nullptr) gate_backward(ctx, x.plain, saved, dx);
    ctx.saved.rewind(mark);
}

namespace {

// The gate is a router with one expert that every token chooses; the probability is sigmoid(logit).
constexpr op::RouterOptions kGate = {.score = op::Score::sigmoid};

}  // namespace

void Ffn::gate(Context& ctx, const TensorView& x, FfnSaved& saved) const {
    ArenaScope scope(ctx.scratch);
    saved.gate_logits = ctx.saved.tensor(DType::f32, {ctx.tokens, 1}, "shared expert");
    saved.gate_ids = ctx.saved.tensor(DType::i32, {ctx.tokens, 1}, "shared expert");
    saved.experts.prob = ctx.saved.tensor(DType::f32, {ctx.tokens}, "shared expert");
    const TensorView counts = ctx.scratch.tensor(DType::i64, {1}, "shared expert");
    ctx.ops.zero({.y = counts}, ctx.launch);
    ctx.ops.router_logits({.x = x, .weight = gate_->plain, .logits = saved.gate_logits}, ctx.launch);
    ctx.ops.router_top_k({.logits = saved.gate_logits,
                          .options = kGate,
                          .ids = saved.gate_ids,
                          .probs = saved.experts.prob.reshape({ctx.tokens, 1}),
                          .counts = counts},
                         ctx.launch);
}

// dx += the gate's part.
void Ffn::gate_backward(Context& ctx, const TensorView& x, const FfnSaved& saved,
                        const TensorView& dx) const {
    const TensorView dlogits = ctx.scratch.tensor(DType::f32, {ctx.tokens, 1}, "shared expert");
    ctx.ops.router_top_k_backward({.logits = saved.gate_logits,
                                   .ids = saved.gate_ids,
                                   .dprobs = saved.experts.dprob.reshape({ctx.tokens, 1}),
                                   .options = kGate,
                                   .dlogits = dlogits},
                                  ctx.launch);
    ctx.ops.router_logits_backward({.dlogits = dlogits,
                                    .x = x,
                                    .weight = gate_->plain,
                                    .dx_in = dx,
                                    .dweight_mode = ctx.grad_mode,
                                    .dx = dx,
                                    .dweight = gate_->main_grad},
                                   ctx.launch);
}

}  // namespace fp8flow
