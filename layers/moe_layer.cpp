// SPDX-License-Identifier: MIT
// Forward and backward of the MoE layer, and its recompute modes.
#include "layers/moe_layer.h"

#include "layers/schedule/wire_stream.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace fp8flow {

MoeLayer::MoeLayer(ParameterStore& store, Device& device, const BlockSpec& spec)
    : moe_(spec.moe),
      precision_(spec.precision),
      recompute_(spec.recompute),
      layer_(spec.layer),
      first_expert_(spec.moe.num_experts / spec.expert_parallel_size * spec.expert_parallel_rank),
      local_experts_(spec.moe.num_experts / spec.expert_parallel_size),
      sources_(gradient_sources(spec.moe, spec.expert_parallel_size)),
      form_(routed_form(spec.model.glu)) {
    flow_ = make_flow(precision_, experts_recompute(recompute_));
    shared_flow_ = make_flow(precision_, {});
    router_ = std::make_unique<Router>(store, device, spec.model, moe_, spec.plain_dtype, layer_);
    const std::string name = fmt::format("layers.{}.moe", layer_);
    experts_ = add_expert_weights(store, spec.model,
                                  {.name = name + ".experts",
                                   .width = moe_.moe_ffn_hidden_size,
                                   .num_experts = local_experts_,
                                   .first_expert = first_expert_,
                                   .sources = sources_,
                                   .expert_parallel = true,
                                   .format = flow_->weight_format(),
                                   .plain_dtype = spec.plain_dtype});
    if (moe_.moe_shared_expert_intermediate_size > 0)
        shared_ = std::make_unique<Ffn>(store, spec.model, *shared_flow_,
                                        FfnSpec{.name = name + ".shared_experts",
                                                .width = moe_.moe_shared_expert_intermediate_size,
                                                .form = local_form(spec.model.glu),
                                                .gated = moe_.moe_shared_expert_gate,
                                                .plain_dtype = spec.plain_dtype});
}

int64_t MoeLayer::row_capacity(const MoeSpec& moe, int64_t tokens_per_rank, int64_t expert_parallel_size) {
    const int64_t local = moe.num_experts / expert_parallel_size;
    const int64_t worst = expert_parallel_size * tokens_per_rank * std::min(moe.moe_router_topk, local);
    int64_t rows = worst;
    if (moe.moe_expert_rank_capacity_factor > 0.0) {
        const double wanted =
            moe.moe_expert_rank_capacity_factor * static_cast<double>(tokens_per_rank * moe.moe_router_topk);
        if (wanted < static_cast<double>(worst)) rows = static_cast<int64_t>(std::ceil(wanted));
    }
    const int64_t groups = local * gradient_sources(moe, expert_parallel_size);
    return round_up(rows + groups * (moe.moe_row_alignment - 1), kBlock);
}

int64_t MoeLayer::worst_rows(MoeSpec moe, int64_t tokens_per_rank, int64_t expert_parallel_size) {
    moe.moe_expert_rank_capacity_factor = 0;
    return row_capacity(moe, tokens_per_rank, expert_parallel_size);
}

void MoeLayer::forward(Context& ctx, const TokenRows& x, const TensorView& residual, MoeSaved& saved,
                       const TensorView& y) const {
    const SavedMark mark(ctx);
    saved.depth = ctx.rows.depth();
    forward_once(ctx, x, residual, saved, y);
    if (recompute_.moe) mark.rewind(ctx);  // only the layer's input stays
}

void MoeLayer::forward_once(Context& ctx, const TokenRows& x, const TensorView& residual, MoeSaved& saved,
                            const TensorView& y) const {
    ArenaScope scope(ctx.scratch);
    SideStream* const side = side_of(ctx);
    TensorView addend;
    Event addend_ready;
    const auto shared_expert = [&](Context& side_ctx) {
        auto timed = side_ctx.stage("shared expert");
        shared_->forward(side_ctx, x, {}, recompute_.shared_experts, saved.shared, addend);
    };
    if (shared_) addend = ctx.scratch.tensor(ctx.activation, {ctx.tokens, x.plain.cols()}, "shared expert");
    if (side != nullptr) addend_ready = on_side(ctx, shared_expert);
    router_->forward(ctx, x.plain, saved.route);
    make_plan(ctx, saved);
    saved.experts.form = form_;
    if (shared_ && side == nullptr) shared_expert(ctx);
    flow_->forward(ctx,
                   {.x = x,
                    .plan = saved.plan,
                    .weights = experts_,
                    .residual = residual,
                    .addend = addend,
                    .addend_ready = addend_ready,
                    .y = y},
                   saved.experts);
    ctx.rows.push();
}

// The stream for the shared expert if it runs in parallel with the routed experts, else null.
SideStream* MoeLayer::side_of(const Context& ctx) const {
    const bool overlap =
        shared_ != nullptr && ctx.side != nullptr && ctx.side->schedule().moe_shared_expert_overlap;
    return overlap ? ctx.side : nullptr;
}
// Queues work of the shared expert there; returns the event after it.
template <class Work> Event MoeLayer::on_side(Context& ctx, Work work) const {
    Context side_ctx = ctx.side->begin(
        ctx, recompute_.shared_experts ? SideStream::Kept::dropped : SideStream::Kept::for_backward);
    work(side_ctx);
    return ctx.side->mark();
}

void MoeLayer::backward(Context& ctx, const TokenRows& x, const TensorView& dy, MoeSaved& saved,
                        const TensorView& dx) const {
    const Arena::Mark mark = ctx.saved.mark();
    ArenaScope scope(ctx.scratch);
    const int64_t hidden = dy.cols();
    if (recompute_.moe) {
        ArenaScope rebuilt(ctx.scratch);
        const RecomputeScope again(ctx);
        const TensorView y = ctx.scratch.tensor(ctx.activation, {ctx.tokens, hidden}, "combine");
        forward_once(ctx, x, x.plain, saved, y);
    }
    TokenRows gradient{.plain = dy};
    flow_->prepare_gradient(ctx, gradient);
    SideStream* const side = side_of(ctx);
    TensorView dx_shared;
    Event dx_shared_ready;
    const auto shared_expert = [&](Context& side_ctx) {
        auto timed = side_ctx.stage("shared expert");
        shared_->backward(side_ctx, x, gradient, recompute_.shared_experts, saved.shared, dx_shared);
    };
    if (shared_) dx_shared = ctx.scratch.tensor(ctx.activation, {ctx.tokens, hidden}, "shared expert");
    if (side != nullptr)
        dx_shared_ready = on_side(ctx, shared_expert);
    else if (shared_)
        shared_expert(ctx);
    const TensorView dx_experts = ctx.scratch.tensor(ctx.activation, {ctx.tokens, hidden}, "combine");
    const TensorView dprob = ctx.scratch.tensor(DType::f32, {ctx.tokens, moe_.moe_router_topk}, "route");
    flow_->backward(ctx,
                    {.dy = gradient,
                     .x = x,
                     .plan = saved.plan,
                     .weights = experts_,
                     .dx_in = dx_shared,
                     .dx_in_ready = dx_shared_ready,
                     .dx = dx_experts,
                     .dprob = dprob},
                    saved.experts);
    if (ctx.gemms != nullptr) ctx.gemms->router_gradient(ctx, dprob);
    router_->backward(ctx, dprob, x.plain, saved.route, dx_experts, dx);
    if (ctx.side != nullptr) ctx.side->join(ctx);
    ctx.rows.pop(saved.depth);
    if (recompute_.moe) ctx.saved.rewind(mark);
}

void MoeLayer::make_plan(Context& ctx, MoeSaved& saved) const {
    // dispatch comes next on this stream and does not wait for the shared expert
    const Launch wire = begin_wire(ctx);
    auto timed = ctx.stage("plan", wire);
    const int64_t ranks = ctx.exchange.size(), slots = ctx.tokens_per_rank, topk = moe_.moe_router_topk;
    TensorView all_ids, all_probs;
    if (ranks == 1 && ctx.tokens == slots) {  // nothing to gather
        all_ids = saved.route.ids.reshape({1, slots, topk});
        all_probs = saved.route.probs.reshape({1, slots, topk});
    } else {
        all_ids = ctx.saved.tensor(DType::i32, {ranks, slots, topk}, "plan");
        all_probs = ctx.saved.tensor(DType::f32, {ranks, slots, topk}, "plan");
        ctx.exchange.gather_routing(saved.route.ids, saved.route.probs, all_ids, all_probs, wire);
    }
    saved.plan.padded = plan_for(ctx, all_ids, all_probs, moe_.moe_row_alignment, PlanRows::routed, wire);
    if (!precision_.moe_permute_padding_for_fp8)
        saved.plan.unpadded = plan_for(ctx, all_ids, all_probs, 1, PlanRows::layer, wire);
}

DispatchPlan MoeLayer::plan_for(Context& ctx, const TensorView& all_ids, const TensorView& all_probs,
                                int64_t alignment, PlanRows rows, const Launch& launch) const {
    const bool in_row_arena = rows == PlanRows::routed;
    const int64_t capacity = ctx.layer_row_capacity;
    op::PlanDispatch args{.all_ids = all_ids,
                          .all_probs = all_probs,
                          .rank = ctx.exchange.rank(),
                          .first_expert = first_expert_,
                          .num_local_experts = local_experts_,
                          .num_sources = sources_,
                          .groups = {.row_capacity = capacity, .alignment = alignment},
                          .overflow = ctx.step_status};
    if (ctx.known_rows != nullptr) args.groups.known_rows = ctx.known_rows->at(static_cast<size_t>(layer_));
    // weight gradients that wait read the sizes of their groups in the next micro-batch
    Arena& sizes = in_row_arena && ctx.delays_wgrads() ? ctx.delayed->arena() : ctx.saved;
    const int64_t groups = sources_ * local_experts_;
    args.groups.counts = sizes.tensor(DType::i64, {groups}, "plan");
    args.groups.offsets = sizes.tensor(DType::i64, {groups + 1}, "plan");
    if (in_row_arena) {
        args.row_base = ctx.rows.row_base();
        args.next_row_base = ctx.rows.next_row_base();
        args.rows_wanted = ctx.rows.rows_wanted();
        args.row_source = ctx.rows.tensor(DType::i32, 1, "plan source").reshape({ctx.rows.capacity()});
        args.row_prob = ctx.rows.vector(DType::f32, "plan prob");
    }
    allocate_plan(args, [&](DType dtype, std::initializer_list<int64_t> shape) {
        return ctx.saved.tensor(dtype, shape, "plan");
    });
    ctx.ops.plan_dispatch(args, launch);
    return plan_of(args, ctx.tokens);
}

}  // namespace fp8flow
