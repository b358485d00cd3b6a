// SPDX-License-Identifier: MIT
// Recipe fp8_tensorwise: one scale per tensor, from the tensor's own maximum (current scaling); where the
// norm feeds a dense FFN or a shared expert directly, the norm itself writes both FP8 copies with a delayed
// scale (the maximum of earlier steps), so no cast is needed there. BF16 on the wire.
#include "layers/flows/cast_flow.h"

namespace fp8flow {

namespace {

class Fp8TensorwiseFlow final : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override { return fp8_weights(ScaleLayout::tensor); }
    NormOutput norm_output() const override { return NormOutput::tensor_scaled; }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::tensor; }
    ScaleLayout column_layout() const override { return ScaleLayout::tensor; }
};

}  // namespace

std::unique_ptr<Flow> make_fp8_tensorwise_flow(const PrecisionSpec& precision,
                                               const ExpertsRecompute& recompute) {
    return std::make_unique<Fp8TensorwiseFlow>(precision, recompute);
}

}  // namespace fp8flow
