// SPDX-License-Identifier: MIT
// Seconds by hand: roofline, launches, ways between ranks, what a schedule hides; kinds of GPU.
#include "model/predict/time.h"

#include "model/plan/plan.h"
#include "model/predict/choose.h"
#include "tests/support/settings.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fp8flow::predict {
namespace {

const StageTime& stage_of(const StepTime& time, std::string_view stage, std::string_view direction) {
    for (const StageTime& one : time.stages)
        if (one.work.part == "moe layer" && one.work.stage == stage && one.work.direction == direction)
            return one;
    throw std::runtime_error(std::string(stage));
}

TEST(Time, RooflineIsTheRootOfTheSumOfSquares) {
    const Datasheet sheet{.memory_rate = 100, .bf16_per_clock = 2, .fp8_per_clock = 4};
    EXPECT_DOUBLE_EQ(roofline_seconds({.bytes = 300}, sheet, 10), 3);
    EXPECT_DOUBLE_EQ(roofline_seconds({.bf16_flops = 80}, sheet, 10), 4);
    EXPECT_DOUBLE_EQ(roofline_seconds({.fp8_flops = 80}, sheet, 10), 2);
    EXPECT_DOUBLE_EQ(roofline_seconds({.bytes = 300, .bf16_flops = 80}, sheet, 10), 5);
}

TEST(Time, StagesFollowSharesAndClock) {
    Gpu gpu = load_gpu("h200");
    gpu.sheet.clock = 1.5e9;
    const Config config = shipped("layer_deepseek_v3_1gpu");
    const RecipeShares& shares = gpu.calibration.recipes.at("fp8_flow");
    const StepTime time = predict_step(config, 1, gpu);
    const StageTime& fc1 = stage_of(time, "fc1", "forward");
    EXPECT_DOUBLE_EQ(fc1.seconds, shares.whole_over_stages * (gpu.calibration.launch_seconds +
                                                              roofline_seconds(fc1.work, gpu.sheet, 1.5e9) /
                                                                  shares.shares.at("moe layer/fc1/forward")));
    // twice the clock makes GEMMs faster, and nothing that memory bounds
    gpu.sheet.clock = 3e9;
    const StepTime fast = predict_step(config, 1, gpu);
    EXPECT_LT(stage_of(fast, "fc1", "forward").seconds, 0.6 * fc1.seconds);
    EXPECT_EQ(stage_of(fast, "swiglu", "forward").seconds, stage_of(time, "swiglu", "forward").seconds);
    double sum = 0;
    for (const StageTime& stage : time.stages) sum += stage.seconds * stage.runs;
    EXPECT_NEAR(time.step, sum, 1e-12);
    EXPECT_EQ(time.wire, 0);
}

TEST(Time, RowsTakeNvlinkInsideAHostAndTheNetworkBetween) {
    const Gpu gpu = load_gpu("h200");
    Config config = shipped("layer_deepseek_v3", {"moe_router_num_groups=0", "moe_router_group_topk=0"});
    const StepTime inside = predict_step(config, 4, gpu);
    const StageTime& near = stage_of(inside, "dispatch", "forward");
    EXPECT_DOUBLE_EQ(near.wire, near.work.wire_bytes / gpu.sheet.peer_rate);

    config.parallel.expert_model_parallel_size = 32;
    config.training.global_batch_size = 32;
    const StepTime flat = predict_step(config, 32, gpu);
    const StageTime& far = stage_of(flat, "dispatch", "forward");
    // 24 of 31 other ranks are on other hosts
    EXPECT_DOUBLE_EQ(far.wire, far.work.wire_bytes * 24 / 31 / gpu.sheet.network_rate);
    Config per_host = config;
    per_host.parallel.moe_token_dispatcher_type = TokenDispatcher::hierarchical;
    const StepTime once = predict_step(per_host, 32, gpu);
    const double row = 7168.0 * (1 + 1.0 / 128), tokens = 4096;
    const double rows = tokens * plan::expected_distinct_ranks(config.moe, 4) * 3 / 4;
    EXPECT_NEAR(stage_of(once, "dispatch", "forward").wire, rows * row / gpu.sheet.network_rate, 1e-9);
    EXPECT_LT(once.step, flat.step);
    const Choice choice = predicted(config, 32, gpu);
    EXPECT_EQ(choice.time.step, flat.step);
    EXPECT_EQ(choice.per_host->step, once.step);
}

// A bench times a whole call of core attention.
TEST(Time, CoreAttentionCountsItsLaunchesOnce) {
    Gpu gpu = load_gpu("h200");
    const Config config = shipped("h200_100m", {"data.data_kind=synthetic", "data.data_path=[]"});
    const auto core = [&] {
        const StepTime time = predict_step(config, config.parallel.expert_model_parallel_size, gpu);
        for (const StageTime& one : time.stages)
            if (one.work.stage == "core attention" && one.work.direction == "forward") return one;
        throw std::runtime_error("core attention");
    };
    const StageTime before = core();
    ASSERT_GT(before.work.launches, 0);
    gpu.calibration.launch_seconds *= 1.1;
    EXPECT_DOUBLE_EQ(core().seconds, before.seconds);
    gpu.calibration.launch_seconds = 1;
    EXPECT_DOUBLE_EQ(core().seconds, before.work.launches);
}

// Ranks that are late make the others wait in a combine, by a share of the experts' time; rows move
// meanwhile.
TEST(Time, ACombineTakesItsRowsAndTheLateRanks) {
    Gpu gpu = load_gpu("h200");
    const Config config = shipped("layer_deepseek_v3");
    const auto seconds = [&] {
        const StepTime time = predict_step(config, 4, gpu);
        double experts = 0;
        for (const char* stage : {"fc1", "swiglu", "fc2"})
            experts += stage_of(time, stage, "forward").seconds;
        return std::pair{stage_of(time, "combine", "forward"), experts};
    };
    const auto [late, experts] = seconds();
    ASSERT_GT(gpu.calibration.late_share, 0.01);
    const double share = gpu.calibration.late_share;
    gpu.calibration.late_share = 0;
    const StageTime alone = seconds().first;
    EXPECT_NEAR(late.seconds - alone.seconds, share * experts, 1e-9);
    const double whole = gpu.calibration.recipes.at("fp8_flow").whole_over_stages;
    EXPECT_NEAR(alone.seconds, whole * (gpu.calibration.exchange_seconds + alone.wire), 1e-9);
    EXPECT_EQ(
        stage_of(predict_step(shipped("layer_deepseek_v3_1gpu"), 1, load_gpu("h200")), "combine", "forward")
            .wire,
        0);
}

// 24 and 16 tiles on 132 SMs: serial steps lose what they leave idle, and the main stream uses it in
// overlapped ones.
TEST(Time, NarrowWeightGradientsLeaveSmsIdle) {
    const Gpu gpu = load_gpu("h200");
    Config config = shipped("h200_100m", {"data.data_kind=synthetic", "data.data_path=[]",
                                          "parallel.expert_model_parallel_size=1"});
    const auto shared = [&](const char* direction) {
        return stage_of(predict_step(config, 1, gpu), "shared expert", direction);
    };
    const double tokens = f64(config.training.micro_batch_size * config.model.seq_length);
    const StageTime serial = shared("backward");
    const double tile = 2.0 * 128 * 256, end = 1700.0 * 8192;
    const auto wave = [&](double tiles, double contraction, double last) {
        return std::ceil(tiles / 132) * 132 * (tile * contraction + last);
    };
    // W1 [768, 1024], W2 [1024, 384]; dgrads [tokens, 384] over 1024 and [tokens, 1024] over 768
    const double computed = wave(6 * 4, tokens, 0) + wave(8 * 2, tokens, 0) +
                            wave(tokens / 128 * 2, 1024, end) + wave(tokens / 128 * 4, 768, end);
    EXPECT_NEAR(serial.work.fp8_idle, computed - serial.work.fp8_flops, 1e-6 * computed);
    config.schedule.moe_shared_expert_overlap = true;
    EXPECT_LT(shared("backward").seconds, 0.9 * serial.seconds);
    // the DeepSeek-V3 layer fills its waves
    const StageTime wide = stage_of(predict_step(shipped("layer_deepseek_v3"), 4, gpu), "fc1", "forward");
    EXPECT_LT(wide.work.fp8_idle, 0.1 * wide.work.fp8_flops);
}

// The MoE layer of a model with some layers in BF16 is their mean.
TEST(Time, LayersInBf16CountByTheirNumber) {
    const Gpu gpu = load_gpu("h200");
    const auto layer = [&](const char* key) {
        return predict_step(shipped("qwen3_30b_a3b", {key}), 8, gpu).layer;
    };
    const double bf16 = layer("recipe=bf16"), flow = layer("recipe=fp8_flow");
    EXPECT_LT(flow, bf16);
    EXPECT_NEAR(layer("num_layers_at_start_in_bf16=12"), 0.25 * bf16 + 0.75 * flow, 1e-9);
}

// Small models wait for the host; a graph is one launch.
TEST(Time, AStepIsNoShorterThanItsLaunches) {
    Gpu gpu = load_gpu("h200");
    Config config = shipped("layer_deepseek_v3");
    const StepTime device = predict_step(config, 4, gpu);
    EXPECT_FALSE(device.host_bound);
    EXPECT_DOUBLE_EQ(device.useful_flops, sum_of(plan::count_flops(config), &plan::FlopPart::both) * 4096);
    ASSERT_GT(device.launches, 0);
    gpu.calibration.host_seconds = 2 * device.step / device.launches;
    const StepTime host = predict_step(config, 4, gpu);
    EXPECT_TRUE(host.host_bound);
    EXPECT_DOUBLE_EQ(host.step, 2 * device.step);
    config.schedule.cuda_graph_impl = CudaGraphImpl::full_iteration;
    EXPECT_DOUBLE_EQ(predict_step(config, 4, gpu).step, device.step);
}

// What formulas leave out is known from the configuration, before anything is measured.
TEST(Time, WhatIsNotCoveredIsSaid) {
    const Gpu gpu = load_gpu("h200");
    Config config = shipped("layer_deepseek_v3");
    EXPECT_EQ(not_covered(config), "");
    config.schedule.overlap_param_gather = true;
    expect_contains(prediction_text(predicted(config, 4, gpu), gpu), "not covered: what a gather takes");
}

TEST(Time, InterleavedMicroBatchesHideTheNetworkAndNothingInsideAHost) {
    const Gpu gpu = load_gpu("h200");
    Config config = shipped("layer_deepseek_v3", {"global_batch_size=32"});
    const StepTime serial = predict_step(config, 4, gpu);
    config.schedule.overlap_moe_expert_parallel_comm = true;
    EXPECT_EQ(predict_step(config, 4, gpu).step, serial.step);
    config.parallel.expert_model_parallel_size = 16;
    config.training.global_batch_size = 128;
    const StepTime interleaved = predict_step(config, 16, gpu);
    EXPECT_LT(interleaved.exposed, interleaved.wire);
    config.schedule.overlap_moe_expert_parallel_comm = false;
    const StepTime alone = predict_step(config, 16, gpu);
    EXPECT_DOUBLE_EQ(alone.exposed, alone.wire);
    EXPECT_NEAR(alone.step - interleaved.step, interleaved.wire - interleaved.exposed, 1e-9);
}

TEST(Time, GradientsOfReplicasCrossHosts) {
    const Gpu gpu = load_gpu("h200");
    Config config = shipped("layer_deepseek_v3");
    const auto reduction = [&](int64_t gpus) {
        config.training.global_batch_size = gpus;
        double seconds = 0;
        for (const StageTime& stage : predict_step(config, gpus, gpu).stages)
            if (stage.work.part == "gradient reduction") seconds += stage.seconds;
        return seconds;
    };
    const double dense = reduction(4), both = reduction(8), hosts = reduction(16);
    EXPECT_LT(dense, both / 10);  // with 4 ranks every expert is held once
    EXPECT_GT(hosts, 2 * both);
}

TEST(Time, UnknownRecipesAreRefused) {
    const Gpu gpu = load_gpu("h200");
    const Config config = shipped("layer_deepseek_v3_1gpu", {"recipe=mxfp8"});
    EXPECT_FALSE(can_predict(config, gpu));
    EXPECT_THROW(predict_step(config, 1, gpu), Error);
}

// A file with shares alone: stages and recipes that it does not have keep the shares that ship.
TEST(Gpu, SharesOfAFileGoOverThoseThatShip) {
    TemporaryFolder folder;
    const Gpu shipped = load_gpu("h200");
    const Gpu own = load_gpu(folder.write("mine.json", R"({"gpu": "NVIDIA H200", "source": "profile.json",
        "commit": "c", "date": "2026-01-01", "launch seconds": 1e-6, "exchange seconds": 1e-5, "recipes": {"fp8_flow":
        {"clock hertz": 1e9, "whole over stages": 1, "shares": {"moe layer/fc1/forward": 0.5}}}})"));
    const auto& shares = own.calibration.recipes.at("fp8_flow").shares;
    const auto& otherwise = shipped.calibration.recipes.at("fp8_flow").shares;
    EXPECT_EQ(shares.at("moe layer/fc1/forward"), 0.5);
    EXPECT_EQ(shares.at("moe layer/swiglu/forward"), otherwise.at("moe layer/swiglu/forward"));
    EXPECT_EQ(own.calibration.recipes.size(), shipped.calibration.recipes.size());
    EXPECT_EQ(own.calibration.source, "profile.json");
    EXPECT_EQ(own.sheet.memory_bytes, shipped.sheet.memory_bytes);
}

TEST(Gpu, FilesFromElsewhereAreRefusedWithTheirNames) {
    TemporaryFolder folder;
    const auto refusal = [&](const std::string& text) {
        return error_of(ExitCode::usage, [&] { load_gpu(folder.write("mine.json", text)); });
    };
    expect_contains(refusal("[1]"), "mine.json: got no JSON object");
    expect_contains(refusal("{}"), "key 'gpu' not found");
    const std::string recipes =
        R"({"recipes": {"bf16": 3}, "gpu": "NVIDIA H200", "source": "s", "commit": "c",
        "date": "d")";
    expect_contains(refusal(recipes + R"(, "launch seconds": -1})"), "no positive number 'launch seconds'");
    expect_contains(refusal(recipes + R"(, "launch seconds": 1e-6, "exchange seconds": 1e-6})"),
                    "cannot use at() with number");
    EXPECT_THROW(load_gpu("b100"), Error);
}

}  // namespace
}  // namespace fp8flow::predict
