// SPDX-License-Identifier: MIT
// Learning-rate schedule, clipping by the global norm, and one AdamW call per parameter, all on the device.
#include "model/train/optimizer.h"

#include "kernels/core/error.h"
#include "kernels/core/stochastic_rounding.h"

#include <algorithm>
#include <cmath>

namespace fp8flow {

namespace {

double cosine(double done) { return 0.5 * (1.0 + std::cos(3.14159265358979323846 * done)); }

double wsd(const TrainingSpec& t, int64_t update, int64_t decay_iters) {
    const int64_t falling = t.lr_wsd_decay_iters > 0
                                ? t.lr_wsd_decay_iters
                                : std::min(ceil_div(decay_iters, 5), decay_iters - t.lr_warmup_iters);
    const int64_t fallen = update - (decay_iters - falling);
    if (fallen <= 0) return 1.0;
    const double done = f64(fallen) / f64(falling);
    switch (t.lr_wsd_decay_style) {
        case WsdDecayStyle::exponential: return 2.0 * std::pow(0.5, done) - 1.0;
        case WsdDecayStyle::linear: return 1.0 - done;
        case WsdDecayStyle::cosine: return cosine(done);
        case WsdDecayStyle::minus_sqrt: return 1.0 - std::sqrt(done);
    }
    fail(ExitCode::internal, "lr_wsd_decay_style {}", static_cast<int>(t.lr_wsd_decay_style));
}

}  // namespace

double learning_rate(const TrainingSpec& t, int64_t update) {
    const int64_t decay_iters = t.lr_decay_iters > 0 ? t.lr_decay_iters : t.train_iters;
    const int64_t risen = t.lr_warmup_style == LrWarmupStyle::from_zero ? update : update + 1;
    if (t.lr_warmup_iters > 0 && risen <= t.lr_warmup_iters)
        return t.lr_warmup_init + (t.lr - t.lr_warmup_init) * f64(risen) / f64(t.lr_warmup_iters);
    if (t.lr_decay_style == LrDecayStyle::constant) return t.lr;
    if (update >= decay_iters) return t.min_lr;
    const double done =
        f64(update - t.lr_warmup_iters) / f64(std::max<int64_t>(1, decay_iters - t.lr_warmup_iters));
    const double left = t.lr_decay_style == LrDecayStyle::wsd      ? wsd(t, update, decay_iters)
                        : t.lr_decay_style == LrDecayStyle::linear ? 1.0 - done
                                                                   : cosine(done);
    return t.min_lr + left * (t.lr - t.min_lr);
}

std::array<float, 3> adamw_schedule(const TrainingSpec& t, int64_t update) {
    const auto correction = [&](double beta) {
        return static_cast<float>(1.0 - std::pow(beta, f64(update + 1)));
    };
    return {static_cast<float>(learning_rate(t, update)), correction(t.adam_beta1), correction(t.adam_beta2)};
}

Optimizer::Optimizer(const TrainingSpec& training, CombineOrder order, Device& device)
    : training_(training), order_(order), state_(device, "optimizer") {
    squares_ = state_.tensor(DType::f32, {2}, "optimizer");
    dense_squares_ = squares_.slice(0, 1);
    expert_squares_ = squares_.slice(1, 1);
    norm_ = state_.tensor(DType::f32, {1}, "optimizer");
    factor_ = state_.tensor(DType::f32, {1}, "optimizer");
}

// Dense parameters are the same on all ranks and count once. Expert parameters are counted by one of the
// ranks that hold them. If the weight-gradient GEMMs wrote sums of squares, nothing is read again.
void Optimizer::global_norm(Context& ctx, ParameterStore& store) {
    ctx.ops.zero({.y = squares_}, ctx.launch);
    if (store.dense_gradients() && store.shards_gradients(false))
        squares_of_shares(ctx, store, Ranks::world, dense_blocks_, dense_squares_);
    else if (store.dense_gradients())
        ctx.ops.norm_squared({.x = store.dense_gradients(), .sum = dense_squares_}, ctx.launch);
    if (order_ == CombineOrder::invariant) {
        sum_squares_by_expert(ctx, store);
    } else {
        if (store.expert_gradients() && store.shards_gradients(true))
            squares_of_shares(ctx, store, Ranks::expert_replicas, expert_blocks_, expert_squares_);
        else if (store.expert_squares() && ctx.sums_squares)
            ctx.ops.add_squares({.squares = store.expert_squares(), .sum = expert_squares_}, ctx.launch);
        else if (store.expert_gradients() && ctx.exchange.holds_first_replica())
            ctx.ops.norm_squared({.x = store.expert_gradients(), .sum = expert_squares_}, ctx.launch);
        ctx.exchange.all_reduce(Reduce::sum, Ranks::world, expert_squares_, ctx.launch);
    }
    ctx.ops.add({.a = dense_squares_, .b = expert_squares_, .y = dense_squares_}, ctx.launch);
}

// Sharded gradients: each rank has whole blocks, and their sums go to all ranks, so the bits are those of
// norm_squared over all gradients. Experts are counted by one of the ranks that hold them.
void Optimizer::squares_of_shares(Context& ctx, ParameterStore& store, Ranks ranks, TensorView& blocks,
                                  const TensorView& sum) {
    constexpr int64_t kNormBlock = op::kNormSquaredBlock;
    const bool expert = ranks == Ranks::expert_replicas;
    const TensorView& gradients = expert ? store.expert_gradients() : store.dense_gradients();
    if (!blocks) blocks = state_.tensor(DType::f64, {ceil_div(gradients.numel(), kNormBlock)}, "optimizer");
    const Shards shards = store.gradient_shards(expert);
    Shards of_blocks(shards.size());
    for (size_t r = 0; r < shards.size(); ++r)
        for (const Slice& slice : shards[r])
            of_blocks[r].push_back({slice.first / kNormBlock, ceil_div(slice.count, kNormBlock)});
    const auto own = to_size(ctx.exchange.rank_among(ranks));
    for (size_t i = 0; i < shards[own].size(); ++i) {
        const Slice &values = shards[own][i], &sums = of_blocks[own][i];
        ctx.ops.norm_squared({.x = gradients.slice(values.first, values.count),
                              .block_sums = blocks.slice(sums.first, sums.count)},
                             ctx.launch);
    }
    ctx.exchange.all_gather(ranks, blocks, of_blocks, ctx.launch);
    if (!expert || ctx.exchange.holds_first_replica())
        ctx.ops.norm_squared({.block_sums = blocks, .sum = sum}, ctx.launch);
}

// In the order of parameters and global expert ids, so that the sum does not depend on who holds an expert.
void Optimizer::sum_squares_by_expert(Context& ctx, ParameterStore& store) {
    const auto experts_of = [&](const Parameter& p) {
        return p.spec.expert && !p.frozen ? p.spec.shape[0] * ctx.exchange.size() : 0;
    };
    if (!squares_of_experts_) {
        int64_t total = 0;
        for (const Parameter& p : store.all()) total += experts_of(p);
        if (total == 0) return;
        squares_of_experts_ = state_.tensor(DType::f32, {total}, "optimizer");
    }
    ctx.ops.zero({.y = squares_of_experts_}, ctx.launch);
    int64_t first = 0;
    for (const Parameter& p : store.all()) {
        if (p.spec.expert && !p.frozen && ctx.exchange.holds_first_replica())
            for (int64_t e = 0; e < p.spec.shape[0]; ++e)
                ctx.ops.norm_squared({.x = p.main_grad[e],
                                      .sum = squares_of_experts_.slice(first + p.spec.first_expert + e, 1)},
                                     ctx.launch);
        first += experts_of(p);
    }
    ctx.exchange.all_reduce(Reduce::sum, Ranks::world, squares_of_experts_, ctx.launch);
    ctx.ops.sum({.values = squares_of_experts_, .sum = expert_squares_}, ctx.launch);
}

void Optimizer::step(Context& ctx, ParameterStore& store, const StepInputs& inputs) {
    const size_t all = store.all().size();
    if (!ctx.reduces_gradients) {
        auto timed = ctx.part("gradient reduction");
        store.reduce_gradients(ctx.exchange, ctx.rounding.replica, 0, all, ctx.launch);
    }
    update(ctx, store, inputs);
    if (ctx.overlaps_param_gather || !training_.use_distributed_optimizer) return;
    // If the step is bad, no slice was written, and the copies get the same values again.
    auto timed = ctx.part("parameter gather");
    store.gather_copies(ctx.exchange, 0, all, ctx.launch);
}

void Optimizer::agree_on_status(Context& ctx, const StepInputs& inputs) {
    ctx.exchange.all_reduce(Reduce::sum, Ranks::world, inputs.sums(), ctx.launch);
    ctx.exchange.all_reduce(Reduce::max, Ranks::world, ctx.step_status, ctx.launch);
}

void Optimizer::update(Context& ctx, ParameterStore& store, const StepInputs& inputs) {
    auto timed = ctx.part("optimizer");
    // Before the checks of loss and norm: the numbers of a step that overflowed on any rank are meaningless.
    // Loss and norm are the same on every rank, so their checks need no second reduction.
    agree_on_status(ctx, inputs);
    global_norm(ctx, store);
    auto judge = [&](const TensorView& value, double clip, const TensorView& limit) {
        ctx.ops.clip_factor({.norm_squared = value,
                             .clip = static_cast<float>(clip),
                             .limit = limit,
                             .status = ctx.step_status,
                             .norm = norm_,
                             .factor = factor_},
                            ctx.launch);
    };
    // for the status only: gradients can be finite if the loss is not; its "norm" is its root
    judge(inputs.sums().slice(0, 1), 0.0, inputs.loss_limit());
    judge(dense_squares_, training_.clip_grad, inputs.grad_norm_limit());

    Launch launch = ctx.launch;
    for (Parameter& p : store.all()) {
        // this rank has no slice of it; the first call with work waits for the factor
        if (p.master.numel() == 0 || p.frozen) continue;
        const TensorView copy = p.plain && p.plain.data != p.master.data ? p.plain : TensorView{};
        const op::AdamW adamw{
            .grad = p.is_sharded() ? p.part_here(p.main_grad) : p.main_grad,
            .schedule = inputs.schedule(),
            .beta1 = static_cast<float>(training_.adam_beta1),
            .beta2 = static_cast<float>(training_.adam_beta2),
            .eps = static_cast<float>(training_.adam_eps),
            .weight_decay = p.spec.weight_decay ? static_cast<float>(training_.weight_decay) : 0.0f,
            .grad_scale = factor_,
            .status = ctx.step_status,
            .master = p.master,
            .m = p.m,
            .v = p.v,
            .m_key = rounding_key(training_.seed, p.stream, 0),
            .v_key = rounding_key(training_.seed, p.stream, 1),
            .rounding_step = inputs.rounding(),
            .first_element = p.first_element() + p.slice.first,
            .copy = copy && p.is_sharded() ? p.part_here(copy) : copy};
        if (!p.fprop || p.is_sharded())
            ctx.ops.adamw(adamw, launch);
        else
            ctx.ops.adamw_quantize({.adamw = adamw,
                                    .scale_format = p.spec.format.scale_format,
                                    .mx_rounding = p.spec.format.mx_rounding,
                                    .fprop = p.fprop,
                                    .dgrad = p.dgrad},
                                   launch);
        launch.independent = true;  // a parameter's step touches no other's memory
    }
}

}  // namespace fp8flow
