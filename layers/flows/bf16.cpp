// SPDX-License-Identifier: MIT
// Recipe bf16, the baseline of all comparisons: BF16 on the wire and in every GEMM. The steps are those of
// CastFlow, and its casts do nothing. The internal recipe fp32 of the gradient checks is the same with fp32
// tensors.
#include "layers/flows/cast_flow.h"

namespace fp8flow {

using namespace steps;

namespace {

class Bf16Flow final : public CastFlow {
public:
    Bf16Flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute)
        : CastFlow(precision, recompute) {
        precision_.fp8_wgrad = false;
    }
    void check_rules() const override { Flow::check_rules(); }
    WeightFormat weight_format() const override { return {}; }
    std::vector<int64_t> row_alignments() const override { return {1, 16, 32, 128}; }
    double operand_bytes() const override { return kPlainBytes; }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::none; }
    ScaleLayout column_layout() const override { return ScaleLayout::none; }
    Operands cast(Context&, Quantized, const char*, const TensorView& plain, const ExpertsSaved&,
                  std::optional<Life> columns_life) const override {
        return {.rows = {.data = plain}, .columns = {.data = columns_life ? plain : TensorView{}}};
    }
};

}  // namespace

std::unique_ptr<Flow> make_bf16_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    return std::make_unique<Bf16Flow>(precision, recompute);
}

}  // namespace fp8flow
