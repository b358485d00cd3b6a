// SPDX-License-Identifier: MIT
// Recipe fp8_rowwise: as torchao's FP8 grouped training. One scale per row along the contraction (tokens for
// the GEMMs, output channels for weights); the operands of the weight gradient get one scale per expert
// group and column. BF16 on the wire.
#include "layers/flows/cast_flow.h"

namespace fp8flow {

namespace {

class Fp8RowwiseFlow final : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override { return fp8_weights(ScaleLayout::row); }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::row; }
    ScaleLayout column_layout() const override { return ScaleLayout::group_row; }
};

}  // namespace

std::unique_ptr<Flow> make_fp8_rowwise_flow(const PrecisionSpec& precision,
                                            const ExpertsRecompute& recompute) {
    return std::make_unique<Fp8RowwiseFlow>(precision, recompute);
}

}  // namespace fp8flow
