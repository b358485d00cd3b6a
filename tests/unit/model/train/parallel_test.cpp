// SPDX-License-Identifier: MIT
// One global batch on 1 to 4 ranks: the number of ranks must not change what is computed. With the invariant
// order the bits of the forward stay; gradients move by the order of their sums alone between numbers of
// ranks, and not at all between numbers that share the experts (invariant_order_test.cpp). With the rank
// order all moves by one BF16 rounding per rank.
#include "model/train/trainer.h"

#include "tests/support/global_batch.h"
#include "tests/support/training.h"

#include <fmt/ranges.h>

namespace fp8flow {
namespace {

using namespace test;

struct Layout {
    int ranks, expert_ranks;
};
constexpr Layout kLayouts[] = {{2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}};

// A MoE block with attention and a shared expert, 8 sequences of 32 tokens split over the ranks.
LayerCase block_case(Recipe recipe, const Layout& layout, CombineOrder order) {
    LayerCase c = LayerCase::of(recipe);
    c.model.attention = true;
    c.model.seq_length = 32;
    c.model.init_method_std = 0.02;  // as in training: the residual stream carries most of the signal
    c.moe.moe_shared_expert_intermediate_size = 128;
    c.moe.moe_combine_order = order;
    c.forced_routing = false;
    c.tokens.assign(static_cast<size_t>(layout.ranks), 8 * 32 / layout.ranks);
    return c;
}

void expect_gradients_within(const GlobalResult& run, const GlobalResult& wanted, double bound) {
    for (const auto& [name, values] : wanted.values)
        if (name.starts_with("gradient ")) {
            EXPECT_LE(run.distance(wanted, name), bound) << name;
        }
}

TEST(Parallel, InvariantOrderKeepsEveryBitOfForwardAndInputGradient) {
    for (Recipe recipe : kInvariantRecipes) {
        for (const bool balanced : {false, true}) {
            const auto run_on = [&](const Layout& layout) {
                LayerCase c = block_case(recipe, layout, CombineOrder::invariant);
                if (balanced) {
                    c.moe.moe_router_load_balancing_type = {BalancingLoss::global_aux_loss};
                    c.moe.moe_aux_loss_coeff = {0.5};
                    c.moe.moe_global_aux_loss_gradient = GlobalLossGradient::sum;
                }
                return run_global_batch(c, layout.expert_ranks);
            };
            const GlobalResult one = run_on({1, 1});
            GlobalResult apart;  // on as many ranks, each with all experts
            for (const Layout& layout : kLayouts) {
                SCOPED_TRACE(fmt::format("{}, {}balanced, {} ranks, {} share the experts",
                                         recipe_name(recipe), balanced ? "" : "not ", layout.ranks,
                                         layout.expert_ranks));
                const GlobalResult result = run_on(layout);
                EXPECT_EQ(result.counts, one.counts);
                EXPECT_EQ(result.distance(one, "y"), 0);
                EXPECT_EQ(result.distance(one, "dx"), 0);
                expect_gradients_within(result, one, 1e-5);
                if (layout.expert_ranks == 1)
                    apart = result;
                else
                    expect_same_bits(result.values, apart.values);
            }
        }
    }
}

TEST(Parallel, RankOrderIsWithinARounding) {
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        const GlobalResult one = run_global_batch(block_case(recipe, {1, 1}, CombineOrder::rank), 1);
        for (const Layout& layout : kLayouts) {
            SCOPED_TRACE(fmt::format("{}, {} ranks, {} share the experts", recipe_name(recipe), layout.ranks,
                                     layout.expert_ranks));
            const GlobalResult run =
                run_global_batch(block_case(recipe, layout, CombineOrder::rank), layout.expert_ranks);
            EXPECT_LE(run.distance(one, "y"), 1e-3);
            EXPECT_LE(run.distance(one, "dx"), 1e-3);
            for (const auto& [name, values] : one.values) {
                if (!name.starts_with("gradient ")) continue;
                // Gains and the weights in front of the layer see the BF16 roundings of the combined gradient
                // undiluted by a residual.
                const bool in_front = name.find("layernorm") != std::string::npos ||
                                      name.find("linear_qkv") != std::string::npos;
                EXPECT_LE(run.distance(one, name), in_front ? 2.5e-3 : 1e-3) << name;
            }
        }
    }
}

// ---- the edges: who holds which tokens, which experts, how many
struct Scenario {
    const char* name;
    std::vector<int64_t> tokens;  // per rank
    int expert_ranks;
    int64_t experts, topk;
    int64_t favourite = -1;
};
const std::vector<Scenario> kScenarios = {
    {"one token in all", {1, 0}, 2, 4, 2},
    {"rank 0 without tokens", {0, 65}, 2, 4, 2},
    {"middle rank without tokens", {31, 0, 64, 1}, 4, 4, 2},
    {"all but the last rank without tokens", {0, 0, 0, 129}, 4, 8, 2},
    {"uneven, replicated experts", {127, 1, 128, 0}, 2, 4, 2},
    {"all tokens to the first expert", {33, 31}, 2, 4, 1, 0},
    {"all tokens to the last expert", {33, 31}, 2, 4, 1, 3},
    {"all tokens prefer one expert, top 2", {33, 31, 0, 64}, 4, 4, 2, 2},
    {"top-k = E", {40, 24}, 2, 4, 4},
    {"top-k = E on 4 ranks", {40, 24, 3, 0}, 4, 4, 4},
    {"6 experts on 2 ranks", {50, 14}, 2, 6, 2},
    {"6 experts on 3 ranks", {50, 14, 7}, 3, 6, 3},
    {"3 experts on 3 ranks", {5, 60, 1}, 3, 3, 3},
    {"one expert", {20}, 1, 1, 1},
    {"one expert, two replicas", {20, 44}, 1, 1, 1},
    {"one expert a rank, top 1", {20, 44}, 2, 2, 1},
    {"many experts, few tokens", {2, 1}, 2, 32, 6},
};

// All tokens on one rank, or on theirs: each with all experts, or with its share of them.
enum class Spread { one_rank, experts_replicated, experts_shared };

GlobalResult run_scenario(const Scenario& scenario, Recipe recipe, Spread spread) {
    LayerCase c = LayerCase::of(recipe);
    c.moe.moe_combine_order = CombineOrder::invariant;
    c.moe.num_experts = scenario.experts;
    c.moe.moe_router_topk = scenario.topk;
    c.moe.moe_router_pre_softmax = true;
    c.moe.moe_shared_expert_intermediate_size = 128;
    c.forced_routing = false;
    c.tokens = scenario.tokens;
    if (spread == Spread::one_rank)
        c.tokens = {std::accumulate(scenario.tokens.begin(), scenario.tokens.end(), int64_t{0})};
    return run_global_batch(c, spread == Spread::experts_shared ? scenario.expert_ranks : 1,
                            scenario.favourite);
}

// Forward and backward of every scenario against the same tokens on one rank, and against fp32.
TEST(Parallel, EdgeScenarios) {
    for (const Scenario& scenario : kScenarios) {
        const GlobalResult exact = run_scenario(scenario, Recipe::fp32, Spread::one_rank);
        for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
            SCOPED_TRACE(fmt::format("{}: {}", recipe_name(recipe), scenario.name));
            const GlobalResult one = run_scenario(scenario, recipe, Spread::one_rank);
            const GlobalResult run = run_scenario(scenario, recipe, Spread::experts_shared);
            EXPECT_EQ(run.distance(one, "y"), 0);
            EXPECT_EQ(run.distance(one, "dx"), 0);
            expect_gradients_within(run, one, 1e-5);
            EXPECT_EQ(run.counts, one.counts);
            expect_same_bits(run.values, run_scenario(scenario, recipe, Spread::experts_replicated).values);
            const int64_t tokens =
                std::accumulate(scenario.tokens.begin(), scenario.tokens.end(), int64_t{0});
            EXPECT_EQ(std::accumulate(run.counts.begin(), run.counts.end(), int64_t{0}),
                      tokens * scenario.topk);
            if (scenario.favourite >= 0) {
                EXPECT_EQ(run.counts[static_cast<size_t>(scenario.favourite)], tokens);
            }
            // An expert without tokens has a gradient of exactly zero.
            const std::vector<float>& dw = run.values.at("gradient layers.0.moe.experts.linear_fc2.weight");
            const size_t each = dw.size() / run.counts.size();
            for (size_t e = 0; e < run.counts.size(); ++e)
                if (run.counts[e] == 0) {
                    EXPECT_TRUE(std::all_of(dw.begin() + static_cast<int64_t>(e * each),
                                            dw.begin() + static_cast<int64_t>((e + 1) * each),
                                            [](float g) { return g == 0.0f; }));
                }
            if (run.counts != exact.counts) continue;  // a near tie went the other way
            for (const auto& [name, values] : exact.values) {
                const bool router = name.find("router") != std::string::npos;  // differences of experts
                const double bound = recipe == Recipe::bf16 ? 0.02 : router ? 0.2 : 0.12;
                EXPECT_LE(run.distance(exact, name), bound) << name;
            }
        }
    }
}

// Where the probability multiplies is a matter of rounding. Bars of the loss, relative, over the first four
// steps: FP32 1e-6, BF16 1e-4, FP8 1e-3; measured 0, 2e-5 and 3e-4. A value rounds to 2^-24, 2^-9 and 2^-4,
// and a loss averages over hundreds of them and over all tokens. Later steps compare nothing: with this
// learning rate another order of summation alone (Arithmetic::alternative) moves the loss by 2e-3 at the
// sixth.
TEST(Parallel, SwigluAndCombineTrainAlike) {
    for (Recipe recipe : kRecipesAndFp32) {
        const auto losses = [&](const char* where) {
            return train(test_config(recipe, {fmt::format("precision.moe_apply_probs_in={}", where)}), 1,
                         {.steps = 4})
                .losses();
        };
        const std::vector<double> swiglu = losses("swiglu"), combine = losses("combine");
        const bool exact = recipe == Recipe::fp32;
        const double bar = exact ? 1e-6 : recipe == Recipe::bf16 ? 1e-4 : 1e-3;
        ASSERT_EQ(swiglu.size(), combine.size());
        for (size_t i = 0; i < swiglu.size(); ++i)
            EXPECT_NEAR(combine[i], swiglu[i], bar * swiglu[i]) << recipe_name(recipe) << ", step " << i;
        if (!exact) {
            EXPECT_NE(combine, swiglu) << recipe_name(recipe) << ": the switch changes nothing";
        }
    }
}

// The whole model through the trainer: three layouts of one global batch.
TEST(Parallel, ModelTrainsTheSameOnEveryNumberOfRanks) {
    for (Recipe recipe : {Recipe::fp32, Recipe::bf16, Recipe::fp8_flow}) {
        std::vector<TrainingRun> runs;
        for (const Layout& layout : {Layout{1, 1}, {2, 2}, {4, 4}, {4, 2}, {4, 1}}) {
            const Config config = test_config(
                recipe,
                {"moe.moe_combine_order=invariant", "moe.moe_router_load_balancing_type=[global_aux_loss]",
                 "moe.moe_global_aux_loss_gradient=sum",
                 fmt::format("training.micro_batch_size={}", 8 / layout.ranks),
                 fmt::format("parallel.expert_model_parallel_size={}", layout.expert_ranks)});
            runs.push_back(train(config, layout.ranks, {.steps = 1}));
            SCOPED_TRACE(fmt::format("{}, {} ranks, {} share the experts", recipe_name(recipe), layout.ranks,
                                     layout.expert_ranks));
            EXPECT_NEAR(runs.back().steps[0].lm_loss, runs[0].steps[0].lm_loss, 1e-6);
            EXPECT_NEAR(runs.back().steps[0].balancing_loss, runs[0].steps[0].balancing_loss, 1e-7);
            EXPECT_EQ(runs.back().steps[0].load[0].cv, runs[0].steps[0].load[0].cv);
            expect_close(runs.back().state, runs[0].state, "gradient ", 1e-5);
        }
    }
}

}  // namespace
}  // namespace fp8flow
