// SPDX-License-Identifier: MIT
// --tensor-stats: counts and errors against sums made here from the codes themselves, and what a layer
// reports.
#include "layers/tensor_stats.h"

#include "model/train/transformer.h"
#include "tests/support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace fp8flow {
namespace {

using test::HostScaled;
using test::HostTensor;
using test::LayerCase;

// Rows of which the second half of each 32-block is far below its first half: some values underflow to code
// 0.
HostTensor wide_range(int64_t rows, int64_t columns) {
    HostTensor x(DType::bf16, {rows, columns});
    test::fill(x, [&](int64_t i) {
        const double small = i % 32 < 16 ? 1.0 : 1e-6;
        return i % 9 == 0 ? 0.0 : small * random_normal(3, 0, static_cast<uint64_t>(i));
    });
    return x;
}

TEST(TensorStats, CountsOfOneTensor) {
    constexpr int64_t kRows = 8, kColumns = 256;
    const std::vector<int64_t> counts{3, 0, 2};
    const test::GroupsFixture groups(counts, 1, 1);  // rows 0..4 of 6 are valid
    for (ScaleLayout layout :
         {ScaleLayout::vec128, ScaleLayout::row, ScaleLayout::tensor, ScaleLayout::mx32}) {
        const LayerCase c;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) {
            test::RankFixture rank(group, c);
            Context ctx = rank.context();
            const HostTensor x = wide_range(kRows, kColumns);
            HostScaled q(DType::e4m3, {kRows, kColumns}, layout);
            if (layout == ScaleLayout::tensor)
                rank.ops.quantize_tensor({.src = x, .rows = q});
            else
                rank.ops.quantize_rows({.src = x, .dst = q});
            TensorStats stats;
            stats.observe(ctx, "x", q, groups, x);
            stats.observe(ctx, "x", q, groups, x);  // adds up
            ASSERT_EQ(stats.rows().size(), 1u);
            const TensorStatsRow& row = stats.rows()[0];

            int64_t zeros = 0, underflows = 0, saturations = 0;
            double error = 0, energy = 0, low = std::numeric_limits<double>::infinity(), high = 0;
            for (int64_t r = 0; r < 5; ++r) {
                for (int64_t col = 0; col < kColumns; ++col) {
                    const int64_t i = r * kColumns + col;
                    const int64_t scale_at = layout == ScaleLayout::vec128 ? col / 128 * kRows + r
                                             : layout == ScaleLayout::mx32 ? col / 32 * kRows + r
                                             : layout == ScaleLayout::row  ? r
                                                                           : 0;
                    const double scale = q.scales(scale_at), code = q.data(i), truth = x(i);
                    zeros += code == 0;
                    underflows += code == 0 && truth != 0;
                    saturations += std::abs(code) == 448;
                    error += (code * scale - truth) * (code * scale - truth);
                    energy += truth * truth;
                    low = std::min(low, scale);
                    high = std::max(high, scale);
                }
            }
            EXPECT_GT(underflows, 0) << name_of(layout);
            EXPECT_EQ(row.values, 2 * 5 * kColumns);
            EXPECT_EQ(row.zeros, 2 * zeros);
            EXPECT_EQ(row.underflows, 2 * underflows);
            EXPECT_EQ(row.saturations, 2 * saturations);
            EXPECT_EQ(row.scale_min, low);
            EXPECT_EQ(row.scale_max, high);
            EXPECT_NEAR(row.nmse(), error / energy, 1e-9 * error / energy);
        });
    }
}

TEST(TensorStats, RowBaseIsRespected) {
    const LayerCase c;
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        test::RankFixture rank(group, c);
        Context ctx = rank.context();
        constexpr int64_t kBase = 128, kRows = 256;
        const test::GroupsFixture groups({5}, 128);
        HostTensor x = wide_range(kRows, 128);
        HostScaled q(DType::e4m3, {kRows, 128}, ScaleLayout::vec128);
        rank.ops.quantize_rows({.src = x, .dst = q});
        TensorStats whole, based;
        whole.observe(ctx, "x", {q.data, q.scales, q.layout}, {}, x);
        x.set_row_base(kBase);
        q.set_row_base(kBase);
        based.observe(ctx, "x", q, groups, x);
        EXPECT_EQ(whole.rows()[0].values, kRows * 128);
        EXPECT_EQ(based.rows()[0].values, 5 * 128);
        int64_t zeros = 0;
        for (int64_t i = kBase * 128; i < (kBase + 5) * 128; ++i) zeros += q.data(i) == 0;
        EXPECT_EQ(based.rows()[0].zeros, zeros);
    });
}

// What each recipe reports, and that the numbers are those of its format.
TEST(TensorStats, OfALayer) {
    const std::map<Recipe, std::vector<std::string>> wanted{
        {Recipe::bf16, {}},
        {Recipe::fp8_flow, {"norm", "swiglu", "dY", "swiglu backward"}},
        {Recipe::fp8_blockwise, {"fc1 input", "swiglu", "dY", "swiglu backward"}},
        {Recipe::fp8_rowwise, {"fc1 input", "swiglu", "dY", "swiglu backward"}},
        {Recipe::mxfp8, {"fc1 input", "swiglu", "dY", "swiglu backward"}},
        {Recipe::fp8_tensorwise, {"fc1 input", "swiglu", "dY", "swiglu backward"}}};
    for (const auto& [recipe, names] : wanted) {
        const LayerCase c = LayerCase::of(recipe);
        TensorStats stats;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) { test::run_block(group, c, &stats); });
        ASSERT_EQ(stats.rows().size(), names.size());
        for (size_t i = 0; i < names.size(); ++i) {
            const TensorStatsRow& row = stats.rows()[i];
            EXPECT_EQ(row.tensor, names[i]);
            const int64_t rows =
                names[i] == "norm" || (recipe == Recipe::fp8_flow && names[i] == "dY") ? 64 : 128;
            EXPECT_EQ(row.values, rows * (names[i] == "swiglu backward" ? 256 : 128)) << names[i];
            EXPECT_TRUE(row.has_source);
            EXPECT_GT(row.nmse(), 2e-4) << names[i];  // E4M3 rounds by 2.6 % rms
            EXPECT_LT(row.nmse(), 2e-3) << names[i];
            EXPECT_GT(row.scale_min, 0) << names[i];
        }
        // what is computed a second time is not counted a second time
        for (const char* module : {"layernorm", "moe_act", "moe_expert", "moe", "shared_experts", "full"}) {
            LayerCase recomputed = c;
            recomputed.moe.moe_shared_expert_intermediate_size = 128;
            const auto values = [&] {
                TensorStats all;
                run_thread_ranks(1, 60,
                                 [&](ProcessGroup& group) { test::run_block(group, recomputed, &all); });
                std::map<std::string, int64_t> result;
                for (const TensorStatsRow& row : all.rows()) result[row.tensor] = row.values;
                return result;
            };
            const auto wanted_values = values();
            RecomputeSpec& set = recomputed.recompute;
            const std::string name = module;
            set.recompute_granularity =
                name == "full" ? RecomputeGranularity::full : RecomputeGranularity::selective;
            set.layernorm = name == "layernorm";
            set.moe_act = name == "moe_act";
            set.moe_expert = name == "moe_expert";
            set.moe = name == "moe";
            set.shared_experts = name == "shared_experts";
            EXPECT_EQ(values(), wanted_values) << name;
        }
        // a diagnosis changes nothing
        if (recipe != Recipe::fp8_flow) continue;
        LayerCase apart = c;
        const auto with = test::run_block(apart)[0];
        run_thread_ranks(
            1, 60, [&](ProcessGroup& group) { EXPECT_TRUE(test::run_block(group, c, &stats).y == with.y); });
    }
}

// With the cast behind the wire, what arrives is observed instead of the norm's rows: 64 tokens to 2 experts
// each.
TEST(TensorStats, OfTheFlowWithoutAnFp8Wire) {
    for (bool routed : {true, false}) {
        LayerCase c = LayerCase::of(Recipe::fp8_flow);
        c.model.moe_layer_freq = {routed ? 1 : 0};
        c.precision.moe_quantize_before_dispatch = false;
        TensorStats stats;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) { test::run_block(group, c, &stats); });
        std::map<std::string, int64_t> values;
        for (const TensorStatsRow& row : stats.rows()) {
            values[row.tensor] = row.values;
            EXPECT_GT(row.nmse(), 2e-4) << row.tensor;
            EXPECT_LT(row.nmse(), 2e-3) << row.tensor;
        }
        const int64_t rows = routed ? 128 : 64, ffn = routed ? 128 : 256;
        EXPECT_EQ(values, (std::map<std::string, int64_t>{{"dispatch", rows * 128},
                                                          {"dY", rows * 128},
                                                          {"swiglu", rows * ffn},
                                                          {"swiglu backward", rows * 2 * ffn}}));
    }
}

}  // namespace
}  // namespace fp8flow
