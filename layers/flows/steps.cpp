// SPDX-License-Identifier: MIT
// The steps of flows: memory of routed rows by lifetime, dispatch, combine, GEMMs. Nothing here depends on
// the recipe.
#include "layers/flows/steps.h"

#include "kernels/core/error.h"
#include "layers/tensor_stats.h"

namespace fp8flow::steps {

namespace {

Arena& arena_of(Context& ctx, Life life) {
    switch (life) {
        case Life::backward: return ctx.saved;
        case Life::call: return ctx.scratch;
        case Life::next: return ctx.delayed->arena();
    }
    fail(ExitCode::internal, "unknown life {}", static_cast<int>(life));
}

// Scales that are not per row: one per tensor, or one per group and column.
TensorView layer_scales(Context& ctx, const ExpertsSaved& saved, Life life, ScaleLayout layout, int64_t width,
                        const char* kind) {
    Arena& arena = arena_of(ctx, life);
    if (layout == ScaleLayout::tensor) return arena.tensor(DType::f32, {1}, kind);
    return arena.tensor(DType::f32, {saved.groups.num_groups, width}, kind);
}

bool in_row_arena(const ExpertsSaved& saved, Life life) { return saved.routed && life == Life::backward; }

}  // namespace

TensorView rows(Context& ctx, const ExpertsSaved& saved, Life life, DType dtype, int64_t width,
                const char* kind) {
    if (in_row_arena(saved, life)) return ctx.rows.tensor(dtype, width, kind);
    return arena_of(ctx, life).tensor(dtype, {saved.groups.row_capacity, width}, kind);
}

TensorView row_vector(Context& ctx, const ExpertsSaved& saved, Life life, const char* kind) {
    if (in_row_arena(saved, life)) return ctx.rows.vector(DType::f32, kind);
    return arena_of(ctx, life).tensor(DType::f32, {saved.groups.row_capacity}, kind);
}

ScaledTensor fp8_rows(Context& ctx, const ExpertsSaved& saved, Life life, DType dtype, int64_t width,
                      ScaleLayout layout, const char* kind, ScaleFormat format) {
    const bool shared = in_row_arena(saved, life);
    ScaledTensor result =
        shared ? ctx.rows.fp8(dtype, width, layout, kind)
               : arena_of(ctx, life).fp8(dtype, {saved.groups.row_capacity, width}, layout, kind);
    result.format = format;
    if (!result.scales) result.scales = layer_scales(ctx, saved, life, layout, width, kind);
    return result;
}

ScaledTensor fp8_columns(Context& ctx, const ExpertsSaved& saved, Life life, DType dtype, int64_t width,
                         ScaleLayout layout, const char* kind) {
    if (!in_row_arena(saved, life))
        return arena_of(ctx, life).fp8(dtype, {width, saved.groups.row_capacity}, layout, kind,
                                       saved.groups.num_groups);
    ScaledTensor result = ctx.rows.fp8_transposed(dtype, width, layout, kind);
    if (!result.scales) result.scales = layer_scales(ctx, saved, life, layout, width, kind);
    return result;
}

void begin_routed(ExpertsSaved& saved, const FlowPlan& plan, const PrecisionSpec& precision) {
    saved.routed = true;
    saved.groups = plan.padded.groups;
    saved.prob = precision.moe_apply_probs_in == ProbsIn::swiglu ? plan.padded.row_prob : TensorView{};
}

void begin_backward(ExpertsSaved& saved, const FlowPlan& plan) { saved.prob = plan.padded.row_prob; }

void begin_dense(Context& ctx, ExpertsSaved& saved) {
    saved.routed = false;
    saved.groups = ctx.all_tokens;
}

void await(Context& ctx, Event ready) {
    if (ready.handle != nullptr) ctx.side->await(ctx, ready);
}

namespace {

// Rows as received, in wire layout, in a buffer for every row that may arrive.
ScaledTensor receive(Context& ctx, Arena& arena, const ScaledTensor& tokens, const DispatchPlan& plan) {
    const int64_t rows = plan.all_ids.dim(0) * plan.all_ids.dim(1);
    ScaledTensor received{.data = arena.tensor(tokens.data.dtype, {rows, tokens.data.cols()}, "dispatch"),
                          .layout = tokens.layout,
                          .format = tokens.format};
    if (tokens.scales)  // E8M0 bytes; fp32 with scale_format: fp32
        received.scales = arena.tensor(tokens.scales.dtype, {rows, tokens.scales.cols()}, "dispatch");
    on_wire(ctx, [&](const Launch& wire) {
        auto timed = ctx.stage("dispatch", wire);
        ctx.exchange.dispatch_rows(tokens, plan, received, ctx.scratch, wire);
    });
    return received;
}

}  // namespace

ScaledTensor dispatch_once(Context& ctx, const ScaledTensor& tokens, const FlowPlan& plan) {
    return receive(ctx, ctx.saved, tokens, plan.padded);
}

void fan_out(Context& ctx, const ScaledTensor& received, const FlowPlan& plan, const ScaledTensor& dst) {
    auto timed = ctx.stage("dispatch");
    ctx.ops.permute_pad({.src = received,
                         .row_source = plan.padded.row_source,
                         .recv_rows = plan.padded.recv_rows,
                         .num_rows = plan.padded.recv_offsets.slice(plan.padded.all_ids.dim(0), 1),
                         .groups = plan.padded.groups,
                         .dst = dst},
                        ctx.launch);
}

void dispatch(Context& ctx, const ScaledTensor& tokens, const FlowPlan& plan, PermutePadding padding,
              const ScaledTensor& dst) {
    if (padding == PermutePadding::fused) {
        on_wire(ctx, [&](const Launch& wire) {
            auto timed = ctx.stage("dispatch", wire);
            ctx.exchange.dispatch(tokens, plan.padded, dst, ctx.scratch, wire);
        });
        return;
    }
    ArenaScope scope(ctx.scratch);
    const int64_t width = tokens.data.cols();
    const ScaledTensor received = receive(ctx, ctx.scratch, tokens, plan.unpadded);
    auto timed = ctx.stage("dispatch");
    ScaledTensor permuted = ctx.scratch.fp8(tokens.data.dtype, {plan.unpadded.groups.row_capacity, width},
                                            dst.layout, "dispatch");
    permuted.format = dst.format;
    ctx.ops.permute_pad({.src = received,
                         .row_source = plan.unpadded.row_source,
                         .groups = plan.unpadded.groups,
                         .dst = permuted},
                        ctx.launch);
    ctx.ops.pad_rows(
        {.src = permuted, .src_groups = plan.unpadded.groups, .dst_groups = plan.padded.groups, .dst = dst},
        ctx.launch);
}

void combine(Context& ctx, const Exchange::Combine& args, const FlowPlan& plan, PermutePadding padding) {
    const auto sums = [&](const Exchange::Combine& rows, const DispatchPlan& of) {
        on_wire(ctx, [&](const Launch& wire) {
            auto timed = ctx.stage("combine", wire);
            ctx.exchange.combine(rows, of, ctx.scratch, wire);
        });
    };
    if (padding == PermutePadding::fused) return sums(args, plan.padded);
    ArenaScope scope(ctx.scratch);
    auto unpad = [&](const TensorView& src) {
        auto timed = ctx.stage("combine");
        const TensorView dst =
            ctx.scratch.tensor(src.dtype, {plan.unpadded.groups.row_capacity, src.cols()}, "combine");
        ctx.ops.unpad_rows(
            {.src = src, .src_groups = plan.padded.groups, .dst_groups = plan.unpadded.groups, .dst = dst},
            ctx.launch);
        return dst;
    };
    Exchange::Combine unpadded = args;
    unpadded.src = {unpad(args.src.data)};
    if (args.row_prob) unpadded.row_prob = plan.unpadded.row_prob;
    if (args.drow_prob) {
        const int64_t rows = args.drow_prob.dim(0);
        const TensorView prob = unpad(args.drow_prob.reshape({rows, 1}));
        unpadded.drow_prob = prob.reshape({prob.dim(0)});
    }
    sums(unpadded, plan.unpadded);
}

void combine_output(Context& ctx, const Flow::Forward& io, const TensorView& ye,
                    const PrecisionSpec& precision, PermutePadding padding) {
    await(ctx, io.addend_ready);
    const bool merges = precision.moe_apply_probs_in == ProbsIn::combine;  // otherwise SwiGLU has multiplied
    combine(ctx,
            {.src = {ye},
             .row_prob = merges ? io.plan.padded.row_prob : TensorView{},
             .residual = io.residual,
             .addend = io.addend,
             .y = {io.y}},
            io.plan, padding);
}

void combine_gradient(Context& ctx, const Flow::Backward& io, const TensorView& dxe,
                      const TensorView& drow_prob, PermutePadding padding) {
    await(ctx, io.dx_in_ready);
    combine(ctx,
            {.src = {dxe}, .residual = io.dx_in, .drow_prob = drow_prob, .y = {io.dx}, .dprob = io.dprob},
            io.plan, padding);
}

void swiglu(Context& ctx, const ExpertsSaved& saved, const TensorView& a) {
    auto timed = ctx.stage("swiglu");
    ctx.ops.swiglu({.h = saved.h, .prob = saved.prob, .groups = saved.groups, .form = saved.form, .a = a},
                   ctx.launch);
}

void swiglu_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da, const TensorView& dh,
                     const TensorView& drow_prob) {
    auto timed = ctx.stage("swiglu");
    ctx.ops.swiglu_backward({.da = da,
                             .h = saved.h,
                             .prob = saved.prob,
                             .groups = saved.groups,
                             .form = saved.form,
                             .dh = dh,
                             .dprob = drow_prob},
                            ctx.launch);
}

void forward_gemm(Context& ctx, const char* stage, const ScaledTensor& a, const Parameter& weight,
                  const RowGroups& groups, const TensorView& d) {
    {
        auto timed = ctx.stage(stage);
        ctx.ops.grouped_gemm({.a = a, .b = weight.for_fprop(), .groups = groups, .d = d}, ctx.launch);
    }
    if (ctx.gemms != nullptr) ctx.gemms->gemm(ctx, stage, a, d, groups);
    if (ctx.tensor_stats != nullptr && !ctx.recomputing && ctx.micro_batch == 0)
        ctx.tensor_stats->observe_weight(ctx, stage, weight);
}

void data_gradient(Context& ctx, const char* stage, const ScaledTensor& dy, const Parameter& weight,
                   const RowGroups& groups, const TensorView& dx) {
    {
        auto timed = ctx.stage(stage);
        if (weight.dgrad) {
            ctx.ops.grouped_gemm({.a = dy, .b = weight.dgrad, .groups = groups, .d = dx}, ctx.launch);
        } else {
            ctx.ops.grouped_gemm(
                {.a = dy, .b = {.data = weight.plain}, .groups = groups, .form = op::GemmForm::nn, .d = dx},
                ctx.launch);
        }
    }
    if (ctx.gemms != nullptr) ctx.gemms->gemm(ctx, stage, dy, dx, groups);
}

namespace {

// Stochastic rounding of a gradient in BF16, the same for every expert-parallel size. replica: number of this
// rank's sum among all sums of the weight's gradient.
StochasticRounding rounding_of(const Context& ctx, const Parameter& weight, int64_t replica) {
    constexpr int64_t kMoments = 2;  // uses 0 and 1 of a tensor are its moments
    const int64_t use = kMoments + replica * ctx.num_micro_batches + ctx.micro_batch;
    return {.key = rounding_key(ctx.rounding.seed, weight.stream, use),
            .first = weight.spec.expert ? weight.spec.first_expert * weight.spec.shape[1] : 0,
            .step = ctx.rounding.step ? ctx.rounding.step.as<int64_t>() : nullptr};
}

TensorView squares_of(const Context& ctx, const Parameter& weight) {
    return ctx.sums_squares ? weight.squares : TensorView{};
}

// The operands with the groups of one source rank, and with the scales of these groups.
op::WgradOperands of_source(op::WgradOperands operands, int64_t source, int64_t experts) {
    if (!operands || operands.groups.num_groups == experts) return operands;
    operands.groups = operands.groups.slice(source * experts, experts);
    for (ScaledTensor* operand : {&operands.dy, &operands.x})
        if (operand->layout == ScaleLayout::group_row)
            operand->scales = operand->scales.slice(source * experts, experts);
    return operands;
}

// One GEMM for the tokens of each source rank that has groups of its own.
void add_by_source(Context& ctx, const DelayedWgrads::Waiting& sets, const Parameter& weight) {
    const int64_t experts = weight.spec.matrices().count,
                  sources = sets.operands[0].groups.num_groups / experts;
    for (int64_t source = 0; source < sources; ++source) {
        const auto set = [&](size_t i) { return of_source(sets.operands[i], source, experts); };
        const auto [dy, x, groups] = set(0);
        op::GroupedGemmWgrad args{
            .dy = dy,
            .x = x,
            .groups = groups,
            .mode = sets.mode,
            .dw = weight.gradient_of(source),
            .second = set(1),
            .rounding = rounding_of(ctx, weight, ctx.rounding.replica * sources + source),
            .squares = squares_of(ctx, weight)};
        for (size_t i = 0; i < args.more.size(); ++i) args.more[i] = set(i + 2);
        ctx.ops.grouped_gemm_wgrad(args, ctx.launch);
    }
}

}  // namespace

void weight_gradient(Context& ctx, const char* stage, const ScaledTensor& dy, const ScaledTensor& x,
                     const RowGroups& groups, Parameter& weight) {
    if (weight.frozen) return;
    auto timed = ctx.stage(stage);
    add_by_source(ctx, {.operands = {{{dy, x, groups}}}, .count = 1, .mode = ctx.grad_mode}, weight);
}

void joined_weight_gradient(Context& ctx, const char* stage, const ScaledTensor& dy, const ScaledTensor& x,
                            const ExpertsSaved& saved, Parameter& weight) {
    if (weight.frozen) return;
    const op::WgradOperands own{dy, x, saved.groups};
    if (saved.routed && ctx.delays_wgrads()) {
        ctx.delayed->keep(weight, own, ctx.grad_mode);
        return;
    }
    auto waiting = ctx.delayed != nullptr ? ctx.delayed->take(weight) : std::nullopt;
    if (!waiting) {
        weight_gradient(ctx, stage, dy, x, saved.groups, weight);
        return;
    }
    auto timed = ctx.stage(stage);
    waiting->operands[static_cast<size_t>(waiting->count)] = own;
    add_by_source(ctx, *waiting, weight);
}

double fp8_bytes(ScaleLayout layout) {
    switch (layout) {
        case ScaleLayout::vec128: return 1 + 4.0 / static_cast<double>(kBlock);
        case ScaleLayout::mx32: return 1 + 1.0 / static_cast<double>(kMxBlock);
        case ScaleLayout::tensor:
        case ScaleLayout::row:
        case ScaleLayout::group_row: return 1;
        default: fail(ExitCode::internal, "no GEMM reads rows with scales {}", name_of(layout));
    }
}

void observe(Context& ctx, const char* name, const ScaledTensor& quantized, const RowGroups& groups,
             const TensorView& source) {
    if (ctx.tensor_stats != nullptr) ctx.tensor_stats->observe(ctx, name, quantized, groups, source);
}

void observe_swiglu(Context& ctx, const ExpertsSaved& saved, const ScaledTensor& a) {
    if (ctx.tensor_stats == nullptr) return;
    ArenaScope scope(ctx.scratch);
    const TensorView plain = rows(ctx, saved, Life::call, ctx.activation, a.data.dim(1), "tensor stats");
    ctx.ops.swiglu({.h = saved.h, .prob = saved.prob, .groups = saved.groups, .form = saved.form, .a = plain},
                   ctx.launch);
    observe(ctx, "swiglu", a, saved.groups, plain);
}

void observe_swiglu_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da,
                             const ScaledTensor& dh) {
    if (ctx.tensor_stats == nullptr) return;
    ArenaScope scope(ctx.scratch);
    const TensorView plain = rows(ctx, saved, Life::call, ctx.activation, dh.data.dim(1), "tensor stats");
    ctx.ops.swiglu_backward(
        {.da = da, .h = saved.h, .prob = saved.prob, .groups = saved.groups, .form = saved.form, .dh = plain},
        ctx.launch);
    observe(ctx, "swiglu backward", dh, saved.groups, plain);
}

void observe_transposed(Context& ctx, const char* name, const ScaledTensor& rows, const ScaledTensor& copy,
                        const ExpertsSaved& saved, const Parameter& weight) {
    if (ctx.tensor_stats == nullptr) return;
    ctx.tensor_stats->observe_transposed(ctx, weight.spec.name, name, rows, copy, saved.groups);
}

}  // namespace fp8flow::steps
