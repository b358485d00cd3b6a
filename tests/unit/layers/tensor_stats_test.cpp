// SPDX-License-Identifier: MIT
// --tensor-stats: counts and errors against sums made here from the FP8 values themselves, and what a layer
// reports.
#include "layers/tensor_stats.h"

#include "model/report/table.h"
#include "model/report/tensor_stats.h"
#include "model/train/transformer.h"
#include "tests/support/files.h"
#include "tests/support/layers/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <regex>
#include <string>
#include <tuple>
#include <vector>

namespace fp8flow {
namespace {

using namespace test;

// Rows of which the second half of each 32-block is far below its first half: some values underflow to code
// 0.
HostTensor wide_range(int64_t rows, int64_t columns) {
    HostTensor x(DType::bf16, {rows, columns});
    fill(x, [&](int64_t i) {
        const double small = i % 32 < 16 ? 1.0 : 1e-6;
        return i % 9 == 0 ? 0.0 : small * random_normal(3, 0, static_cast<uint64_t>(i));
    });
    return x;
}

TEST(TensorStats, CountsOfOneTensor) {
    constexpr int64_t kRows = 8, kColumns = 256;
    const std::vector<int64_t> counts{3, 0, 2};
    const GroupsFixture groups(counts, 1, 1);  // rows 0..4 of 6 are valid
    for (ScaleLayout layout :
         {ScaleLayout::vec128, ScaleLayout::row, ScaleLayout::tensor, ScaleLayout::mx32}) {
        const LayerCase c;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) {
            RankFixture rank(group, c);
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
            stats.end_iteration();
            ASSERT_EQ(stats.rows().size(), 1u);
            const TensorStatsRow& row = stats.rows()[0];
            std::map<int, double> exponents;

            int64_t zeros = 0, underflows = 0, at_maximum = 0;
            double error = 0, energy = 0, low = std::numeric_limits<double>::infinity(), high = 0,
                   largest = 0;
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
                    at_maximum += std::abs(code) == 448;
                    error += (code * scale - truth) * (code * scale - truth);
                    energy += truth * truth;
                    low = std::min(low, scale);
                    high = std::max(high, scale);
                    largest = std::max(largest, std::abs(truth));
                    exponents[std::ilogb(scale)] += 2;
                }
            }
            EXPECT_GT(underflows, 0) << name_of(layout);
            EXPECT_EQ(row.counts.values, 2 * 5 * kColumns);
            EXPECT_EQ(row.counts.zeros, 2 * zeros);
            EXPECT_EQ(row.counts.flushed, 2 * underflows);
            EXPECT_EQ(row.counts.at_maximum, 2 * at_maximum);
            EXPECT_EQ(row.counts.clipped, 0);  // scales follow the maximum
            EXPECT_EQ(row.counts.scale_min, low);
            EXPECT_EQ(row.counts.scale_max, high);
            EXPECT_EQ(row.counts.amax, largest);
            EXPECT_EQ(row.first_exponent, exponents.begin()->first);
            for (size_t i = 0; i < row.exponents.size(); ++i)
                EXPECT_EQ(row.exponents[i], exponents[row.first_exponent + static_cast<int>(i)]);
            EXPECT_EQ(row.first_exponent + static_cast<int>(row.exponents.size()),
                      exponents.rbegin()->first + 1);
            EXPECT_NEAR(row.nmse(), error / energy, 1e-9 * error / energy);
            const auto file = report::tensor_stats_json(stats, {})[0];
            std::string shares;  // of the table
            for (const auto& [key, count] : {std::pair{"zeros", row.counts.zeros},
                                             {"underflows", row.counts.flushed},
                                             {"at maximum", row.counts.at_maximum},
                                             {"saturations", row.counts.clipped}}) {
                EXPECT_EQ(file.at(key), count) << key;
                shares += report::format_percent(count / row.counts.values, 3) + " ";
            }
            const std::string table =
                std::regex_replace(report::tensor_stats_table(stats), std::regex(" +"), " ");
            expect_contains(table, shares);
        });
    }
}

TEST(TensorStats, HalfOfTheValuesHaveTheMedianExponentOrLess) {
    TensorStatsRow row;
    row.first_exponent = -4;
    row.exponents = {3, 6, 1};
    row.counts = {.values = 10, .nonzero = 8, .flushed = 2, .clipped = 1};
    const auto record = report::tensor_stats_record(row);
    EXPECT_EQ(record.at("scale_exponent"), -3);
    EXPECT_EQ(record.at("flushed_share"), 0.25);
    EXPECT_EQ(record.at("clipped_share"), 0.1);
}

TEST(TensorStats, ThePageShowsAllOfALongRun) {
    report::TensorHistory history;
    for (int64_t i = 1; i <= 60; ++i)
        history.add(report::tensor_stats_record({.iteration = i, .tensor = "x"}));
    const auto heat = history.heat();
    ASSERT_EQ(heat.size(), 24u);
    EXPECT_EQ(heat[0].at("iteration"), 2);
    EXPECT_EQ(heat[11].at("iteration"), 30);
    EXPECT_EQ(heat[23].at("iteration"), 60);
}

// Clipped is what lies beyond the largest code; what is merely coded as it is not.
TEST(TensorStats, ClippedValuesAreNotThoseAtTheMaximum) {
    const LayerCase c;
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        RankFixture rank(group, c);
        Context ctx = rank.context();
        const auto observed = [&](DType code, double maximum, auto quantise) {
            HostTensor x(DType::bf16, {4, 256});
            HostScaled q(code, {4, 256}, ScaleLayout::vec128);
            quantise(x, q, maximum);
            TensorStats stats;
            stats.observe(ctx, "x", q, {}, x);
            stats.end_iteration();
            return stats.rows()[0].counts;
        };
        // a scale of 1: 3 at the maximum, 2 more rounded down to it, 4 beyond it, of both signs
        for (const DType code : {DType::e4m3, DType::e5m2}) {
            const op::QuantizationCounts row =
                observed(code, fp8_max(code), [](HostTensor& x, HostScaled& q, double max) {
                    const double values[] = {max,        -max,        max,        max * 0.99, -max * 0.98,
                                             max * 1.05, -max * 1.01, max * 1.15, -max * 8,   1.0};
                    fill(x, [&](int64_t i) { return i < 10 ? values[i] : 0.25; });
                    fill(q.scales, [](int64_t) { return 1.0; });
                    for (int64_t i = 0; i < 1024; ++i)
                        q.data.view().bytes_ptr()[i] = to_fp8(static_cast<float>(x(i)), q.data.view().dtype);
                });
            EXPECT_EQ(row.at_maximum, 9) << name_of(code);
            EXPECT_EQ(row.clipped, 4) << name_of(code);
        }
        // scales of the maximum itself, rounded as they are, clip nothing; MXFP8's floor does
        for (const ScaleFormat format : {ScaleFormat::pow2, ScaleFormat::fp32}) {
            const op::QuantizationCounts row =
                observed(DType::e4m3, 0, [&](HostTensor& x, HostScaled& q, double) {
                    fill_normal(x, 5);
                    rank.ops.quantize_rows({.src = x, .scale_format = format, .dst = q});
                });
            EXPECT_EQ(row.clipped, 0);
            EXPECT_GE(row.at_maximum, format == ScaleFormat::fp32 ? 8 : 0);
        }
        HostTensor x(DType::bf16, {4, 256});
        fill_normal(x, 5);
        HostScaled q(DType::e4m3, {4, 256}, ScaleLayout::mx32);
        rank.ops.quantize_rows({.src = x, .mx_rounding = MxRounding::floor, .dst = q});
        int64_t beyond = 0;
        for (int64_t i = 0; i < 1024; ++i)
            beyond += std::abs(x(i)) > 448 * q.scales(i % 256 / 32 * 4 + i / 256);
        TensorStats stats;
        stats.observe(ctx, "x", q, {}, x);
        stats.end_iteration();
        EXPECT_GT(beyond, 0);
        EXPECT_EQ(stats.rows()[0].counts.clipped, beyond);
        EXPECT_GE(stats.rows()[0].counts.at_maximum, beyond);
    });
}

TEST(TensorStats, RowBaseIsRespected) {
    const LayerCase c;
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        RankFixture rank(group, c);
        Context ctx = rank.context();
        constexpr int64_t kBase = 128, kRows = 256;
        const GroupsFixture groups({5}, 128);
        HostTensor x = wide_range(kRows, 128);
        HostScaled q(DType::e4m3, {kRows, 128}, ScaleLayout::vec128);
        rank.ops.quantize_rows({.src = x, .dst = q});
        TensorStats whole, based;
        whole.observe(ctx, "x", {q.data, q.scales, q.layout}, {}, x);
        x.set_row_base(kBase);
        q.set_row_base(kBase);
        based.observe(ctx, "x", q, groups, x);
        whole.end_iteration();
        based.end_iteration();
        EXPECT_EQ(whole.rows()[0].counts.values, kRows * 128);
        EXPECT_EQ(based.rows()[0].counts.values, 5 * 128);
        int64_t zeros = 0;
        for (int64_t i = kBase * 128; i < (kBase + 5) * 128; ++i) zeros += q.data(i) == 0;
        EXPECT_EQ(based.rows()[0].counts.zeros, zeros);
    });
}

// Two groups, of 128 rows and of 1, after row bases of their own. Rows are +-1 in every second column, code
// 256 with the scale 2^-8; three rows are 2^-17, 2^-18 and 2^-19 of that. 256 * 2^-17 is the least E4M3 code,
// half of it is a tie that rounds to 0.
TEST(TensorStats, FlushedByTheTransposeExactly) {
    constexpr int64_t kColumns = 256, kUsed = kColumns / 2, kRowBase = 128, kCopyBase = 256;
    const std::map<int64_t, double> tiny{{5, 0x1p-17}, {70, 0x1p-18}, {127, 0x1p-19}};
    const LayerCase c;
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        RankFixture rank(group, c);
        Context ctx = rank.context();
        const GroupsFixture groups({128, 1}, 128, 128);
        HostTensor x(DType::bf16, {groups.capacity() + kRowBase, kColumns});
        fill(x, [&](int64_t i) {
            const int64_t row = i / kColumns - kRowBase, column = i % kColumns;
            if (column % 2 == 0) return 0.0;
            return (column % 4 == 1 ? 1.0 : -1.0) * (tiny.contains(row) ? tiny.at(row) : 1.0);
        });
        HostScaled rows =
            HostScaled(DType::e4m3, {groups.capacity() + kRowBase, kColumns}, ScaleLayout::vec128)
                .declared(ScaleFormat::pow2);
        rank.ops.quantize_rows({.src = x, .dst = rows});
        rows.set_row_base(kRowBase);
        HostScaled copy(DType::e4m3, {kColumns, groups.capacity() + kCopyBase}, ScaleLayout::tile128);
        copy.set_row_base(kCopyBase);
        rank.ops.transpose_fp8({.src = rows, .groups = groups, .dst = copy});

        TensorStats stats;
        stats.begin_iteration(3);
        stats.observe_transposed(ctx, "w", "dye^T", rows, copy, groups);
        stats.end_iteration();
        stats.begin_iteration(4);
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch)
            stats.observe_transposed(ctx, "w", "dye^T", rows, copy, groups);
        stats.observe_transposed(ctx, "w", "dh^T", rows, copy, groups);
        stats.observe_transposed(ctx, "v", "dye^T", rows, copy, groups);
        stats.end_iteration();
        ASSERT_EQ(stats.transposed().size(), 4u);
        const TensorStatsRow &once = stats.transposed()[0], &twice = stats.transposed()[1];
        const auto file = report::transpose_stats_json(stats, {}).at("iterations")[0].at("transposed")[0];
        EXPECT_EQ(file.at("flushed share"), once.flushed_share());
        EXPECT_EQ(file.at("flushed norm share"), once.flushed_energy_share());
        EXPECT_NE(once.flushed_share(), once.flushed_energy_share());
        EXPECT_EQ(once.iteration, 3);
        EXPECT_EQ(once.counts.values, 129 * kColumns);
        EXPECT_EQ(once.counts.nonzero, 129 * kUsed);
        EXPECT_EQ(once.counts.flushed, 2 * kUsed);
        const double flushed = kUsed * (0x1p-36 + 0x1p-38);
        EXPECT_EQ(once.counts.flushed_energy, flushed);
        EXPECT_EQ(once.counts.energy, kUsed * (126.0 + 0x1p-34) + flushed);
        EXPECT_EQ(once.counts.error_energy, flushed);  // the rest is exact
        EXPECT_EQ(once.flushed_share(), 2.0 / 129.0);
        EXPECT_EQ(once.flushed_energy_share(), flushed / once.counts.energy);
        EXPECT_EQ(twice.iteration, 4);
        EXPECT_EQ(twice.counts.flushed, 2 * once.counts.flushed);
        EXPECT_EQ(twice.counts.energy, 2 * once.counts.energy);
        EXPECT_EQ(twice.flushed_energy_share(), once.flushed_energy_share());
    });
}

// Double quantisation has scales per column: the same tiny rows alone in their columns are not flushed.
TEST(TensorStats, FlushedByDoubleQuantisation) {
    const LayerCase c;
    run_thread_ranks(1, 60, [&](ProcessGroup& group) {
        RankFixture rank(group, c);
        Context ctx = rank.context();
        HostTensor x(DType::bf16, {128, 128});
        fill(x, [](int64_t i) {
            const bool tiny = i / 128 == 7, own = i % 128 < 32;
            return tiny == own ? (tiny ? 0x1p-20 : 1.0) : i % 128 < 64 ? 0.0 : tiny ? 0x1p-20 : 1.0;
        });
        const HostScaled rows =
            HostScaled(DType::e4m3, {128, 128}, ScaleLayout::vec128).declared(ScaleFormat::pow2);
        rank.ops.quantize_rows({.src = x, .dst = rows});
        HostScaled tiles(DType::e4m3, {128, 128}, ScaleLayout::tile128),
            columns(DType::e4m3, {128, 128}, ScaleLayout::vec128);
        rank.ops.transpose_fp8({.src = rows, .dst = tiles});
        rank.ops.transpose_requantize({.src = rows, .scale_format = ScaleFormat::pow2, .dst = columns});
        TensorStats stats;
        stats.observe_transposed(ctx, "tiles", "dye^T", rows, tiles, {});
        stats.observe_transposed(ctx, "columns", "dye^T", rows, columns, {});
        stats.end_iteration();
        EXPECT_EQ(stats.transposed()[0].counts.nonzero, 127 * 96 + 96);
        EXPECT_EQ(stats.transposed()[0].counts.flushed, 96);  // of the tiny row all
        EXPECT_EQ(stats.transposed()[1].counts.flushed, 64);  // those that share their column
        EXPECT_EQ(stats.transposed()[1].counts.nonzero, 127 * 96 + 96);
    });
}

// The four transposed copies of the layer of LayerCase: 128 routed rows.
void expect_transposed(const TensorStats& stats, bool wanted) {
    const std::vector<std::tuple<std::string, std::string, int64_t>> copies{
        {"fc2", "dye^T", 128}, {"fc2", "a^T", 128}, {"fc1", "dh^T", 256}, {"fc1", "xe^T", 128}};
    ASSERT_EQ(stats.transposed().size(), wanted ? copies.size() : 0);
    for (size_t i = 0; i < stats.transposed().size(); ++i) {
        const TensorStatsRow& row = stats.transposed()[i];
        const auto& [weight, tensor, columns] = copies[i];
        EXPECT_EQ(row.weight, "layers.0.moe.experts.linear_" + weight + ".weight");
        EXPECT_EQ(row.tensor, tensor);
        EXPECT_EQ(row.iteration, 0);
        EXPECT_EQ(row.counts.values, 128 * columns) << tensor;
        EXPECT_GT(row.counts.nonzero, 0.98 * row.counts.values) << tensor;
        EXPECT_LT(row.flushed_share(), 1e-2) << tensor;
        EXPECT_GT(row.counts.energy, 0) << tensor;
        EXPECT_LE(row.nmse(), 1e-6) << tensor;
    }
}

// What each recipe reports, and that the numbers are those of its format.
TEST(TensorStats, OfALayer) {
    const std::map<Recipe, std::vector<std::string>> wanted{
        {Recipe::bf16, {}},
        {Recipe::fp8_flow, {"norm", "fc1 weight", "swiglu", "fc2 weight", "dY", "swiglu backward"}},
        {Recipe::fp8_blockwise, {"fc1 input", "fc1 weight", "swiglu", "fc2 weight", "dY", "swiglu backward"}},
        {Recipe::fp8_rowwise, {"fc1 input", "fc1 weight", "swiglu", "fc2 weight", "dY", "swiglu backward"}},
        {Recipe::mxfp8, {"fc1 input", "fc1 weight", "swiglu", "fc2 weight", "dY", "swiglu backward"}},
        {Recipe::fp8_tensorwise,
         {"fc1 input", "fc1 weight", "swiglu", "fc2 weight", "dY", "swiglu backward"}}};
    for (const auto& [recipe, names] : wanted) {
        const LayerCase c = LayerCase::of(recipe);
        TensorStats stats;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) { run_block(group, c, &stats); });
        ASSERT_EQ(stats.rows().size(), names.size());
        for (size_t i = 0; i < names.size(); ++i) {
            const TensorStatsRow& row = stats.rows()[i];
            EXPECT_EQ(row.layer, 0);
            EXPECT_GT(row.counts.amax, 0) << names[i];
            EXPECT_EQ(row.tensor, names[i]);
            const int64_t rows =
                names[i] == "norm" || (recipe == Recipe::fp8_flow && names[i] == "dY") ? 64 : 128;
            if (names[i].ends_with("weight"))
                EXPECT_EQ(row.counts.values,
                          (names[i] == "fc1 weight" ? 2 : 1) * c.moe.num_experts * 128 * 128);
            else
                EXPECT_EQ(row.counts.values, rows * (names[i] == "swiglu backward" ? 256 : 128)) << names[i];
            EXPECT_GT(row.nmse(), 2e-4) << names[i];  // E4M3 rounds by 2.6 % rms
            EXPECT_LT(row.nmse(), 2e-3) << names[i];
            EXPECT_GT(row.counts.scale_min, 0) << names[i];
        }
        expect_transposed(stats, recipe == Recipe::fp8_flow);
        // what is computed a second time is not counted a second time
        for (const char* module : {"layernorm", "moe_act", "moe_expert", "moe", "shared_experts", "full"}) {
            LayerCase recomputed = c;
            recomputed.moe.moe_shared_expert_intermediate_size = 128;
            const auto values = [&] {
                TensorStats all;
                run_thread_ranks(1, 60, [&](ProcessGroup& group) { run_block(group, recomputed, &all); });
                std::map<std::string, double> result;
                for (const TensorStatsRow& row : all.rows()) result[row.tensor] = row.counts.values;
                for (const TensorStatsRow& row : all.transposed())
                    result[row.weight + " " + row.tensor] = row.counts.values;
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
        const auto with = run_block(apart)[0];
        run_thread_ranks(1, 60,
                         [&](ProcessGroup& group) { EXPECT_TRUE(run_block(group, c, &stats).y == with.y); });
    }
}

// With the cast after the wire, what arrives is observed instead of the norm's rows: 64 tokens to 2 experts
// each.
TEST(TensorStats, OfTheFlowWithoutAnFp8Wire) {
    for (bool routed : {true, false}) {
        LayerCase c = LayerCase::of(Recipe::fp8_flow);
        c.model.moe_layer_freq = {routed ? 1 : 0};
        c.precision.moe_quantize_before_dispatch = false;
        TensorStats stats;
        run_thread_ranks(1, 60, [&](ProcessGroup& group) { run_block(group, c, &stats); });
        std::map<std::string, double> values;
        for (const TensorStatsRow& row : stats.rows()) {
            if (!row.tensor.ends_with("weight")) values[row.tensor] = row.counts.values;
            EXPECT_GT(row.nmse(), 2e-4) << row.tensor;
            EXPECT_LT(row.nmse(), 2e-3) << row.tensor;
        }
        const int64_t rows = routed ? 128 : 64, ffn = routed ? 128 : 256;
        EXPECT_EQ(values, (std::map<std::string, double>{{"dispatch", rows * 128},
                                                         {"dY", rows * 128},
                                                         {"swiglu", rows * ffn},
                                                         {"swiglu backward", rows * 2 * ffn}}));
    }
}

}  // namespace
}  // namespace fp8flow
