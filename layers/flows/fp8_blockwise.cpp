// SPDX-License-Identifier: MIT
// Recipe fp8_blockwise: as Transformer Engine's block scaling on Hopper. BF16 on the wire and between
// operators; every GEMM's input is quantised from BF16 in both orientations, 1x128 along its rows and
// 128x1 along its columns; weights in 128x128 blocks.
#include "layers/flows/cast_flow.h"

namespace fp8flow {

namespace {

class Fp8BlockwiseFlow final : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override { return fp8_weights(ScaleLayout::block128); }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::vec128; }
    ScaleLayout column_layout() const override { return ScaleLayout::vec128; }
};

}  // namespace

std::unique_ptr<Flow> make_fp8_blockwise_flow(const PrecisionSpec& precision,
                                              const ExpertsRecompute& recompute) {
    return std::make_unique<Fp8BlockwiseFlow>(precision, recompute);
}

}  // namespace fp8flow
