// SPDX-License-Identifier: MIT
// precision.moe_wgrad_micro_batches: auto, as a run and a plan decide it; what a resumed run keeps; and the
// key of earlier versions.
#include "model/config/changed_rules.h"
#include "model/predict/fit.h"
#include "model/validate/arms.h"
#include "tests/support/files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace fp8flow::predict {
namespace {

constexpr double kPlenty = 0x1p50;

Config config_of(const std::vector<std::string>& keys) {
    return parse_config("training: {micro_batch_size: 1, global_batch_size: 8}\n", "t.yaml", keys);
}

int64_t decided(const std::vector<std::string>& keys, int64_t ranks = 2, double usable = kPlenty) {
    Config config = config_of(keys);
    decide_joined(config, ranks, usable);
    return config.precision.moe_wgrad_micro_batches;
}

TEST(JoinedMicroBatches, AreTheDefaultWhereTheyArePossible) {
    EXPECT_EQ(decided({}), 4) << "all of a rank";
    EXPECT_EQ(decided({"moe_wgrad_micro_batches=auto", "recipe=fp8_blockwise"}), 4);
    for (const std::string key :
         {"moe_wgrad_micro_batches=1", "global_batch_size=2", "recipe=bf16", "recipe=mxfp8",
          "fp8_wgrad=false", "overlap_moe_expert_parallel_comm=true", "moe_layer_freq=[0, 0]"})
        EXPECT_EQ(decided({key}), 1) << key;
    EXPECT_EQ(decided({}, 8), 1) << "one micro-batch on each rank";
}

// 8 experts and top-2: a micro-batch of 4096 tokens has 1024 rows per expert.
TEST(JoinedMicroBatches, AreAsManyAsGainTimeInEqualGroups) {
    const auto of = [](int64_t tokens, int64_t micro_batches) {
        return useful_joined(
            config_of({"moe.num_experts=8", "moe_router_topk=2", fmt::format("seq_length={}", tokens),
                       fmt::format("global_batch_size={}", 2 * micro_batches)}),
            2);
    };
    EXPECT_EQ(of(8192, 16), 2);
    EXPECT_EQ(of(4096, 16), 2);
    EXPECT_EQ(of(2048, 16), 4);
    EXPECT_EQ(of(1024, 16), 8);
    EXPECT_EQ(of(128, 16), 8) << "no more";
    EXPECT_EQ(of(128, 9), 5) << "and 4";
    EXPECT_EQ(of(2048, 6), 3);
}

TEST(JoinedMicroBatches, NeedTheMemoryAndSayWhatTheyCost) {
    Config config = config_of({});
    EXPECT_EQ(decide_joined(config, 2, 1.0).find("joins no micro-batches"), 0u);
    EXPECT_EQ(config.precision.moe_wgrad_micro_batches, 1);
    config = config_of({});
    const std::string line = decide_joined(config, 2, kPlenty);
    EXPECT_EQ(line.find("joins the weight gradients of 4 micro-batches"), 0u) << line;
    expect_contains(line, "B per layer, ");
    EXPECT_EQ(decide_joined(config, 2, kPlenty), "") << "decided once";
    config = config_of({"moe_wgrad_micro_batches=3"});
    EXPECT_EQ(decide_joined(config, 2, 1.0), "") << "the user decides";
    EXPECT_EQ(config.precision.moe_wgrad_micro_batches, 3);
    const double four = plan::sum_of(joined_memory(config_of({}), 2, 4)->joined);
    EXPECT_EQ(decided({}, 2, four), 4);
    EXPECT_EQ(decided({}, 2, four - 1), 2);
    const double two = plan::sum_of(joined_memory(config_of({}), 2, 2)->joined);
    EXPECT_EQ(decided({}, 2, two), 2);
    EXPECT_EQ(decided({}, 2, two - 1), 1);
}

// A checkpoint has what its run decided; one of an earlier version joined nothing unless its key says so.
TEST(JoinedMicroBatches, OfAResumedRunAreThoseOfItsCheckpoint) {
    const auto resumed = [](Config saved, const std::vector<std::string>& keys) {
        Config config = config_of(keys);
        decide_joined(config, 2, kPlenty);
        keep_old_rules(saved, config);
        return config.precision.moe_wgrad_micro_batches;
    };
    EXPECT_EQ(resumed(config_of({}), {}), 1);
    EXPECT_EQ(resumed(config_of({"moe_wgrad_micro_batches=1"}), {}), 1);
    EXPECT_EQ(resumed(config_of({"moe_wgrad_micro_batches=3"}), {}), 3);
    EXPECT_EQ(resumed(config_of({"moe_wgrad_micro_batches=1"}), {"moe_wgrad_micro_batches=auto"}), 1);
    EXPECT_EQ(resumed(config_of({"moe_wgrad_micro_batches=1"}), {"moe_wgrad_micro_batches=2"}), 2);
    // Texts that the resumed run has changed exclude what its checkpoint joined.
    const Config joined = config_of({"moe_wgrad_micro_batches=3"});
    for (const char* key :
         {"schedule.overlap_moe_expert_parallel_comm=true", "fp8_wgrad=false", "recipe=bf16"})
        EXPECT_EQ(resumed(joined, {key}), 1) << key;
}

// However its keys are spelled, an arm that cannot join micro-batches joins none; what the user set is an
// error.
TEST(JoinedMicroBatches, OfAnArmAreThoseOfTheRunUnlessItsKeysExcludeThem) {
    const auto joined = [](const std::string& arm, const Config& config) {
        for (const validate::Arm& made :
             validate::make_arms(config, validate::Ablation::none, 2, {"x:" + arm}))
            if (made.name == "x") return made.config.precision.moe_wgrad_micro_batches;
        return int64_t{-1};
    };
    Config config = config_of({});
    decide_joined(config, 2, kPlenty);
    EXPECT_EQ(joined("recipe=fp8_flow", config), 4);
    EXPECT_EQ(joined("recipe=fp8_flow,moe_wgrad_micro_batches=2", config), 2);
    EXPECT_EQ(joined("recipe=fp8_flow,moe_wgrad_micro_batches=1", config), 1);
    for (const char* keys : {"fp8_wgrad=false", "precision.fp8_wgrad=False", "fp8_wgrad= false",
                             "fp8_wgrad=\"false\"", "overlap_moe_expert_parallel_comm=True"})
        EXPECT_EQ(joined(keys, config), 1) << keys;
    EXPECT_EQ(joined("recipe=mxfp8", config), 0) << "it has no such key";
    EXPECT_THROW(joined("fp8_wgrad=false,moe_wgrad_micro_batches=2", config), Error);
    EXPECT_THROW(joined("fp8_wgrad=false", config_of({"moe_wgrad_micro_batches=2"})), Error);
    for (const validate::Arm& arm :
         validate::recipe_arms(config, {Recipe::fp8_flow}, validate::Ablation::schedules, 2))
        EXPECT_EQ(arm.config.precision.moe_wgrad_micro_batches,
                  arm.config.schedule.overlap_moe_expert_parallel_comm ? 1 : 4)
            << arm.name;
}

TEST(JoinedMicroBatches, PairsOfEarlierVersionsAreRead) {
    const auto of = [](const std::string& key) { return config_of({key}).precision.moe_wgrad_micro_batches; };
    EXPECT_EQ(of("moe_wgrad_pair_micro_batches=true"), 2);
    EXPECT_EQ(of("precision.moe_wgrad_pair_micro_batches=false"), 1);
    EXPECT_EQ(of("moe_wgrad_pair_micro_batches=auto"), 0);
    const Config config = parse_config("precision: {moe_wgrad_pair_micro_batches: true}\n", "t.yaml", {});
    EXPECT_EQ(config.precision.moe_wgrad_micro_batches, 2);
    EXPECT_TRUE(config.origin.contains("precision.moe_wgrad_micro_batches"));
    for (const char* key : {"moe_wgrad_micro_batches=0", "moe_wgrad_micro_batches=9",
                            "moe_wgrad_micro_batches=[2]", "moe_wgrad_micro_batches=many"})
        EXPECT_THROW(of(key), Error) << key;
}

}  // namespace
}  // namespace fp8flow::predict
