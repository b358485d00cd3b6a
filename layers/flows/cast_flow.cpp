// SPDX-License-Identifier: MIT
// Forward and backward of the recipes that cast around every GEMM, and of bf16.
#include "layers/flows/cast_flow.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fp8flow {

using namespace steps;

namespace {

constexpr std::array kCast = {Quantized::x, Quantized::a, Quantized::dy, Quantized::dh};

bool has(const Rule& rule, ScaleLayout layout) { return rule.rows == layout || rule.columns == layout; }

}  // namespace

Rule CastFlow::full_rule(Quantized tensor) const {
    Rule rule = rule_of(tensor);
    if (rule.rows == ScaleLayout::none) rule.rows = row_layout();
    if (rule.columns == ScaleLayout::none) rule.columns = column_layout();
    return rule;
}

void CastFlow::check_rules() const {
    Flow::check_rules();
    const Rule weights = rule_of(Quantized::weights);
    if (weights.rows != ScaleLayout::none || weights.columns != ScaleLayout::none)
        refuse_rule(Quantized::weights, "scale layouts", "none: that of weights is in weight_format");
    for (const Quantized tensor : kCast) {
        const Rule rule = full_rule(tensor);
        if (rule.clip < 1) refuse_rule(tensor, fmt::format("clip {}", rule.clip), "1: only fp8_flow clips");
        if (has(rule, ScaleLayout::tensor) && rule.rows != rule.columns)
            refuse_rule(tensor, "scales tensor in one direction", "tensor in both, or in none");
        if (has(rule, ScaleLayout::mx32) && rule.scales == ScaleFormat::fp32 &&
            precision_.scale_format == ScaleFormat::pow2)
            refuse_rule(tensor, "scales fp32 with mx32", "pow2");
        if (tensor == Quantized::x && norm_casts() && rule.dtype != DType::e4m3)
            refuse_rule(tensor, name_of(rule.dtype), "e4m3: its delayed scale is of that dtype");
    }
}

// Tiles of 128 rows; blocks of 32 along them; FP8 leading dimensions of a multiple of 16 bytes.
std::vector<int64_t> CastFlow::row_alignments() const {
    const auto any = [&](ScaleLayout layout) {
        return std::ranges::any_of(kCast, [&](Quantized tensor) { return has(full_rule(tensor), layout); });
    };
    if (any(ScaleLayout::vec128)) return {128};
    return any(ScaleLayout::mx32) ? std::vector<int64_t>{32, 128} : std::vector<int64_t>{16, 32, 128};
}
double CastFlow::operand_bytes() const {
    return std::max(fp8_bytes(row_layout()), fp8_bytes(column_layout()));
}

double CastFlow::kept_bytes() const {
    return precision_.fp8_wgrad ? fp8_bytes(column_layout()) : kPlainBytes;
}
// The columns of x, or plain x where it is quantised again; h bf16; the columns of a, or plain.
double CastFlow::saved_bytes_routed(int64_t hidden, int64_t width) const {
    return (drops_h() ? kPlainBytes : kept_bytes()) * static_cast<double>(hidden) +
           kPlainBytes * static_cast<double>(drops_h() ? 0 : 2 * width) +
           kept_bytes() * static_cast<double>(drops_a() ? 0 : width);
}
double CastFlow::saved_bytes_local(int64_t hidden, int64_t width) const {
    const bool own_columns = precision_.fp8_wgrad && !norm_casts();  // otherwise x is the norm's output
    return kPlainBytes * static_cast<double>(2 * width) +
           kept_bytes() * static_cast<double>(width + (own_columns ? hidden : 0));
}
double CastFlow::saved_bytes_linear(int64_t width, Input input) const {
    const bool own_columns = precision_.fp8_wgrad && !(input == Input::normed && norm_casts());
    return own_columns ? kept_bytes() * static_cast<double>(width) : 0;
}

void CastFlow::forward(Context& ctx, const Forward& io, ExpertsSaved& saved) const {
    ArenaScope scope(ctx.scratch);
    begin_routed(saved, io.plan, precision_);
    const int64_t hidden = io.x.plain.cols();
    const bool keep_plain = recompute_.experts || !precision_.fp8_wgrad;
    const TensorView xe =
        rows(ctx, saved, keep_unless(!keep_plain), ctx.activation, hidden, "dispatch");  // [M, H] bf16
    const TensorView ye = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc2");   // [M, H] bf16

    dispatch(ctx, {.data = io.x.plain}, io.plan, PermutePadding::fused, {.data = xe});
    if (keep_plain) saved.plain = xe;
    experts_forward(ctx, xe, io.weights, saved, ye);
    combine_output(ctx, io, ye, precision_);
}

void CastFlow::backward(Context& ctx, const Backward& io, ExpertsSaved& saved) const {
    begin_backward(saved, io.plan);
    const int64_t hidden = io.dx.cols();
    const TensorView dye = rows(ctx, saved, Life::call, ctx.activation, hidden, "dispatch");  // [M, H] bf16
    const TensorView dxe = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc1");       // [M, H] bf16
    const TensorView drow_prob = row_vector(ctx, saved, Life::call, "swiglu");                // [M] f32

    dispatch(ctx, {.data = io.dy.plain}, io.plan, PermutePadding::fused, {.data = dye});
    experts_backward(ctx, dye, io.weights, saved, drow_prob, dxe);
    combine_gradient(ctx, io, dxe, drow_prob);
}

void CastFlow::dense_forward(Context& ctx, const TokenRows& x, const ExpertWeights& weights,
                             ExpertsSaved& saved, const TensorView& y) const {
    ArenaScope scope(ctx.scratch);
    begin_dense(ctx, saved);
    saved.x = x.quantized;  // fp8_tensorwise: the norm delivers both copies, no cast
    saved.x_t = x.transposed;
    experts_forward(ctx, x.plain, weights, saved, y);
}

void CastFlow::dense_backward(Context& ctx, const TokenRows& x, const TokenRows& dy,
                              const ExpertWeights& weights, ExpertsSaved& saved, const TensorView& dx) const {
    ArenaScope scope(ctx.scratch);
    saved.plain = x.plain;
    take_columns(x, saved);
    experts_backward(ctx, dy.plain, weights, saved, saved.dprob, dx);
}

// ---- a linear layer on this rank's own rows

void CastFlow::linear_forward(Context& ctx, const Linear& layer, const TokenRows& x, ExpertsSaved& saved,
                              const TensorView& y) const {
    ArenaScope scope(ctx.scratch);
    begin_dense(ctx, saved);
    saved.x = x.quantized;
    if (!saved.x) cast_input(ctx, layer.name.input, x.plain, saved, Life::backward);
    forward_gemm(ctx, layer.name.stage, saved.x, layer.weight, saved.groups, y);
    saved.x = {};
}

void CastFlow::linear_backward(Context& ctx, const Linear& layer, const TokenRows& x, const TokenRows& dy,
                               ExpertsSaved& saved, const TensorView& dx) const {
    ArenaScope scope(ctx.scratch);
    begin_dense(ctx, saved);
    take_columns(x, saved);
    if (!saved.x_t) {  // core_attn
        const RecomputeScope again(ctx);
        cast_input(ctx, layer.name.input, x.plain, saved, Life::call);
    }
    const Operands d = cast(ctx, Quantized::dy, layer.name.gradient, dy.plain, saved, Life::call);
    weight_gradient(ctx, layer.name.stage, d.columns, saved.x_t, saved.groups, layer.weight);
    data_gradient(ctx, layer.name.stage, d.rows, layer.weight, saved.groups, dx);
}

// ---- forward: x [M, H] bf16, cast -> h [M, 2F] bf16 -> a [M, F] bf16, cast -> ye [M, H] bf16
void CastFlow::experts_forward(Context& ctx, const TensorView& x, const ExpertWeights& w, ExpertsSaved& saved,
                               const TensorView& ye) const {
    const bool drop_h = drops_h(), drop_a = drops_a(saved.routed);
    saved.h = rows(ctx, saved, keep_unless(drop_h), ctx.activation, w.w1->spec.shape[1], "fc1");

    if (!saved.x)
        cast_input(ctx, "fc1 input", x, saved, drop_h ? std::nullopt : std::optional(Life::backward));
    forward_gemm(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
    saved.x = {};  // the row copy served fc1
    activation(ctx, w, saved, drop_a ? std::nullopt : std::optional(Life::backward));
    forward_gemm(ctx, "fc2", saved.a, *w.w2, saved.groups, ye);
    if (drop_h) saved.h = {};
    saved.a = {};  // the row copy served fc2
}

void CastFlow::cast_input(Context& ctx, const char* name, const TensorView& x, ExpertsSaved& saved,
                          std::optional<Life> columns_life) const {
    const Operands to = cast(ctx, Quantized::x, name, x, saved, columns_life);
    saved.x = to.rows;
    saved.x_t = to.columns;
}

// h -> a: the row copy for fc2, and what the weight gradient of fc2 will read (absent life: rebuilt in the
// backward).
void CastFlow::activation(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved,
                          std::optional<Life> columns_life) const {
    const Life act_life = precision_.fp8_wgrad ? Life::call : columns_life.value_or(Life::call);
    const TensorView act = rows(ctx, saved, act_life, ctx.activation, w.w2->spec.shape[2], "swiglu");
    swiglu(ctx, saved, act);
    const Operands to = cast(ctx, Quantized::a, "swiglu", act, saved, columns_life);
    saved.a = to.rows;
    saved.a_t = to.columns;
}

// ---- backward: the same steps in reverse
void CastFlow::experts_backward(Context& ctx, const TensorView& dye, const ExpertWeights& w,
                                ExpertsSaved& saved, const TensorView& drow_prob,
                                const TensorView& dxe) const {
    const int64_t ffn = w.w2->spec.shape[2];
    if (!saved.h) {  // moe_expert: cast and fc1 again, from the received rows
        const RecomputeScope again(ctx);
        saved.h = rows(ctx, saved, Life::call, ctx.activation, 2 * ffn, "fc1");
        cast_input(ctx, "fc1 input", saved.plain, saved, Life::call);
        forward_gemm(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
        saved.x = {};
    }
    if (!saved.a_t) {  // moe_act, moe_expert
        const RecomputeScope again(ctx);
        activation(ctx, w, saved, Life::call);
    }
    const TensorView da = rows(ctx, saved, Life::call, ctx.activation, ffn, "fc2");         // [M, F] bf16
    const TensorView dh = rows(ctx, saved, Life::call, ctx.activation, 2 * ffn, "swiglu");  // [M, 2F] bf16
    const Operands dy = cast(ctx, Quantized::dy, "dY", dye, saved, Life::call);
    wgrad(ctx, "fc2 wgrad", dy.columns, saved.a_t, saved, *w.w2);
    data_gradient(ctx, "fc2 dgrad", dy.rows, *w.w2, saved.groups, da);
    swiglu_backward(ctx, saved, da, dh, drow_prob);
    const Operands dh_operands = cast(ctx, Quantized::dh, "swiglu backward", dh, saved, Life::call);
    wgrad(ctx, "fc1 wgrad", dh_operands.columns, saved.x_t, saved, *w.w1);
    data_gradient(ctx, "fc1 dgrad", dh_operands.rows, *w.w1, saved.groups, dxe);
}

// BF16 operands are not kept for a later micro-batch.
void CastFlow::wgrad(Context& ctx, const char* stage, const ScaledTensor& dy, const ScaledTensor& x,
                     const ExpertsSaved& saved, Parameter& weight) const {
    aside(ctx, saved, [&](Context& side_ctx) {
        if (precision_.fp8_wgrad)
            joined_weight_gradient(side_ctx, stage, dy, x, saved, weight);
        else
            weight_gradient(side_ctx, stage, dy, x, saved.groups, weight);
    });
}

// Buffers of x may have been made again since the forward.
void CastFlow::take_columns(const TokenRows& x, ExpertsSaved& saved) const {
    if (!precision_.fp8_wgrad)
        saved.x_t = {.data = x.plain};
    else if (x.transposed)
        saved.x_t = x.transposed;
}

CastFlow::Operands CastFlow::cast(Context& ctx, Quantized what, const char* name, const TensorView& plain,
                                  const ExpertsSaved& saved, std::optional<Life> columns_life) const {
    const Rule rule = full_rule(what);
    const int64_t width = plain.cols();
    const char* const kind = what == Quantized::x ? "fc1" : what == Quantized::a ? "swiglu" : "cast";
    Operands out;
    out.rows = fp8_rows(ctx, saved, Life::call, rule.dtype, width, rule.rows, kind, rule.scales);
    if (columns_life && precision_.fp8_wgrad)
        out.columns = fp8_columns(ctx, saved, wgrad_life(ctx, saved, *columns_life), rule.dtype, width,
                                  rule.columns, kind);
    {
        auto timed = ctx.stage("cast");
        quantize(ctx, plain, saved.groups, out.rows, out.columns);
    }
    if (!ctx.recomputing) observe(ctx, name, out.rows, saved.groups, plain);
    if (columns_life && !precision_.fp8_wgrad) out.columns = {.data = plain};
    return out;
}

void CastFlow::quantize(Context& ctx, const TensorView& plain, const RowGroups& groups,
                        const ScaledTensor& rows, const ScaledTensor& columns) const {
    if (rows.layout == ScaleLayout::tensor) {
        ctx.ops.quantize_tensor({.src = plain,
                                 .groups = groups,
                                 .scale_format = rows.format,
                                 .rows = rows,
                                 .transposed = columns},
                                ctx.launch);
    } else if (columns) {
        ctx.ops.quantize_dual({.src = plain,
                               .groups = groups,
                               .scale_format = rows.format,
                               .mx_rounding = precision_.mx_rounding,
                               .rows = rows,
                               .columns = columns},
                              ctx.launch);
    } else {
        ctx.ops.quantize_rows({.src = plain,
                               .groups = groups,
                               .scale_format = rows.format,
                               .mx_rounding = precision_.mx_rounding,
                               .dst = rows},
                              ctx.launch);
    }
}

}  // namespace fp8flow
