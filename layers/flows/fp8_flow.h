// SPDX-License-Identifier: MIT
// Fp8Flow: the class of recipe fp8_flow. Its steps are virtual, so that an ablation replaces one of them
// (fp8_flow_ablations.cpp) and the flow itself has no branches. Read fp8_flow.cpp first.
#pragma once

#include "layers/flows/steps.h"

namespace fp8flow {

class Fp8Flow : public Flow {
public:
    using Flow::Flow;

    WeightFormat weight_format() const override { return fp8_weights(ScaleLayout::block128); }
    void check_rules() const override;
    NormOutput norm_output() const override { return NormOutput::wire_rows; }
    std::vector<int64_t> row_alignments() const override { return {kBlock}; }
    double operand_bytes() const override { return steps::fp8_bytes(ScaleLayout::vec128); }
    double saved_bytes_routed(int64_t hidden, int64_t width) const override;
    double saved_bytes_local(int64_t hidden, int64_t width) const override;
    double saved_bytes_received(int64_t hidden) const override;
    double saved_bytes_linear(int64_t width, Input input) const override;
    void prepare_gradient(Context& ctx, TokenRows& dy) const override;
    void forward(Context& ctx, const Forward& io, ExpertsSaved& saved) const override;
    void backward(Context& ctx, const Backward& io, ExpertsSaved& saved) const override;
    void dense_forward(Context& ctx, const TokenRows& x, const ExpertWeights& weights, ExpertsSaved& saved,
                       const TensorView& y) const override;
    void dense_backward(Context& ctx, const TokenRows& x, const TokenRows& dy, const ExpertWeights& weights,
                        ExpertsSaved& saved, const TensorView& dx) const override;
    void linear_forward(Context& ctx, const Linear& layer, const TokenRows& x, ExpertsSaved& saved,
                        const TensorView& y) const override;
    void linear_backward(Context& ctx, const Linear& layer, const TokenRows& x, const TokenRows& dy,
                         ExpertsSaved& saved, const TensorView& dx) const override;
    ScaledTensor gradient_rows(Context& ctx, int64_t width) const override;

protected:
    using Received = Quantized;  // x or dy
    // Tokens to their experts: [T, H] -> [M, H] FP8.
    virtual void receive(Context& ctx, Received what, const TokenRows& tokens, const FlowPlan& plan,
                         const ExpertsSaved& saved, const ScaledTensor& dst) const;
    // The same for rows that stay on this rank (shared expert, dense FFN): [T, H] FP8, as the GEMM reads it.
    virtual ScaledTensor local_rows(Context& ctx, Received what, const TokenRows& tokens,
                                    const ExpertsSaved& saved) const;
    // FP8 rows by their rule, not written yet.
    ScaledTensor fp8(Context& ctx, Quantized what, const ExpertsSaved& saved, steps::Life life, int64_t width,
                     const char* kind) const;
    // A cast of BF16 rows: by which rule, the name for --tensor-stats, how long the FP8 rows live.
    struct CastTo {
        Quantized what;
        const char* name;
        steps::Life life = steps::Life::call;
    };
    static CastTo cast_of(Quantized what);
    void cast(Context& ctx, Quantized what, const TensorView& plain, const ExpertsSaved& saved,
              const ScaledTensor& dst) const;
    // FP8 rows as a GEMM reads them: a cast only where the tokens come without FP8 rows.
    ScaledTensor operand(Context& ctx, const TokenRows& tokens, const CastTo& to,
                         const ExpertsSaved& saved) const;
    // Whether fc1 and SwiGLU may run as one kernel that keeps h [M, 2F] in registers. Not while `replay
    // --intermediates` or --tensor-stats reads h from memory.
    virtual bool fuses_fc1(const Context& ctx) const;
    virtual void fc1_swiglu(Context& ctx, const Parameter& w1, ExpertsSaved& saved) const;
    // saved.h [M, 2F] bf16 -> saved.a [M, F] FP8, times the row's probability.
    virtual void swiglu(Context& ctx, ExpertsSaved& saved) const;
    // da [M, F] bf16 -> dh [M, 2F] FP8 and the probabilities' gradient [M] f32.
    virtual void swiglu_backward(Context& ctx, const ExpertsSaved& saved, const TensorView& da,
                                 const ScaledTensor& dh, const TensorView& drow_prob) const;
    // stage: "fc1 wgrad" or "fc2 wgrad". dy, x: its operands' names for --tensor-stats.
    struct WgradNames {
        const char *stage, *dy, *x;
    };
    // weight.main_grad (+)= dy^T x.
    virtual void wgrad(Context& ctx, const WgradNames& names, const ScaledTensor& dy, const ScaledTensor& x,
                       const ExpertsSaved& saved, Parameter& weight) const;
    // [M, width] FP8 -> [width, M] FP8, an operand of the weight gradient.
    virtual ScaledTensor transposed(Context& ctx, const ScaledTensor& src, const ExpertsSaved& saved) const;

    steps::PermutePadding padding_ = steps::PermutePadding::fused;

private:
    void receive_again(Context& ctx, const Backward& io, const ExpertsSaved& saved) const;
    void experts_forward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved,
                         const TensorView& ye) const;
    // fc2_backward rebuilds h and a if they were not kept, in scratch that fc1_backward does not read.
    void fc2_backward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved, const ScaledTensor& dye,
                      const ScaledTensor& dh, const TensorView& drow_prob) const;
    void fc1_backward(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved, const ScaledTensor& dh,
                      const TensorView& dxe) const;
    ScaledTensor gradient_of_h(Context& ctx, const ExpertWeights& w, const ExpertsSaved& saved) const;
    void rebuild(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved) const;
};

// Whether a switch of `precision` replaces a step of fp8_flow.cpp.
bool is_ablation(const PrecisionSpec& precision);
// Fp8Flow with the steps that the switches replace.
std::unique_ptr<Flow> make_fp8_flow_ablation(const PrecisionSpec& precision,
                                             const ExpertsRecompute& recompute);

}  // namespace fp8flow
