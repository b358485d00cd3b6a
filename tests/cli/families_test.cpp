// SPDX-License-Identifier: MIT
// Families of which the MoE layers are known, by the config.json of a small variant of each: plan and profile
// take it, train refuses it and says which part is foreign.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

using Json = nlohmann::json;

struct Family {
    const char* type;
    Json fields;
    const char* foreign;
};

// Keys as the families write them, sizes for a test.
std::vector<Family> families() {
    const Json sigmoid = {{"n_routed_experts", 8},
                          {"n_shared_experts", 1},
                          {"num_experts_per_tok", 2},
                          {"moe_intermediate_size", 128},
                          {"intermediate_size", 256},
                          {"n_group", 1},
                          {"topk_group", 1},
                          {"norm_topk_prob", true},
                          {"routed_scaling_factor", 2.5},
                          {"first_k_dense_replace", 1}};
    Json lite = sigmoid;
    lite.update({{"scoring_func", "softmax"},
                 {"topk_method", "greedy"},
                 {"norm_topk_prob", false},
                 {"routed_scaling_factor", 1.0},
                 {"intermediate_size", 200}});
    Json as_it_is = sigmoid;
    as_it_is["norm_topk_prob"] = false;
    return {{"deepseek_v3", sigmoid, "multi-latent"},
            {"kimi_k2", sigmoid, "multi-latent"},
            {"glm4_moe", as_it_is, "rotates a part of each head"},
            {"deepseek_v2", lite, "multi-latent"},
            {"olmoe",
             {{"num_experts", 8},
              {"num_experts_per_tok", 2},
              {"intermediate_size", 128},
              {"norm_topk_prob", false},
              {"router_aux_loss_coef", 0.01}},
             "normalises queries and keys over all heads"},
            {"minimax_m2",
             {{"num_local_experts", 8},
              {"num_experts_per_tok", 2},
              {"intermediate_size", 128},
              {"scoring_func", "sigmoid"},
              {"use_routing_bias", true}},
             "rotates a part of each head and normalises"}};
}

std::string config_of(const TemporaryFolder& folder, const Family& family) {
    Json json = {{"model_type", family.type}, {"hidden_act", "silu"}, {"hidden_size", 128},
                 {"num_hidden_layers", 2},    {"vocab_size", 128},    {"rms_norm_eps", 1e-6},
                 {"num_attention_heads", 2},  {"rope_theta", 10000},  {"tie_word_embeddings", false}};
    json.update(family.fields);
    return folder.write(std::string(family.type) + ".json", json.dump());
}

std::string yaml_of(const TemporaryFolder& folder) {
    return folder.write(
        "run.yaml",
        "model: {seq_length: 64}\ntraining: {micro_batch_size: 1, global_batch_size: 1, train_iters: 2, "
        "eval_iters: 0}\nprofile: {profile_step_start: 1, energy_seconds: 0}");
}

TEST(Families, PlanTakesThemAndTrainSaysWhatIsForeign) {
    const TemporaryFolder folder;
    const std::string yaml = yaml_of(folder), out = folder.path("train");
    for (const Family& family : families()) {
        SCOPED_TRACE(family.type);
        const std::string config = config_of(folder, family);
        const CommandResult plan = fp8flow_alone({"plan", "--hf-config", config}, folder.path());
        EXPECT_EQ(plan.status, 0) << plan.err;
        expect_contains(plan.out, "warning: " + config + ": model_type " + family.type);
        expect_contains(plan.out, family.foreign);
        EXPECT_EQ(plan.out.find("is taken as 256") != std::string::npos,
                  family.fields["intermediate_size"] == 200)
            << plan.out;
        EXPECT_EQ(plan.out.find("router_aux_loss_coef") != std::string::npos,
                  family.fields.contains("router_aux_loss_coef"))
            << plan.out;
        const CommandResult refused =
            fp8flow_alone({"train", yaml, "--hf-config", config, "--backend", "reference", "--out", out});
        EXPECT_EQ(refused.status, 2) << refused.out;
        expect_contains(refused.err, config + ": model_type " + family.type);
        expect_contains(refused.err, family.foreign);
        EXPECT_FALSE(std::filesystem::exists(out));
    }
}

// One with sigmoid scores as they are, one with a softmax over all experts.
TEST(Families, ProfileAndATrainingWithoutAttentionTakeThem) {
    const TemporaryFolder folder;
    const std::string yaml = yaml_of(folder);
    for (const Family& family : families()) {
        if (family.type != std::string("glm4_moe") && family.type != std::string("deepseek_v2")) continue;
        SCOPED_TRACE(family.type);
        const std::string config = config_of(folder, family), out = folder.path(family.type);
        const CommandResult profile =
            fp8flow_alone({"profile", yaml, "--hf-config", config, "--backend", "reference", "--recipes",
                           "fp8_flow", "--steps", "1", "--out", out});
        EXPECT_EQ(profile.status, 0) << profile.err;
        expect_contains(profile.out, family.foreign);
        const CommandResult trained =
            fp8flow_alone({"train", yaml, "--hf-config", config, "--backend", "reference", "--out",
                           out + "_trained", "--set", "model.attention=false"});
        EXPECT_EQ(trained.status, 0) << trained.err;
        EXPECT_EQ(trained.out.find(family.foreign), std::string::npos) << trained.out;
    }
}

}  // namespace
}  // namespace fp8flow
