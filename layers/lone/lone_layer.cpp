// SPDX-License-Identifier: MIT
// Gives one MoE layer what the trainer gives to all layers of a model.
#include "layers/lone/lone_layer.h"

#include "kernels/core/error.h"

#include <cmath>
#include <cstdint>

namespace fp8flow {

namespace {

BlockSpec block_of(const LoneLayerSpec& spec, const Exchange& exchange) {
    BlockSpec block{.moe = spec.moe, .precision = spec.precision, .recompute = spec.recompute};
    block.model.num_layers = 1;
    block.model.hidden_size = spec.hidden_size;
    block.model.seq_length = spec.max_tokens;
    block.model.norm_epsilon = spec.norm_epsilon;
    block.model.glu = spec.glu;
    block.model.zero_centered_gamma = spec.zero_centered_gamma;
    block.model.init_method_std = spec.init_method_std;
    block.model.moe_layer_freq = {1};
    block.expert_parallel_rank = exchange.rank();
    block.expert_parallel_size = exchange.size();
    return block;
}

// The checks of a configuration that concern one layer.
void check(const LoneLayerSpec& spec, const Exchange& exchange) {
    const MoeSpec& moe = spec.moe;
    for (const auto& [name, value] :
         {std::pair{"hidden_size", spec.hidden_size},
          {"moe.moe_ffn_hidden_size", moe.moe_ffn_hidden_size},
          {"moe.moe_shared_expert_intermediate_size",
           moe.moe_shared_expert_intermediate_size == 0 ? kBlock : moe.moe_shared_expert_intermediate_size}})
        require(value > 0 && value <= INT32_MAX && value % kBlock == 0, ExitCode::usage,
                "{} is {}, want a multiple of {} that fits 32 bits", name, value, kBlock);
    require(spec.max_tokens > 0 && spec.max_tokens <= INT32_MAX, ExitCode::usage,
            "max_tokens is {}, want 1 to {}", spec.max_tokens, INT32_MAX);
    require(moe.num_experts > 0 && moe.num_experts <= INT32_MAX && moe.num_experts % exchange.size() == 0,
            ExitCode::usage, "moe.num_experts is {}, want a multiple of the {} ranks that fits 32 bits",
            moe.num_experts, exchange.size());
    require(moe.moe_router_topk > 0 && moe.moe_router_topk <= moe.num_experts, ExitCode::usage,
            "moe.moe_router_topk is {}, want 1 to moe.num_experts ({})", moe.moe_router_topk,
            moe.num_experts);
    const auto scaling = static_cast<float>(moe.moe_router_topk_scaling_factor);
    require(scaling > 0 && std::isfinite(scaling), ExitCode::usage,
            "moe.moe_router_topk_scaling_factor is {}, want a number above 0",
            moe.moe_router_topk_scaling_factor);
    require(moe.moe_aux_loss_coeff.size() == moe.moe_router_load_balancing_type.size(), ExitCode::usage,
            "moe.moe_aux_loss_coeff has {} values for {} balancing losses", moe.moe_aux_loss_coeff.size(),
            moe.moe_router_load_balancing_type.size());
}

}  // namespace

LoneLayer::LoneLayer(Ops& ops, Exchange& exchange, const LoneLayerSpec& spec)
    : ops_(ops),
      exchange_(exchange),
      spec_((check(spec, exchange), spec)),
      store_(ops, spec.seed, {}, {}, spec.masters),
      state_(ops.device(), "state"),
      kept_(ops.device(), "saved"),
      scratch_(ops.device(), "scratch"),
      layer_rows_(MoeLayer::worst_rows(spec.moe, spec.max_tokens, exchange.size())),
      rows_(ops.device(), layer_rows_, 2),
      flow_(make_flow(spec.precision, {})) {
    const BlockSpec block = block_of(spec, exchange);
    layer_ = std::make_unique<MoeLayer>(store_, ops.device(), block);
    if (spec.norm) {
        const NormOutput output =
            flow_->norm_output() == NormOutput::tensor_scaled ? NormOutput::plain : flow_->norm_output();
        norm_ = std::make_unique<Norm>(store_, ops.device(), block.model, spec.precision, output,
                                       layer_->input_rule(), "layers.0.pre_mlp_layernorm");
    }
    if (spec.masters == Masters::own) store_.allocate_gradients();
    status_ = state_.tensor(DType::i32, {1}, "step");
    zero_ = state_.tensor(DType::bf16, {spec.max_tokens, spec.hidden_size}, "residual");
    all_tokens_ = {.num_groups = 1,
                   .counts = state_.tensor(DType::i64, {1}, "batch"),
                   .offsets = state_.tensor(DType::i64, {2}, "batch"),
                   .alignment = kBlock};
    for (const TensorView& view : {status_, zero_})
        ops.device().fill(view.data, 0, static_cast<size_t>(view.bytes()));
    begin_step();
}

Context LoneLayer::context(const Launch& launch) {
    Context ctx{{.ops = ops_,
                 .exchange = exchange_,
                 .saved = kept_,
                 .scratch = scratch_,
                 .rows = rows_,
                 .timer = timer_}};
    ctx.tokens = tokens_;
    ctx.tokens_per_rank = exchange_.size() == 1 ? tokens_ : spec_.max_tokens;
    ctx.seq_length = spec_.max_tokens;
    ctx.layer_row_capacity = layer_rows_;
    ctx.all_tokens = all_tokens_;
    ctx.data_parallel_size = exchange_.num_ranks(Ranks::world);
    ctx.global_tokens = ctx.data_parallel_size * spec_.max_tokens;
    ctx.step_status = status_;
    ctx.gemms = spec_.gemms;
    ctx.launch = launch;
    return ctx;
}

void LoneLayer::set_tokens(int64_t tokens, const Launch& launch) {
    if (tokens == tokens_) return;
    tokens_ = tokens;
    all_tokens_.row_capacity = tokens;
    const int64_t words[3] = {tokens, 0, tokens};
    ops_.device().copy_in(all_tokens_.counts.data, words, sizeof(int64_t), launch.stream);
    ops_.device().copy_in(all_tokens_.offsets.data, words + 1, 2 * sizeof(int64_t), launch.stream);
}

// The norm's output, or without one the rows as they are, with the FP8 rows that the recipe sends.
TokenRows LoneLayer::layer_input(Context& ctx) {
    if (norm_) {
        norm_->forward(ctx, x_, kept_, saved_norm_);
        return saved_norm_.out;
    }
    TokenRows rows{.plain = x_};
    if (flow_->norm_output() != NormOutput::wire_rows) return rows;
    const Rule rule = flow_->rule_of(Quantized::x);
    rows.quantized = wire_rows(kept_, rule, tokens_, x_.cols(), "cast");
    ops_.quantize_rows({.src = x_, .scale_format = rule.scales, .dst = rows.quantized}, ctx.launch);
    clip(ctx, rule, rows.quantized, {});
    return rows;
}

void LoneLayer::forward(const TensorView& x, const TensorView& y, const Launch& launch) {
    for (const auto& [name, view] : {std::pair{"x", x}, {"y", y}})
        require(view.rank == 2 && view.dtype == DType::bf16 && view.dims[1] == spec_.hidden_size &&
                    view.dims[0] == x.dims[0] && view.dims[0] <= spec_.max_tokens,
                ExitCode::usage, "{} is {}, want bf16[T, {}] with T up to max_tokens ({}), as x", name,
                describe(view), spec_.hidden_size, spec_.max_tokens);
    kept_.rewind({});
    rows_.pop(0);
    set_tokens(x.dims[0], launch);
    x_ = x;
    saved_moe_ = {};
    Context ctx = context(launch);
    input_ = layer_input(ctx);
    layer_->forward(ctx, input_, spec_.residual ? x : zero_.slice(0, tokens_), saved_moe_, y);
}

void LoneLayer::backward(const TensorView& dy, const TensorView& dx, Gradient mode, const Launch& launch) {
    require(x_ && saved_moe_.route.ids, ExitCode::usage, "backward without a forward before it");
    for (const auto& [name, view] : {std::pair{"dy", dy}, {"dx", dx}})
        require(view.rank == 2 && view.dtype == DType::bf16 && view.dims[0] == tokens_ &&
                    view.dims[1] == spec_.hidden_size,
                ExitCode::usage, "{} is {}, want {}, as x", name, describe(view), describe(x_));
    Context ctx = context(launch);
    ctx.grad_mode = mode;
    const TensorView from_residual = spec_.residual ? dy : zero_.slice(0, tokens_);
    if (norm_) {
        ArenaScope scope(scratch_);
        const TensorView dxn = scratch_.tensor(DType::bf16, {tokens_, x_.cols()}, "norm");
        layer_->backward(ctx, input_, dy, saved_moe_, dxn);
        norm_->backward(ctx, dxn, from_residual, saved_norm_, dx);
    } else {
        layer_->backward(ctx, input_, dy, saved_moe_, dx);
        if (spec_.residual) ops_.add({.a = dx, .b = dy, .y = dx}, launch);
    }
    x_ = {};
}

void LoneLayer::reduce_gradients(const Launch& launch) {
    exchange_.all_reduce(Reduce::sum, Ranks::world, store_.dense_gradients(), launch);
    store_.reduce_expert_gradients(exchange_, spec_.replica, store_.expert_gradients(), launch);
}

void LoneLayer::begin_step(const Launch& launch) {
    Context ctx = context(launch);
    layer_->router().begin_step(ctx);
}

void LoneLayer::end_step(const Launch& launch) {
    Context ctx = context(launch);
    layer_->router().reduce_counts(ctx);
    layer_->router().update_bias(ctx);
}

}  // namespace fp8flow
