// SPDX-License-Identifier: MIT
// The ablations of fp8_flow. Each switch of PrecisionSpec that is off replaces one step of the flow.
#include "layers/flows/fp8_flow.h"

namespace fp8flow {

using namespace steps;

namespace {

class Fp8FlowAblation final : public Fp8Flow {
public:
    Fp8FlowAblation(const PrecisionSpec& precision, const ExpertsRecompute& recompute)
        : Fp8Flow(precision, recompute) {
        padding_ = precision.moe_permute_padding_for_fp8 ? PermutePadding::fused : PermutePadding::unfused;
    }

    // ---- moe_quantize_before_dispatch: false. BF16 on the wire, and a cast of the received rows.
    NormOutput norm_output() const override {
        return precision_.moe_quantize_before_dispatch ? NormOutput::wire_rows : NormOutput::plain;
    }
    void prepare_gradient(Context& ctx, TokenRows& dy) const override {
        if (precision_.moe_quantize_before_dispatch) Fp8Flow::prepare_gradient(ctx, dy);
    }

protected:
    void receive(Context& ctx, Received what, const TokenRows& tokens, const FlowPlan& plan,
                 const ExpertsSaved& saved, const ScaledTensor& dst) const override {
        if (precision_.moe_quantize_before_dispatch) {
            Fp8Flow::receive(ctx, what, tokens, plan, saved, dst);
        } else {
            ArenaScope scope(ctx.scratch);
            const ScaledTensor plain{
                .data = rows(ctx, saved, Life::call, ctx.activation, dst.data.cols(), "dispatch")};
            dispatch(ctx, {.data = tokens.plain}, plan, padding_, plain);
            cast(ctx, what, plain.data, saved, dst);
            if (!ctx.recomputing) observe(ctx, cast_of(what).name, dst, saved.groups, plain.data);
        }
    }

    // ---- moe_act_quantize_fusion: false. SwiGLU, then a cast.
    bool fuses_fc1(const Context& ctx) const override {
        return precision_.moe_act_quantize_fusion && Fp8Flow::fuses_fc1(ctx);
    }
    void swiglu(Context& ctx, ExpertsSaved& saved) const override {
        if (precision_.moe_act_quantize_fusion) {
            Fp8Flow::swiglu(ctx, saved);
        } else {
            ArenaScope scope(ctx.scratch);
            const TensorView plain =
                rows(ctx, saved, Life::call, ctx.activation, saved.a.data.cols(), "swiglu");
            steps::swiglu(ctx, saved, plain);
            cast(ctx, Quantized::a, plain, saved, saved.a);
            if (!ctx.recomputing) observe_swiglu(ctx, saved, saved.a);
        }
    }

    void swiglu_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da,
                         const ScaledTensor& dh, const TensorView& drow_prob) const override {
        if (precision_.moe_act_quantize_fusion) {
            Fp8Flow::swiglu_backward(ctx, saved, da, dh, drow_prob);
        } else {
            ArenaScope scope(ctx.scratch);
            const TensorView plain = rows(ctx, saved, Life::call, ctx.activation, dh.data.cols(), "swiglu");
            steps::swiglu_backward(ctx, saved, da, plain, drow_prob);
            cast(ctx, Quantized::dh, plain, saved, dh);
            observe_swiglu_backward(ctx, saved, da, dh);
        }
    }

    // ---- fp8_wgrad: false. The weight gradient reads dequantised BF16 operands.
    void wgrad(Context& ctx, const WgradNames& names, const ScaledTensor& dy, const ScaledTensor& x,
               const ExpertsSaved& saved, Parameter& weight) const override {
        if (precision_.fp8_wgrad) return Fp8Flow::wgrad(ctx, names, dy, x, saved, weight);
        ArenaScope scope(ctx.scratch);
        const ScaledTensor dy_plain = dequantized(ctx, dy, saved), x_plain = dequantized(ctx, x, saved);
        weight_gradient(ctx, names.stage, dy_plain, x_plain, saved.groups, weight);
    }

    // ---- moe_scaling_aware_transpose: false. Dequantise and requantise, one scale per column and block.
    ScaledTensor transposed(Context& ctx, const ScaledTensor& src, const ExpertsSaved& saved) const override {
        if (precision_.moe_scaling_aware_transpose) return Fp8Flow::transposed(ctx, src, saved);
        auto timed = ctx.stage("transpose");
        const ScaledTensor dst = fp8_columns(ctx, saved, wgrad_life(ctx, saved, Life::call), src.data.dtype,
                                             src.data.cols(), ScaleLayout::vec128, "transpose");
        ctx.ops.transpose_requantize(
            {.src = src, .groups = saved.groups, .scale_format = format_of(src), .dst = dst}, ctx.launch);
        return dst;
    }

private:
    ScaledTensor dequantized(Context& ctx, const ScaledTensor& src, const ExpertsSaved& saved) const {
        auto timed = ctx.stage("cast");
        const TensorView plain = rows(ctx, saved, Life::call, ctx.activation, src.data.cols(), "cast");
        ctx.ops.dequantize({.src = src, .groups = saved.groups, .dst = plain}, ctx.launch);
        return {.data = plain};
    }
};

}  // namespace

bool is_ablation(const PrecisionSpec& precision) {
    return !(precision.moe_quantize_before_dispatch && precision.moe_scaling_aware_transpose &&
             precision.moe_permute_padding_for_fp8 && precision.moe_act_quantize_fusion &&
             precision.fp8_wgrad);
}

std::unique_ptr<Flow> make_fp8_flow_ablation(const PrecisionSpec& precision,
                                             const ExpertsRecompute& recompute) {
    return std::make_unique<Fp8FlowAblation>(precision, recompute);
}

}  // namespace fp8flow
