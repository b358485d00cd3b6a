// SPDX-License-Identifier: MIT
// CastFlow: BF16 between operators and a cast around every GEMM. Base class of fp8_blockwise, fp8_tensorwise,
// fp8_rowwise and mxfp8, which differ only in how a tensor is quantised, and of bf16, which casts nothing.
// Four casts per layer in forward and backward, each in both orientations.
#pragma once

#include "layers/flows/steps.h"

#include <optional>

namespace fp8flow {

class CastFlow : public Flow {
public:
    using Flow::Flow;

    void check_rules() const override;
    std::vector<int64_t> row_alignments() const override;
    double operand_bytes() const override;
    double saved_bytes_routed(int64_t hidden, int64_t width) const override;
    double saved_bytes_local(int64_t hidden, int64_t width) const override;
    double saved_bytes_linear(int64_t width, Input input) const override;
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

protected:
    // Scales of the row copy [M, dim] (forward and data gradient) and of the column copy [dim, M] (weight
    // gradient), where rule_of names no others.
    virtual ScaleLayout row_layout() const = 0;
    virtual ScaleLayout column_layout() const = 0;
    // Whether a norm in front of local rows delivers the column copy (NormOutput::tensor_scaled).
    bool norm_casts() const { return norm_output() == NormOutput::tensor_scaled; }
    // plain [M, dim] -> rows and columns from one read; columns may be absent.
    virtual void quantize(Context& ctx, const TensorView& plain, const RowGroups& groups,
                          const ScaledTensor& rows, const ScaledTensor& columns) const;
    // What one cast delivers: the operand of the forward or data-gradient GEMM, and that of the weight
    // gradient: a column copy, or with fp8_wgrad: false the plain rows.
    struct Operands {
        ScaledTensor rows, columns;
    };
    // By the tensor's rule. No life of the columns: no weight gradient reads them.
    virtual Operands cast(Context& ctx, Quantized what, const char* name, const TensorView& plain,
                          const ExpertsSaved& saved, std::optional<steps::Life> columns_life) const;

private:
    Rule full_rule(Quantized tensor) const;  // with the recipe's layouts
    // Bytes of one value of a weight-gradient operand that is kept.
    double kept_bytes() const;
    // The operand of x's weight gradient, where it is in x.
    void take_columns(const TokenRows& x, ExpertsSaved& saved) const;
    void experts_forward(Context& ctx, const TensorView& x, const ExpertWeights& w, ExpertsSaved& saved,
                         const TensorView& ye) const;
    // x [M, K] -> saved.x and, with a life, saved.x_t.
    void cast_input(Context& ctx, const char* name, const TensorView& x, ExpertsSaved& saved,
                    std::optional<steps::Life> columns_life) const;
    void activation(Context& ctx, const ExpertWeights& w, ExpertsSaved& saved,
                    std::optional<steps::Life> columns_life) const;
    void experts_backward(Context& ctx, const TensorView& dy, const ExpertWeights& w, ExpertsSaved& saved,
                          const TensorView& drow_prob, const TensorView& dx) const;
    void wgrad(Context& ctx, const char* stage, const ScaledTensor& dy, const ScaledTensor& x,
               const ExpertsSaved& saved, Parameter& weight) const;
};

}  // namespace fp8flow
