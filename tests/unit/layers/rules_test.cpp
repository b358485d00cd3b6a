// SPDX-License-Identifier: MIT
// Flow::rule_of: one virtual method changes how one tensor is quantised, in the flow without casts and in a
// casting one. A rule that no kernel follows is refused with tensor and rule.
#include "layers/flows/cast_flow.h"
#include "layers/flows/fp8_flow.h"
#include "model/config/config.h"
#include "tests/support/files.h"
#include "tests/support/layers/layer_fixture.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>

namespace fp8flow {
namespace {

using test::LayerCase;
using test::LayerResult;

std::function<void(Quantized, Rule&)> change;  // what the flows below do to every rule

template <class Base> class Changed final : public Base {
public:
    using Base::Base;
    Rule rule_of(Quantized tensor) const override {
        Rule rule = Base::rule_of(tensor);
        change(tensor, rule);
        return rule;
    }
};
class CastOf128 : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override { return fp8_weights(ScaleLayout::block128); }
    ScaleLayout row_layout() const override { return ScaleLayout::vec128; }
    ScaleLayout column_layout() const override { return ScaleLayout::vec128; }
};

LayerCase changed_case(Recipe base) {
    static const bool registered = [] {
        register_flow<Changed<Fp8Flow>>("changed_flow", Recipe::fp8_flow);
        register_flow<Changed<CastOf128>>("changed_cast", Recipe::fp8_blockwise);
        return true;
    }();
    LayerCase c = LayerCase::of(base);
    c.precision.flow = registered && base == Recipe::fp8_flow ? "changed_flow" : "changed_cast";
    return c;
}

LayerResult with_rules(const LayerCase& c, std::function<void(Quantized, Rule&)> rules) {
    change = std::move(rules);
    return test::run_block(c)[0];
}

// Without a change the bits are the recipe's; E5M2 for dY and dh is fp8_format: hybrid; FP32 scales
// everywhere are scale_format: fp32.
TEST(Rules, TogetherTheyAreTheKeys) {
    for (const Recipe base : {Recipe::fp8_flow, Recipe::fp8_blockwise}) {
        LayerCase plain = LayerCase::of(base), c = changed_case(base);
        for (LayerCase* one : {&plain, &c}) one->moe.moe_shared_expert_intermediate_size = 128;
        expect_same_result(test::run_block(plain)[0], with_rules(c, [](Quantized, Rule&) {}));
        plain.precision.fp8_format = Fp8Format::hybrid;
        expect_same_result(test::run_block(plain)[0], with_rules(c, [](Quantized tensor, Rule& rule) {
                               if (tensor == Quantized::dy || tensor == Quantized::dh)
                                   rule.dtype = DType::e5m2;
                           }));
        if (base == Recipe::fp8_flow) continue;  // its transpose shifts exponents
        plain.precision.fp8_format = Fp8Format::e4m3;
        plain.precision.scale_format = ScaleFormat::fp32;
        expect_same_result(test::run_block(plain)[0],
                           with_rules(c, [](Quantized, Rule& rule) { rule.scales = ScaleFormat::fp32; }));
    }
}

// Every dtype and scale format of every tensor alone: the pass is finite, near the recipe's own, and not it.
TEST(Rules, EachTensorAlone) {
    for (const Recipe base : {Recipe::fp8_flow, Recipe::fp8_blockwise}) {
        const LayerCase c = changed_case(base);
        const LayerResult own = with_rules(c, [](Quantized, Rule&) {});
        for (size_t i = 0; i < kQuantizedNames.size(); ++i) {
            for (int option = 0; option < 3; ++option) {
                const auto tensor = static_cast<Quantized>(i);
                if (base == Recipe::fp8_flow && option == 1 && tensor != Quantized::weights) continue;
                if (option == 2 && (base != Recipe::fp8_flow || tensor == Quantized::weights)) continue;
                SCOPED_TRACE(fmt::format("{} {} option {}", recipe_name(base), kQuantizedNames[i], option));
                const LayerResult other = with_rules(c, [&](Quantized of, Rule& rule) {
                    if (of != tensor) return;
                    if (option == 0) rule.dtype = DType::e5m2;
                    if (option == 1) rule.scales = ScaleFormat::fp32;
                    if (option == 2) rule.clip = 0.5f;
                });
                const bool backward = tensor == Quantized::dy || tensor == Quantized::dh;
                EXPECT_EQ(other.y == own.y, backward);
                EXPECT_FALSE(other.gradients == own.gradients);
                for (const auto& [name, gradient] : own.gradients) {
                    const double nmse = test::nmse(other.gradients.at(name), gradient);
                    EXPECT_LT(nmse, option == 2 ? 0.3 : 3e-2) << name;
                }
                EXPECT_EQ(other.casts, own.casts);
            }
        }
    }
}

// Layouts of one tensor of a casting recipe; the others keep theirs.
TEST(Rules, LayoutsOfOneTensor) {
    const LayerCase c = changed_case(Recipe::fp8_blockwise);
    const LayerResult own = with_rules(c, [](Quantized, Rule&) {});
    using L = ScaleLayout;
    for (const auto& [rows, columns] : {std::pair{L::row, L::group_row},
                                        {L::none, L::group_row},
                                        {L::mx32, L::mx32},
                                        {L::tensor, L::tensor}}) {
        const LayerResult other = with_rules(c, [&](Quantized of, Rule& rule) {
            if (of == Quantized::a) rule.rows = rows, rule.columns = columns;
        });
        const std::string name = "layers.0.moe.experts.linear_fc2.weight";
        EXPECT_LT(test::nmse(other.gradients.at(name), own.gradients.at(name)), 1e-2) << name_of(columns);
        EXPECT_EQ(other.casts, own.casts);
    }
}

TEST(Rules, Refusals) {
    struct {
        Recipe base;
        const char* text;
        std::function<void(Quantized, Rule&)> rules;
    } const cases[] = {
        {Recipe::fp8_flow, "rule of dY: got scales fp32, want pow2, or precision.moe_scaling_aware_transpose",
         [](Quantized t, Rule& r) {
             if (t == Quantized::dy) r.scales = ScaleFormat::fp32;
         }},
        {Recipe::fp8_flow, "rule of x: got scale layouts, want none",
         [](Quantized t, Rule& r) {
             if (t == Quantized::x) r.rows = ScaleLayout::row;
         }},
        {Recipe::fp8_flow, "rule of weights: got clip 0.5, want 1",
         [](Quantized t, Rule& r) {
             if (t == Quantized::weights) r.clip = 0.5f;
         }},
        {Recipe::fp8_flow, "rule of a: got dtype bf16, want e4m3 or e5m2",
         [](Quantized t, Rule& r) {
             if (t == Quantized::a) r.dtype = DType::bf16;
         }},
        {Recipe::fp8_blockwise, "rule of dh: got clip 0.5, want 1",
         [](Quantized t, Rule& r) {
             if (t == Quantized::dh) r.clip = 0.5f;
         }},
        {Recipe::fp8_blockwise, "rule of a: got scales tensor in one direction",
         [](Quantized t, Rule& r) {
             if (t == Quantized::a) r.rows = ScaleLayout::tensor;
         }},
        {Recipe::fp8_blockwise, "rule of weights: got scale layouts, want none",
         [](Quantized t, Rule& r) {
             if (t == Quantized::weights) r.rows = ScaleLayout::row;
         }},
        {Recipe::fp8_blockwise, "rule of x: got scales fp32 with mx32, want pow2",
         [](Quantized t, Rule& r) {
             if (t == Quantized::x) r.columns = ScaleLayout::mx32, r.scales = ScaleFormat::fp32;
         }},
    };
    for (const auto& test_case : cases) {
        const LayerCase c = changed_case(test_case.base);
        change = test_case.rules;
        expect_contains(error_of(ExitCode::usage, [&] { make_flow(c.precision, {}); }), test_case.text);
    }
}

}  // namespace
}  // namespace fp8flow
