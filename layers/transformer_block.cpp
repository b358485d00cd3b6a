// SPDX-License-Identifier: MIT
// The block as two residual branches, forward and backward, and the precision of each layer.
#include "layers/transformer_block.h"

#include "layers/attention/latent_attention.h"

#include <fmt/core.h>

namespace fp8flow {

PrecisionSpec precision_of_layer(const ModelSpec& model, const PrecisionSpec& precision, int layer) {
    PrecisionSpec result = precision;
    const bool first = layer < model.num_layers_at_start_in_bf16;
    const bool last = layer >= model.num_layers - model.num_layers_at_end_in_bf16;
    if ((first || last) && precision.recipe != Recipe::fp32) {
        result = {.recipe = Recipe::bf16, .moe_apply_probs_in = precision.moe_apply_probs_in};
    }
    return result;
}

TransformerBlock::TransformerBlock(ParameterStore& store, Device& device, const BlockSpec& spec)
    : recompute_(spec.recompute), layer_(spec.layer) {
    const ModelSpec& model = spec.model;
    BlockSpec own = spec;
    own.precision = precision_of_layer(model, spec.precision, spec.layer);
    const std::string name = fmt::format("layers.{}", spec.layer);
    if (model.attention) {
        NormOutput output = NormOutput::plain;
        Rule rule;
        if (own.precision.fp8_attention_linears) {
            linear_flow_ = make_flow(own.precision, {});
            output = linear_flow_->norm_output();
            rule = linear_flow_->rule_of(Quantized::x);
            if (output == NormOutput::wire_rows) output = NormOutput::gemm_rows;  // these rows stay here
        }
        attention_norm_ = std::make_unique<Norm>(store, device, model, own.precision, output, rule,
                                                 name + ".input_layernorm");
        const std::string own_name = name + ".self_attention";
        if (model.multi_latent_attention)
            attention_ = std::make_unique<LatentAttention>(store, device, own, linear_flow_.get(), own_name);
        else
            attention_ = std::make_unique<SelfAttention>(store, own, linear_flow_.get(), own_name);
    }
    const bool routed = model.moe_layer_freq[static_cast<size_t>(spec.layer)] != 0;
    NormOutput output;
    Rule rule;
    if (routed) {
        moe_ = std::make_unique<MoeLayer>(store, device, own);
        output = moe_->norm_output();
        rule = moe_->input_rule();
        // per-tensor rows from the norm serve only experts that need no dispatch
        if (output == NormOutput::tensor_scaled && spec.moe.moe_shared_expert_intermediate_size == 0)
            output = NormOutput::plain;
    } else {
        dense_flow_ = make_flow(own.precision, {});
        dense_ = std::make_unique<Ffn>(store, model, *dense_flow_,
                                       FfnSpec{.name = name + ".mlp",
                                               .width = model.ffn_hidden_size,
                                               .form = local_form(model.glu),
                                               .plain_dtype = spec.plain_dtype});
        output = dense_flow_->norm_output();
        rule = dense_flow_->rule_of(Quantized::x);
    }
    ffn_norm_ = std::make_unique<Norm>(store, device, model, own.precision, output, rule,
                                       name + ".pre_mlp_layernorm");
}

void TransformerBlock::forward(Context& ctx, const TensorView& x, BlockSaved& saved,
                               const TensorView& y) const {
    const SavedMark mark(ctx);
    ctx.layer = layer_;
    forward_once(ctx, x, saved, y);
    if (recompute_.recompute_granularity != RecomputeGranularity::full) return;
    mark.rewind(ctx);  // only the block's input stays
    saved = {};
    saved.x = x;
}

void TransformerBlock::forward_once(Context& ctx, const TensorView& x, BlockSaved& saved,
                                    const TensorView& y) const {
    ArenaScope scope(ctx.scratch);
    Arena& norms = recompute_.layernorm ? ctx.scratch : ctx.saved;
    saved.x = x;
    saved.x_mid = x;
    if (attention_) {
        auto timed = ctx.part("attention");
        saved.x_mid = ctx.saved.tensor(ctx.activation, {ctx.tokens, x.cols()}, "residual");
        attention_norm_->forward(ctx, x, norms, saved.attention_norm);
        attention_->forward(ctx, saved.attention_norm.out, x, saved.attention, saved.x_mid);
    }
    auto timed = ctx.part(ffn_part());
    ffn_norm_->forward(ctx, saved.x_mid, norms, saved.ffn_norm);
    if (moe_)
        moe_->forward(ctx, saved.ffn_norm.out, saved.x_mid, saved.moe, y);
    else
        dense_->forward(ctx, saved.ffn_norm.out, saved.x_mid, false, saved.dense, y);
}

void TransformerBlock::backward(Context& ctx, const TensorView& dy, BlockSaved& saved,
                                const TensorView& dx) const {
    const Arena::Mark mark = ctx.saved.mark();
    ctx.layer = layer_;
    if (recompute_.recompute_granularity == RecomputeGranularity::full) {
        ArenaScope scope(ctx.scratch);
        const RecomputeScope again(ctx);
        const TensorView y = ctx.scratch.tensor(ctx.activation, {ctx.tokens, dy.cols()}, "residual");
        forward_once(ctx, saved.x, saved, y);
    }
    backward_once(ctx, dy, saved, dx);
    ctx.saved.rewind(mark);
}

void TransformerBlock::backward_once(Context& ctx, const TensorView& dy, BlockSaved& saved,
                                     const TensorView& dx) const {
    ArenaScope scope(ctx.scratch);
    const TensorView dxn = ctx.scratch.tensor(ctx.activation, {ctx.tokens, dy.cols()}, "norm");
    const TensorView dx_mid =
        attention_ ? ctx.scratch.tensor(ctx.activation, {ctx.tokens, dy.cols()}, "residual") : dx;
    {
        auto timed = ctx.part(ffn_part());
        if (recompute_.layernorm) ffn_norm_->recompute(ctx, ctx.scratch, saved.ffn_norm);
        ffn_backward(ctx, dy, saved, dxn);
        ffn_norm_->backward(ctx, dxn, dy, saved.ffn_norm, dx_mid);
    }
    if (!attention_) return;
    auto timed = ctx.part("attention");
    if (recompute_.layernorm) attention_norm_->recompute(ctx, ctx.scratch, saved.attention_norm);
    attention_->backward(ctx, dx_mid, saved.attention_norm.out, saved.attention, dxn);
    attention_norm_->backward(ctx, dxn, dx_mid, saved.attention_norm, dx);
}

void TransformerBlock::ffn_backward(Context& ctx, const TensorView& dy, BlockSaved& saved,
                                    const TensorView& dxn) const {
    if (moe_) return moe_->backward(ctx, saved.ffn_norm.out, dy, saved.moe, dxn);
    TokenRows gradient{.plain = dy};
    dense_flow_->prepare_gradient(ctx, gradient);
    dense_->backward(ctx, saved.ffn_norm.out, gradient, false, saved.dense, dxn);
}

std::vector<const Norm*> TransformerBlock::norms() const {
    std::vector<const Norm*> norms{ffn_norm_.get()};
    if (attention_norm_) norms.push_back(attention_norm_.get());
    return norms;
}

void TransformerBlock::begin_step(Context& ctx) const {
    if (moe_) moe_->router().begin_step(ctx);
    for (const Norm* norm : norms()) norm->begin_step(ctx);
}

void TransformerBlock::update_state(Context& ctx, const TensorView& step) const {
    if (moe_) router()->update_bias(ctx);
    for (const Norm* norm : norms()) norm->update_state(ctx, step);
}

std::vector<NamedTensor> TransformerBlock::state() const {
    std::vector<NamedTensor> state;
    for (const Norm* norm : norms())
        for (const NamedTensor& tensor : norm->state()) state.push_back(tensor);
    if (moe_ && router()->expert_bias())
        state.push_back({router()->name() + ".expert_bias", router()->expert_bias()});
    return state;
}

}  // namespace fp8flow
