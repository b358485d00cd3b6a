// SPDX-License-Identifier: MIT
// Recipes that are fp8_flow with a fault, to see whether `fp8flow validate CONFIG --plugin FILE`
// distinguishes them from fp8_flow, with how many tokens and seeds:
// docs/evidence.md#would-validate-find-a-bug.
#include <fp8flow/recipe.h>

#include <algorithm>

using namespace fp8flow;

namespace {

// One of kShare scale blocks of SwiGLU's output and of the received dY, at most the first of every row, has
// the scale of the row before.
template <int64_t kShare> class WrongScale final : public Fp8Flow {
public:
    using Fp8Flow::Fp8Flow;

protected:
    void receive(Context& ctx, Received what, const TokenRows& tokens, const FlowPlan& plan,
                 const ExpertsSaved& saved, const ScaledTensor& dst) const override {
        Fp8Flow::receive(ctx, what, tokens, plan, saved, dst);
        if (what == Received::dy) plant(ctx, dst);
    }
    void swiglu(Context& ctx, ExpertsSaved& saved) const override {
        Fp8Flow::swiglu(ctx, saved);
        plant(ctx, saved.a);
    }
    bool fuses_fc1(const Context&) const override { return false; }

private:
    static void plant(Context& ctx, const ScaledTensor& tensor) {
        ArenaScope scope(ctx.scratch);
        const int64_t count = std::min(ceil_div(tensor.scales.numel(), kShare), tensor.scales.cols());
        const size_t bytes = static_cast<size_t>(count) * sizeof(float);
        const TensorView copy = ctx.scratch.tensor(DType::f32, {count}, "fault");
        Device& device = ctx.ops.device();
        device.copy(copy.data, tensor.scales.data, bytes, ctx.launch.stream);
        device.copy(tensor.scales.as<float>() + 1, copy.data, bytes - sizeof(float), ctx.launch.stream);
    }
};

// SwiGLU's output and dY are clipped at half of the largest FP8 value.
class HalfRange final : public Fp8Flow {
public:
    using Fp8Flow::Fp8Flow;
    Rule rule_of(Quantized tensor) const override {
        Rule rule = Fp8Flow::rule_of(tensor);
        if (tensor == Quantized::a || tensor == Quantized::dy) rule.clip = 0.5f;
        return rule;
    }
};

}  // namespace

FP8FLOW_RECIPES(register_flow<WrongScale<128>>("wrong_scale", Recipe::fp8_flow),
                register_flow<WrongScale<1>>("wrong_scales", Recipe::fp8_flow),
                register_flow<HalfRange>("half_range", Recipe::fp8_flow))
