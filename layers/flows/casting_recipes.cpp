// SPDX-License-Identifier: MIT
// The recipes that are a CastFlow: BF16 on the wire and between operators. Every GEMM's input is quantised
// from BF16 in both orientations, in the scale layouts of the recipe; in bf16 it stays as it is.
#include "layers/flows/cast_flow.h"

namespace fp8flow {

namespace {

struct Layouts {
    ScaleLayout rows, columns, weights;
    NormOutput norm = NormOutput::plain;
};

Layouts layouts_of(Recipe recipe) {
    using L = ScaleLayout;
    switch (recipe) {
        // As Transformer Engine's block scaling on Hopper: 1x128 along rows, 128x1 along columns, weights
        // 128x128.
        case Recipe::fp8_blockwise: return {L::vec128, L::vec128, L::block128};
        // As torchao's FP8 grouped training: one scale per row along the contraction (tokens for the GEMMs,
        // output channels for weights); the operands of the weight gradient have one scale per expert group
        // and column.
        case Recipe::fp8_rowwise: return {L::row, L::group_row, L::row};
        // One scale per tensor, from the tensor's own maximum (current scaling). Where the norm feeds a dense
        // FFN or a shared expert directly, it writes both FP8 copies with a delayed scale (the maximum of
        // earlier steps), so no cast is needed there.
        case Recipe::fp8_tensorwise: return {L::tensor, L::tensor, L::tensor, NormOutput::tensor_scaled};
        // OCP Microscaling, as torchao: blocks of 32 along the contraction with E8M0 scales, floor or rceil
        // rounding. Weights: 1x32 for the forward, "3D column-wise" 32x1 for the data gradient.
        default: return {L::mx32, L::mx32, L::mx32};
    }
}

class CastingRecipe final : public CastFlow {
public:
    CastingRecipe(const PrecisionSpec& precision, const ExpertsRecompute& recompute)
        : CastFlow(precision, recompute), layouts_(layouts_of(precision.recipe)) {}
    WeightFormat weight_format() const override { return fp8_weights(layouts_.weights); }
    NormOutput norm_output() const override { return layouts_.norm; }

protected:
    ScaleLayout row_layout() const override { return layouts_.rows; }
    ScaleLayout column_layout() const override { return layouts_.columns; }

private:
    Layouts layouts_;
};

// The baseline of all comparisons: its casts do nothing. The internal recipe fp32 of the gradient checks is
// the same with FP32 tensors.
class Bf16Flow final : public CastFlow {
public:
    Bf16Flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute)
        : CastFlow(precision, recompute) {
        precision_.fp8_wgrad = false;
    }
    void check_rules() const override { Flow::check_rules(); }
    WeightFormat weight_format() const override { return {}; }
    std::vector<int64_t> row_alignments() const override { return {1, 16, 32, 128}; }
    double operand_bytes() const override { return steps::kPlainBytes; }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::none; }
    ScaleLayout column_layout() const override { return ScaleLayout::none; }
    Operands cast(Context&, Quantized, const char*, const TensorView& plain, const ExpertsSaved&,
                  std::optional<steps::Life> columns_life) const override {
        return {.rows = {.data = plain}, .columns = {.data = columns_life ? plain : TensorView{}}};
    }
};

}  // namespace

std::unique_ptr<Flow> make_casting_recipe(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    if (precision.recipe == Recipe::bf16 || precision.recipe == Recipe::fp32)
        return std::make_unique<Bf16Flow>(precision, recompute);
    return std::make_unique<CastingRecipe>(precision, recompute);
}

}  // namespace fp8flow
