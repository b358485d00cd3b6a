// SPDX-License-Identifier: MIT
// The search over runs, and the advice where memory is short.
#include "model/predict/choose.h"

#include "tests/support/settings.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>
#include <sstream>

namespace fp8flow::predict {
namespace {

TEST(Choose, WhatTheFileSaysStays) {
    const Gpu gpu = load_gpu("h200");
    const Config config = shipped("qwen3_30b_a3b");
    const auto choices = choose(config, open_search(config, {8, 16}, {Recipe::bf16, Recipe::fp8_flow}), gpu);
    ASSERT_EQ(choices.size(), 4u);
    for (const Choice& choice : choices) {
        EXPECT_TRUE(choice.best);
        EXPECT_EQ(choice.config.parallel.expert_model_parallel_size, 8);
        EXPECT_EQ(choice.config.training.micro_batch_size, config.training.micro_batch_size);
    }
}

TEST(Choose, OpenSizesAreSearchedAndTheFastestThatFitsIsMarked) {
    const Gpu gpu = load_gpu("h200");
    Config config = shipped("qwen3_30b_a3b");
    config.origin.clear();
    const Search search = open_search(config, {16}, {Recipe::fp8_flow});
    const auto choices = choose(config, search, gpu);
    std::set<int64_t> sizes;
    const Choice* best = nullptr;
    for (const Choice& choice : choices) {
        sizes.insert(choice.config.parallel.expert_model_parallel_size);
        if (choice.best) best = &choice;
        EXPECT_EQ(choice.config.training.global_batch_size, kSequences * 16);
        EXPECT_EQ(choice.per_host.has_value(), choice.config.parallel.expert_model_parallel_size > 8);
        EXPECT_STREQ(choice.basis(gpu), "extrapolation");
    }
    EXPECT_EQ(sizes, (std::set<int64_t>{1, 2, 4, 8, 16}));
    ASSERT_NE(best, nullptr);
    ASSERT_TRUE(best->fit.fits());
    for (const Choice& choice : choices)
        EXPECT_TRUE(!choice.fit.fits() || choice.time.tokens_per_second() <= best->time.tokens_per_second());
}

// A DeepSeek-V3 layer on four H200s with 8 micro-batches took 14.88 ms, and 12.13 ms with pairs.
TEST(Choose, JoinedMicroBatchesSayWhatTheyGainAndCost) {
    const Gpu gpu = load_gpu("h200");
    const auto of = [&](const char* joined) {
        const auto key = fmt::format("moe_wgrad_micro_batches={}", joined);
        return joining_of(shipped("layer_deepseek_v3", {"global_batch_size=32", key}), 4, gpu).value();
    };
    const Joining pairs = of("2"), open = of("auto");
    EXPECT_TRUE(pairs.used);
    EXPECT_FALSE(open.used);
    EXPECT_NEAR(pairs.layer_single, 14.88e-3, 0.05 * 14.88e-3);
    EXPECT_NEAR(pairs.layer_joined / pairs.layer_single, 12.13 / 14.88, 0.03);
    const double rows = 49152, row = (2 * 7168 + 3 * 2048) * (1 + 4.0 / (128 * 128));
    EXPECT_NEAR(pairs.bytes_joined - pairs.bytes_single, rows * row, 1);
    EXPECT_EQ(open.micro_batches, 4) << "512 rows per expert";
    EXPECT_LT(open.layer_joined, pairs.layer_joined);
    EXPECT_NEAR(open.bytes_joined - open.bytes_single, 3 * rows * row, 3);
    const Config two_layers = shipped("layer_deepseek_v3", {"global_batch_size=32", "num_layers=2"});
    EXPECT_LT(joining_of(two_layers, 4, gpu).value().bytes_single, 1.01 * open.bytes_single) << "of a layer";
    EXPECT_FALSE(joining_of(shipped("layer_deepseek_v3"), 4, gpu).has_value()) << "one micro-batch";
}

// Four H200s as two hosts took 39.95 ms per step, without, and 39.44 ms with one row per host.
TEST(Choose, BetweenHostsAPredictionIsARange) {
    Gpu gpu = load_gpu("h200");
    const Choice inside = predicted(shipped("layer_deepseek_v3"), 4, gpu);
    EXPECT_FALSE(inside.time.extrapolated());
    EXPECT_EQ(prediction_text(inside, gpu).find("extrapolation"), std::string::npos);
    for (const auto& [dispatcher, measured] : {std::pair{"flex", 39.95e-3}, {"hierarchical", 39.44e-3}}) {
        const std::string key = fmt::format("moe_token_dispatcher_type={}", dispatcher);
        const Choice hosts = predicted(shipped("layer_deepseek_v3", {"parallel.hosts=2x2", key}), 4, gpu);
        EXPECT_LT(hosts.time.least, measured);
        EXPECT_GT(hosts.time.most, measured);
        EXPECT_LT(hosts.time.most, 2 * measured) << "a range that says something";
        EXPECT_TRUE(hosts.per_host.has_value());
    }
    const Config wide = shipped("layer_deepseek_v3", {"global_batch_size=16"});
    const Choice machines = predicted(wide, 16, gpu);
    EXPECT_LT(machines.time.least, machines.time.step);
    EXPECT_GT(machines.time.most, machines.time.step);
    expect_contains(prediction_text(machines, gpu), "extrapolation");
    expect_contains(plan_page("a", {machines}, gpu, {}), "extrapolation");
    const auto range = choices_json({machines}, gpu, {}).at("choices")[0];
    EXPECT_DOUBLE_EQ(range.at("step_seconds_range")[1], machines.time.most);
    gpu.sheet.network_rate /= 10;
    EXPECT_GT(predicted(wide, 16, gpu).time.least, machines.time.most)
        << "the reduction is most of this step";
}

TEST(Choose, NothingLegalIsRefused) {
    const Gpu gpu = load_gpu("h200");
    const Config config = shipped("qwen3_30b_a3b");
    EXPECT_THROW(choose(config, open_search(config, {3}, {Recipe::fp8_flow}), gpu), Error);
}

TEST(Fit, NamesTheLargestAndTheKeysThatFit) {
    const Gpu gpu = load_gpu("h100");
    const Config config = shipped("qwen3_30b_a3b");
    const Fit fit = fit_of(config, 8, gpu.sheet);
    ASSERT_FALSE(fit.fits());
    ASSERT_EQ(fit.largest.size(), 5u);
    EXPECT_TRUE(std::is_sorted(fit.largest.begin(), fit.largest.end(),
                               [](const auto& a, const auto& b) { return a.item.bytes > b.item.bytes; }));
    EXPECT_EQ(fit.largest.front().key, "training.exp_avg_dtype, training.exp_avg_sq_dtype: bf16");
    ASSERT_FALSE(fit.settings.empty());
    expect_contains(consumers_text(fit, gpu.sheet), "It fits with");
    EXPECT_EQ(consumers_text(fit_of(config, 8, load_gpu("h200").sheet), gpu.sheet), "");
}

// The settings do what they say, and none is superfluous.
class Fits : public ::testing::TestWithParam<const char*> {};
TEST_P(Fits, EverySettingIsNeeded) {
    const Texts base = {std::string("recompute.recompute_granularity=") + GetParam()};
    const Config config = shipped("qwen3_30b_a3b", base);
    const double needed = fit_of(config, 8, 0).needed;
    size_t most = 0;
    for (double share = 0.95; share > 0.3; share -= 0.05) {
        const Fit fit = fit_of(config, 8, share * needed);
        most = std::max(most, fit.settings.size());
        const auto fits_without = [&](size_t left_out) {
            Texts overrides = base;
            for (size_t i = 0; i < fit.settings.size(); ++i) {
                std::istringstream settings(i == left_out ? "" : fit.settings[i]);
                for (std::string one; settings >> one;)  // "a=1, b=2"
                    overrides.push_back(one.substr(0, one.find_last_not_of(',') + 1));
            }
            return fit_of(shipped("qwen3_30b_a3b", overrides), 8, share * needed).fits();
        };
        if (fit.settings.empty()) continue;
        EXPECT_TRUE(fits_without(fit.settings.size())) << share;
        for (size_t i = 0; i < fit.settings.size(); ++i)
            EXPECT_FALSE(fits_without(i)) << share << " " << fit.settings[i];
    }
    EXPECT_GT(most, 2u);
}
INSTANTIATE_TEST_SUITE_P(Recompute, Fits, ::testing::Values("none", "full"));

TEST(Fit, SomeModelsFitWithNoKey) {
    Config config = shipped("qwen3_30b_a3b");
    config.parallel.expert_model_parallel_size = 1;
    const Fit fit = fit_of(config, 1, load_gpu("h100").sheet);
    EXPECT_FALSE(fit.fits());
    EXPECT_TRUE(fit.settings.empty());
    EXPECT_EQ(fit_text(fit), "no");
}

TEST(Choose, JsonAndPageHoldTheChoices) {
    const Gpu gpu = load_gpu("h200");
    const Config config = shipped("layer_deepseek_v3");
    const auto choices = choose(config, open_search(config, {4}, {Recipe::bf16, Recipe::fp8_flow}), gpu);
    const auto json = choices_json(choices, gpu, {});
    ASSERT_EQ(json.at("choices").size(), 2u);
    EXPECT_EQ(json.at("prediction").at("source"), "profile_deepseek_v3_4gpu_recipes.json");
    double sum = 0;
    for (const auto& stage : json.at("choices")[1].at("stages"))
        sum += stage.at("seconds").get<double>() * stage.at("runs").get<double>();
    EXPECT_NEAR(sum, json.at("choices")[1].at("step_seconds").get<double>(), 1e-9);
    const std::string page = plan_page("layer_deepseek_v3", choices, gpu, {});
    for (const char* text : {"layer_deepseek_v3, predicted for the H200, fp8_flow on 4 GPUs: 1.1",
                             "sequences of 4096 tokens (model.seq_length)"})
        EXPECT_NE(page.find(text), std::string::npos) << text;
    EXPECT_EQ(json.at("choices")[1].at("seq_length"), 4096);
    Gpu vague = gpu;
    vague.calibration.check->mean_step = 0.5;
    expect_contains(plan_page("a", choices, vague, {}), "bf16 within the error of the prediction");
}

// Nothing fits: no row is the fastest that does, whatever is shown in detail.
TEST(Choose, OnlyWhatFitsIsMarkedAndCompared) {
    const Gpu gpu = load_gpu("h100");
    const Config config = shipped("qwen3_30b_a3b");
    const auto choices = choose(config, open_search(config, {8}, {Recipe::bf16, Recipe::fp8_flow}), gpu);
    for (const Choice& choice : choices) {
        ASSERT_FALSE(choice.fit.fits());
        EXPECT_TRUE(choice.best);
        EXPECT_FALSE(choice.fastest_that_fits());
    }
    Config open = config;
    open.origin.clear();  // what needs the least memory, not the fastest
    EXPECT_EQ(choose(open, open_search(open, {1}, {Recipe::bf16}), gpu)[0].config.training.micro_batch_size,
              1);
    EXPECT_EQ(choices_markdown(choices, gpu).find("*"), std::string::npos) << choices_markdown(choices, gpu);
    expect_contains(choices_text(choices, gpu), "Does not fit");
    EXPECT_EQ(choices_json(choices, gpu, {}).at("choices")[0].at("best"), false);
    expect_contains(plan_page("a", choices, gpu, {}), R"("a, predicted for the H100")");
}

}  // namespace
}  // namespace fp8flow::predict
