// SPDX-License-Identifier: MIT
// Families of which the MoE layers are known, by the config.json of a small variant of each: plan and profile
// take it, train refuses it and says which part is foreign.
#include "model/safetensors/tensor_set.h"
#include "model/safetensors/writer.h"
#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
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
    Json as_it_is = sigmoid;
    as_it_is.update({{"norm_topk_prob", false}, {"intermediate_size", 200}});
    return {{"axk1", sigmoid, "multi-latent"}, {"axk2", as_it_is, "index of keys"}};
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
        const CommandResult plan = succeeded(fp8flow_alone({"plan", "--hf-config", config}, folder.path()));
        expect_contains(plan.out, "warning: " + config + ": model_type " + family.type);
        expect_contains(plan.out, family.foreign);
        EXPECT_EQ(plan.out.find("is taken as 256") != std::string::npos,
                  family.fields.at("intermediate_size") == 200)
            << plan.out;
        EXPECT_EQ(plan.out.find("router_aux_loss_coef") != std::string::npos,
                  family.fields.contains("router_aux_loss_coef"))
            << plan.out;
        const std::string refused = failure(
            2, fp8flow_alone({"train", yaml, "--hf-config", config, "--backend", "reference", "--out", out}));
        expect_contains(refused, config + ": model_type " + family.type);
        expect_contains(refused, family.foreign);
        EXPECT_FALSE(std::filesystem::exists(out));
    }
}

// One with sigmoid scores as they are, one with a softmax over all experts.
TEST(Families, ProfileAndATrainingWithoutAttentionTakeThem) {
    const TemporaryFolder folder;
    const std::string yaml = yaml_of(folder);
    for (const Family& family : families()) {
        SCOPED_TRACE(family.type);
        const std::string config = config_of(folder, family), out = folder.path(family.type);
        const CommandResult profile =
            succeeded(fp8flow_alone({"profile", yaml, "--hf-config", config, "--backend", "reference",
                                     "--recipes", "fp8_flow", "--steps", "1", "--out", out}));
        expect_contains(profile.out, family.foreign);
        const CommandResult trained =
            succeeded(fp8flow_alone({"train", yaml, "--hf-config", config, "--backend", "reference", "--out",
                                     out + "_trained", "--set", "model.attention=false"}));
        EXPECT_EQ(trained.out.find(family.foreign), std::string::npos) << trained.out;
    }
}

// ---- against Transformers: blocks whose results scripts/compare_torch.py fixtures has written

// Multiples of 1/128 below 1, times 2^-shift, as the script makes them.
double spread(int64_t tag, int64_t i, int shift) {
    return static_cast<double>((tag * 7919 + i * 104729 + i * i % 10007) % 251 - 125) / 128 *
           std::exp2(-shift);
}

void write_spread(const std::string& path, const std::vector<std::pair<TensorDeclaration, int64_t>>& tensors,
                  int shift) {
    std::ofstream file(path, std::ios::binary);
    std::vector<TensorDeclaration> declarations;
    for (const auto& [tensor, tag] : tensors) declarations.push_back(tensor);
    SafetensorsWriter writer(declarations, {}, [&](const void* data, size_t bytes) {
        file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    });
    for (const auto& [tensor, tag] : tensors) {
        std::vector<float> values(static_cast<size_t>(*checked_bytes(FileDType::u8, tensor.shape)));
        const int own = tensor.name.find("bias") != std::string::npos ? shift + 1 : shift;
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = static_cast<float>(spread(tag, static_cast<int64_t>(i), own));
        writer.append(tensor.name, values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
    }
    writer.finish();
}

// Norm, and product with spread values, against those of the float64 block.
void expect_sketch(const TensorSet& set, const std::string& name, const Json& want, int64_t tag) {
    SCOPED_TRACE(name);
    const TensorSet::Item item = set.find(name);
    ASSERT_TRUE(static_cast<bool>(item));
    std::vector<float> values(static_cast<size_t>(item.entry->numel()));
    read_floats(*item.entry, item.bytes(), 0, values);
    double squares = 0, product = 0;
    for (size_t i = 0; i < values.size(); ++i) {
        squares += static_cast<double>(values[i]) * values[i];
        product += values[i] * spread(tag, static_cast<int64_t>(i), 0);
    }
    const double norm = want[0].get<double>();
    EXPECT_NEAR(std::sqrt(squares), norm, 6e-3 * norm);
    EXPECT_NEAR(product, want[1].get<double>(), 1.2e-2 * norm);  // the errors are about 4e-3 of the norm
}

TEST(Families, ReplayComputesTheBlocksOfTransformers) {
    const std::filesystem::path data = FP8FLOW_SOURCE_DIR "/tests/data/families";
    int families = 0;
    for (const auto& entry : std::filesystem::directory_iterator(data)) {
        SCOPED_TRACE(entry.path().filename().string());
        const TemporaryFolder folder;
        const Json made = Json::parse(std::ifstream(entry.path()));
        const int64_t tokens = made["tokens"], hidden = 256;
        std::vector<std::pair<TensorDeclaration, int64_t>> weights;
        for (const auto& [name, shape] : made["tensors"].items())
            weights.push_back({{name, FileDType::f32, shape.get<std::vector<int64_t>>()},
                               static_cast<int64_t>(weights.size())});
        write_spread(folder.path("weights.safetensors"), weights, 3);
        write_spread(folder.path("input.safetensors"),
                     {{{"hidden_states", FileDType::f32, {tokens, hidden}}, 100},
                      {{"grad_output", FileDType::f32, {tokens, hidden}}, 101}},
                     0);
        const std::string out = folder.path("out");
        succeeded(fp8flow_alone({"replay", "--hf-config", folder.write("config.json", made["config"].dump()),
                                 "--input", folder.path("input.safetensors"), "--weights",
                                 folder.path("weights.safetensors"), "--layer",
                                 std::to_string(made["layer"].get<int>()), "--backend", "reference", "--set",
                                 "precision.recipe=bf16", "--out", out}));
        const TensorSet results(out + "/replay.safetensors"), gradients(out + "/gradients");
        for (const auto& [name, want] : made["results"].items()) expect_sketch(results, name, want, 102);
        for (const auto& [name, want] : made["gradients"].items()) expect_sketch(gradients, name, want, 103);
        ++families;
    }
    EXPECT_EQ(families, 4);
}

TEST(Families, AreListed) {
    const CommandResult list = succeeded(fp8flow_alone({"families"}));
    expect_contains(list.out, "qwen3_moe         whole");
    expect_contains(list.out, "deepseek_v32      whole    more than 2048 tokens");
    expect_contains(list.out, "gpt_oss           refused  its experts have biases");
    expect_contains(fp8flow_alone({"families", "--markdown"}).out,
                    "| `mixtral` | Mixtral | whole | softmax |  |");
}

}  // namespace
}  // namespace fp8flow
