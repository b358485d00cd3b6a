// SPDX-License-Identifier: MIT
// Every recipe's MoE layer, forward and backward: against the fp32 recipe on the same weights and the same
// choice of experts; its casts, transposes and bytes on the wire; and what each switch of the flow changes
// and what it must not change. All memory starts as NaN.
#include "model/config/config.h"
#include "model/train/forced_routing.h"
#include "model/train/transformer.h"
#include "tests/support/layers/layer_fixture.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>

namespace fp8flow {
namespace {

using test::LayerCase;
using test::LayerResult;

// 1 - 2 <a, b> / (|a|^2 + |b|^2): about half the relative squared error. NaN where anything is NaN.
double difference(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    double product = 0, power = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        product += a[i] * b[i];
        power += a[i] * a[i] + b[i] * b[i];
    }
    return power == 0 ? 0 : 1 - 2 * product / power;
}

// The layer's own part of y and dx: without the residual stream.
std::vector<double> output(const LayerResult& r) {
    std::vector<double> y = r.y;
    for (size_t i = 0; i < y.size(); ++i) y[i] -= r.x[i];
    return y;
}
std::vector<double> input_gradient(const LayerResult& r) {
    std::vector<double> dx = r.dx;
    for (size_t i = 0; i < dx.size(); ++i) dx[i] -= r.dy[i];
    return dx;
}

struct Bounds {
    double output, dx, dw1, dw2, router;
};

// E4M3 with a scale per block errs by 2.6 % rms: 7e-4 of a tensor's energy. Gate and up carry the errors of x
// and W1 (1.4e-3 each), their product both, and fc2 adds those of its two operands: 4.2e-3, of which
// `difference` is half. dW2 reads the activation and dY (2.8e-3 + 0.7e-3 + 0.7e-3), dx and dW1 come after two
// roundings more. The router's gradient is a difference of products, so that its error is larger than theirs.
// bf16: 2^-9 at a handful of places.
Bounds bounds_of(const PrecisionSpec& p) {
    if (p.recipe == Recipe::bf16) return {2e-5, 3e-5, 3e-5, 2e-5, 5e-5};
    // E5M2 keeps one bit less: four times the error for each of the two gradients
    if (p.fp8_format == Fp8Format::hybrid) return {2.5e-3, 7e-3, 7e-3, 4e-3, 1.2e-2};
    return {2.5e-3, 4e-3, 4e-3, 3e-3, 8e-3};
}

void expect_close(const LayerCase& c, const std::string& what) {
    LayerCase exact = c;
    exact.precision = {};
    exact.precision.recipe = Recipe::fp32;
    exact.recompute = {};
    const auto got = test::run_block(c), wanted = test::run_block(exact);
    const Bounds bounds = bounds_of(c.precision);
    for (size_t r = 0; r < got.size(); ++r) {
        EXPECT_EQ(got[r].status, 0);
        EXPECT_EQ(got[r].in_use, 0) << what;
        EXPECT_LE(difference(output(got[r]), output(wanted[r])), bounds.output) << what << ": y, rank " << r;
        EXPECT_LE(difference(input_gradient(got[r]), input_gradient(wanted[r])), bounds.dx)
            << what << ": dx, rank " << r;
        for (const auto& [name, gradient] : got[r].gradients) {
            const double bound = name.find("router") != std::string::npos ? bounds.router
                                 : name.find("fc2") != std::string::npos  ? bounds.dw2
                                                                          : bounds.dw1;
            EXPECT_LE(difference(gradient, wanted[r].gradients.at(name)), bound)
                << what << ": " << name << ", rank " << r;
        }
    }
}

void expect_same_bits(const LayerCase& a, const LayerCase& b, const std::string& what) {
    SCOPED_TRACE(what);
    expect_same_results(test::run_block(a), test::run_block(b));
}

// ---- against fp32

TEST(Flows, RoutedExpertsAgainstFp32) {
    for (Recipe recipe : kRecipes) expect_close(LayerCase::of(recipe), std::string(recipe_name(recipe)));
}

// 40 tokens: no multiple of 32 or 128, as a last batch may be.
TEST(Flows, SharedExpertAgainstFp32) {
    for (Recipe recipe : kRecipes) {
        LayerCase c = LayerCase::of(recipe);
        c.model.seq_length = 8;
        c.tokens = {40};
        c.moe.moe_shared_expert_intermediate_size = 256;
        expect_close(c, std::string(recipe_name(recipe)));
        c.moe.moe_shared_expert_gate = true;
        expect_close(c, std::string(recipe_name(recipe)) + ", gated");
    }
}

TEST(Flows, DenseFfnAgainstFp32) {
    for (Recipe recipe : kRecipes) {
        for (int64_t tokens : {64, 200}) {
            LayerCase c = LayerCase::of(recipe);
            c.model.seq_length = 8;
            c.tokens = {tokens};
            c.model.moe_layer_freq = {0};
            expect_close(c, std::string(recipe_name(recipe)));
        }
    }
}

TEST(Flows, TwoRanksUnevenAndEmpty) {
    for (Recipe recipe : kRecipes) {
        for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{48, 16}, {0, 32}}) {
            LayerCase c = LayerCase::of(recipe);
            c.tokens = tokens;
            c.moe.num_experts = 6;
            c.moe.moe_router_topk = 3;
            c.moe.moe_shared_expert_intermediate_size = 128;
            c.moe.moe_combine_order = CombineOrder::invariant;
            expect_close(c, std::string(recipe_name(recipe)));
        }
    }
}

TEST(Flows, OnlyRoutedExpertsClampIfTheModelSaysSo) {
    const auto output = [](int routed, int64_t shared, double limit, bool routed_only) {
        LayerCase c = LayerCase::of(Recipe::bf16);
        c.model.moe_layer_freq = {routed};
        c.model.glu.activation_func_clamp_value = limit;
        c.model.glu.activation_func_clamp_routed_only = routed_only;
        c.moe.moe_shared_expert_intermediate_size = shared;
        return test::run_block(c)[0].y;
    };
    EXPECT_TRUE(output(0, 0, 0.01, true) == output(0, 0, 0, false));
    EXPECT_FALSE(output(0, 0, 0.01, false) == output(0, 0, 0, false));
    EXPECT_TRUE(output(1, 0, 0.01, true) == output(1, 0, 0.01, false));
    EXPECT_FALSE(output(1, 0, 0.01, true) == output(1, 0, 0, false));
    EXPECT_FALSE(output(1, 128, 0.01, true) == output(1, 128, 0.01, false));
}

// The same micro-batch twice: main gradients are exactly twice those of one, whatever they held before.
TEST(Flows, SecondMicroBatchAddsItsGradients) {
    for (Recipe recipe : kRecipes) {
        LayerCase c = LayerCase::of(recipe);
        c.tokens = {32};
        c.model.attention = c.model.add_qkv_bias = c.model.qk_layernorm = true;
        c.model.num_layers = 2;
        c.model.moe_layer_freq = {0, 1};
        c.model.untie_embeddings_and_output_weights = false;
        if (recipe == Recipe::fp8_tensorwise)  // the dense layer's delayed scale moves between steps
            c.model.moe_layer_freq = {1, 1};
        run_thread_ranks(1, 60, [&](ProcessGroup& group) {
            test::ModelFixture model(group, c);
            const LayerResult once = model.step();
            const LayerResult twice = model.step(0, Gradient::accumulate);
            for (const auto& [name, gradient] : once.gradients) {
                std::vector<double> doubled = gradient;
                for (double& g : doubled) g *= 2;
                EXPECT_LE(test::nmse(twice.gradients.at(name), doubled), 1e-13)
                    << recipe_name(recipe) << ": " << name;
            }
        });
    }
}

// The backward is linear and scales are powers of two: gradients of 2^-70 (1e-21) have the bits of those of
// 1, as a loss has that is divided by very many tokens.
TEST(Flows, SmallGradientsHaveTheBitsOfLargeOnes) {
    constexpr double kSmall = 0x1.0p-70;
    for (Recipe recipe : kRecipes) {
        LayerCase c = LayerCase::of(recipe);
        c.tokens = {48, 16};
        c.moe.moe_shared_expert_intermediate_size = 128;
        const std::vector<LayerResult> large = run_block(c);
        c.gradient_size = kSmall;
        const std::vector<LayerResult> small = run_block(c);
        for (size_t r = 0; r < large.size(); ++r) {
            auto expect_scaled = [&](const std::vector<double>& got, std::vector<double> want,
                                     const std::string& name) {
                for (double& value : want) value *= kSmall;
                EXPECT_EQ(got, want) << recipe_name(recipe) << ": " << name;
            };
            expect_scaled(small[r].dx, large[r].dx, "dx");
            for (const auto& [name, gradient] : large[r].gradients)
                expect_scaled(small[r].gradients.at(name), gradient, name);
        }
    }
}

// Delayed scaling: what a step saw that was not applied (rows overflowed) leaves no trace in the scale of
// later steps.
TEST(Flows, ARedoneStepLeavesNoMaximum) {
    LayerCase c = LayerCase::of(Recipe::fp8_tensorwise);
    c.tokens = {16};
    c.model.moe_layer_freq = {0};
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        auto last_output = [&](bool failed_first) {
            test::RankFixture rank(group, c);
            ParameterStore store(rank.ops, c.seed);
            const TransformerBlock block(store, rank.poison, c.block_spec(0, 1));
            Parameter& gamma = store.all().back();
            Context ctx = rank.context();
            test::HostTensor x(DType::bf16, {16, 128}), y(DType::bf16, {16, 128});
            test::fill_bf16_normal(x, 1, 1.0);
            auto step = [&](double gain, int32_t status) {
                ArenaScope scope(rank.saved);
                test::fill(gamma.master, [&](int64_t) { return gain; });
                block.begin_step(ctx);
                BlockSaved saved;
                block.forward(ctx, x, saved, y);
                rank.status.as<int32_t>()[0] = status;
                test::end_step(block, ctx, rank.step_number);
                rank.status.as<int32_t>()[0] = 0;
            };
            if (failed_first) step(1000.0, 1);
            step(1.0, 0);
            step(1.0, 0);
            return y.bytes();
        };
        EXPECT_EQ(last_output(true), last_output(false));
    });
}

// ---- casts, transposes, bytes

TEST(Flows, CastsPerMoeLayer) {
    const std::map<Recipe, int64_t> wanted{{Recipe::bf16, 0},          {Recipe::fp8_flow, 1},
                                           {Recipe::fp8_blockwise, 4}, {Recipe::fp8_tensorwise, 4},
                                           {Recipe::fp8_rowwise, 4},   {Recipe::mxfp8, 4}};
    for (const auto& [recipe, casts] : wanted) {
        const LayerResult r = test::run_block(LayerCase::of(recipe))[0];
        EXPECT_EQ(r.casts, casts) << recipe_name(recipe);
        EXPECT_EQ(r.calls("transpose_fp8"), recipe == Recipe::fp8_flow ? 4 : 0) << recipe_name(recipe);
        EXPECT_EQ(r.calls("dequantize"), 0) << recipe_name(recipe);
    }
}

TEST(Flows, CastsOfTheFlowsSwitches) {
    struct {
        const char* name;
        void (*set)(PrecisionSpec&);
        int64_t casts, transposes;
    } const cases[] = {
        {"norm and quantise apart", [](PrecisionSpec& p) { p.moe_norm_quantize_fusion = false; }, 2, 4},
        {"quantise after the wire", [](PrecisionSpec& p) { p.moe_quantize_before_dispatch = false; }, 2, 4},
        {"activation and quantise apart", [](PrecisionSpec& p) { p.moe_act_quantize_fusion = false; }, 3, 4},
        {"double quantisation", [](PrecisionSpec& p) { p.moe_scaling_aware_transpose = false; }, 5, 0},
        {"permute and pad apart", [](PrecisionSpec& p) { p.moe_permute_padding_for_fp8 = false; }, 1, 4},
        {"bf16 weight gradients", [](PrecisionSpec& p) { p.fp8_wgrad = false; }, 5, 0},
    };
    for (const auto& test_case : cases) {
        LayerCase c = LayerCase::of(Recipe::fp8_flow);
        test_case.set(c.precision);
        const LayerResult r = test::run_block(c)[0];
        EXPECT_EQ(r.casts, test_case.casts) << test_case.name;
        EXPECT_EQ(r.calls("transpose_fp8"), test_case.transposes) << test_case.name;
    }
}

// A shared expert reuses the norm's rows and the one cast of dY.
TEST(Flows, SharedExpertAddsNoCastToTheFlow) {
    LayerCase c = LayerCase::of(Recipe::fp8_flow);
    c.moe.moe_shared_expert_intermediate_size = 128;
    EXPECT_EQ(test::run_block(c)[0].casts, 1);
}

TEST(Flows, WireBytes) {
    constexpr int64_t kHidden = 128;
    struct Leg {
        Recipe recipe;
        ScaleFormat scales;
        int64_t dispatch_row;
    };
    for (const CombineOrder order : {CombineOrder::rank, CombineOrder::invariant}) {
        for (const Leg& leg : {Leg{Recipe::bf16, ScaleFormat::pow2, 2 * kHidden},
                               Leg{Recipe::fp8_blockwise, ScaleFormat::pow2, 2 * kHidden},
                               Leg{Recipe::fp8_flow, ScaleFormat::pow2, kHidden + kHidden / 128},
                               Leg{Recipe::fp8_flow, ScaleFormat::fp32, kHidden + 4 * kHidden / 128}}) {
            LayerCase c = LayerCase::of(leg.recipe);
            c.precision.scale_format = leg.scales;
            c.precision.moe_scaling_aware_transpose = leg.scales == ScaleFormat::pow2;
            c.moe.num_experts = 6;
            c.moe.moe_router_topk = 3;
            c.moe.moe_combine_order = order;
            c.tokens = {48, 16};
            const auto results = test::run_block(c);
            // choices[r][g], pairs[r][g]: (token, k) and distinct tokens that rank r's tokens send to rank g
            int64_t choices[2][2] = {}, pairs[2][2] = {};
            for (int64_t r = 0; r < 2; ++r) {
                const int64_t tokens = c.tokens[static_cast<size_t>(r)];
                const auto ids =
                    forced_assignment({.tokens = c.slots(), .rank = r, .num_experts = 6, .topk = 3});
                for (int64_t t = 0; t < tokens; ++t) {
                    bool goes[2] = {};
                    for (int64_t k = 0; k < 3; ++k) {
                        const int host = ids[static_cast<size_t>(3 * t + k)] / 3;
                        ++choices[r][host];
                        goes[host] = true;
                    }
                    for (int g = 0; g < 2; ++g) pairs[r][g] += goes[g];
                }
            }
            for (int64_t r = 0; r < 2; ++r) {
                const WireBytes& wire = results[static_cast<size_t>(r)].wire;
                const int64_t other = 1 - r;
                // forward and backward: rows out to their experts
                EXPECT_EQ(wire.dispatch, static_cast<double>(2 * pairs[r][other] * leg.dispatch_row));
                // forward and backward: BF16 sums (or single rows) to their owner; backward: one fp32 per
                // choice
                const int64_t rows = order == CombineOrder::rank ? pairs[other][r] : choices[other][r];
                EXPECT_EQ(wire.combine, static_cast<double>(2 * rows * 2 * kHidden + 4 * choices[other][r]));
                EXPECT_EQ(wire.routing, static_cast<double>(c.slots() * 3 * (4 + 4)));
                EXPECT_EQ(results[static_cast<size_t>(r)].dispatches, 2);
                EXPECT_EQ(results[static_cast<size_t>(r)].combines, 2);
            }
            ASSERT_GT(pairs[0][1] + pairs[1][0], 0);
        }
    }
}

// ---- switches

TEST(Flows, UnfusedPermuteAndPadGivesTheSameBytes) {
    for (bool free_scales : {false, true}) {
        LayerCase fused = LayerCase::of(Recipe::fp8_flow);
        fused.tokens = {48, 16};
        if (free_scales) {
            fused.precision.scale_format = ScaleFormat::fp32;
            fused.precision.moe_scaling_aware_transpose = false;
        }
        for (bool early : {true, false}) {
            fused.precision.moe_quantize_before_dispatch = early;
            LayerCase unfused = fused;
            unfused.precision.moe_permute_padding_for_fp8 = false;
            expect_same_bits(fused, unfused, early ? "FP8 wire" : "BF16 wire");
            fused.precision.moe_apply_probs_in = unfused.precision.moe_apply_probs_in = ProbsIn::combine;
            expect_same_bits(fused, unfused, "merging weights");
            fused.precision.moe_apply_probs_in = ProbsIn::swiglu;
        }
    }
}

TEST(Flows, NormAndQuantiseApartStayWithinBounds) {
    LayerCase c = LayerCase::of(Recipe::fp8_flow);
    c.precision.moe_norm_quantize_fusion = false;
    expect_close(c, "norm and quantise apart");
}

TEST(Flows, SwitchesStayWithinBounds) {
    for (bool shared : {false, true}) {
        for (int off = 0; off < 6; ++off) {
            LayerCase c = LayerCase::of(Recipe::fp8_flow);
            c.tokens = {64, 32};  // the bounds are of means: 16 tokens may miss them
            c.moe.moe_shared_expert_intermediate_size = shared ? 128 : 0;
            if (off == 0) c.precision.moe_act_quantize_fusion = false;
            if (off == 1) c.precision.moe_quantize_before_dispatch = false;
            if (off == 2) c.precision.moe_scaling_aware_transpose = false;
            if (off == 3 || off == 4) {
                c.precision.moe_scaling_aware_transpose = false;
                c.precision.scale_format = ScaleFormat::fp32;
                c.precision.moe_act_quantize_fusion = off == 4;
            }
            if (off == 5) c.precision.fp8_wgrad = false;
            expect_close(c, "switch " + std::to_string(off));
        }
    }
}

// The probability in combine: against the same exact layer, for every recipe, and through the ablations.
TEST(Flows, MergingWeightsStayWithinBounds) {
    for (Recipe recipe : kRecipes) {
        for (int option = 0; option < 4; ++option) {
            LayerCase c = LayerCase::of(recipe);
            c.precision.moe_apply_probs_in = ProbsIn::combine;
            c.tokens = {64, 32};
            c.moe.moe_shared_expert_intermediate_size = 128;
            if (option == 1)
                c.recompute = {.recompute_granularity = RecomputeGranularity::selective, .moe_expert = true};
            if (option == 2) c.moe.moe_combine_order = CombineOrder::invariant;
            if (option == 3) {
                if (recipe != Recipe::fp8_flow) continue;
                c.precision.moe_act_quantize_fusion = c.precision.moe_permute_padding_for_fp8 = false;
            }
            expect_close(c, fmt::format("{}, merging weights, option {}", recipe_name(recipe), option));
        }
    }
}

// What combine costs: a recipe that casts quantises the activation again, as under moe_act.
TEST(Flows, CastsWithMergingWeights) {
    for (Recipe recipe : kRecipes) {
        LayerCase c = LayerCase::of(recipe);
        c.precision.moe_apply_probs_in = ProbsIn::combine;
        const int64_t casts = recipe == Recipe::bf16 ? 0 : recipe == Recipe::fp8_flow ? 1 : 5;
        EXPECT_EQ(test::run_block(c)[0].casts, casts) << recipe_name(recipe);
    }
}

TEST(Flows, OptionsOfTheCastingRecipes) {
    for (Recipe recipe : {Recipe::fp8_tensorwise, Recipe::fp8_blockwise, Recipe::fp8_rowwise, Recipe::mxfp8,
                          Recipe::fp8_flow}) {
        for (int option = 0; option < 4; ++option) {
            LayerCase c = LayerCase::of(recipe);
            c.moe.moe_shared_expert_intermediate_size = 128;
            if (option == 0) c.precision.fp8_format = Fp8Format::hybrid;
            if (option == 1) c.precision.fp8_wgrad = false;
            if (option == 2 && recipe != Recipe::fp8_flow) c.precision.scale_format = ScaleFormat::fp32;
            if (option == 3) {
                c.precision.fp8_format = Fp8Format::hybrid;
                c.precision.fp8_wgrad = false;
                c.precision.moe_quantize_before_dispatch = recipe != Recipe::fp8_flow;
            }
            expect_close(c, std::string(recipe_name(recipe)) + ", option " + std::to_string(option));
        }
    }
}

// Gradients in E5M2 wherever a gradient is quantised: the forward is the E4M3 one, the backward is not.
TEST(Flows, HybridChangesTheBackwardOnly) {
    for (bool early : {true, false}) {
        LayerCase e4m3 = LayerCase::of(Recipe::fp8_flow);
        e4m3.model.moe_layer_freq = {0};
        e4m3.precision.moe_quantize_before_dispatch = early;
        LayerCase hybrid = e4m3;
        hybrid.precision.fp8_format = Fp8Format::hybrid;
        const LayerResult a = test::run_block(e4m3)[0], b = test::run_block(hybrid)[0];
        EXPECT_TRUE(a.y == b.y);
        const std::string w2 = "layers.0.mlp.linear_fc2.weight";  // its gradient reads dY as quantised
        EXPECT_GT(difference(a.gradients.at(w2), b.gradients.at(w2)), 5e-4) << early;
    }
}

// Weight gradients against those from the same FP8 values without a second quantisation (fp8_wgrad: false
// reads them dequantised).
TEST(Flows, TransposeAddsAnErrorOnlyWithFreeScales) {
    auto w1_gradient = [](bool aware, ScaleFormat scales, bool fp8_wgrad) {
        LayerCase c = LayerCase::of(Recipe::fp8_flow);
        c.precision.moe_scaling_aware_transpose = aware;
        c.precision.scale_format = scales;
        c.precision.fp8_wgrad = fp8_wgrad;
        return test::run_block(c)[0].gradients.at("layers.0.moe.experts.linear_fc1.weight");
    };
    const auto exact = w1_gradient(true, ScaleFormat::pow2, false);
    EXPECT_LE(test::nmse(w1_gradient(true, ScaleFormat::pow2, true), exact), 1e-6);   // scaling-aware
    EXPECT_LE(test::nmse(w1_gradient(false, ScaleFormat::pow2, true), exact), 1e-6);  // ties with it
    const auto exact_free = w1_gradient(false, ScaleFormat::fp32, false);
    EXPECT_GE(test::nmse(w1_gradient(false, ScaleFormat::fp32, true), exact_free), 2e-4);
}

// Of the gradient of a dense FFN's W2 [128, 256], the rows that odd tokens own: an odd token's dY is `small`
// times an even one's and lies in columns 64..127, where even tokens have zeros. In the root, against fp32.
double error_of_small_tokens(PrecisionSpec precision, double small) {
    auto gradient = [&](const PrecisionSpec& of) {
        LayerCase c = LayerCase::of(of.recipe);
        c.precision = of;
        c.tokens = {128};
        c.model.moe_layer_freq = {0};
        std::vector<double> result;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) {
            test::RankFixture rank(group, c);
            ParameterStore store(rank.ops, c.seed);
            const TransformerBlock block(store, rank.poison, c.block_spec(0, 1));
            store.allocate_gradients();
            Context ctx = rank.context();
            test::HostTensor x(c.activation(), {128, 128}), dy(c.activation(), {128, 128}),
                y(c.activation(), {128, 128}), dx(c.activation(), {128, 128});
            test::fill_bf16_normal(x, 1, 0.0625);
            test::fill(dy, [&](int64_t i) {
                const bool odd = i / 128 % 2 == 1;
                if (odd != (i % 128 >= 64)) return 0.0;
                const double value = random_normal(2, 0, static_cast<uint64_t>(i));
                return static_cast<double>(
                    to_float(to_bf16(static_cast<float>(odd ? small * value : value))));
            });
            ArenaScope scope(rank.saved);
            block.begin_step(ctx);
            BlockSaved saved;
            block.forward(ctx, x, saved, y);
            block.backward(ctx, dy, saved, dx);
            for (const Parameter& p : store.all())
                if (p.spec.name == "layers.0.mlp.linear_fc2.weight") result = test::to_doubles(p.main_grad);
        });
        result.erase(result.begin(), result.begin() + static_cast<int64_t>(result.size()) / 2);
        return result;
    };
    PrecisionSpec exact;
    exact.recipe = Recipe::fp32;
    return std::sqrt(test::nmse(gradient(precision), gradient(exact)));
}

// The table of docs/numerics/accuracy.md, "What the transpose flushes". The shift reaches 17 octaves: tokens
// of 1e-4 of their tile's largest lose bits, those of 1e-5 most of them. Each other setting keeps what the
// rows hold.
TEST(Flows, SmallTokensOfATileAndTheirCures) {
    constexpr double kSizes[] = {1.0, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8};
    struct {
        const char* name;
        void (*set)(PrecisionSpec&);
        std::vector<double> errors;  // by size
    } const cases[] = {
        {"default", [](PrecisionSpec&) {}, {0.068, 0.068, 0.117, 0.825, 1.0, 1.0}},
        {"moe_scaling_aware_transpose: false",
         [](PrecisionSpec& p) { p.moe_scaling_aware_transpose = false; },
         {0.068, 0.067, 0.068, 0.068, 0.067, 0.068}},
        {"fp8_wgrad: false",
         [](PrecisionSpec& p) { p.fp8_wgrad = false; },
         {0.068, 0.067, 0.068, 0.068, 0.067, 0.068}},
        {"fp8_format: hybrid",
         [](PrecisionSpec& p) { p.fp8_format = Fp8Format::hybrid; },
         {0.080, 0.081, 0.081, 0.082, 0.083, 0.093}},
        {"fp8_blockwise",
         [](PrecisionSpec& p) { p.recipe = Recipe::fp8_blockwise; },
         {0.068, 0.067, 0.068, 0.067, 0.067, 0.068}},
    };
    for (const auto& test_case : cases) {
        PrecisionSpec precision;
        precision.recipe = Recipe::fp8_flow;
        test_case.set(precision);
        for (size_t i = 0; i < std::size(kSizes); ++i)
            EXPECT_NEAR(error_of_small_tokens(precision, kSizes[i]), test_case.errors[i], 0.002)
                << test_case.name << ", " << kSizes[i];
    }
}

TEST(Flows, RowAlignmentDoesNotChangeAResult) {
    const std::map<Recipe, std::vector<int64_t>> legal{{Recipe::bf16, {1, 16, 32}},
                                                       {Recipe::fp8_tensorwise, {16, 32}},
                                                       {Recipe::fp8_rowwise, {16, 32}},
                                                       {Recipe::mxfp8, {32}}};
    for (const auto& [recipe, alignments] : legal) {
        for (int64_t alignment : alignments) {
            LayerCase wide = LayerCase::of(recipe);
            wide.tokens = {48, 16};
            LayerCase narrow = wide;
            narrow.moe.moe_row_alignment = alignment;
            expect_same_bits(wide, narrow,
                             std::string(recipe_name(recipe)) + ", alignment " + std::to_string(alignment));
        }
    }
}

}  // namespace
}  // namespace fp8flow
