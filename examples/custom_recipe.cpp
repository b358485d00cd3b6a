// SPDX-License-Identifier: MIT
// A recipe of one's own, for `fp8flow train|validate|profile CONFIG --plugin FILE`: fp8_flow with one rule
// changed, dY in E5M2. Step by step: docs/usage/new_recipe.md.
#include <fp8flow/recipe.h>

using namespace fp8flow;

namespace {

class WideGradient final : public Fp8Flow {
public:
    using Fp8Flow::Fp8Flow;
    Rule rule_of(Quantized tensor) const override {
        Rule rule = Fp8Flow::rule_of(tensor);
        if (tensor == Quantized::dy) rule.dtype = DType::e5m2;
        return rule;
    }
};

}  // namespace

FP8FLOW_RECIPES(register_flow<WideGradient>("e5m2_dy", Recipe::fp8_flow))
