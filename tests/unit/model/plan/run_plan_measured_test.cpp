// SPDX-License-Identifier: MIT
// `plan` says what a layer saves before anything runs; here one block runs under every recipe and recompute
// mode, and its arenas are compared with the plan.
#include "layers/rope.h"
#include "layers/transformer_block.h"
#include "model/job/backend.h"
#include "model/plan/plan.h"

#include "kernels/reference/reference_ops.h"
#include "tests/support/training.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <random>

namespace fp8flow {

using namespace plan;

namespace {

constexpr int64_t kTokens = 128;

Config small_config(Recipe recipe, bool routed, const RecomputeSpec& recompute, int64_t shared,
                    ProbsIn probs = ProbsIn::swiglu, bool linears = false) {
    Config config;
    config.model.num_layers = 1;
    config.model.qk_layernorm = true;
    config.model.hidden_size = 128;
    config.model.num_attention_heads = 2;
    config.model.num_query_groups = 1;
    config.model.ffn_hidden_size = 256;
    config.model.seq_length = kTokens;
    config.moe_layer_freq = routed ? "1" : "[0]";
    config.moe.num_experts = 4;
    config.moe.moe_ffn_hidden_size = 128;
    config.moe.moe_shared_expert_intermediate_size = shared;
    config.moe.moe_shared_expert_gate = shared > 0;
    config.precision.recipe = recipe;
    config.precision.moe_apply_probs_in = probs;
    config.precision.fp8_attention_linears = linears;
    config.recompute = recompute;
    resolve_config(config);
    return config;
}

struct Measured {
    double saved = 0;    // bytes of the arena between forward and backward, with the block's input
    double per_row = 0;  // of the row arena
    double copies = 0;   // of the weights
};

Measured run_forward(const Config& config) {
    const BackendChoice backend = choose_backend(BackendKind::reference);
    const auto ops = make_ops(backend, Arithmetic::stated);
    const auto world = make_thread_groups(1, 60.0);
    const RankGroups groups = make_rank_groups(*world[0], 1);
    const auto exchange = make_exchange(backend, groups, *ops, config).exchange;
    Device& device = ops->device();
    ParameterStore store(*ops, 1);
    TransformerBlock block(store, device,
                           {.model = config.model,
                            .moe = config.moe,
                            .precision = config.precision,
                            .recompute = config.recompute});

    Arena inputs(device, "inputs"), saved(device, "saved", true), scratch(device, "scratch", true);
    const std::vector<float> table = rope_table(config.model);
    const TensorView rope =
        inputs.tensor(DType::f32, {config.model.seq_length, rope_dims(config.model) / 2, 2}, "rope");
    device.copy_in(rope.data, table.data(), table.size() * sizeof(float));
    block.attention()->set_rope_table(rope);

    const int64_t capacity = MoeLayer::row_capacity(config.moe, kTokens, 1);
    RowArena rows(device, capacity, 2);
    StageTimer timer;
    Context ctx{{.ops = *ops,
                 .exchange = *exchange,
                 .saved = saved,
                 .scratch = scratch,
                 .rows = rows,
                 .timer = timer}};
    ctx.tokens = ctx.tokens_per_rank = ctx.global_tokens = kTokens;
    ctx.seq_length = config.model.seq_length;
    ctx.layer_row_capacity = capacity;
    ctx.step_status = inputs.tensor(DType::i32, {1}, "step");
    const int32_t fine = 0;
    device.copy_in(ctx.step_status.data, &fine, sizeof fine);
    const int64_t counts[1] = {kTokens}, offsets[2] = {0, kTokens};
    ctx.all_tokens = {.num_groups = 1,
                      .counts = inputs.tensor(DType::i64, {1}, "batch"),
                      .offsets = inputs.tensor(DType::i64, {2}, "batch"),
                      .row_capacity = kTokens,
                      .alignment = kBlock};
    device.copy_in(ctx.all_tokens.counts.data, counts, sizeof counts);
    device.copy_in(ctx.all_tokens.offsets.data, offsets, sizeof offsets);

    const TensorView x = inputs.tensor(DType::bf16, {kTokens, config.model.hidden_size}, "x");
    const TensorView y = inputs.tensor(DType::bf16, {kTokens, config.model.hidden_size}, "y");
    std::mt19937 random(3);
    std::vector<uint16_t> values(static_cast<size_t>(x.numel()));
    for (auto& value : values)
        value = static_cast<uint16_t>(0x3F00 + (random() % 0x100) + (random() % 2) * 0x8000);
    device.copy_in(x.data, values.data(), values.size() * sizeof(uint16_t));

    block.begin_step(ctx);
    BlockSaved kept;
    block.forward(ctx, x, kept, y);
    Measured measured{static_cast<double>(saved.bytes_in_use() + x.bytes()), 0};
    for (const auto& [kind, bytes] : rows.bytes_per_row()) measured.per_row += bytes;
    measured.copies = static_cast<double>(store.bytes().at("copies"));
    return measured;
}

class MeasuredPlan : public testing::TestWithParam<Recipe> {};

TEST_P(MeasuredPlan, SavedBytesAreThoseOfTheLayers) {
    using enum RecomputeGranularity;
    const std::pair<const char*, RecomputeSpec> modes[] = {
        {"none", {}},
        {"core_attn", {.recompute_granularity = selective, .core_attn = true}},
        {"layernorm", {.recompute_granularity = selective, .layernorm = true}},
        {"moe_act", {.recompute_granularity = selective, .moe_act = true}},
        {"moe_expert", {.recompute_granularity = selective, .moe_expert = true}},
        {"received",
         {.recompute_granularity = selective, .moe_expert = true, .saved_rows = SavedRows::received}},
        {"no rows", {.recompute_granularity = selective, .moe_expert = true, .saved_rows = SavedRows::none}},
        {"shared_experts", {.recompute_granularity = selective, .shared_experts = true}},
        {"moe", {.recompute_granularity = selective, .moe = true}},
        {"full", {.recompute_granularity = full}},
    };
    for (const bool routed : {true, false}) {
        for (const int64_t shared : {int64_t{0}, int64_t{128}}) {
            for (const auto& [name, recompute] : modes) {
                const Config config = small_config(GetParam(), routed, recompute, shared);
                try {
                    check_config(config);
                } catch (const std::exception&) {
                    continue;  // refused by name: nothing to measure
                }
                SCOPED_TRACE(
                    fmt::format("{} {} routed {} shared {}", recipe_name(GetParam()), name, routed, shared));
                const SavedBytes planned = saved_activation_bytes(config, 0, recompute);
                const Measured measured = run_forward(config);
                // Counters and alignment of the arena are not in the plan.
                EXPECT_NEAR((planned.per_token + planned.per_received) * kTokens, measured.saved,
                            0.01 * measured.saved + 4096);
                if (planned.per_row > 0) {
                    EXPECT_NEAR(planned.per_row, measured.per_row, 0.01 * measured.per_row);
                }
            }
        }
    }
}

// With merging weights the routed experts keep no activation; the shared expert keeps its own.
TEST_P(MeasuredPlan, SavedBytesWithMergingWeights) {
    const Config config = small_config(GetParam(), true, {}, 128, ProbsIn::combine);
    const SavedBytes planned = saved_activation_bytes(config, 0, {});
    const Measured measured = run_forward(config);
    EXPECT_NEAR(planned.per_token * kTokens, measured.saved, 0.01 * measured.saved + 4096);
    EXPECT_NEAR(planned.per_row, measured.per_row, 0.01 * measured.per_row);
    const Config swiglu = small_config(GetParam(), true, {}, 128);
    EXPECT_LT(planned.per_row, saved_activation_bytes(swiglu, 0, {}).per_row);
}

// What a forward pass saves, and the copies of all weights.
void expect_bytes(const Config& config) {
    check_config(config);
    const Measured measured = run_forward(config);
    EXPECT_NEAR(saved_activation_bytes(config, 0, config.recompute).per_token * kTokens, measured.saved,
                0.01 * measured.saved + 4096);
    double copies = 0;
    for (const MemoryItem& item : make_plan(config, 1).memory)
        if (item.category == "weights (BF16)" || item.category == "weights (FP8 copies)")
            copies += item.bytes;
    const double outside = 2.0 * static_cast<double>(2 * 384 + 1) * 128;  // embedding, head, last norm
    EXPECT_NEAR(copies - outside, measured.copies, 0.01 * copies);
}

// With FP8 projections.
TEST_P(MeasuredPlan, BytesWithFp8Projections) {
    if (GetParam() == Recipe::bf16) return;
    for (int bits = 0; bits < 4; ++bits) {
        RecomputeSpec recompute{.core_attn = (bits & 1) != 0, .layernorm = (bits & 2) != 0};
        if (bits > 0) recompute.recompute_granularity = RecomputeGranularity::selective;
        const Config config = small_config(GetParam(), true, recompute, 128, ProbsIn::swiglu, true);
        SCOPED_TRACE(fmt::format("core_attn {}, layernorm {}", recompute.core_attn, recompute.layernorm));
        expect_bytes(config);
    }
}

// Multi-latent attention, with and without a latent of the queries and FP8 projections.
TEST_P(MeasuredPlan, BytesWithLatentAttention) {
    for (int bits = 0; bits < 16; ++bits) {
        const bool linears = (bits & 8) != 0;
        if (linears && GetParam() == Recipe::bf16) continue;
        RecomputeSpec recompute{.core_attn = (bits & 1) != 0, .mla_up_proj = (bits & 2) != 0};
        if ((bits & 3) != 0) recompute.recompute_granularity = RecomputeGranularity::selective;
        Config config = small_config(GetParam(), true, recompute, 128, ProbsIn::swiglu, linears);
        config.model.multi_latent_attention = true;
        config.model.q_lora_rank = (bits & 4) != 0 ? 256 : 0;
        config.model.kv_lora_rank = 128;
        config.model.qk_head_dim = 128;
        config.model.v_head_dim = 192;
        SCOPED_TRACE(fmt::format("{} {}", recipe_name(GetParam()), bits));
        expect_bytes(config);
    }
}

// Of a whole run: the final norm too, and the layer that runs forward again in the backward pass.
TEST(MeasuredRun, SavedBytesAreThoseOfTheRun) {
    for (const char* layers : {"[0, 0]", "[1, 1]"})
        for (const char* modules : {"none", "full", "moe"}) {
            const bool moe = std::string_view(modules) == "moe";
            if (moe && layers == std::string_view("[0, 0]")) continue;
            SCOPED_TRACE(fmt::format("layers {}, recompute {}", layers, modules));
            std::vector<std::string> keys = {fmt::format("model.moe_layer_freq={}", layers)};
            keys.push_back(fmt::format("recompute.recompute_granularity={}", moe ? "selective" : modules));
            if (moe) keys.emplace_back("recompute.recompute_modules=[moe]");
            const Config config = test::test_config(Recipe::bf16, keys);
            const RunPlan plan = make_plan(config, 1);
            const double again = saved_activation_bytes(config, 0, {}).per_row -
                                 saved_activation_bytes(config, 0, config.recompute).per_row;
            const double planned = plan.saved_reserved + plan.row_capacity * again +
                                   bytes_of(plan.memory, "workspace, layer run again");
            double measured = 0;
            const auto look = [&](Trainer& trainer, ProcessGroup&, int64_t step) {
                if (step == 0) return;
                for (const auto& [name, bytes] : trainer.saved_bytes()) measured += f64(bytes);
            };
            test::train(config, 1, {.steps = 1, .before_step = look});
            EXPECT_NEAR(planned, measured, 0.01 * measured + 8192);
        }
}

INSTANTIATE_TEST_SUITE_P(Recipes, MeasuredPlan, testing::ValuesIn(kRecipes),
                         [](const auto& recipe) { return std::string(recipe_name(recipe.param)); });

}  // namespace
}  // namespace fp8flow
