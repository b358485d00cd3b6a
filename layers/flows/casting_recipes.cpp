// SPDX-License-Identifier: MIT
// The recipes that cast around every GEMM: CastFlow with the scale layouts of each. BF16 on the wire and
// between operators; every GEMM's input is quantised from BF16 in both orientations.
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

}  // namespace

std::unique_ptr<Flow> make_casting_recipe(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    return std::make_unique<CastingRecipe>(precision, recompute);
}

}  // namespace fp8flow
