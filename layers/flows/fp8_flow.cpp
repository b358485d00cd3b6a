// SPDX-License-Identifier: MIT
// Recipe fp8_flow: the casting-free FP8 flow (FP8-Flow-MoE). Activations are FP8 from the norm's output to
// the experts, and gradients from the dispatch of dY. fc1's output, fc2's output and the sums of combine are
// BF16.
//
//  1. Quantise before dispatch: FP8 rows and E8M0 scale bytes on the wire.
//  2. Scaling-aware transpose: weight gradients read a transposed copy, made by exponent shifts without
//     dequantising.
//  3. Fused permute + pad: part of dispatch.
//  4. Fused activation + quantise: SwiGLU x prob writes FP8, forward and backward.
//  5. Recompute moe_expert saves the received FP8 rows only: sorted by expert, once per (token, rank), or not
//     at all (saved_rows).
//
// The layer has one explicit cast (dY). The norm quantises its own output. Each optimisation can be switched
// off (PrecisionSpec): fp8_flow_ablations.cpp.
#include "layers/flows/fp8_flow.h"

namespace fp8flow {

using namespace steps;

// ---- routed experts: dispatch, fc1, swiglu, fc2, combine; backward: the same list in reverse

void Fp8Flow::forward(Context& ctx, const Forward& io, ExpertsSaved& saved) const {
    ArenaScope scope(ctx.scratch);
    begin_routed(saved, io.plan, precision_);
    const int64_t hidden = io.x.plain.cols();
    const bool drop_x = recompute_.rows != SavedRows::sorted;
    saved.x = fp8(ctx, Quantized::x, saved, keep_unless(drop_x), hidden, "dispatch");   // [M, H] e4m3
    const TensorView ye = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc2");  // [M, H] bf16

    if (recompute_.rows == SavedRows::received) {
        saved.received = dispatch_once(ctx, io.x.quantized, io.plan);  // [G*S, H] e4m3
        fan_out(ctx, saved.received, io.plan, saved.x);
    } else {
        receive(ctx, Received::x, io.x, io.plan, saved, saved.x);
    }
    experts_forward(ctx, io.weights, saved, ye);
    if (drop_x) saved.x = {};
    combine_output(ctx, io, ye, precision_, padding_);
}

void Fp8Flow::backward(Context& ctx, const Backward& io, ExpertsSaved& saved) const {
    begin_backward(saved, io.plan);
    const int64_t hidden = io.dx.cols();
    const bool again = !saved.x;
    if (again) saved.x = fp8(ctx, Quantized::x, saved, Life::call, hidden, "dispatch");
    const ScaledTensor dh = gradient_of_h(ctx, io.weights, saved);              // [M, 2F]
    const TensorView drow_prob = row_vector(ctx, saved, Life::call, "swiglu");  // [M] f32
    {
        const HalfScope fc2_alone(ctx, saved);  // fc1's half reads dh, so dh is older than this scope
        const ScaledTensor dye = fp8(ctx, Quantized::dy, saved, Life::call, hidden, "dispatch");  // [M, H]
        receive(ctx, Received::dy, io.dy, io.plan, saved, dye);
        if (again) receive_again(ctx, io, saved);
        fc2_backward(ctx, io.weights, saved, dye, dh, drow_prob);
    }
    const TensorView dxe = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc1");  // [M, H] bf16
    fc1_backward(ctx, io.weights, saved, dh, dxe);
    combine_gradient(ctx, io, dxe, drow_prob, padding_);
}

// ---- x [M, H] e4m3 -> h [M, 2F] bf16 -> a [M, F] e4m3 -> ye [M, H] bf16
void Fp8Flow::experts_forward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved,
                              const TensorView& ye) const {
    const bool drop_h = drops_h(), drop_a = drops_a(saved.routed);
    saved.h = rows(ctx, saved, keep_unless(drop_h), ctx.activation, w.w1->spec.shape[1], "fc1");
    saved.a = fp8(ctx, Quantized::a, saved, keep_unless(drop_a), w.w2->spec.shape[2], "swiglu");

    if (drop_h && fuses_fc1(ctx)) {
        fc1_swiglu(ctx, *w.w1, saved);
    } else {
        forward_gemm(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
        swiglu(ctx, saved);
    }
    forward_gemm(ctx, "fc2", saved.a, *w.w2, saved.groups, ye);
    if (drop_h) saved.h = {};
    if (drop_a) saved.a = {};
}

// ---- dye [M, H] FP8 -> da [M, F] bf16 -> dh [M, 2F] FP8
void Fp8Flow::fc2_backward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved, const ScaledTensor& dye,
                           const ScaledTensor& dh, const TensorView& drow_prob) const {
    rebuild(ctx, w, saved);
    aside(ctx, saved, [&](Context& side_ctx) {
        wgrad(side_ctx, {"fc2 wgrad", "dye^T", "a^T"}, dye, saved.a, saved, *w.w2);
    });
    const TensorView da =
        rows(ctx, saved, Life::call, ctx.activation, w.w2->spec.shape[2], "fc2");  // [M, F] bf16
    data_gradient(ctx, "fc2 dgrad", dye, *w.w2, saved.groups, da);
    swiglu_backward(ctx, saved, da, dh, drow_prob);
}

// ---- dh [M, 2F] FP8 -> dxe [M, H] bf16
void Fp8Flow::fc1_backward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved, const ScaledTensor& dh,
                           const TensorView& dxe) const {
    aside(ctx, saved, [&](Context& side_ctx) {
        wgrad(side_ctx, {"fc1 wgrad", "dh^T", "xe^T"}, dh, saved.x, saved, *w.w1);
    });
    data_gradient(ctx, "fc1 dgrad", dh, *w.w1, saved.groups, dxe);
}

ScaledTensor Fp8Flow::gradient_of_h(Context& ctx, const ExpertWeights& w, const ExpertsSaved& saved) const {
    return fp8(ctx, Quantized::dh, saved, Life::call, 2 * w.w2->spec.shape[2], "swiglu");
}

// Rebuilds the expert-sorted rows saved.x [M, H], which were kept once per (token, rank) or not at all.
void Fp8Flow::receive_again(Context& ctx, const Backward& io, const ExpertsSaved& saved) const {
    const RecomputeScope again(ctx);
    if (saved.received)
        fan_out(ctx, saved.received, io.plan, saved.x);
    else
        receive(ctx, Received::x, io.x, io.plan, saved, saved.x);
}

// Rebuilds from the received rows what the forward did not keep (recompute moe_act, moe_expert; merging
// weights).
void Fp8Flow::rebuild(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved) const {
    const int64_t ffn = w.w2->spec.shape[2];
    const RecomputeScope again(ctx);
    if (!saved.h) {  // moe_expert
        saved.h = rows(ctx, saved, Life::call, ctx.activation, 2 * ffn, "fc1");
        forward_gemm(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
    }
    if (!saved.a) {  // moe_act, moe_expert
        saved.a = fp8(ctx, Quantized::a, saved, Life::call, ffn, "swiglu");
        swiglu(ctx, saved);
    }
}

// ---- shared expert and dense FFN: the same experts on this rank's own rows

void Fp8Flow::dense_forward(Context& ctx, const TokenRows& x, const ExpertWeights& weights,
                            ExpertsSaved& saved, const TensorView& y) const {
    ArenaScope scope(ctx.scratch);
    begin_dense(ctx, saved);
    saved.x = local_rows(ctx, Received::x, x, saved);
    experts_forward(ctx, weights, saved, y);
    saved.x = {};
}

void Fp8Flow::dense_backward(Context& ctx, const TokenRows& x, const TokenRows& dy,
                             const ExpertWeights& weights, ExpertsSaved& saved, const TensorView& dx) const {
    ArenaScope scope(ctx.scratch);
    {
        const RecomputeScope again(ctx);
        saved.x = local_rows(ctx, Received::x, x, saved);
    }
    const ScaledTensor dh = gradient_of_h(ctx, weights, saved);
    {
        const HalfScope fc2_alone(ctx, saved);
        const ScaledTensor dye = local_rows(ctx, Received::dy, dy, saved);
        fc2_backward(ctx, weights, saved, dye, dh, saved.dprob);
    }
    fc1_backward(ctx, weights, saved, dh, dx);
}

// ---- a linear layer on this rank's own rows: y = x W^T; dW = dy^T x, dx = dy W

void Fp8Flow::linear_forward(Context& ctx, const Linear& layer, const TokenRows& x, ExpertsSaved& saved,
                             const TensorView& y) const {
    ArenaScope scope(ctx.scratch);
    begin_dense(ctx, saved);
    const ScaledTensor rows = operand(ctx, x, {Quantized::x, layer.name.input, Life::backward}, saved);
    if (!x.quantized) saved.x = rows;
    forward_gemm(ctx, layer.name.stage, rows, layer.weight, saved.groups, y);
}

void Fp8Flow::linear_backward(Context& ctx, const Linear& layer, const TokenRows& x, const TokenRows& dy,
                              ExpertsSaved& saved, const TensorView& dx) const {
    ArenaScope scope(ctx.scratch);
    begin_dense(ctx, saved);
    if (!saved.x) {
        const RecomputeScope again(ctx);
        saved.x = operand(ctx, x, {Quantized::x, layer.name.input}, saved);
    }
    const ScaledTensor rows = operand(ctx, dy, {Quantized::dy, layer.name.gradient}, saved);
    wgrad(ctx, {layer.name.stage, "dy^T", "x^T"}, rows, saved.x, saved, layer.weight);
    data_gradient(ctx, layer.name.stage, rows, layer.weight, saved.groups, dx);
}

// --tensor-stats compares with plain rows, which are not written if FP8 rows are. Only a cast clips.
ScaledTensor Fp8Flow::gradient_rows(Context& ctx, int64_t width) const {
    const Rule rule = rule_of(Quantized::dy);
    if (ctx.tensor_stats != nullptr || rule.clip < 1) return {};
    ScaledTensor rows = ctx.scratch.fp8(rule.dtype, {ctx.tokens, width}, ScaleLayout::vec128, "attention");
    rows.format = rule.scales;
    return rows;
}

// ---- the steps

// Fused operations and the wire have scales per 128 values; the transpose shifts exponents.
void Fp8Flow::check_rules() const {
    Flow::check_rules();
    // The configuration has rejected keys that contradict each other.
    const bool shifts = precision_.moe_scaling_aware_transpose && precision_.fp8_wgrad &&
                        precision_.scale_format == ScaleFormat::pow2;
    for (const Quantized tensor :
         {Quantized::x, Quantized::a, Quantized::dy, Quantized::dh, Quantized::weights}) {
        const Rule rule = rule_of(tensor);
        if (rule.rows != ScaleLayout::none || rule.columns != ScaleLayout::none)
            refuse_rule(tensor, "scale layouts", "none: fp8_flow has one scale per 128 values of a row");
        if (shifts && tensor != Quantized::weights && rule.scales == ScaleFormat::fp32)
            refuse_rule(tensor, "scales fp32",
                        "pow2, or precision.moe_scaling_aware_transpose: false (it shifts exponents)");
    }
}

// x, a and h (BF16). A local x is the norm's output.
double Fp8Flow::saved_bytes_routed(int64_t hidden, int64_t width) const {
    const int64_t sorted = recompute_.rows == SavedRows::sorted ? hidden : 0;
    return fp8_bytes(ScaleLayout::vec128) * static_cast<double>(sorted + (drops_a() ? 0 : width)) +
           kPlainBytes * static_cast<double>(drops_h() ? 0 : 2 * width);
}
// FP8 values with the wire's scales.
double Fp8Flow::saved_bytes_received(int64_t hidden) const {
    if (recompute_.rows != SavedRows::received) return 0;
    const int64_t scale = rule_of(Quantized::x).scales == ScaleFormat::pow2 ? 1 : 4;
    return static_cast<double>(hidden + scale * ceil_div(hidden, kBlock));
}
double Fp8Flow::saved_bytes_local(int64_t, int64_t width) const {
    return fp8_bytes(ScaleLayout::vec128) * static_cast<double>(width) +
           kPlainBytes * static_cast<double>(2 * width);
}
double Fp8Flow::saved_bytes_linear(int64_t width, Input input) const {
    const bool from_norm = input == Input::normed && norm_output() != NormOutput::plain;
    return from_norm ? 0 : fp8_bytes(ScaleLayout::vec128) * static_cast<double>(width);
}

// The one explicit cast: dY, quantised once for the wire, fc2's data gradient and its weight gradient.
void Fp8Flow::prepare_gradient(Context& ctx, TokenRows& dy) const {
    auto timed = ctx.stage("cast");
    const Rule rule = rule_of(Quantized::dy);
    dy.quantized = wire_rows(ctx.scratch, rule, dy.plain.rows(), dy.plain.cols(), "cast");
    ctx.ops.quantize_rows({.src = dy.plain, .scale_format = rule.scales, .dst = dy.quantized}, ctx.launch);
    clip(ctx, rule, dy.quantized, {});
    observe(ctx, "dY", dy.quantized, {}, dy.plain);
}

void Fp8Flow::receive(Context& ctx, Received, const TokenRows& tokens, const FlowPlan& plan,
                      const ExpertsSaved&, const ScaledTensor& dst) const {
    dispatch(ctx, tokens.quantized, plan, padding_, dst);
}

ScaledTensor Fp8Flow::fp8(Context& ctx, Quantized what, const ExpertsSaved& saved, Life life, int64_t width,
                          const char* kind) const {
    const Rule rule = rule_of(what);
    return fp8_rows(ctx, saved, life, rule.dtype, width, ScaleLayout::vec128, kind, rule.scales);
}

void Fp8Flow::cast(Context& ctx, Quantized what, const TensorView& plain, const ExpertsSaved& saved,
                   const ScaledTensor& dst) const {
    auto timed = ctx.stage("cast");
    const Rule rule = rule_of(what);
    ctx.ops.quantize_rows({.src = plain, .groups = saved.groups, .scale_format = rule.scales, .dst = dst},
                          ctx.launch);
    clip(ctx, rule, dst, saved.groups);
}

Fp8Flow::CastTo Fp8Flow::cast_of(Quantized what) { return {what, what == Quantized::x ? "dispatch" : "dY"}; }

ScaledTensor Fp8Flow::local_rows(Context& ctx, Received what, const TokenRows& tokens,
                                 const ExpertsSaved& saved) const {
    return operand(ctx, tokens, cast_of(what), saved);
}

ScaledTensor Fp8Flow::operand(Context& ctx, const TokenRows& tokens, const CastTo& to,
                              const ExpertsSaved& saved) const {
    if (!tokens.quantized) {
        const ScaledTensor dst = fp8(ctx, to.what, saved, to.life, tokens.plain.cols(), "cast");
        cast(ctx, to.what, tokens.plain, saved, dst);
        if (!ctx.recomputing) observe(ctx, to.name, dst, saved.groups, tokens.plain);
        return dst;
    }
    // the token's own FP8 rows, with their scales in the GEMM's order
    if (tokens.quantized.layout == ScaleLayout::vec128) return tokens.quantized;
    const int64_t num_tokens = tokens.plain.rows(), width = tokens.plain.cols();
    const TensorView scales = ctx.scratch.tensor(DType::f32, {width / kBlock, num_tokens}, "dispatch");
    ctx.ops.relayout_scales({.wire = tokens.quantized.scales, .vec128 = scales}, ctx.launch);
    return {.data = tokens.quantized.data,
            .scales = scales,
            .layout = ScaleLayout::vec128,
            .format = tokens.quantized.format};
}

bool Fp8Flow::fuses_fc1(const Context& ctx) const {
    return ctx.gemms == nullptr && ctx.tensor_stats == nullptr;
}

void Fp8Flow::fc1_swiglu(Context& ctx, const Parameter& w1, ExpertsSaved& saved) const {
    auto timed = ctx.stage("fc1");
    const Rule rule = rule_of(Quantized::a);
    ctx.ops.grouped_gemm_swiglu_quantize({.a = saved.x,
                                          .b = w1.for_fprop(),
                                          .groups = saved.groups,
                                          .prob = saved.prob,
                                          .form = saved.form,
                                          .scale_format = rule.scales,
                                          .save_h = op::SaveH::no,
                                          .h = saved.h,
                                          .act = saved.a},
                                         ctx.launch);
    clip(ctx, rule, saved.a, saved.groups);
}

void Fp8Flow::swiglu(Context& ctx, ExpertsSaved& saved) const {
    {
        auto timed = ctx.stage("swiglu");
        const Rule rule = rule_of(Quantized::a);
        ctx.ops.swiglu_quantize({.h = saved.h,
                                 .prob = saved.prob,
                                 .groups = saved.groups,
                                 .form = saved.form,
                                 .scale_format = rule.scales,
                                 .a = saved.a},
                                ctx.launch);
        clip(ctx, rule, saved.a, saved.groups);
    }
    if (!ctx.recomputing) observe_swiglu(ctx, saved, saved.a);
}

void Fp8Flow::swiglu_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da,
                              const ScaledTensor& dh, const TensorView& drow_prob) const {
    {
        auto timed = ctx.stage("swiglu");
        const Rule rule = rule_of(Quantized::dh);
        ctx.ops.swiglu_backward_quantize({.da = da,
                                          .h = saved.h,
                                          .prob = saved.prob,
                                          .groups = saved.groups,
                                          .form = saved.form,
                                          .scale_format = rule.scales,
                                          .dh = dh,
                                          .dprob = drow_prob},
                                         ctx.launch);
        clip(ctx, rule, dh, saved.groups);
    }
    observe_swiglu_backward(ctx, saved, da, dh);
}

void Fp8Flow::wgrad(Context& ctx, const WgradNames& names, const ScaledTensor& dy, const ScaledTensor& x,
                    const ExpertsSaved& saved, Parameter& weight) const {
    if (weight.frozen) return;  // nobody reads the transposes
    ArenaScope scope(ctx.scratch);
    const ScaledTensor dy_t = transposed(ctx, dy, saved), x_t = transposed(ctx, x, saved);
    observe_transposed(ctx, names.dy, dy, dy_t, saved, weight);
    observe_transposed(ctx, names.x, x, x_t, saved, weight);
    joined_weight_gradient(ctx, names.stage, dy_t, x_t, saved, weight);
}

// Scaling-aware: one scale per 128x128 tile.
ScaledTensor Fp8Flow::transposed(Context& ctx, const ScaledTensor& src, const ExpertsSaved& saved) const {
    auto timed = ctx.stage("transpose");
    const ScaledTensor dst = fp8_columns(ctx, saved, wgrad_life(ctx, saved, Life::call), src.data.dtype,
                                         src.data.cols(), ScaleLayout::tile128, "transpose");
    ctx.ops.transpose_fp8({.src = src, .groups = saved.groups, .dst = dst}, ctx.launch);
    return dst;
}

std::unique_ptr<Flow> make_fp8_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    if (is_ablation(precision)) return make_fp8_flow_ablation(precision, recompute);
    return std::make_unique<Fp8Flow>(precision, recompute);
}

}  // namespace fp8flow
