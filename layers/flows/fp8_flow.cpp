// SPDX-License-Identifier: MIT
// Recipe fp8_flow: the casting-free FP8 flow (FP8-Flow-MoE). Activations are FP8 from the norm's output to
// the experts, and gradients from the dispatch of dY; BF16 islands are fc1's output, fc2's output and the
// sums of combine.
//
//   1 quantise before dispatch       FP8 rows and E8M0 scale bytes on the wire
//   2 scaling-aware transpose        weight gradients read a transposed copy made by exponent arithmetic,
//   never by dequantising 3 fused permute + pad            part of dispatch 4 fused activation + quantise
//   SwiGLU x prob writes FP8, forward and backward 5 moe_expert recompute           only the received FP8
//   rows are saved
//
// Explicit casts per layer, forward + backward: 1 (dY), the norm's output being quantised inside the norm.
// Each optimisation can be switched off (PrecisionSpec); the `off` branches below are the ablation.
#include "layers/flows/steps.h"

namespace fp8flow {

using namespace steps;

namespace {

class Fp8Flow final : public Flow {
public:
    Fp8Flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) : Flow(precision, recompute) {
        padding_ = precision.moe_permute_padding_for_fp8 ? PermutePadding::fused : PermutePadding::unfused;
    }

    WeightFormat weight_format() const override {
        return {.plain = false, .fp8_layout = ScaleLayout::block128, .scale_format = precision_.scale_format};
    }
    NormOutput norm_output() const override {
        return precision_.moe_quantize_before_dispatch ? NormOutput::wire_rows : NormOutput::plain;
    }

    // The one explicit cast: dY, quantised once for the wire, fc2's data gradient and its weight gradient.
    void prepare_gradient(Context& ctx, TokenRows& dy) const override {
        if (!precision_.moe_quantize_before_dispatch) return;
        auto timed = ctx.stage("cast");
        dy.quantized = wire_rows(ctx.scratch, gradient_code(precision_), dy.plain.rows(), dy.plain.cols(),
                                 precision_.scale_format, "cast");
        ctx.ops.quantize_rows({.src = dy.plain, .scale_format = precision_.scale_format, .dst = dy.quantized},
                              ctx.launch);
        observe(ctx, "dY", dy.quantized, {}, dy.plain);
    }

    void forward(Context& ctx, const Forward& io, ExpertsSaved& saved) const override {
        ArenaScope scope(ctx.scratch);
        begin_routed(saved, io.plan);
        const int64_t hidden = io.x.plain.cols();
        saved.x = fp8_rows(ctx, saved, Life::backward, DType::e4m3, hidden, ScaleLayout::vec128,
                           "dispatch");                                                     // [M, H] e4m3
        const TensorView ye = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc2");  // [M, H] bf16

        receive(ctx, "dispatch", io.x, io.plan, saved, saved.x);
        experts_forward(ctx, io.weights, saved, ye);
        combine(ctx, {.src = ye, .residual = io.residual, .addend = io.addend, .y = io.y}, io.plan, padding_);
    }

    void backward(Context& ctx, const Backward& io, ExpertsSaved& saved) const override {
        ArenaScope scope(ctx.scratch);
        const int64_t hidden = io.dx.cols();
        const ScaledTensor dye = fp8_rows(ctx, saved, Life::call, gradient_code(precision_), hidden,
                                          ScaleLayout::vec128, "dispatch");                  // [M, H]
        const TensorView dxe = rows(ctx, saved, Life::call, ctx.activation, hidden, "fc1");  // [M, H] bf16
        const TensorView drow_prob = row_vector(ctx, saved, Life::call, "swiglu");           // [M] f32

        receive(ctx, "dY", io.dy, io.plan, saved, dye);
        if (precision_.fault_wrong_scale_index) plant_fault(ctx, dye);
        experts_backward(ctx, io.weights, saved, dye, drow_prob, dxe);
        combine(ctx,
                {.src = dxe, .residual = io.dx_in, .drow_prob = drow_prob, .y = io.dx, .dprob = io.dprob},
                io.plan, padding_);
    }

    void dense_forward(Context& ctx, const TokenRows& x, const ExpertWeights& weights, ExpertsSaved& saved,
                       const TensorView& y) const override {
        ArenaScope scope(ctx.scratch);
        begin_dense(ctx, saved);
        saved.x = local_rows(ctx, "dispatch", x, DType::e4m3, saved);
        experts_forward(ctx, weights, saved, y);
        saved.x = {};
    }

    void dense_backward(Context& ctx, const TokenRows& x, const TokenRows& dy, const ExpertWeights& weights,
                        ExpertsSaved& saved, const TensorView& dx) const override {
        ArenaScope scope(ctx.scratch);
        {
            const RecomputeScope again(ctx);
            saved.x = local_rows(ctx, "dispatch", x, DType::e4m3, saved);
        }
        const ScaledTensor dye = local_rows(ctx, "dY", dy, gradient_code(precision_), saved);
        experts_backward(ctx, weights, saved, dye, {}, dx);
    }

private:
    // ---- forward: x [M, H] e4m3 -> h [M, 2F] bf16 -> a [M, F] e4m3 -> ye [M, H] bf16
    void experts_forward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved,
                         const TensorView& ye) const {
        const bool drop_h = recompute_.experts, drop_a = drop_h || recompute_.activation;
        saved.h = rows(ctx, saved, keep_unless(drop_h), ctx.activation, w.w1->spec.shape[1], "fc1");
        saved.a = fp8_rows(ctx, saved, keep_unless(drop_a), DType::e4m3, w.w2->spec.shape[2],
                           ScaleLayout::vec128, "swiglu");

        if (drop_h && fuses_fc1(ctx)) {
            fused_fc1(ctx, *w.w1, saved);
        } else {
            forward_product(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
            activation(ctx, saved);
        }
        forward_product(ctx, "fc2", saved.a, *w.w2, saved.groups, ye);
        if (drop_h) saved.h = {};
        if (drop_a) saved.a = {};
    }

    // ---- backward: the same list read upwards
    void experts_backward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved, const ScaledTensor& dye,
                          const TensorView& drow_prob, const TensorView& dxe) const {
        const int64_t ffn = w.w2->spec.shape[2];
        if (!saved.h) {  // moe_expert: rebuilt from the received rows
            saved.h = rows(ctx, saved, Life::call, ctx.activation, 2 * ffn, "fc1");
            forward_product(ctx, "fc1", saved.x, *w.w1, saved.groups, saved.h);
        }
        if (!saved.a) {  // moe_act, moe_expert
            const RecomputeScope again(ctx);
            saved.a = fp8_rows(ctx, saved, Life::call, DType::e4m3, ffn, ScaleLayout::vec128, "swiglu");
            activation(ctx, saved);
        }
        const TensorView da = rows(ctx, saved, Life::call, ctx.activation, ffn, "fc2");  // [M, F] bf16
        const ScaledTensor dh = fp8_rows(ctx, saved, Life::call, gradient_code(precision_), 2 * ffn,
                                         ScaleLayout::vec128, "swiglu");  // [M, 2F]

        weight_gradient_of(ctx, "fc2 wgrad", dye, saved.a, saved, *w.w2);
        data_gradient(ctx, "fc2 dgrad", dye, *w.w2, saved.groups, da);
        activation_backward(ctx, saved, da, dh, drow_prob);
        weight_gradient_of(ctx, "fc1 wgrad", dh, saved.x, saved, *w.w1);
        data_gradient(ctx, "fc1 dgrad", dh, *w.w1, saved.groups, dxe);
    }

    // dW (+)= dy^T x through the transposed copies of both operands.
    void weight_gradient_of(Context& ctx, const char* stage, const ScaledTensor& dy, const ScaledTensor& x,
                            const ExpertsSaved& saved, Parameter& weight) const {
        ArenaScope scope(ctx.scratch);
        if (!precision_.fp8_wgrad) {
            const ScaledTensor dy_plain = dequantized(ctx, dy, saved), x_plain = dequantized(ctx, x, saved);
            weight_gradient(ctx, stage, dy_plain, x_plain, saved.groups, weight);
            return;
        }
        const ScaledTensor dy_t = transposed(ctx, dy, saved), x_t = transposed(ctx, x, saved);
        paired_weight_gradient(ctx, stage, dy_t, x_t, saved, weight);
    }

    // Switch 2: scaling-aware (one scale per 128x128 tile) or, off, dequantise + requantise per column.
    ScaledTensor transposed(Context& ctx, const ScaledTensor& src, const ExpertsSaved& saved) const {
        auto timed = ctx.stage("transpose");
        const int64_t width = src.data.cols();
        const Life life = wgrad_life(ctx, saved, Life::call);
        if (precision_.moe_scaling_aware_transpose) {
            const ScaledTensor dst =
                fp8_columns(ctx, saved, life, src.data.dtype, width, ScaleLayout::tile128, "transpose");
            ctx.ops.transpose_fp8({.src = src, .groups = saved.groups, .dst = dst}, ctx.launch);
            return dst;
        }
        const ScaledTensor dst =
            fp8_columns(ctx, saved, life, src.data.dtype, width, ScaleLayout::vec128, "transpose");
        ctx.ops.transpose_requantize(
            {.src = src, .groups = saved.groups, .scale_format = precision_.scale_format, .dst = dst},
            ctx.launch);
        return dst;
    }

    // fp8_wgrad: false.
    ScaledTensor dequantized(Context& ctx, const ScaledTensor& src, const ExpertsSaved& saved) const {
        auto timed = ctx.stage("cast");
        const TensorView plain = rows(ctx, saved, Life::call, ctx.activation, src.data.cols(), "cast");
        ctx.ops.dequantize({.src = src, .groups = saved.groups, .dst = plain}, ctx.launch);
        return {.data = plain};
    }

    // Switches 1 and 3: tokens to experts, FP8 on the wire, or (off) BF16 on the wire and a cast behind it.
    void receive(Context& ctx, const char* name, const TokenRows& tokens, const FlowPlan& plan,
                 const ExpertsSaved& saved, const ScaledTensor& dst) const {
        if (precision_.moe_quantize_before_dispatch) {
            dispatch(ctx, tokens.quantized, plan, padding_, dst);
            return;
        }
        ArenaScope scope(ctx.scratch);
        const ScaledTensor plain{
            .data = rows(ctx, saved, Life::call, ctx.activation, dst.data.cols(), "dispatch")};
        dispatch(ctx, {.data = tokens.plain}, plan, padding_, plain);
        cast(ctx, plain.data, saved, dst);
        if (!ctx.recomputing) observe(ctx, name, dst, saved.groups, plain.data);
    }

    // Rows that stay on this rank: the token's own FP8 rows, with their scales in the GEMM's order.
    ScaledTensor local_rows(Context& ctx, const char* name, const TokenRows& tokens, DType code,
                            const ExpertsSaved& saved) const {
        const int64_t num_tokens = tokens.plain.rows(), width = tokens.plain.cols();
        if (precision_.moe_quantize_before_dispatch) {
            const TensorView scales =
                ctx.scratch.tensor(DType::f32, {width / kBlock, num_tokens}, "dispatch");
            ctx.ops.relayout_scales({.wire = tokens.quantized.scales, .vec128 = scales}, ctx.launch);
            return {.data = tokens.quantized.data, .scales = scales, .layout = ScaleLayout::vec128};
        }
        const ScaledTensor dst = ctx.scratch.fp8(code, {num_tokens, width}, ScaleLayout::vec128, "dispatch");
        cast(ctx, tokens.plain, saved, dst);
        if (!ctx.recomputing) observe(ctx, name, dst, saved.groups, tokens.plain);
        return dst;
    }

    // Where nobody reads fc1's output but SwiGLU, it need not leave the product's registers.
    bool fuses_fc1(const Context& ctx) const {
        return precision_.moe_act_quantize_fusion && ctx.products == nullptr && ctx.tensor_stats == nullptr;
    }
    void fused_fc1(Context& ctx, const Parameter& w1, const ExpertsSaved& saved) const {
        {
            auto timed = ctx.stage("fc1");
            ctx.ops.grouped_gemm_swiglu_quantize({.a = saved.x,
                                                  .b = w1.for_fprop(),
                                                  .groups = saved.groups,
                                                  .prob = saved.prob,
                                                  .scale_format = precision_.scale_format,
                                                  .save_h = op::SaveH::no,
                                                  .h = saved.h,
                                                  .act = saved.a},
                                                 ctx.launch);
        }
        if (precision_.fault_wrong_scale_index) plant_fault(ctx, saved.a);
    }

    // Switch 4: SwiGLU x prob + quantise in one kernel, or (off) SwiGLU, then a cast.
    void activation(Context& ctx, ExpertsSaved& saved) const {
        if (precision_.moe_act_quantize_fusion) {
            auto timed = ctx.stage("swiglu");
            ctx.ops.swiglu_quantize({.h = saved.h,
                                     .prob = saved.prob,
                                     .groups = saved.groups,
                                     .scale_format = precision_.scale_format,
                                     .a = saved.a},
                                    ctx.launch);
        } else {
            ArenaScope scope(ctx.scratch);
            const TensorView plain =
                rows(ctx, saved, Life::call, ctx.activation, saved.a.data.cols(), "swiglu");
            {
                auto timed = ctx.stage("swiglu");
                ctx.ops.swiglu({.h = saved.h, .prob = saved.prob, .groups = saved.groups, .a = plain},
                               ctx.launch);
            }
            cast(ctx, plain, saved, saved.a);
        }
        if (!ctx.recomputing) observe_swiglu(ctx, saved, saved.a);
        if (precision_.fault_wrong_scale_index) plant_fault(ctx, saved.a);
    }

    void activation_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da,
                             const ScaledTensor& dh, const TensorView& drow_prob) const {
        if (precision_.moe_act_quantize_fusion) {
            auto timed = ctx.stage("swiglu");
            ctx.ops.swiglu_backward_quantize({.da = da,
                                              .h = saved.h,
                                              .prob = saved.prob,
                                              .groups = saved.groups,
                                              .scale_format = precision_.scale_format,
                                              .dh = dh,
                                              .dprob = drow_prob},
                                             ctx.launch);
        } else {
            ArenaScope scope(ctx.scratch);
            const TensorView plain = rows(ctx, saved, Life::call, ctx.activation, dh.data.cols(), "swiglu");
            {
                auto timed = ctx.stage("swiglu");
                ctx.ops.swiglu_backward({.da = da,
                                         .h = saved.h,
                                         .prob = saved.prob,
                                         .groups = saved.groups,
                                         .dh = plain,
                                         .dprob = drow_prob},
                                        ctx.launch);
            }
            cast(ctx, plain, saved, dh);
        }
        observe_swiglu_backward(ctx, saved, da, dh);
    }

    void cast(Context& ctx, const TensorView& plain, const ExpertsSaved& saved,
              const ScaledTensor& dst) const {
        auto timed = ctx.stage("cast");
        ctx.ops.quantize_rows(
            {.src = plain, .groups = saved.groups, .scale_format = precision_.scale_format, .dst = dst},
            ctx.launch);
    }

    // Test only, on SwiGLU's output and the received dY: row r of the first scale block reads the scale of
    // row r - 1. `validate` must notice.
    void plant_fault(Context& ctx, const ScaledTensor& tensor) const {
        ArenaScope scope(ctx.scratch);
        const TensorView& scales = tensor.scales;
        const size_t bytes = static_cast<size_t>(scales.cols() - 1) * sizeof(float);
        const TensorView copy = ctx.scratch.tensor(DType::f32, {scales.cols()}, "fault");
        Device& device = ctx.ops.device();
        device.copy(copy.data, scales.data, bytes, ctx.launch.stream);
        device.copy(scales.as<float>() + 1, copy.data, bytes, ctx.launch.stream);
    }

    PermutePadding padding_;
};

}  // namespace

std::unique_ptr<Flow> make_fp8_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    return std::make_unique<Fp8Flow>(precision, recompute);
}

}  // namespace fp8flow
