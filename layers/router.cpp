// SPDX-License-Identifier: MIT
// Routing of one layer: logits, scores, choice, losses, and their gradients.
#include "layers/router.h"

#include "kernels/core/error.h"
#include "layers/schedule/wire_stream.h"

#include <algorithm>
#include <vector>

namespace fp8flow {

Router::Router(ParameterStore& store, Device& device, const ModelSpec& model, const MoeSpec& moe,
               DType plain_dtype, int layer)
    : moe_(moe), layer_(layer), name_(fmt::format("layers.{}.moe.router", layer)) {
    const bool sigmoid = moe.moe_router_score_function == ScoreFunction::sigmoid;
    options_ = {.score = sigmoid ? op::Score::sigmoid : op::Score::softmax,
                .pre_softmax = moe.moe_router_pre_softmax,
                .normalise = moe.moe_router_norm_topk_prob,
                .num_groups = moe.moe_router_num_groups,
                .group_topk = moe.moe_router_group_topk,
                .scaling_factor = static_cast<float>(moe.moe_router_topk_scaling_factor)};
    FP8FLOW_CHECK(moe.moe_router_load_balancing_type.size() <= op::kBalanceTerms,
                  "{} entries in moe_router_load_balancing_type, at most {} are supported",
                  moe.moe_router_load_balancing_type.size(), op::kBalanceTerms);
    const bool fp32 = moe.moe_router_dtype == RouterDtype::fp32;
    weight_ = &store.add({.name = name_ + ".weight",
                          .shape = {moe.num_experts, model.hidden_size, 0},
                          .init_std = model.init_method_std,
                          .gradient_with_dx = true,
                          .plain_dtype = fp32 ? DType::f32 : plain_dtype});
    state_ = std::make_unique<Arena>(device, "router state");
    counts_ = state_->tensor(DType::i64, {moe.num_experts}, "router");
    losses_ = state_->tensor(DType::f32, {op::kRouterLosses}, "router");
    if (moe.balances_by(BalancingLoss::global_aux_loss))
        global_counts_ = state_->tensor(DType::f32, {moe.num_experts}, "router");
    if (moe.moe_router_enable_expert_bias) bias_ = state_->tensor(DType::f32, {moe.num_experts}, "router");
    for (const TensorView& view : {counts_, losses_, global_counts_, bias_})
        if (view) device.fill(view.data, 0, static_cast<size_t>(view.bytes()));
}

void Router::use_model_statistics(int64_t moe_layer, const TensorView& counts, const TensorView& losses) {
    moe_layer_ = moe_layer;
    counts_ = counts;
    losses_ = losses;
    owns_statistics_ = false;
}

// Given ids are made once, because a step must not compute on the host or wait for copies from it.
TensorView Router::given_ids(Context& ctx) const {
    if (ctx.routing.given) return ctx.routing.given[moe_layer_].slice(0, ctx.tokens);
    if (moe_.given_ids == nullptr) return {};
    const int64_t tokens = ctx.tokens_per_rank;
    if (!given_ || given_.dim(0) < tokens) {
        const std::vector<int32_t> ids = moe_.given_ids(moe_, layer_, ctx.exchange.rank(), tokens);
        given_ = state_->tensor(DType::i32, {tokens, moe_.moe_router_topk}, "router");
        ctx.ops.device().copy_in(given_.data, ids.data(), ids.size() * sizeof(int32_t), ctx.launch.stream);
    }
    return given_.slice(0, ctx.tokens);
}

void Router::forward(Context& ctx, const TensorView& xn, RouterSaved& saved) const {
    auto timed = ctx.stage("route");
    const int64_t experts = moe_.num_experts, topk = moe_.moe_router_topk;
    saved.logits = ctx.saved.tensor(DType::f32, {ctx.tokens, experts}, "route");
    saved.ids = ctx.saved.tensor(DType::i32, {ctx.tokens, topk}, "route");
    saved.probs = ctx.saved.tensor(DType::f32, {ctx.tokens, topk}, "route");
    saved.balance = allocate_balance(ctx);
    ArenaScope scope(ctx.scratch);
    // A forward that is re-run in the backward must not count its tokens twice.
    TensorView counts = counts_;
    if (ctx.recomputing) {
        counts = ctx.scratch.tensor(DType::i64, {experts}, "route");
        ctx.ops.zero({.y = counts}, ctx.launch);
    }
    ctx.ops.router_logits({.x = xn, .weight = weight_->plain, .logits = saved.logits}, ctx.launch);
    const op::RouterTopK choice{.logits = saved.logits,
                                .expert_bias = bias_,
                                .options = options_,
                                .forced_ids = given_ids(ctx),
                                .ids = saved.ids,
                                .probs = saved.probs,
                                .counts = counts,
                                .balance = saved.balance};
    ctx.ops.router_top_k(choice, ctx.launch);
    if (ctx.routing.chosen != nullptr && !ctx.recomputing) record_choice(ctx, choice);
}

// Copies the router's own choice to the host, also with given ids.
void Router::record_choice(Context& ctx, op::RouterTopK choice) const {
    if (choice.forced_ids) {
        choice.forced_ids = {};
        choice.ids = ctx.scratch.tensor(DType::i32, {ctx.tokens, moe_.moe_router_topk}, "route");
        choice.probs = ctx.scratch.tensor(DType::f32, {ctx.tokens, moe_.moe_router_topk}, "route");
        choice.counts = ctx.scratch.tensor(DType::i64, {moe_.num_experts}, "route");
        choice.balance = {};
        ctx.ops.zero({.y = choice.counts}, ctx.launch);
        ctx.ops.router_top_k(choice, ctx.launch);
    }
    const int64_t layer_ids = ctx.tokens_per_rank * moe_.moe_router_topk;
    ctx.ops.device().copy_out_async(ctx.routing.chosen + moe_layer_ * layer_ids, choice.ids.data,
                                    static_cast<size_t>(choice.ids.bytes()), ctx.launch.stream);
}

// A set is a sequence if a loss is computed per sequence.
op::RouterBalance Router::allocate_balance(Context& ctx) const {
    const bool by_sequence = moe_.balances_by(BalancingLoss::seq_aux_loss);
    op::RouterBalance balance{.set_tokens = by_sequence ? ctx.seq_length : 0};
    const int64_t experts = moe_.num_experts, sets = op::balance_sets(ctx.tokens, balance.set_tokens),
                  blocks = op::balance_blocks(ctx.tokens, balance.set_tokens);
    if (!moe_.moe_router_load_balancing_type.empty()) {
        balance.counts = ctx.saved.tensor(DType::f32, {sets, experts}, "route");
        balance.score_sums = ctx.saved.tensor(DType::f32, {blocks, experts}, "route");
    }
    if (moe_.moe_z_loss_coeff > 0.0) balance.log_squares = ctx.saved.tensor(DType::f32, {blocks}, "route");
    return balance;
}

void Router::backward(Context& ctx, const TensorView& dprobs, const TensorView& xn, const RouterSaved& saved,
                      const TensorView& dx_in, const TensorView& dx) const {
    auto timed = ctx.stage("route");
    ArenaScope scope(ctx.scratch);
    const TensorView dlogits = ctx.scratch.tensor(DType::f32, {ctx.tokens, moe_.num_experts}, "route");
    op::RouterTopKBackward args{.logits = saved.logits,
                                .ids = saved.ids,
                                .dprobs = dprobs,
                                .options = options_,
                                .balance = saved.balance,
                                .losses = losses_,
                                .dlogits = dlogits};
    for (size_t i = 0; i < moe_.moe_router_load_balancing_type.size(); ++i)
        args.terms[i] = balance_term(ctx, moe_.moe_router_load_balancing_type[i], moe_.moe_aux_loss_coeff[i],
                                     saved.balance);
    if (moe_.moe_z_loss_coeff > 0.0 && ctx.tokens > 0) {
        // mean over this rank's tokens, then over ranks and micro-batches, as the main loss is
        const double share = 1.0 / static_cast<double>(ctx.num_micro_batches * ctx.data_parallel_size);
        args.z_weight = static_cast<float>(moe_.moe_z_loss_coeff * share / static_cast<double>(ctx.tokens));
    }
    ctx.ops.router_top_k_backward(args, ctx.launch);
    ctx.ops.router_logits_backward({.dlogits = dlogits,
                                    .x = xn,
                                    .weight = weight_->plain,
                                    .dx_in = dx_in,
                                    .dweight_mode = ctx.grad_mode,
                                    .dx = dx,
                                    .dweight = weight_->main_grad},
                                   ctx.launch);
}

// coeff * E/(K n^2) * sum_e counts_e P_e over a set of n tokens: this rank's micro-batch (aux_loss), each
// sequence (seq_aux_loss), or the global batch so far (global_aux_loss). Averaged over micro-batches and
// ranks, as the main loss. The parts of global_aux_loss add up to the loss: moe_global_aux_loss_gradient says
// whether their gradients are averaged or added.
op::BalanceTerm Router::balance_term(Context& ctx, BalancingLoss type, double coeff,
                                     const op::RouterBalance& balance) const {
    const auto weight_for = [&](double tokens) {
        const double experts = static_cast<double>(moe_.num_experts),
                     topk = static_cast<double>(moe_.moe_router_topk);
        return coeff * experts / (topk * tokens * tokens);
    };
    TensorView counts = balance.counts;
    if (type == BalancingLoss::global_aux_loss || (type == BalancingLoss::aux_loss && counts.dim(0) > 1)) {
        counts = ctx.scratch.tensor(DType::f32, {1, moe_.num_experts}, "route");
        ctx.ops.zero({.y = counts}, ctx.launch);
        for (int64_t s = 0; s < balance.counts.dim(0); ++s)
            ctx.ops.add({.a = counts, .b = balance.counts.slice(s, 1), .y = counts}, ctx.launch);
    }
    const double tokens = static_cast<double>(ctx.tokens),
                 micro_batches = static_cast<double>(ctx.num_micro_batches);
    if (type == BalancingLoss::global_aux_loss) {
        // every rank takes part in the reduction, also without tokens
        on_wire(ctx, [&](const Launch& wire) {
            ctx.exchange.all_reduce(Reduce::sum, Ranks::world, counts, wire);
        });
        counts = counts.reshape({moe_.num_experts});
        ctx.ops.add({.a = global_counts_, .b = counts, .y = global_counts_}, ctx.launch);
        if (ctx.tokens == 0) return {};
        const double seen = static_cast<double>(ctx.micro_batch + 1);
        const bool averaged = moe_.moe_global_aux_loss_gradient == GlobalLossGradient::mean;
        return {.counts = global_counts_.reshape({1, moe_.num_experts}),
                .weight = static_cast<float>(weight_for(static_cast<double>(ctx.global_tokens)) / seen /
                                             micro_batches /
                                             static_cast<double>(averaged ? ctx.data_parallel_size : 1))};
    }
    if (ctx.tokens == 0) return {};
    const double share = 1.0 / (micro_batches * static_cast<double>(ctx.data_parallel_size));
    const bool by_sequence = type == BalancingLoss::seq_aux_loss;
    const double set = static_cast<double>(
        by_sequence && balance.set_tokens > 0 ? std::min(balance.set_tokens, ctx.tokens) : ctx.tokens);
    return {.counts = counts, .weight = static_cast<float>(weight_for(set) * share * set / tokens)};
}

void Router::begin_step(Context& ctx) const {
    if (global_counts_) ctx.ops.zero({.y = global_counts_}, ctx.launch);
    if (!owns_statistics_) return;
    for (const TensorView& view : {counts_, losses_}) ctx.ops.zero({.y = view}, ctx.launch);
}

void Router::reduce_counts(Context& ctx) const {
    ctx.exchange.all_reduce(Reduce::sum, Ranks::world, counts_, ctx.launch);
}

void Router::update_bias(Context& ctx) const {
    if (bias_ && !weight_->frozen)
        ctx.ops.expert_bias_update({.counts = counts_,
                                    .rate = static_cast<float>(moe_.moe_router_bias_update_rate),
                                    .status = ctx.step_status,
                                    .bias = bias_},
                                   ctx.launch);
}

}  // namespace fp8flow
