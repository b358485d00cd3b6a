// SPDX-License-Identifier: MIT
// A recipe of one's own from existing parts, for `fp8flow train|validate|profile CONFIG --plugin FILE`:
// forward and data gradients read rows with one scale per 128 values, weight gradients read columns with one
// scale per expert and column. Step by step: docs/usage/new_recipe.md.
#include <fp8flow/recipe.h>

using namespace fp8flow;

namespace {

class RowsOf128 final : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override {
        return {.plain = false, .fp8_layout = ScaleLayout::block128, .scale_format = precision_.scale_format};
    }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::vec128; }
    ScaleLayout column_layout() const override { return ScaleLayout::group_row; }
};

}  // namespace

FP8FLOW_RECIPES(register_flow<RowsOf128>("rows_of_128", Recipe::fp8_blockwise))
