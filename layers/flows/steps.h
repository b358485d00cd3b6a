// SPDX-License-Identifier: MIT
// The steps that flows consist of: memory of routed rows, dispatch and combine (fused or not), GEMMs, weight
// gradients. Read next: fp8_flow.cpp.
#pragma once

#include "layers/flows/flow.h"
#include "layers/schedule/wire_stream.h"

#include <optional>

namespace fp8flow::steps {

// How long a tensor lives. backward: from the forward until the backward of the layer. call: this layer call.
// next: until the weight gradients of a later micro-batch (moe_wgrad_micro_batches).
enum class Life { backward, call, next };

inline Life keep_unless(bool dropped) { return dropped ? Life::call : Life::backward; }
// For an operand of an expert weight gradient: longer than `alone` if the gradient waits for the next
// micro-batch.
inline Life wgrad_life(const Context& ctx, const ExpertsSaved& saved, Life alone) {
    return saved.routed && ctx.delays_wgrads() ? Life::next : alone;
}

// Tensors with one row per routed row (or per token, for dense FFNs): plain [M, width], FP8 [M, width],
// transposed FP8 [width, M].
TensorView rows(Context& ctx, const ExpertsSaved& saved, Life life, DType dtype, int64_t width,
                const char* kind);
ScaledTensor fp8_rows(Context& ctx, const ExpertsSaved& saved, Life life, DType dtype, int64_t width,
                      ScaleLayout layout, const char* kind, ScaleFormat format = ScaleFormat::undeclared);
ScaledTensor fp8_columns(Context& ctx, const ExpertsSaved& saved, Life life, DType dtype, int64_t width,
                         ScaleLayout layout, const char* kind);
TensorView row_vector(Context& ctx, const ExpertsSaved& saved, Life life, const char* kind);  // [M] f32

// Points `saved` at the plan's groups, or at the one group of all tokens. The probabilities are SwiGLU's
// factor in both passes, or with ProbsIn::combine in the backward alone: fc2 is linear, so its gradients are
// those of a weighted input.
void begin_routed(ExpertsSaved& saved, const FlowPlan& plan, const PrecisionSpec& precision);
void begin_backward(ExpertsSaved& saved, const FlowPlan& plan);
void begin_dense(Context& ctx, ExpertsSaved& saved);

// Later work of the main stream waits for the event, if a side stream records it.
void await(Context& ctx, Event ready);
inline bool runs_aside(const Context& ctx, const ExpertsSaved& saved) {
    return saved.routed && ctx.side != nullptr && ctx.side->schedule().delay_wgrad_compute;
}
// Runs work that data gradients do not depend on: on the side stream with delay_wgrad_compute, otherwise on
// this stream.
template <class Work> void aside(Context& ctx, const ExpertsSaved& saved, Work&& work) {
    if (!runs_aside(ctx, saved)) return work(ctx);
    Context side_ctx = ctx.side->begin(ctx);
    work(side_ctx);
}
// Scratch of one half of a backward pass, which the other half reuses, unless work that aside() queued on the
// side stream may still read it.
class HalfScope {
public:
    HalfScope(Context& ctx, const ExpertsSaved& saved) {
        if (!runs_aside(ctx, saved)) scope_.emplace(ctx.scratch);
    }

private:
    std::optional<ArenaScope> scope_;
};

// Tokens to their experts. Fused: permute and pad are part of the exchange; otherwise receive, permute, pad
// as three steps.
enum class PermutePadding { fused, unfused };
void dispatch(Context& ctx, const ScaledTensor& tokens, const FlowPlan& plan, PermutePadding padding,
              const ScaledTensor& dst);
// The same in two steps. dispatch_once: [T, H] -> [G*S, H], each row once, as received. fan_out: to the rows
// of the experts [M, H].
ScaledTensor dispatch_once(Context& ctx, const ScaledTensor& tokens, const FlowPlan& plan);
void fan_out(Context& ctx, const ScaledTensor& received, const FlowPlan& plan, const ScaledTensor& dst);
// Experts' rows back to their tokens: y = residual + sums; drow_prob -> dprob with them (optional).
void combine(Context& ctx, const Exchange::Combine& args, const FlowPlan& plan, PermutePadding padding);
// The last step of the routed path: io.y from ye [M, H]; io.dx and io.dprob from dxe [M, H] and drow_prob [M]
// f32.
void combine_output(Context& ctx, const Flow::Forward& io, const TensorView& ye,
                    const PrecisionSpec& precision, PermutePadding padding = PermutePadding::fused);
void combine_gradient(Context& ctx, const Flow::Backward& io, const TensorView& dxe,
                      const TensorView& drow_prob, PermutePadding padding = PermutePadding::fused);

// saved.h [M, 2F] -> a [M, F], times the row's probability; da [M, F] -> dh [M, 2F] and the probabilities'
// gradient [M] f32 (optional).
void swiglu(Context& ctx, const ExpertsSaved& saved, const TensorView& a);
void swiglu_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da, const TensorView& dh,
                     const TensorView& drow_prob);

// forward_gemm: d = a b^T per group. data_gradient: dx = dy times the weight as stored, or its dgrad copy.
void forward_gemm(Context& ctx, const char* stage, const ScaledTensor& a, const Parameter& weight,
                  const RowGroups& groups, const TensorView& d);
void data_gradient(Context& ctx, const char* stage, const ScaledTensor& dy, const Parameter& weight,
                   const RowGroups& groups, const TensorView& dx);
// weight.main_grad (+)= dy^T x per group; with separate sums per source rank if ranks have separate groups.
// Nothing for a frozen weight.
void weight_gradient(Context& ctx, const char* stage, const ScaledTensor& dy, const ScaledTensor& x,
                     const RowGroups& groups, Parameter& weight);
// The same for operands with the lifetime of wgrad_life. With moe_wgrad_micro_batches: N the first N - 1
// micro-batches keep their operands, and the last runs one GEMM over the rows of all.
void joined_weight_gradient(Context& ctx, const char* stage, const ScaledTensor& dy, const ScaledTensor& x,
                            const ExpertsSaved& saved, Parameter& weight);

inline DType gradient_dtype(const PrecisionSpec& precision) {
    return precision.fp8_format == Fp8Format::hybrid ? DType::e5m2 : DType::e4m3;
}

// Bytes of one value of a tensor: plain, or FP8 with its share of the scales (one per tensor, per row, or per
// group and column: nothing).
constexpr double kPlainBytes = 2;
double fp8_bytes(ScaleLayout layout);

// With --tensor-stats: the quantisation error of a tensor against its plain source (absent: scales and values
// only).
void observe(Context& ctx, const char* name, const ScaledTensor& quantized, const RowGroups& groups,
             const TensorView& source);
// The plain SwiGLU output or gradient, which --tensor-stats compares with.
void observe_swiglu(Context& ctx, const ExpertsSaved& saved, const ScaledTensor& a);
void observe_swiglu_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da,
                             const ScaledTensor& dh);
// With --tensor-stats: the error of a transposed copy of `rows`, an operand of weight's gradient.
void observe_transposed(Context& ctx, const char* name, const ScaledTensor& rows, const ScaledTensor& copy,
                        const ExpertsSaved& saved, const Parameter& weight);

}  // namespace fp8flow::steps
