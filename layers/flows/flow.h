// SPDX-License-Identifier: MIT
// Flow: the forward and backward of experts in one recipe. Implementations: fp8_flow.cpp, and cast_flow.cpp
// for all other recipes. Each is a list of steps (steps.h).
#pragma once

#include "layers/context.h"
#include "layers/parameter.h"
#include "layers/spec.h"

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

// [T, H] rows on their owner: before dispatch (the norm's output) or after combine (the gradient).
struct TokenRows {
    TensorView plain;         // bf16 (f32 in gradient checks)
    ScaledTensor quantized;   // FP8 rows: vec128_wire scales (fp8_flow; vec128 in front of a linear layer),
                              // or one delayed scale (fp8_tensorwise); absent otherwise
    ScaledTensor transposed;  // fp8_tensorwise: the transposed copy from the norm
};

// What a norm must deliver in addition to the plain rows. gemm_rows: FP8 rows that stay on this rank, with
// scales vec128.
enum class NormOutput { plain, wire_rows, gemm_rows, tensor_scaled };

// The tensors that a flow quantises: x, the input of fc1 and of other linear layers; a, SwiGLU's output; dY
// and dh, the gradients of fc2's and fc1's output; the weights.
enum class Quantized { x, a, dy, dh, weights };
inline constexpr std::array<const char*, 5> kQuantizedNames = {"x", "a", "dY", "dh", "weights"};

// How one of them is quantised.
struct Rule {
    DType dtype = DType::e4m3;  // or e5m2
    ScaleFormat scales = ScaleFormat::pow2;
    float clip = 1;  // clips FP8 values at this fraction of the dtype's largest value
    // Scale layouts of the rows, and of the transposed copy for weight gradients. none: those of the recipe.
    ScaleLayout rows = ScaleLayout::none, columns = ScaleLayout::none;
};

// W1 [L, 2F, H] (gate rows, then up rows), W2 [L, H, F].
struct ExpertWeights {
    Parameter* w1 = nullptr;
    Parameter* w2 = nullptr;
};

// The exchange's plan, and for the unfused permute + pad ablation the same plan without padding.
struct FlowPlan {
    DispatchPlan padded;
    DispatchPlan unpadded;
};

// What experts_backward needs of one experts_forward. Absent views were dropped for recompute.
struct ExpertsSaved {
    bool routed = true;  // false: shared expert / dense FFN, one group of all tokens
    RowGroups groups;
    op::GluForm form;  // of these experts
    TensorView prob;   // [M] f32, SwiGLU's factor; absent: 1 (begin_routed, begin_backward, Ffn)
    TensorView dprob;  // [M] f32, of local rows: where dense_backward writes its gradient; optional
    // [M, H] rows before quantisation, where a recompute or a BF16 weight gradient needs them
    TensorView plain;
    ScaledTensor received;  // [G*S, H] rows once per rank, as they came over the wire (saved_rows: received)
    ScaledTensor x;         // [M, H] fc1 input
    ScaledTensor x_t;       // [H, M] its copy for the weight gradient, or plain rows [M, H]
    TensorView h;           // [M, 2F] fc1 output
    ScaledTensor a;         // [M, F] fc2 input
    ScaledTensor a_t;       // [F, M], or [M, F]
};

// Recompute modes of the experts.
struct ExpertsRecompute {
    bool activation = false;             // moe_act: the SwiGLU output is rebuilt from h
    bool experts = false;                // moe_expert: h too is rebuilt, from the received rows
    SavedRows rows = SavedRows::sorted;  // with experts
};
ExpertsRecompute experts_recompute(const RecomputeSpec& recompute);

class Flow {
public:
    Flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute)
        : precision_(precision), recompute_(recompute) {}
    virtual ~Flow() = default;

    // How each tensor is quantised. make_flow rejects rules that no kernel supports.
    virtual Rule rule_of(Quantized tensor) const;
    virtual void check_rules() const;  // throws Error(usage) with tensor and rule
    virtual WeightFormat weight_format() const = 0;
    virtual NormOutput norm_output() const { return NormOutput::plain; }
    // What an expert's rows may be padded to (moe_row_alignment), ascending.
    virtual std::vector<int64_t> row_alignments() const = 0;
    // Bytes per value of a GEMM operand, scales included.
    virtual double operand_bytes() const = 0;
    // Bytes that one row keeps from the forward to the backward, scales included, for experts [2F, H] and
    // [H, F]. Routed: in addition to the plan. Local (dense_forward): in addition to the norm's output. BF16
    // activations. Flows of local rows are made without ExpertsRecompute.
    virtual double saved_bytes_routed(int64_t hidden, int64_t width) const = 0;
    virtual double saved_bytes_local(int64_t hidden, int64_t width) const = 0;
    // Of one row of a linear layer's input, in addition to the input itself. normed: it is a norm's output.
    enum class Input { normed, plain };
    virtual double saved_bytes_linear(int64_t, Input) const { return 0; }
    // Bytes that one received row keeps in addition, once for all experts of this rank.
    virtual double saved_bytes_received(int64_t) const { return 0; }
    // dy.quantized: the gradient of the layer's output as it goes over the wire.
    virtual void prepare_gradient(Context&, TokenRows&) const {}

    // y [T, H] = residual + experts' outputs, each token's summed: dispatch, fc1, swiglu, fc2, combine.
    struct Forward {
        TokenRows x;
        const FlowPlan& plan;
        ExpertWeights weights;
        TensorView residual;  // optional
        TensorView addend;    // optional: added to the residual first (Exchange::Combine)
        Event addend_ready;   // recorded if the side stream computes it
        TensorView y;         // out
    };
    virtual void forward(Context& ctx, const Forward& io, ExpertsSaved& saved) const = 0;
    // dx [T, H] = dx_in + the experts' part; dprob [T, K]; main gradients of the weights. What this takes
    // from scratch stays until the caller's scope ends: weight gradients on the side stream may read it.
    struct Backward {
        TokenRows dy;
        TokenRows x;  // the forward's, for saved_rows: none
        const FlowPlan& plan;
        ExpertWeights weights;
        TensorView dx_in;   // optional
        Event dx_in_ready;  // recorded if the side stream computes it
        TensorView dx;      // out
        TensorView dprob;   // out [T, K]
    };
    virtual void backward(Context& ctx, const Backward& io, ExpertsSaved& saved) const = 0;

    // The same experts without dispatch (shared expert, dense FFN): one group of all T rows; the caller sets
    // saved.prob. The backward takes x again, because its buffer may have been rebuilt (recompute layernorm).
    virtual void dense_forward(Context& ctx, const TokenRows& x, const ExpertWeights& weights,
                               ExpertsSaved& saved, const TensorView& y) const = 0;
    virtual void dense_backward(Context& ctx, const TokenRows& x, const TokenRows& dy,
                                const ExpertWeights& weights, ExpertsSaved& saved,
                                const TensorView& dx) const = 0;

    // One linear layer y [T, N] = x W^T on such rows (precision.fp8_attention_linears). What the forward
    // leaves in `saved` may be dropped, then the backward makes it again from x.
    struct LinearNames {
        const char *stage, *input, *gradient;  // of its GEMMs and, for --tensor-stats, of its operands
    };
    struct Linear {
        LinearNames name;
        Parameter& weight;
    };
    virtual void linear_forward(Context& ctx, const Linear& layer, const TokenRows& x, ExpertsSaved& saved,
                                const TensorView& y) const;
    virtual void linear_backward(Context& ctx, const Linear& layer, const TokenRows& x, const TokenRows& dy,
                                 ExpertsSaved& saved, const TensorView& dx) const;
    // FP8 rows [T, width] for dy, in scratch, which the operation that makes dy writes; absent: the backward
    // casts dy.
    virtual ScaledTensor gradient_rows(Context&, int64_t) const { return {}; }

protected:
    // FP8 copies by rule_of(weights).
    WeightFormat fp8_weights(ScaleLayout layout) const;
    // moe_apply_probs_in: combine. The forward's activation is not weighted, but fc2's weight gradient reads
    // the weighted one. So the forward keeps none, and the backward makes it with SwiGLU's factor.
    bool merges_in_combine() const { return precision_.moe_apply_probs_in == ProbsIn::combine; }
    // Whether the backward recomputes h, and SwiGLU's output.
    bool drops_h() const { return recompute_.experts; }
    bool drops_a(bool routed = true) const {
        return drops_h() || recompute_.activation || (routed && merges_in_combine());
    }

    PrecisionSpec precision_;
    ExpertsRecompute recompute_;
};

// FP8 rows [tokens, width] with the wire's scales: E8M0 bytes where scales are powers of two, fp32 otherwise.
ScaledTensor wire_rows(Arena& arena, const Rule& rule, int64_t tokens, int64_t width, const char* category);
// Throws Error(usage): a rule that no kernel follows.
[[noreturn]] void refuse_rule(Quantized tensor, std::string_view got, std::string_view want);
// The last step of every quantisation, if the rule clips.
void clip(Context& ctx, const Rule& rule, const ScaledTensor& rows, const RowGroups& groups);

std::unique_ptr<Flow> make_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute);

// Registers a flow of the caller, selected by PrecisionSpec::flow. Call it before the first layer that uses
// it. The flow has the options and the wire format of recipe `base`: fp8_flow for subclasses of Fp8Flow, a
// casting recipe for subclasses of CastFlow. Throws Error(usage) if the name is taken.
using FlowFactory = std::unique_ptr<Flow> (*)(const PrecisionSpec&, const ExpertsRecompute&);
void register_flow(const std::string& name, Recipe base, FlowFactory make);
template <class OwnFlow> void register_flow(const std::string& name, Recipe base) {
    register_flow(
        name, base,
        [](const PrecisionSpec& precision, const ExpertsRecompute& recompute) -> std::unique_ptr<Flow> {
            return std::make_unique<OwnFlow>(precision, recompute);
        });
}
std::vector<std::string> registered_flows();
std::optional<Recipe> base_of_flow(const std::string& name);  // absent: no such flow

}  // namespace fp8flow
