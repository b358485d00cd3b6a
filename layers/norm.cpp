// SPDX-License-Identifier: MIT
// RMSNorm with the FP8 rows of the recipe, and the history of delayed scaling.
#include "layers/norm.h"

#include "layers/tensor_stats.h"

#include <vector>

namespace fp8flow {

Norm::Norm(ParameterStore& store, Device& device, const ModelSpec& model, const PrecisionSpec& precision,
           NormOutput output, const Rule& rule, const std::string& name)
    : model_(model), precision_(precision), output_(output), rule_(rule) {
    gamma_ = &store.add({.name = name + ".weight",
                         .shape = {model.hidden_size, 0, 0},
                         .rank = 1,
                         .init = model.zero_centered_gamma ? Init::zeros : Init::ones,
                         .weight_decay = false,
                         .gradient_with_dx = true,
                         .plain_dtype = DType::f32});
    if (output_ != NormOutput::tensor_scaled) return;
    state_ = std::make_shared<Arena>(device, name + " delayed scale");
    amax_ = state_->tensor(DType::f32, {1}, "delayed scale");
    history_ = state_->tensor(DType::f32, {precision.fp8_amax_history_len}, "delayed scale");
    scale_ = state_->tensor(DType::f32, {1}, "delayed scale");
    const float one = 1.0f;  // before the first maximum is known
    device.fill(amax_.data, 0, sizeof(float));
    device.fill(history_.data, 0, static_cast<size_t>(history_.bytes()));
    device.copy_in(scale_.data, &one, sizeof one);
}

void Norm::forward(Context& ctx, const TensorView& x, Arena& arena, NormSaved& saved) const {
    saved.x = x;
    saved.rstd = ctx.saved.tensor(DType::f32, {x.rows()}, "norm");
    write(ctx, arena, saved);
    if (ctx.tensor_stats != nullptr && !ctx.recomputing && saved.out.quantized)
        ctx.tensor_stats->observe(ctx, "norm", saved.out.quantized, {}, saved.out.plain);
}

void Norm::recompute(Context& ctx, Arena& arena, NormSaved& saved) const {
    const RecomputeScope again(ctx);
    write(ctx, arena, saved);
}

void Norm::write(Context& ctx, Arena& arena, NormSaved& saved) const {
    auto timed = ctx.stage("norm");
    const int64_t tokens = saved.x.rows(), hidden = saved.x.cols();
    const float eps = static_cast<float>(model_.norm_epsilon);
    TokenRows& out = saved.out;
    out.plain = arena.tensor(ctx.activation, {tokens, hidden}, "norm");
    const auto plain_norm = [&] {
        ctx.ops.rms_norm({.x = saved.x,
                          .gamma = gamma_->plain,
                          .eps = eps,
                          .gamma_form = form(),
                          .y = out.plain,
                          .rstd = saved.rstd},
                         ctx.launch);
    };
    if (output_ == NormOutput::plain) return plain_norm();
    if (output_ == NormOutput::tensor_scaled) {
        out.quantized = {.data = arena.tensor(DType::e4m3, {tokens, hidden}, "norm"),
                         .scales = scale_,
                         .layout = ScaleLayout::tensor};
        out.transposed = {.data = arena.tensor(DType::e4m3, {hidden, tokens}, "norm"),
                          .scales = scale_,
                          .layout = ScaleLayout::tensor};
    } else {
        if (output_ == NormOutput::wire_rows)
            out.quantized = wire_rows(arena, rule_, tokens, hidden, "norm");
        else
            out.quantized = arena.fp8(rule_.dtype, {tokens, hidden}, ScaleLayout::vec128, "norm");
        out.quantized.format = rule_.scales;
        if (!precision_.moe_norm_quantize_fusion) {
            plain_norm();
            auto cast = ctx.stage("cast");
            ctx.ops.quantize_rows({.src = out.plain, .scale_format = rule_.scales, .dst = out.quantized},
                                  ctx.launch);
            return clip(ctx, rule_, out.quantized, {});
        }
    }
    ctx.ops.rms_norm_quantize({.x = saved.x,
                               .gamma = gamma_->plain,
                               .eps = eps,
                               .gamma_form = form(),
                               .scale_format = rule_.scales,
                               .y = out.plain,
                               .rows = out.quantized,
                               .transposed = out.transposed,
                               .amax = ctx.recomputing ? TensorView{} : amax_,
                               .rstd = saved.rstd},
                              ctx.launch);
    clip(ctx, rule_, out.quantized, {});
}

void Norm::backward(Context& ctx, const TensorView& dy, const TensorView& dresidual, const NormSaved& saved,
                    const TensorView& dx) const {
    auto timed = ctx.stage("norm");
    ctx.ops.rms_norm_backward({.dy = dy,
                               .x = saved.x,
                               .gamma = gamma_->plain,
                               .rstd = saved.rstd,
                               .dresidual = dresidual,
                               .gamma_form = form(),
                               .dgamma_mode = ctx.grad_mode,
                               .dx = dx,
                               .dgamma = gamma_->main_grad},
                              ctx.launch);
}

void Norm::begin_step(Context& ctx) const {
    if (output_ == NormOutput::tensor_scaled) ctx.ops.zero({.y = amax_}, ctx.launch);
}

std::vector<NamedTensor> Norm::state() const {
    if (output_ != NormOutput::tensor_scaled) return {};
    return {{gamma_->spec.name + ".amax_history", history_}, {gamma_->spec.name + ".scale", scale_}};
}

void Norm::update_state(Context& ctx, const TensorView& step) const {
    if (output_ != NormOutput::tensor_scaled) return;
    ctx.exchange.all_reduce(Reduce::max, Ranks::world, amax_, ctx.launch);
    ctx.ops.delayed_scale_update({.position = step,
                                  .scale_format = rule_.scales,
                                  .status = ctx.step_status,
                                  .amax = amax_,
                                  .history = history_,
                                  .scale = scale_},
                                 ctx.launch);
}

}  // namespace fp8flow
