// SPDX-License-Identifier: MIT
// Recomputation changes memory and nothing else: for every recipe and every legal set of modules the loss,
// all gradients and the router's statistics keep their bits, on a batch where experts tie; what it costs on
// the wire and saves in memory is what the modes promise.
#include "model/train/trainer.h"
#include "model/train/transformer.h"
#include "tests/support/layers/layer_fixture.h"
#include "tests/support/training.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

namespace fp8flow {
namespace {

using namespace test;

constexpr int64_t kLayers = 2, kTokens = 32, kHidden = 128, kFfn = 128;

LayerCase model_case(Recipe recipe, std::vector<int64_t> tokens = {kTokens}) {
    LayerCase c = LayerCase::of(recipe);
    c.tokens = std::move(tokens);
    c.forced_routing = false;
    c.model.attention = true;
    c.model.num_layers = kLayers;
    c.model.moe_layer_freq = {1, 1};
    c.moe.moe_router_topk = 3;
    c.moe.moe_shared_expert_intermediate_size = 128;
    c.moe.moe_shared_expert_gate = true;
    c.moe.moe_router_load_balancing_type = {BalancingLoss::aux_loss};
    c.moe.moe_aux_loss_coeff = {0.01};
    c.moe.moe_z_loss_coeff = 0.001;
    return c;
}

// Experts 0 and 1, and 2 and 3, have the same router weights: the third choice of every token is a tie.
void make_ties(ModelFixture& model) {
    for (Parameter& p : model.parameters().all()) {
        if (p.spec.name.find("router") == std::string::npos) continue;
        float* rows = p.master.as<float>();
        std::copy_n(rows, kHidden, rows + kHidden);
        std::copy_n(rows + 2 * kHidden, kHidden, rows + 3 * kHidden);
        model.parameters().write_copies(p);
    }
}

std::vector<LayerResult> run(const LayerCase& c) {
    return on_ranks(c, [&](ProcessGroup& group) {
        ModelFixture model(group, c);
        make_ties(model);
        return model.step();
    });
}

RecomputeSpec selective(unsigned bits) {
    RecomputeSpec r;
    r.recompute_granularity = bits == 0 ? RecomputeGranularity::none : RecomputeGranularity::selective;
    r.core_attn = bits & 1;
    r.layernorm = bits & 2;
    r.shared_experts = bits & 4;
    r.moe_act = bits & 8;
    r.moe_expert = bits & 16;
    r.moe = bits & 32;
    return r;
}
RecomputeSpec full() { return {.recompute_granularity = RecomputeGranularity::full}; }
std::string text(const RecomputeSpec& r) {
    return fmt::format("granularity {} core_attn {} layernorm {} shared {} act {} expert {} moe {}",
                       static_cast<int>(r.recompute_granularity), r.core_attn, r.layernorm, r.shared_experts,
                       r.moe_act, r.moe_expert, r.moe);
}

// Every set that the configuration accepts, and full.
std::vector<RecomputeSpec> legal_sets(const LayerCase& c) {
    Config config;
    config.model = c.model;
    config.moe = c.moe;
    config.precision = c.precision;
    EXPECT_NO_THROW(check_config(config));
    std::vector<RecomputeSpec> sets{full()};
    for (unsigned bits = 1; bits < 64; ++bits) {
        config.recompute = selective(bits);
        if (error_or_none(ExitCode::usage, [&] { check_config(config); }).empty())
            sets.push_back(config.recompute);
    }
    return sets;
}

class RecomputeOf : public testing::TestWithParam<Recipe> {};

TEST_P(RecomputeOf, EveryLegalSetKeepsEveryBit) {
    LayerCase c = model_case(GetParam());
    const LayerResult plain = run(c)[0];
    EXPECT_GT(plain.loss, 0);
    EXPECT_EQ(plain.status, 0);
    const int64_t choices =
        std::accumulate(plain.router_counts[0].begin(), plain.router_counts[0].end(), int64_t{0});
    EXPECT_EQ(choices, kTokens * c.moe.moe_router_topk);
    const std::vector<RecomputeSpec> sets = legal_sets(c);
    EXPECT_GE(sets.size(), 28u);
    for (const RecomputeSpec& set : sets) {
        SCOPED_TRACE(text(set));
        c.recompute = set;
        const LayerResult result = run(c)[0];
        expect_same_result(result, plain);
        const bool again = set.moe || set.recompute_granularity == RecomputeGranularity::full;
        EXPECT_EQ(result.dispatches, (again ? 3 : 2) * kLayers);
        EXPECT_EQ(result.combines, (again ? 3 : 2) * kLayers);
        if (HasFailure()) return;
    }
}

// With merging weights too; the backward makes the activation again in every mode.
TEST_P(RecomputeOf, MergingWeightsKeepEveryBit) {
    LayerCase c = model_case(GetParam());
    c.precision.moe_apply_probs_in = ProbsIn::combine;
    const LayerResult plain = run(c)[0];
    for (const RecomputeSpec& set :
         {selective(8), selective(16), selective(32), selective(1 | 2 | 4 | 16), full()}) {
        SCOPED_TRACE(text(set));
        c.recompute = set;
        expect_same_result(run(c)[0], plain);
    }
}

RecomputeSpec kept(SavedRows rows, unsigned bits = 16) {
    RecomputeSpec r = selective(bits);
    r.saved_rows = rows;
    return r;
}

// Rows kept sorted, once, or not at all: the same bits on 1, 2 and 4 ranks of unequal tokens, in both combine
// orders, with merging weights, FP32 scales on the wire and norms that are made again.
TEST(SavedRowsOf, EverySettingKeepsEveryBit) {
    const std::vector<int64_t> worlds[] = {{kTokens}, {16, 32}, {16, 32, 0, 48}};
    for (const auto& tokens : worlds) {
        for (const CombineOrder order : {CombineOrder::rank, CombineOrder::invariant}) {
            for (const int variant : {0, 1, 2, 3}) {
                if (variant > 0 && tokens.size() != 2) continue;
                LayerCase c = model_case(Recipe::fp8_flow, tokens);
                c.moe.moe_combine_order = order;
                if (variant == 1) c.precision.moe_apply_probs_in = ProbsIn::combine;
                if (variant == 2) c.precision.scale_format = ScaleFormat::fp32;
                if (variant == 2) c.precision.moe_scaling_aware_transpose = false;
                const unsigned bits = variant == 3 ? 16 | 2 | 4 : 16;
                c.recompute = selective(bits);
                const auto sorted = run(c);
                for (const SavedRows rows : {SavedRows::received, SavedRows::none}) {
                    SCOPED_TRACE(fmt::format("{} ranks, order {}, variant {}, rows {}", tokens.size(),
                                             static_cast<int>(order), variant, static_cast<int>(rows)));
                    c.recompute = kept(rows, bits);
                    const auto results = run(c);
                    expect_same_results(results, sorted);
                    // forward and backward send the same rows out
                    const double times = rows == SavedRows::none ? 1.5 : 1;
                    for (size_t r = 0; r < tokens.size(); ++r) {
                        EXPECT_EQ(results[r].wire.dispatch, times * sorted[r].wire.dispatch) << r;
                        EXPECT_EQ(results[r].casts, sorted[r].casts) << r;
                    }
                    if (HasFailure()) return;
                }
            }
        }
    }
}

// Side stream and late main stream: what the backward makes of kept rows is waited for.
TEST(SavedRowsOf, SchedulesKeepEveryBit) {
    LayerCase c = model_case(Recipe::fp8_flow, {16, 32});
    c.recompute = selective(16);
    const auto sorted = run(c);
    for (const SavedRows rows : {SavedRows::received, SavedRows::none}) {
        SCOPED_TRACE(static_cast<int>(rows));
        c.recompute = kept(rows);
        for (const bool late : {false, true}) {
            c.schedule = {.moe_shared_expert_overlap = true, .delay_wgrad_compute = true};
            c.main_is_late = late;
            expect_same_results(run(c), sorted);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Recipes, RecomputeOf, testing::ValuesIn(kRecipes),
                         [](const auto& info) { return std::string(recipe_name(info.param)); });

TEST(Recompute, WireBytesOnTwoRanks) {
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        LayerCase c = model_case(recipe, {16, 32});
        const auto plain = run(c);
        for (const RecomputeSpec& set : {selective(16), selective(8 | 4 | 2 | 1), selective(32), full()}) {
            SCOPED_TRACE(text(set));
            c.recompute = set;
            const auto results = run(c);
            expect_same_results(results, plain);
            const bool again = set.moe || set.recompute_granularity == RecomputeGranularity::full;
            for (size_t r = 0; r < 2; ++r) {
                const WireBytes &got = results[r].wire, &base = plain[r].wire;
                ASSERT_GT(base.dispatch, 0);
                // forward and backward send the same rows out, so one more dispatch is half as much again
                EXPECT_EQ(got.dispatch, (again ? 1.5 : 1.0) * base.dispatch);
                EXPECT_EQ(got.routing, (again ? 2 : 1) * base.routing);
                EXPECT_GE(got.combine, base.combine);
                EXPECT_EQ(got.combine > base.combine, again);
            }
        }
    }
}

double row_bytes(const LayerResult& result) {
    double bytes = 0;
    for (const auto& [kind, per_row] : result.row_bytes) bytes += per_row;
    return bytes;
}

// Per routed row: the received row, fc1's output, the activation, and 8 bytes of the plan (source row,
// probability).
TEST(Recompute, SavedBytesPerRoutedRow) {
    constexpr double kScale = 1 + 4.0 / 128;  // a code and its share of a 1x128 scale
    struct {
        Recipe recipe;
        double x, h, a, x_alone;  // x_alone: what moe_expert keeps
    } const cases[] = {
        {Recipe::bf16, 2.0 * kHidden, 4.0 * kFfn, 2.0 * kFfn, 2.0 * kHidden},
        {Recipe::fp8_flow, kScale * kHidden, 4.0 * kFfn, kScale * kFfn, kScale * kHidden},
        {Recipe::fp8_blockwise, kScale * kHidden, 4.0 * kFfn, kScale * kFfn, 2.0 * kHidden},
    };
    for (const auto& kept : cases) {
        auto bytes = [&](const RecomputeSpec& set) {
            LayerCase c = model_case(kept.recipe);
            c.recompute = set;
            return row_bytes(run(c)[0]);
        };
        EXPECT_DOUBLE_EQ(bytes(selective(0)), kept.x + kept.h + kept.a + 8);
        EXPECT_DOUBLE_EQ(bytes(selective(8)), kept.x + kept.h + 8);  // moe_act
        EXPECT_DOUBLE_EQ(bytes(selective(16)), kept.x_alone + 8);    // moe_expert
        EXPECT_DOUBLE_EQ(bytes(selective(3)), kept.x + kept.h + kept.a + 8);
    }
}

// Neither keeps expert-sorted rows; received: every row that may arrive, with a byte for each 128 values.
TEST(SavedRowsOf, SavedBytes) {
    const std::vector<int64_t> tokens = {kTokens, kTokens};
    const auto result_of = [&](SavedRows rows) {
        LayerCase c = model_case(Recipe::fp8_flow, tokens);
        c.recompute = kept(rows);
        return run(c)[0];
    };
    const LayerResult sorted = result_of(SavedRows::sorted), received = result_of(SavedRows::received),
                      none = result_of(SavedRows::none);
    EXPECT_DOUBLE_EQ(row_bytes(received), 8);
    EXPECT_DOUBLE_EQ(row_bytes(none), 8);
    EXPECT_EQ(none.saved_bytes, sorted.saved_bytes);
    // 64 bytes of scales in a slot of 256
    EXPECT_EQ(received.saved_bytes - none.saved_bytes, kLayers * (2 * kTokens * kHidden + 256));
}

TEST(Recompute, SavedBytesPerToken) {
    auto saved = [&](const RecomputeSpec& set) {
        LayerCase c = model_case(Recipe::fp8_flow);
        c.recompute = set;
        return run(c)[0].saved_bytes;
    };
    const int64_t none = saved(selective(0));
    const int64_t plain_rows = kTokens * kHidden * 2;
    // core_attn: the output of attention and its log-sum-exp
    EXPECT_EQ(none - saved(selective(1)), kLayers * (plain_rows + kTokens * 4 * 4));
    // layernorm: two BF16 outputs, and the FP8 rows with their scales (32 bytes in a slot of 256)
    EXPECT_EQ(none - saved(selective(2)), kLayers * (2 * plain_rows + kTokens * kHidden + 256));
    EXPECT_LT(saved(selective(4)), none);
    EXPECT_LT(saved(selective(32)), saved(selective(4)));
    EXPECT_LT(saved(full()), saved(selective(32)));
}

// Casts of a MoE layer when parts of it run twice: the flow quantises inside its operators, so it pays none;
// the casting recipes quantise the activation (moe_act) and the received rows (moe_expert) again.
TEST(Recompute, CastsPerMoeLayer) {
    for (Recipe recipe : kRecipes) {
        const int64_t base = recipe == Recipe::bf16 ? 0 : recipe == Recipe::fp8_flow ? 1 : 4;
        const int64_t again = base == 4 ? 1 : 0;
        SCOPED_TRACE(recipe_name(recipe));
        auto casts = [&](const RecomputeSpec& set) {
            LayerCase c = LayerCase::of(recipe);
            c.recompute = set;
            return run_block(c)[0].casts;
        };
        EXPECT_EQ(casts(selective(0)), base);
        EXPECT_EQ(casts(selective(2)), base);               // layernorm
        EXPECT_EQ(casts(selective(8)), base + again);       // moe_act
        EXPECT_EQ(casts(selective(16)), base + 2 * again);  // moe_expert
        EXPECT_EQ(casts(selective(32)), base + 2 * again);  // moe
        EXPECT_EQ(casts(full()), base + 2 * again);
    }
}

// The second step finds all memory in place, also after an evaluation.
TEST(Recompute, ASecondStepAllocatesNothing) {
    const std::string selective = "recompute_granularity=selective";
    for (const Texts& recompute : {Texts{"recompute_granularity=full"},
                                   {selective, "recompute_modules=[core_attn, layernorm, moe_expert]"},
                                   {selective, "recompute_modules=[moe]"},
                                   {selective, "recompute_modules=[moe_expert]", "saved_rows=received"},
                                   {selective, "recompute_modules=[moe_expert]", "saved_rows=none"}}) {
        SCOPED_TRACE(recompute.back());
        const Texts keys = {"expert_model_parallel_size=2", "moe_layer_freq=[1, 1]"};
        const Config config = test_config(Recipe::fp8_flow, with(keys, recompute));
        on_trainers(config, 2, [&](ReferenceTrainer& trainer, ProcessGroup&) {
            trainer.run_step();
            const int64_t warm = trainer.allocations();
            EXPECT_GT(warm, 0);
            trainer.run_step();
            EXPECT_EQ(trainer.allocations(), warm);
            trainer.evaluate(1);
            trainer.run_step();
            EXPECT_EQ(trainer.allocations(), warm) << "after an evaluation";
        });
    }
}

}  // namespace
}  // namespace fp8flow
