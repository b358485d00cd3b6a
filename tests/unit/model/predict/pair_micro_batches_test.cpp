// SPDX-License-Identifier: MIT
// precision.moe_wgrad_pair_micro_batches: auto, as a run and a plan decide it; and what a resumed run keeps.
#include "model/config/meanings.h"
#include "model/predict/fit.h"

#include <gtest/gtest.h>

namespace fp8flow::predict {
namespace {

constexpr double kPlenty = 0x1p50;

Config config_of(const std::vector<std::string>& keys) {
    return parse_config("training: {micro_batch_size: 1, global_batch_size: 8}\n", "t.yaml", keys);
}

AutoSwitch decided(const std::vector<std::string>& keys, int64_t ranks = 2, double usable = kPlenty) {
    Config config = config_of(keys);
    decide_pairs(config, ranks, usable);
    return config.precision.moe_wgrad_pair_micro_batches;
}

TEST(PairMicroBatches, AreTheDefaultWhereTheyArePossible) {
    EXPECT_EQ(decided({}), AutoSwitch::on);
    EXPECT_EQ(decided({"moe_wgrad_pair_micro_batches=auto", "recipe=fp8_blockwise"}), AutoSwitch::on);
    for (const std::string key :
         {"moe_wgrad_pair_micro_batches=false", "global_batch_size=2", "recipe=bf16", "recipe=mxfp8",
          "fp8_wgrad=false", "overlap_moe_expert_parallel_comm=true", "moe_layer_freq=[0, 0]"})
        EXPECT_EQ(decided({key}), AutoSwitch::off) << key;
    EXPECT_EQ(decided({}, 8), AutoSwitch::off) << "one micro-batch on each rank";
}

TEST(PairMicroBatches, NeedTheMemoryAndSayWhatTheyCost) {
    Config config = config_of({});
    EXPECT_EQ(decide_pairs(config, 2, 1.0).find("does not pair micro-batches"), 0u);
    EXPECT_EQ(config.precision.moe_wgrad_pair_micro_batches, AutoSwitch::off);
    config = config_of({});
    const std::string line = decide_pairs(config, 2, kPlenty);
    EXPECT_EQ(line.find("pairs micro-batches"), 0u) << line;
    EXPECT_NE(line.find("B per layer, "), std::string::npos) << line;
    EXPECT_EQ(decide_pairs(config, 2, kPlenty), "") << "decided once";
    config = config_of({"moe_wgrad_pair_micro_batches=true"});
    EXPECT_EQ(decide_pairs(config, 2, 1.0), "") << "the user decides";
    EXPECT_EQ(config.precision.moe_wgrad_pair_micro_batches, AutoSwitch::on);
}

// A checkpoint has what its run decided; one of an earlier version had no pairs unless its key says so.
TEST(PairMicroBatches, OfAResumedRunAreThoseOfItsCheckpoint) {
    const auto resumed = [](Config saved, const std::vector<std::string>& keys) {
        Config config = config_of(keys);
        decide_pairs(config, 2, kPlenty);
        keep_meanings(saved, config);
        return config.precision.moe_wgrad_pair_micro_batches;
    };
    EXPECT_EQ(resumed(config_of({}), {}), AutoSwitch::off);
    EXPECT_EQ(resumed(config_of({"moe_wgrad_pair_micro_batches=false"}), {}), AutoSwitch::off);
    EXPECT_EQ(resumed(config_of({"moe_wgrad_pair_micro_batches=true"}), {}), AutoSwitch::on);
    EXPECT_EQ(
        resumed(config_of({"moe_wgrad_pair_micro_batches=false"}), {"moe_wgrad_pair_micro_batches=auto"}),
        AutoSwitch::off);
    EXPECT_EQ(
        resumed(config_of({"moe_wgrad_pair_micro_batches=false"}), {"moe_wgrad_pair_micro_batches=true"}),
        AutoSwitch::on);
}

}  // namespace
}  // namespace fp8flow::predict
