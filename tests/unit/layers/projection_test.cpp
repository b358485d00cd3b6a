// SPDX-License-Identifier: MIT
// The projections of attention in FP8 (precision.fp8_attention_linears) under every recipe that has FP8:
// against products of the dequantised operands; casts and transposes; recomputation, schedules, divided state
// and resumed runs; and that training follows the BF16 projections.
#include "layers/projection.h"
#include "tests/support/checkpoints.h"
#include "tests/support/layers/layer_fixture.h"

#include <fmt/format.h>

namespace fp8flow::test {
namespace {

std::vector<Recipe> fp8_recipes() {
    std::vector<Recipe> recipes(kRecipes.begin(), kRecipes.end());
    std::erase(recipes, Recipe::bf16);
    return recipes;
}

// ---- one projection

std::vector<double> dequantised(Ops& ops, const ScaledTensor& values, const RowGroups& groups) {
    HostTensor plain(DType::f32, values.data.dims, values.data.rank);
    ops.dequantize({.src = values, .groups = groups, .dst = plain});
    return to_doubles(plain);
}

struct Layouts {
    ScaleLayout rows, columns;
};
Layouts layouts_of(Recipe recipe) {
    using enum ScaleLayout;
    switch (recipe) {
        case Recipe::fp8_flow: return {vec128, tile128};
        case Recipe::fp8_blockwise: return {vec128, vec128};
        case Recipe::fp8_tensorwise: return {tensor, tensor};
        case Recipe::fp8_rowwise: return {row, group_row};
        default: return {mx32, mx32};
    }
}

// What the GEMMs read of plain [T, K], as double: rows [T, K] and columns [K, T].
struct Operands {
    std::vector<double> rows, columns;
};
Operands operands_of(Ops& ops, Recipe recipe, const TensorView& plain, const RowGroups& all) {
    const Layouts layouts = layouts_of(recipe);
    const int64_t t = plain.rows(), k = plain.cols();
    const auto row_copy = [&] {
        return HostScaled(DType::e4m3, {t, k}, layouts.rows).declared(ScaleFormat::pow2);
    };
    HostScaled rows = row_copy(), columns(DType::e4m3, {k, t}, layouts.columns, 1);
    if (recipe == Recipe::fp8_tensorwise) {
        ops.quantize_tensor({.src = plain, .groups = all, .rows = rows, .transposed = columns});
    } else {
        ops.quantize_rows({.src = plain, .groups = all, .dst = rows});
        if (recipe == Recipe::fp8_flow)
            ops.transpose_fp8({.src = rows, .groups = all, .dst = columns});
        else
            ops.quantize_columns({.src = plain, .groups = all, .dst = columns});
    }
    const bool routed = recipe == Recipe::fp8_flow || recipe == Recipe::fp8_rowwise;
    return {dequantised(ops, rows, all), dequantised(ops, columns, routed ? all : RowGroups{})};
}

// [M, K] by [N, K], both contiguous along K.
std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b, int64_t m, int64_t n,
                            int64_t k) {
    std::vector<double> d(static_cast<size_t>(m * n));
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j)
            for (int64_t c = 0; c < k; ++c)
                d[static_cast<size_t>(i * n + j)] +=
                    a[static_cast<size_t>(i * k + c)] * b[static_cast<size_t>(j * k + c)];
    return d;
}

// 136 tokens: a whole block and a part of one, as a last batch may have.
TEST(Fp8Projection, IsTheProductOfItsDequantisedOperands) {
    constexpr int64_t kTokens = 136, kIn = 128, kOut = 256;
    for (const Recipe recipe : fp8_recipes()) {
        SCOPED_TRACE(recipe_name(recipe));
        LayerCase c = LayerCase::of(recipe);
        c.tokens = {kTokens};
        c.model.seq_length = 8;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) {
            RankFixture rank(group, c);
            ParameterStore store(rank.ops, 1);
            const auto flow = make_flow(c.precision, {});
            Parameter& weight = store.add(
                {.name = "w", .shape = {kOut, kIn, 0}, .init_std = 0.1, .format = flow->weight_format()});
            store.allocate_gradients();
            const Projection projection(weight, flow.get(), {"qkv", "x", "dy"});
            Context ctx = rank.context();
            HostTensor x(DType::bf16, {kTokens, kIn}), dy(DType::bf16, {kTokens, kOut}),
                y(DType::bf16, {kTokens, kOut}), dx(DType::bf16, {kTokens, kIn});
            fill_normal(x, 1);
            fill_normal(dy, 2);
            ExpertsSaved saved;
            projection.forward(ctx, {.plain = x}, saved, y);
            projection.backward(ctx, {.plain = dy}, {.plain = x}, saved, dx);

            const Operands of_x = operands_of(rank.ops, recipe, x, rank.all_tokens),
                           of_dy = operands_of(rank.ops, recipe, dy, rank.all_tokens);
            EXPECT_LE(
                nmse(y, product(of_x.rows, dequantised(rank.ops, weight.fprop, {}), kTokens, kOut, kIn)),
                1e-5);
            EXPECT_LE(
                nmse(dx, product(of_dy.rows, dequantised(rank.ops, weight.dgrad, {}), kTokens, kIn, kOut)),
                1e-5);
            EXPECT_LE(nmse(weight.main_grad, product(of_dy.columns, of_x.columns, kOut, kIn, kTokens)),
                      1e-11);
        });
    }
}

// ---- a block with attention

LayerCase block_case(Recipe recipe, bool linears) {
    LayerCase c = LayerCase::of(recipe);
    c.model.attention = true;
    c.model.qk_layernorm = true;
    c.precision.fp8_attention_linears = linears;
    return c;
}

// fp8_flow: the attention's output and the gradient of its own; the norm and qkv_heads_backward write FP8.
// The others cast x (fp8_tensorwise: the norm does), the output, and both gradients.
TEST(Fp8Projection, CastsAndTransposes) {
    const std::map<Recipe, int64_t> wanted{{Recipe::fp8_flow, 2},
                                           {Recipe::fp8_blockwise, 4},
                                           {Recipe::fp8_tensorwise, 3},
                                           {Recipe::fp8_rowwise, 4},
                                           {Recipe::mxfp8, 4}};
    for (const auto& [recipe, casts] : wanted) {
        SCOPED_TRACE(recipe_name(recipe));
        LayerCase c = block_case(recipe, true);
        const LayerResult with = run_block(c)[0], without = run_block(block_case(recipe, false))[0];
        EXPECT_EQ(with.casts - without.casts, casts);
        EXPECT_EQ(with.calls("gemm"), 0) << "attention's GEMMs are FP8";
        EXPECT_EQ(without.calls("gemm"), 6);
        const int64_t transposes = recipe == Recipe::fp8_flow ? 4 : 0;
        EXPECT_EQ(with.calls("transpose_fp8") - without.calls("transpose_fp8"), transposes);
        EXPECT_EQ(with.calls("relayout_scales"), without.calls("relayout_scales"));
        c.recompute.recompute_granularity = RecomputeGranularity::selective;
        c.recompute.core_attn = true;  // and the output is cast again
        EXPECT_EQ(run_block(c)[0].casts - without.casts, casts + 1);
    }
    LayerCase late = block_case(Recipe::fp8_flow, true);  // the BF16 norm, then a cast
    late.precision.moe_quantize_before_dispatch = false;
    LayerCase plain = late;
    plain.precision.fp8_attention_linears = false;
    EXPECT_EQ(run_block(late)[0].casts - run_block(plain)[0].casts, 3);
}

// E4M3's rounding error: 7e-4 of a tensor's energy for each operand and gradient, some of them in a row. The
// gradient passes both projections in both directions, and the derivative of softmax enlarges its error.
TEST(Fp8Projection, ABlockIsCloseToThatWithBf16Projections) {
    for (const Recipe recipe : fp8_recipes()) {
        const LayerResult got = run_block(block_case(recipe, true))[0],
                          wanted = run_block(block_case(recipe, false))[0];
        SCOPED_TRACE(recipe_name(recipe));
        EXPECT_LE(nmse(got.y, wanted.y), 0.01);
        EXPECT_LE(nmse(got.dx, wanted.dx), 0.02);
        EXPECT_NE(got.y, wanted.y);
        for (const char* name : {"linear_qkv", "linear_proj"}) {
            const std::string key = fmt::format("layers.0.self_attention.{}.weight", name);
            EXPECT_LE(nmse(got.gradients.at(key), wanted.gradients.at(key)), 0.02) << name;
        }
    }
}

TEST(Fp8Projection, RecomputationKeepsEveryBit) {
    const auto expect_same = [](const LayerCase& c) {
        LayerCase plain = c;
        plain.recompute = {};
        expect_same_results(run_block(c), run_block(plain));
    };
    for (const Recipe recipe : fp8_recipes())
        for (int mode = 1; mode < 5; ++mode)
            for (const bool fp8_wgrad : {true, false}) {
                SCOPED_TRACE(fmt::format("{}, mode {}, fp8_wgrad {}", recipe_name(recipe), mode, fp8_wgrad));
                LayerCase c = block_case(recipe, true);
                c.precision.fp8_wgrad = fp8_wgrad;
                c.recompute.recompute_granularity =
                    mode == 4 ? RecomputeGranularity::full : RecomputeGranularity::selective;
                c.recompute.core_attn = mode == 1 || mode == 3;
                c.recompute.layernorm = mode == 2 || mode == 3;
                expect_same(c);
                if (recipe != Recipe::fp8_flow) continue;
                c.precision.moe_quantize_before_dispatch = false;
                expect_same(c);
            }
}

// ---- training

Config config_of(Recipe recipe, const Texts& keys) {
    return test_config(recipe, with(keys, {"precision.fp8_attention_linears=true"}));
}

TEST(Fp8Projection, TrainingFollowsBf16Projections) {
    const Texts keys = {"training.train_iters=40"};
    for (const Recipe recipe : {Recipe::fp8_flow, Recipe::fp8_tensorwise}) {
        SCOPED_TRACE(recipe_name(recipe));
        const TrainingRun bf16 = train(test_config(recipe, keys), 1, {.steps = 40}),
                          fp8 = train(config_of(recipe, keys), 1, {.steps = 40});
        EXPECT_NE(fp8.losses(), bf16.losses());
        EXPECT_LT(fp8.mean_of_last(10), fp8.steps[0].lm_loss - 0.5);
        EXPECT_NEAR(fp8.mean_of_last(10), bf16.mean_of_last(10), 0.03);
    }
}

TEST(Fp8Projection, SchedulesAndDividedStateChangeNoBit) {
    const Texts base = {"training.micro_batch_size=1", "parallel.expert_model_parallel_size=2"};
    const std::pair<Recipe, Texts> runs[] = {
        {Recipe::fp8_flow,
         {"schedule.moe_shared_expert_overlap=true", "schedule.delay_wgrad_compute=true",
          "moe.moe_expert_rank_capacity_factor=0.01"}},
        {Recipe::fp8_flow,
         {"schedule.overlap_moe_expert_parallel_comm=true", "schedule.overlap_grad_reduce=true"}},
        {Recipe::fp8_flow,
         {"training.use_distributed_optimizer=true", "schedule.overlap_param_gather=true",
          "schedule.cuda_graph_impl=full_iteration"}},
        {Recipe::fp8_blockwise,
         {"training.use_distributed_optimizer=true", "recompute.recompute_granularity=full"}},
        {Recipe::fp8_tensorwise,
         {"training.use_distributed_optimizer=true", "schedule.overlap_moe_expert_parallel_comm=true"}}};
    std::map<Recipe, TrainingRun> plain;
    for (const auto& [recipe, more] : runs) {
        SCOPED_TRACE(fmt::format("{} {}", recipe_name(recipe), fmt::join(more, " ")));
        if (!plain.contains(recipe)) plain[recipe] = train(config_of(recipe, base), 2, {.steps = 2});
        const TrainingRun run = train(config_of(recipe, with(base, more)), 2, {.steps = 2});
        expect_same_run(run, plain[recipe]);
    }
}

// fp8_tensorwise's norm in front of QKV has a delayed scale, which a checkpoint keeps. A checkpoint of BF16
// projections loads too: its masters are the same.
TEST(Fp8Projection, ResumedRunsGiveTheSameBits) {
    for (const Recipe recipe : {Recipe::fp8_flow, Recipe::fp8_tensorwise}) {
        SCOPED_TRACE(recipe_name(recipe));
        const auto [whole, rest] = whole_and_resumed(config_of(recipe, {}));
        ASSERT_EQ(rest.steps.size(), 2u);
        for (size_t i = 0; i < 2; ++i) EXPECT_EQ(rest.steps[i].lm_loss, whole.steps[2 + i].lm_loss);
        expect_same_bits(rest.state, whole.state);
    }
    TemporaryFolder folder;
    Config config = test_config(Recipe::fp8_flow);
    config.checkpoint.save_interval = 2;
    const TrainingRun bf16 = train_with_checkpoints(config, 1, {folder.path(), 2});
    config = config_of(Recipe::fp8_flow, {});
    config.checkpoint.load = "auto";
    expect_same_bits(train_with_checkpoints(config, 1, {folder.path(), 2}).state, bf16.state, "weight ");
}

}  // namespace
}  // namespace fp8flow::test
