// Routing of one layer in the order of the formulas: logits, scores, choice, losses; their gradients upwards.
#include "layers/router.h"

#include "layers/forced_routing.h"

#include <vector>

namespace fp8flow {

Router::Router(ParameterStore& store, Device& device, const ModelSpec& model, const MoeSpec& moe,
               DType plain_dtype, int layer)
    : model_(model), moe_(moe), layer_(layer), name_(fmt::format("layers.{}.moe.router", layer)) {
    const bool sigmoid = moe.moe_router_score_function == ScoreFunction::sigmoid;
    score_ = sigmoid ? op::Score::sigmoid : op::Score::softmax;
    options_ = {.score = score_,
                .pre_softmax = moe.moe_router_pre_softmax,
                .num_groups = moe.moe_router_num_groups,
                .group_topk = moe.moe_router_group_topk,
                .scaling_factor = static_cast<float>(moe.moe_router_topk_scaling_factor)};
    weight_ = &store.add({.name = name_ + ".weight",
                          .shape = {moe.num_experts, model.hidden_size, 0},
                          .init_std = model.init_method_std,
                          .plain_dtype = plain_dtype});
    state_ = std::make_unique<Arena>(device, "router state");
    counts_ = state_->tensor(DType::i64, {moe.num_experts}, "router");
    losses_ = state_->tensor(DType::f32, {2}, "router");
    global_counts_ = state_->tensor(DType::f32, {moe.num_experts}, "router");
    for (const TensorView& view : {counts_, losses_, global_counts_})
        device.fill(view.data, 0, static_cast<size_t>(view.bytes()));
    if (moe.moe_router_enable_expert_bias) {
        bias_ = state_->tensor(DType::f32, {moe.num_experts}, "router");
        device.fill(bias_.data, 0, static_cast<size_t>(bias_.bytes()));
    }
}

void Router::place_statistics(const TensorView& counts, const TensorView& losses) {
    counts_ = counts;
    losses_ = losses;
}

// Made once: a step must neither compute on the host nor wait for copies from it.
TensorView Router::forced_ids(Context& ctx) const {
    const double skew = moe_.moe_router_force_load_balancing ? 1.0 : moe_.moe_router_force_biased;
    if (skew == 0.0) return {};
    if (!forced_ || forced_.dim(0) < ctx.tokens_per_rank) {
        const std::vector<int32_t> ids = forced_assignment({.tokens = ctx.tokens_per_rank,
                                                            .rank = ctx.exchange.rank(),
                                                            .num_experts = moe_.num_experts,
                                                            .topk = moe_.moe_router_topk,
                                                            .num_groups = moe_.moe_router_num_groups,
                                                            .group_topk = moe_.moe_router_group_topk,
                                                            .max_over_mean = skew,
                                                            .seed = static_cast<uint64_t>(layer_)});
        forced_ = state_->tensor(DType::i32, {ctx.tokens_per_rank, moe_.moe_router_topk}, "router");
        ctx.ops.device().copy_in(forced_.data, ids.data(), ids.size() * sizeof(int32_t), ctx.launch.stream);
    }
    return forced_.slice(0, ctx.tokens);
}

void Router::forward(Context& ctx, const TensorView& xn, RouterSaved& saved) const {
    auto timed = ctx.stage("route");
    const int64_t experts = moe_.num_experts, topk = moe_.moe_router_topk;
    saved.logits = ctx.saved.tensor(DType::f32, {ctx.tokens, experts}, "route");
    saved.ids = ctx.saved.tensor(DType::i32, {ctx.tokens, topk}, "route");
    saved.probs = ctx.saved.tensor(DType::f32, {ctx.tokens, topk}, "route");
    ArenaScope scope(ctx.scratch);
    // A forward that is re-run in the backward must not count its tokens twice.
    TensorView counts = counts_;
    if (ctx.recomputing) {
        counts = ctx.scratch.tensor(DType::i64, {experts}, "route");
        ctx.ops.zero({.y = counts}, ctx.launch);
    }
    ctx.ops.router_logits({.x = xn, .weight = weight_->plain, .logits = saved.logits}, ctx.launch);
    ctx.ops.router_top_k({.logits = saved.logits,
                          .expert_bias = bias_,
                          .options = options_,
                          .forced_ids = forced_ids(ctx),
                          .ids = saved.ids,
                          .probs = saved.probs,
                          .counts = counts},
                         ctx.launch);
}

void Router::backward(Context& ctx, const TensorView& dprobs, const TensorView& xn, const RouterSaved& saved,
                      const TensorView& dx_in, const TensorView& dx) const {
    auto timed = ctx.stage("route");
    ArenaScope scope(ctx.scratch);
    const TensorView dlogits = ctx.scratch.tensor(DType::f32, {ctx.tokens, moe_.num_experts}, "route");
    ctx.ops.router_top_k_backward(
        {.logits = saved.logits, .ids = saved.ids, .dprobs = dprobs, .options = options_, .dlogits = dlogits},
        ctx.launch);
    balancing_gradients(ctx, saved.logits, dlogits);
    ctx.ops.router_logits_backward({.dlogits = dlogits,
                                    .x = xn,
                                    .weight = weight_->plain,
                                    .dx_in = dx_in,
                                    .dweight_mode = ctx.grad_mode,
                                    .dx = dx,
                                    .dweight = weight_->main_grad},
                                   ctx.launch);
}

void Router::balancing_gradients(Context& ctx, const TensorView& logits, const TensorView& dlogits) const {
    for (size_t i = 0; i < moe_.moe_router_load_balancing_type.size(); ++i)
        balance(ctx, moe_.moe_router_load_balancing_type[i], moe_.moe_aux_loss_coeff[i], logits, dlogits);
    if (moe_.moe_z_loss_coeff > 0.0 && ctx.tokens > 0) {
        // mean over this rank's tokens, then over ranks and micro-batches, as the main loss is
        const double share = 1.0 / static_cast<double>(ctx.num_micro_batches * ctx.data_parallel_size);
        const double weight = moe_.moe_z_loss_coeff * share / static_cast<double>(ctx.tokens);
        ctx.ops.router_z_loss({.logits = logits,
                               .weight = static_cast<float>(weight),
                               .grad_weight = static_cast<float>(weight),
                               .loss = z_loss(),
                               .dlogits = dlogits},
                              ctx.launch);
    }
}

// coeff * E/(K n^2) * sum_e counts_e P_e over a set of n tokens: this rank's micro-batch (aux_loss), each sequence (seq_aux_loss), or the
// global batch so far (global_aux_loss); averaged over ranks and micro-batches, as the main loss is.
void Router::balance(Context& ctx, BalancingLoss type, double coeff, const TensorView& logits,
                     const TensorView& dlogits) const {
    const int64_t experts = moe_.num_experts, topk = moe_.moe_router_topk;
    const TensorView counts = ctx.scratch.tensor(DType::f32, {experts}, "route");
    const TensorView sums = ctx.scratch.tensor(DType::f32, {experts}, "route");
    const double ranks = static_cast<double>(ctx.data_parallel_size);
    const double share = 1.0 / (static_cast<double>(ctx.num_micro_batches) * ranks);
    auto apply = [&](int64_t first, int64_t tokens, const TensorView& all_counts, double weight) {
        ctx.ops.router_aux_loss_backward({.logits = logits.slice(first, tokens),
                                          .counts = all_counts,
                                          .score = score_,
                                          .weight = static_cast<float>(weight),
                                          .score_sums = sums,
                                          .loss = balancing_loss(),
                                          .dlogits = dlogits.slice(first, tokens)},
                                         ctx.launch);
    };
    auto weight_for = [&](double tokens) {
        return coeff * static_cast<double>(experts) / (static_cast<double>(topk) * tokens * tokens);
    };
    if (type == BalancingLoss::global_aux_loss) {
        // every rank takes part in the reduction, also one without tokens
        ctx.ops.router_score_sums(
            {.logits = logits, .score = score_, .topk = topk, .counts = counts, .score_sums = sums},
            ctx.launch);
        ctx.exchange.all_reduce(Reduce::sum, Ranks::world, counts, ctx.launch);
        ctx.ops.add({.a = global_counts_, .b = counts, .y = global_counts_}, ctx.launch);
        const double tokens = static_cast<double>(ctx.global_tokens);
        const double seen = static_cast<double>(ctx.micro_batch + 1);
        if (ctx.tokens > 0 && tokens > 0)
            apply(0, ctx.tokens, global_counts_,
                  weight_for(tokens) / seen / static_cast<double>(ctx.num_micro_batches));
        return;
    }
    const int64_t set = type == BalancingLoss::seq_aux_loss ? ctx.seq_length : ctx.tokens;
    for (int64_t first = 0; first + set <= ctx.tokens && set > 0; first += set) {
        ctx.ops.router_score_sums({.logits = logits.slice(first, set),
                                   .score = score_,
                                   .topk = topk,
                                   .counts = counts,
                                   .score_sums = sums},
                                  ctx.launch);
        apply(first, set, counts,
              weight_for(static_cast<double>(set)) * share * static_cast<double>(set) /
                  static_cast<double>(ctx.tokens));
    }
}

void Router::begin_step(Context& ctx) const {
    for (const TensorView& view : {counts_, losses_, global_counts_}) ctx.ops.zero({.y = view}, ctx.launch);
}

void Router::reduce_counts(Context& ctx) const {
    ctx.exchange.all_reduce(Reduce::sum, Ranks::world, counts_, ctx.launch);
}

void Router::update_bias(Context& ctx) const {
    if (bias_)
        ctx.ops.expert_bias_update({.counts = counts_,
                                    .rate = static_cast<float>(moe_.moe_router_bias_update_rate),
                                    .status = ctx.step_status,
                                    .bias = bias_},
                                   ctx.launch);
}

}  // namespace fp8flow
