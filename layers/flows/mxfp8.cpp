// SPDX-License-Identifier: MIT
// Recipe mxfp8: blocks of 32 along the contraction with E8M0 scales (OCP Microscaling; torchao), floor or
// rceil rounding. Activations 1x32 along rows and 32x1 along columns; expert weights 1x32 for the forward,
// "3D column-wise" 32x1 for the data gradient. BF16 on the wire.
#include "layers/flows/cast_flow.h"

namespace fp8flow {

namespace {

class Mxfp8Flow final : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override { return fp8_weights(ScaleLayout::mx32); }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::mx32; }
    ScaleLayout column_layout() const override { return ScaleLayout::mx32; }
};

}  // namespace

std::unique_ptr<Flow> make_mxfp8_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    return std::make_unique<Mxfp8Flow>(precision, recompute);
}

}  // namespace fp8flow
