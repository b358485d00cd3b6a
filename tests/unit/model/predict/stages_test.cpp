// SPDX-License-Identifier: MIT
// Closed formulas of stages against what `profile` counted from the calls of real steps.
#include "model/predict/stages.h"
#include "model/config/fields.h"
#include "model/predict/time.h"
#include "model/validate/arms.h"
#include "tests/support/settings.h"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <map>
#include <set>
#include <sstream>

namespace fp8flow::predict {
namespace {

using namespace std::string_literals;
using nlohmann::json;

// The configuration of a profile; keys that the program no longer has are left out.
Config config_of(const json& profile, const std::string& file) {
    std::istringstream lines(profile.at("config").get<std::string>());
    std::string section, known;
    for (std::string line; std::getline(lines, line);) {
        const std::string name = line.substr(0, line.find(':'));
        if (!name.starts_with(' ')) section = name;
        if (!name.starts_with(' ') || find_field(section, name.substr(2)) != nullptr) known += line + "\n";
    }
    return parse_config(known, file);
}

// Absent: the arm overlaps stages, and counts the side stream elsewhere.
std::optional<Config> config_of_arm(const Config& config, const json& arm, int ranks) {
    using validate::Ablation;
    const std::vector<Recipe> recipes(std::begin(kRecipes), std::end(kRecipes));
    for (const Ablation ablation : {Ablation::none, Ablation::schedules, Ablation::state_dtypes})
        for (const auto& one : validate::recipe_arms(config, recipes, ablation, ranks))
            if (arm.at("name") == one.name)
                return one.config.schedule.overlaps() ? std::nullopt : std::optional(one.config);
    return std::nullopt;
}

// Rows of a layer are of one layer and micro-batch, all others of a step.
std::map<std::string, Work> counts_of(const Config& config, int64_t ranks) {
    const TrainingSpec& training = config.training;
    const double batches = static_cast<double>(training.global_batch_size) /
                           static_cast<double>(training.micro_batch_size * ranks);
    const double accumulates = (batches - 1) / batches;
    std::map<std::string, Work> counts;
    const auto add = [&](const std::vector<Work>& works, double runs) {
        for (const Work& work : works) {
            Work& sum = counts[key_of(work)];
            sum.bytes += work.bytes * runs;
            sum.bf16_flops += work.bf16_flops * runs;
            sum.fp8_flops += work.fp8_flops * runs;
            sum.wire_bytes += work.wire_bytes;
            sum.launches += work.launches * runs;
        }
    };
    const LayerWork layer = layer_work(config, config.precision, accumulates);
    add(layer.moe, 1);
    add(layer.attention, 1);
    add(ends_work(config, accumulates), batches);
    add(update_work(config, ranks), 1);
    return counts;
}

struct Case {
    const char* file;
    // rows of older commits: that program moved more bytes
    std::set<std::string> without = {};
};

TEST(Stages, AgreeWithWhatStepsCounted) {
    const std::set<std::string> added = {"moe layer/shared expert/forward", "moe layer/combine/forward"};
    const std::string update = "optimizer/optimizer/update";
    std::set<std::string> added_and_update = added;
    added_and_update.insert(update);
    const Case cases[] = {{"profile_deepseek_v3_2gpu_schedules.json", {update}},
                          {"profile_deepseek_v3_2gpu_micro_batches.json", {update}},
                          {"profile_qwen3_235b_2gpu_schedules.json", {update}},
                          {"profile_state_dtypes_2gpu.json", {update}},
                          {"profile_100m_2gpu.json", {update}},
                          {"exposed_mixtral_2gpu.json"},
                          {"exposed_100m_2gpu.json"},
                          {"profile_deepseek_v3_4gpu_latest.json"},
                          {"profile_deepseek_v3.json", added_and_update},
                          {"profile_deepseek_v3_8192.json", added_and_update},
                          {"profile_mixtral_8x7b.json", {update}},
                          {"profile_qwen3_1gpu.json", {update}}};
    size_t compared = 0;
    for (const Case& one : cases) {
        const json profile = json::parse(read_whole(FP8FLOW_SOURCE_DIR "/tests/data/profiles/"s + one.file));
        const int ranks = profile.at("ranks");
        const Config base = config_of(profile, one.file);
        for (const json& arm : profile.at("recipes")) {
            const auto config = config_of_arm(base, arm, ranks);
            if (!config) continue;
            const auto counts = counts_of(*config, ranks);
            for (const json& row : arm.at("rows")) {
                const std::string key =
                    fmt::format("{}/{}/{}", row.at("part").get<std::string>(),
                                row.at("stage").get<std::string>(), row.at("direction").get<std::string>());
                const double bytes = row.at("bytes"), flops = row.at("product flops"),
                             wire_bytes = row.at("wire bytes");
                if (bytes == 0 || one.without.contains(key)) continue;
                SCOPED_TRACE(fmt::format("{} {} {}", one.file, arm.at("name").get<std::string>(), key));
                const auto found = counts.find(key);
                ASSERT_NE(found, counts.end());
                const Work& work = found->second;
                // small passes over a few kB are left out of the formulas
                EXPECT_NEAR(work.bytes, bytes, 0.015 * bytes + 4e5);
                EXPECT_NEAR(work.bf16_flops + work.fp8_flops, flops, 1e-5 * flops);
                // even routing is expected, a few rows more or less are real
                EXPECT_NEAR(work.wire_bytes, wire_bytes, 0.03 * wire_bytes + 100);
                ++compared;
            }
        }
    }
    EXPECT_GT(compared, 500u);
}

TEST(Stages, RecomputedStagesRunTwice) {
    Config config = load_config(FP8FLOW_SOURCE_DIR "/configs/layer_deepseek_v3_1gpu.yaml");
    const auto flops = [&](const char* direction) {
        double sum = 0;
        for (const Work& work : layer_work(config, config.precision, 0).moe)
            if (work.direction == direction) sum += work.fp8_flops;
        return sum;
    };
    const double forward = flops("forward"), backward = flops("backward");
    EXPECT_DOUBLE_EQ(backward, 2 * forward);
    config.recompute.recompute_granularity = RecomputeGranularity::selective;
    config.recompute.moe = true;
    EXPECT_DOUBLE_EQ(flops("backward"), 3 * forward);
    config.recompute.moe = false;
    config.recompute.moe_expert = true;  // fc1 alone, two thirds of the routed experts' FLOPs
    const double shared = 6.0 * 4096 * 7168 * 2048;
    EXPECT_DOUBLE_EQ(flops("backward"), backward + (forward - shared) * 2 / 3);
}

// Rows that are dispatched again cross the wire again; rows kept once are read and fanned out.
TEST(Stages, SavedRows) {
    Config config = shipped("layer_deepseek_v3");
    config.recompute.recompute_granularity = RecomputeGranularity::selective;
    config.recompute.moe_expert = true;
    const auto dispatch = [&](SavedRows rows, const char* direction) {
        config.recompute.saved_rows = rows;
        for (const Work& work : layer_work(config, config.precision, 0).moe)
            if (work.stage == std::string("dispatch") && work.direction == direction) return work;
        return Work{};
    };
    const Work sorted = dispatch(SavedRows::sorted, "backward"), none = dispatch(SavedRows::none, "backward"),
               received = dispatch(SavedRows::received, "backward");
    EXPECT_GT(sorted.wire_bytes, 0);
    EXPECT_DOUBLE_EQ(none.wire_bytes, 2 * sorted.wire_bytes);
    EXPECT_DOUBLE_EQ(none.bytes, 2 * sorted.bytes);
    EXPECT_DOUBLE_EQ(received.wire_bytes, sorted.wire_bytes);
    EXPECT_GT(received.bytes, sorted.bytes);
    EXPECT_NEAR(dispatch(SavedRows::received, "forward").bytes - dispatch(SavedRows::sorted, "forward").bytes,
                2 * plan::expected_received_rows(config) * 7168 * (1 + 1.0 / 128), 1);  // written and read
}

// With moe_apply_probs_in: combine a combine reads the weight of each row.
TEST(Stages, MergingWeightsAreRead) {
    const auto combine = [](const char* where) {
        const Config config = shipped("layer_deepseek_v3", {fmt::format("moe_apply_probs_in={}", where)});
        for (const Work& work : layer_work(config, config.precision, 0).moe)
            if (key_of(work) == "moe layer/combine/forward") return work.bytes;
        return 0.0;
    };
    EXPECT_EQ(combine("combine") - combine("swiglu"), 4 * 4096 * 8);
}

// What training.freeze names has no weight gradient, no transposes for it, and no update.
TEST(Stages, FrozenWeightsHaveNoGradients) {
    const std::string file = FP8FLOW_SOURCE_DIR "/configs/quickstart.yaml";
    const auto counts = [&](const std::string& freeze) {
        return counts_of(load_config(file, {"training.freeze=" + freeze, "recipe=fp8_flow"}), 1);
    };
    const auto all = counts("[]"), experts = counts("[moe.experts]"),
               layer = counts("[layers.1.moe.experts]"), head = counts("[output_layer]"),
               embedding = counts("[word_embeddings]"), attention = counts("[self_attention]");
    for (const char* stage : {"fc1 wgrad", "fc2 wgrad", "transpose"}) {
        const std::string key = fmt::format("moe layer/{}/backward", stage);
        const Work &none = experts.at(key), &half = layer.at(key), &whole = all.at(key);
        EXPECT_GT(whole.bytes, 0);
        EXPECT_EQ(none.bytes + none.fp8_flops + none.launches, 0);
        EXPECT_DOUBLE_EQ(half.bytes, whole.bytes / 2);
        EXPECT_DOUBLE_EQ(half.fp8_flops, whole.fp8_flops / 2);
    }
    const auto of = [](const auto& from, const char* part) { return from.at(std::string(part)); };
    constexpr const char* kFc1 = "moe layer/fc1 dgrad/backward";
    EXPECT_EQ(of(experts, kFc1).bytes, of(all, kFc1).bytes);
    for (const char* key : {"attention/qkv/backward", "attention/proj/backward"})
        EXPECT_DOUBLE_EQ(of(attention, key).bf16_flops, of(all, key).bf16_flops / 2) << key;
    constexpr const char *kHead = "head/head/forward", *kEmbedding = "embedding/embedding/backward";
    EXPECT_DOUBLE_EQ(of(head, kHead).bf16_flops, of(all, kHead).bf16_flops * 2 / 3);
    EXPECT_LT(of(head, kHead).bytes, of(all, kHead).bytes);
    EXPECT_EQ(of(embedding, kEmbedding).bytes, 0);
    constexpr const char* kUpdate = "optimizer/optimizer/update";
    EXPECT_LT(of(experts, kUpdate).launches, of(all, kUpdate).launches);
    EXPECT_LT(of(experts, kUpdate).bytes, of(all, kUpdate).bytes);
}

TEST(Stages, RecipesWithoutFormulasAreNotKnown) {
    PrecisionSpec precision;
    EXPECT_TRUE(knows(precision));
    precision.moe_scaling_aware_transpose = false;
    EXPECT_FALSE(knows(precision));
    precision = {};
    precision.recipe = Recipe::mxfp8;
    EXPECT_FALSE(knows(precision));
}

}  // namespace
}  // namespace fp8flow::predict
