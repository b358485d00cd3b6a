// SPDX-License-Identifier: MIT
// A Hugging Face config.json becomes the configuration that computes the same; what a layer of ours does not
// compute is listed, all of it at once. Long because every family has its case. tests/data/hf_published.json
// has what the authors of models publish, tests/data/hf_families.json what the classes of Transformers 5.24
// write.
#include "model/config/hf_config.h"
#include "layers/rope.h"
#include "model/config/config.h"
#include "model/config/hf_families.h"
#include "model/safetensors/tensor_set.h"

#include "tests/support/settings.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

using Json = nlohmann::json;

Json data_of(const char* file) {
    return Json::parse(read_whole(std::string(FP8FLOW_SOURCE_DIR "/tests/data/") + file));
}

// With the keys of `patch` changed; null removes one.
Json changed(Json json, const std::string& patch) {
    json.merge_patch(Json::parse("{" + patch + "}"));
    return json;
}
Json published(const std::string& model, const std::string& patch = "") {
    static const Json all = data_of("hf_published.json");
    return changed(all.at(model), patch);
}
Json family(const std::string& type, const std::string& patch = "") {
    static const Json all = data_of("hf_families.json");
    return changed(all.at(type).at("config"), patch);
}
Json with_null(Json json, const std::string& key) {
    json[key] = nullptr;
    return json;
}

const std::string kYaml = "training: {train_iters: 1}";
Config config_of(const Json& json, const std::string& yaml = kYaml, const Texts& overrides = {}) {
    return parse_config(yaml, "t.yaml", overrides, std::nullopt, parse_hf_config(json.dump(), "config.json"));
}
std::string refused(const Json& json, const std::string& yaml = kYaml) {
    const std::string error = error_or_none(ExitCode::usage, [&] { config_of(json, yaml); });
    EXPECT_NE(error, "") << json;
    return error;
}
int64_t dense_layers(const Config& c) {
    return std::count(c.model.moe_layer_freq.begin(), c.model.moe_layer_freq.end(), 0);
}

struct Read {
    const char* model;
    const char* patch;
    Texts settings;
};

// What each model says. Transformers 5 writes Qwen3's number of experts under Mixtral's name and RoPE's base
// below rope_parameters; a key that is left out has the default of the family's class.
TEST(HfConfig, KeysBecomeSettings) {
    const Read cases[] = {
        {"qwen3",
         "",
         {"num_layers: 48", "hidden_size: 2048", "num_attention_heads: 32", "num_query_groups: 4",
          "kv_channels: 128", "attention: true", "qk_layernorm: true", "rotary_base: 1000000",
          "norm_epsilon: 1e-06", "vocab_size: 151936", "untie_embeddings_and_output_weights: true",
          "ffn_hidden_size: 6144", "num_experts: 128", "moe_router_topk: 8", "moe_ffn_hidden_size: 768",
          "moe_router_score_function: softmax",
          "moe_router_pre_softmax: false",  // a softmax over the logits of the chosen
          "moe_shared_expert_intermediate_size: 0", "max_position_embeddings: 0"}},
        {"qwen3", R"("norm_topk_prob": false)", {"moe_router_pre_softmax: true"}},
        {"qwen3", R"("tie_word_embeddings": true)", {"untie_embeddings_and_output_weights: false"}},
        {"qwen3", R"("max_position_embeddings": 40960)", {"max_position_embeddings: 40960"}},
        {"qwen3",
         R"("num_hidden_layers": 6, "decoder_sparse_step": 2)",
         {"moe_layer_freq: \"[0,1,0,1,0,1]\""}},
        {"qwen3",
         R"("num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2])",
         {"moe_layer_freq: \"[0,0,0,1,0,1]\""}},
        {"qwen3",
         R"("num_experts": null, "rope_theta": null, "rope_scaling": null, "num_local_experts": 64,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"})",
         {"num_experts: 64", "rotary_base: 10000"}},
        {"mixtral",
         "",
         {"num_layers: 32", "kv_channels: 128", "qk_layernorm: false", "num_experts: 8", "moe_router_topk: 2",
          "moe_ffn_hidden_size: 14336", "moe_router_pre_softmax: false"}},
        {"mixtral",
         R"("rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5})",
         {"rotary_base: 500000"}},
        {"deepseek_v3",
         "",
         {"attention: true", "multi_latent_attention: true", "hidden_size: 7168", "num_experts: 256",
          "moe_router_topk: 8", "moe_ffn_hidden_size: 2048", "moe_shared_expert_intermediate_size: 2048",
          "moe_router_score_function: sigmoid", "moe_router_enable_expert_bias: true",
          "moe_router_num_groups: 8", "moe_router_group_topk: 4", "moe_router_topk_scaling_factor: 2.5",
          "moe_router_norm_topk_prob: true", "moe_layer_freq: \"([0]*3+[1]*58)\""}},
        {"deepseek_v3", R"("n_shared_experts": 2)", {"moe_shared_expert_intermediate_size: 4096"}},
        {"deepseek_v3", R"("n_group": 1, "topk_group": 1)", {"moe_router_num_groups: 0"}},
        {"deepseek_v3", R"("norm_topk_prob": false)", {"moe_router_norm_topk_prob: false"}},
        {"deepseek_v3",
         R"("n_group": null, "topk_group": null, "n_shared_experts": null, "first_k_dense_replace": null,
            "routed_scaling_factor": null, "norm_topk_prob": null, "n_routed_experts": null,
            "num_experts_per_tok": null)",
         {"moe_router_num_groups: 8", "moe_router_group_topk: 4", "moe_shared_expert_intermediate_size: 2048",
          "num_experts: 256", "moe_router_topk: 8", "moe_router_topk_scaling_factor: 2.5",
          "moe_layer_freq: \"([0]*3+[1]*58)\""}},
        {"deepseek_v2_lite", R"("n_routed_experts": null)", {"num_experts: 64"}},
        {"glm4", R"("norm_topk_prob": false)", {"moe_router_norm_topk_prob: false"}},
        {"glm4",
         R"("n_group": null, "topk_group": null, "n_shared_experts": null, "first_k_dense_replace": null,
            "routed_scaling_factor": null, "n_routed_experts": null, "num_experts_per_tok": null)",
         {"num_experts: 128", "moe_router_topk: 8", "moe_router_num_groups: 0",
          "moe_shared_expert_intermediate_size: 1536", "moe_router_topk_scaling_factor: 1",
          "moe_layer_freq: \"([0]*1+[1]*91)\""}},
        {"olmoe", R"("norm_topk_prob": true)", {"moe_router_pre_softmax: false"}},
        {"olmoe", R"("num_experts": null, "num_local_experts": 32)", {"num_experts: 32"}},
        {"qwen2", R"("norm_topk_prob": true)", {"moe_router_pre_softmax: false"}},
        {"qwen2",
         R"("num_experts": null, "num_experts_per_tok": null, "shared_expert_intermediate_size": null)",
         {"num_experts: 60", "moe_router_topk: 4", "moe_shared_expert_intermediate_size: 5632",
          "moe_shared_expert_gate: true"}},
        {"qwen2",
         R"("num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3])",
         {"moe_layer_freq: \"[0,1,0,0]\""}},
    };
    for (const auto& [model, patch, settings] : cases) {
        SCOPED_TRACE(fmt::format("{} {}", model, patch));
        expect_settings(config_of(published(model, patch)), settings);
    }
    const Config qwen3 = config_of(published("qwen3"));
    EXPECT_EQ(qwen3.model.padded_vocab_size, 151936);
    EXPECT_EQ(qwen3.model.moe_layer_freq, std::vector<int>(48, 1));
    EXPECT_EQ(config_of(published("mixtral")).model.moe_layer_freq, std::vector<int>(32, 1));
    // null is false, as in Python, and no shared expert
    expect_settings(config_of(with_null(published("deepseek_v3"), "norm_topk_prob")),
                    {"moe_router_norm_topk_prob: false"});
    expect_settings(config_of(with_null(published("deepseek_v3"), "n_shared_experts")),
                    {"moe_shared_expert_intermediate_size: 0"});
}

TEST(HfConfig, WhatALayerDoesNotComputeIsRefusedByKey) {
    const struct {
        const char *model, *patch, *error;
    } cases[] = {
        {"qwen3", R"("num_hidden_layers": 6, "mlp_only_layers": [6])",
         "config.json: mlp_only_layers: got 6, want layers below 6"},
        {"qwen3", R"("mlp_only_layers": 3)", "want a list of layers"},
        {"qwen3", R"("decoder_sparse_step": 0)", "decoder_sparse_step: got 0, want at least 1"},
        {"qwen3", R"("num_experts": null)", "num_experts: is missing"},
        {"qwen3", R"("attention_dropout": 0.1)", "config.json: attention_dropout: got 0.1, want 0"},
        {"qwen3", R"("resid_pdrop": 0.1)", "config.json: resid_pdrop: got 0.1, want 0"},
        {"qwen3", R"("hidden_dropout": 0.1)", "config.json: hidden_dropout: got 0.1, want 0"},
        {"qwen3", R"("sliding_window": null, "use_sliding_window": true)", "sliding_window: got 4096"},
        {"qwen3", R"("rope_scaling": {"rope_type": "yarn"})", "has no number factor"},
        {"qwen3", R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"})",
         "rope_scaling.beta_fast: got \"32\", want a number"},
        {"qwen3", R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.0})",
         "rope_scaling: got attention_factor 0, want more than 0"},
        {"qwen3", R"("rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.5})",
         "rope_scaling: got attention_factor 1.5, want 1 where factor is 1"},
        {"qwen3", R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0})",
         "original_max_position_embeddings: got 0"},
        {"qwen3", R"("rope_scaling": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0})",
         "rope_scaling: has alpha, want none"},
        {"deepseek_v3", R"("rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0})",
         "rope_scaling: has mscale_all_dim, want rope_type yarn with it"},
        // a class without the key rotates whole heads, whatever it says
        {"qwen3", R"("partial_rotary_factor": 0.5)", "partial_rotary_factor: got 0.5, want 1.0"},
        // rope_scaling takes the place of rope_parameters, with all that is in it
        {"qwen3",
         R"("rope_theta": null, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 5e5})",
         "rope_theta: got null, want a number"},
        {"qwen3", R"("layer_types": ["full_attention", "sliding_attention"])",
         "layer_types: got \"sliding_attention\", want full_attention"},
        {"qwen3", R"("hidden_act": "swigluoai")", "hidden_act: got swigluoai, want silu"},
        {"qwen3", R"("hidden_size": 2050)", "config.json: hidden_size: model.hidden_size: got 2050"},
        {"qwen3", R"("num_experts_per_tok": 300)",
         "moe.moe_router_topk: got 300, want at most num_experts = 128"},
        // Mixtral's class knows its window alone
        {"mixtral", R"("sliding_window": 4096)", "sliding_window: got 4096"},
        {"mixtral", R"("sliding_window": 4096, "use_sliding_window": false)", "sliding_window: got 4096"},
        {"mixtral", R"("rope_theta": null)", "rope_theta: got null, want a number"},
        {"mixtral", R"("router_jitter_noise": 0.01)", "router_jitter_noise: got 0.01, want 0"},
        {"deepseek_v3", R"("topk_group": 2)", "topk_group: got 2 with num_experts_per_tok = 8"},
        {"deepseek_v3", R"("scoring_func": "softmax")", "scoring_func: got softmax, want sigmoid"},
        {"deepseek_v3", R"("topk_method": "greedy")", "topk_method: got greedy, want noaux_tc"},
        {"deepseek_v3", R"("first_k_dense_replace": 62)", "first_k_dense_replace: got 62"},
        {"deepseek_v3", R"("moe_layer_freq": 2)", "moe_layer_freq: got 2, want 1"},
        {"deepseek_v3", R"("rope_interleave": false)", "rope_interleave: got false, want true"},
        {"glm4_flash", R"("partial_rotary_factor": 0.5)", "partial_rotary_factor: got 0.5, want 1.0"},
        {"deepseek_v2_lite", R"("n_group": 8)", "n_group: got 8, want 1"},
        {"deepseek_v3", R"("n_group": 0)", "n_group: got 0, want at least 1"},
        {"glm4", R"("num_experts_per_tok": 1)", "norm_topk_prob: got true with num_experts_per_tok = 1"},
        {"glm4_flash", R"("mlp_layer_types": ["dense", "moe"])",
         "mlp_layer_types: got \"moe\", want dense (0) or sparse (1)"},
        {"qwen3", R"("layer_types": "sliding_attention")", "layer_types: want a list"},
        {"deepseek_v2_lite", R"("topk_method": "group_limited_greedy")",  // the larger DeepSeek-V2
         "topk_method: got group_limited_greedy, want greedy: a group is scored by its best"},
        {"deepseek_v2_lite", R"("norm_topk_prob": true)", "norm_topk_prob: got true"},
        {"qwen2", R"("use_sliding_window": true)", "sliding_window: got 65536"},
        {"olmoe", R"("attention_bias": true)", "attention_bias: got true, want false"},
        {"olmoe", R"("clip_qkv": 8.0)", "clip_qkv: got 8.0, want null"},
        {"minimax_m2", R"("qk_norm_type": "per_head")", "qk_norm_type: got \"per_head\", want \"per_layer\""},
        {"minimax_m2", R"("shared_intermediate_size": 1536)", "shared_intermediate_size: got 1536, want 0"},
        {"minimax_m2", R"("use_routing_bias": false)", "use_routing_bias: got false, want true"},
        // a list that the class does not read
        {"deepseek_v3", R"("moe_layer_freq": [0, 1])", "moe_layer_freq: want the first 3 layers dense"},
        {"glm4_flash", R"("mlp_layer_types": null, "first_k_dense_replace": 2)",
         "first_k_dense_replace: got 2, want 1"},
        {"qwen3", R"("num_local_experts": 64)", "num_experts: got 128, and num_local_experts = 64: want one"},
        {"minimax_m2", R"("scoring_func": "softmax")", "scoring_func: got softmax, want sigmoid"},
    };
    for (const auto& [model, patch, error] : cases) expect_contains(refused(published(model, patch)), error);
    const Json m3 = family("minimax_m3_vl");
    expect_contains(refused(changed(m3, R"("swiglu_alpha": 1.5)")), "swiglu_alpha: got 1.5, want 1.702");
    expect_contains(refused(family("axk2", R"("n_group": 4, "topk_group": 2)")),
                    "n_group: got 4, want [null, 1]: experts of other groups have a score of 0 there");
    const Json dbrx = family("dbrx");
    expect_contains(refused(changed(dbrx, R"("ffn_config": {"moe_jitter_eps": 0.01})")),
                    "moe_jitter_eps: got 0.01, want 0");
    expect_contains(refused(changed(dbrx, R"("ffn_config": {"ffn_act_fn": {"name": "gelu"}})")),
                    "ffn_config.ffn_act_fn.name: got \"gelu\", want \"silu\"");
    // a key of another family is none of its own
    expect_settings(config_of(family("hy_v3", R"("routed_scaling_factor": 0.5, "n_group": 4)")),
                    {"moe_router_topk_scaling_factor: 2.826", "moe_router_num_groups: 0"});
    expect_settings(config_of(family("afmoe", R"("route_scale": 0.5)")),
                    {"moe_router_topk_scaling_factor: 0.5"});
    // a window that is not used is none, nor is a dropout of 0
    for (const char* patch :
         {R"("sliding_window": 4096)", R"("sliding_window": 4096, "use_sliding_window": null)",
          R"("use_sliding_window": true)"})
        EXPECT_NO_THROW(config_of(published("qwen3", patch)));
    EXPECT_NO_THROW(config_of(published("mixtral", R"("attention_bias": true)")));
    EXPECT_NO_THROW(config_of(with_null(
        published("mixtral", R"("router_jitter_noise": 0.0, "attention_dropout": 0)"), "hidden_dropout")));
    EXPECT_NO_THROW(config_of(changed(m3, R"("hidden_act": "swigluoai")")));
    Json full = published("qwen3");
    full["layer_types"] = Texts(48, "full_attention");
    EXPECT_NO_THROW(config_of(full));
}

struct Family {
    const char* name;
    int64_t experts, topk, width, shared, dense;
    ScoreFunction score;
    bool pre_softmax, bias;
    double scaling;
};

TEST(HfConfig, MoeLayersOfFamilies) {
    const ScoreFunction sigmoid = ScoreFunction::sigmoid, softmax = ScoreFunction::softmax;
    const Family families[] = {
        {"kimi_k2", 384, 8, 2048, 2048, 1, sigmoid, false, true, 2.827},
        {"moonlight", 64, 6, 1408, 2816, 1, sigmoid, false, true, 2.446},
        {"glm4", 160, 8, 1536, 1536, 3, sigmoid, false, true, 2.5},
        {"qwen2", 64, 8, 2560, 20480, 0, softmax, true, false, 1.0},
        {"olmoe", 64, 8, 1024, 0, 0, softmax, true, false, 1.0},
        {"minimax_m2", 256, 8, 1536, 0, 0, sigmoid, false, true, 1.0},
        {"deepseek_v2_lite", 64, 6, 1408, 2816, 1, softmax, true, false, 1.0},
    };
    for (const Family& family : families) {
        SCOPED_TRACE(family.name);
        const Config c = config_of(published(family.name));
        EXPECT_TRUE(c.model.attention);
        EXPECT_EQ(c.moe.num_experts, family.experts);
        EXPECT_EQ(c.moe.moe_router_topk, family.topk);
        EXPECT_EQ(c.moe.moe_ffn_hidden_size, family.width);
        EXPECT_EQ(c.moe.moe_shared_expert_intermediate_size, family.shared);
        EXPECT_EQ(dense_layers(c), family.dense);
        EXPECT_EQ(c.moe.moe_router_score_function, family.score);
        EXPECT_EQ(c.moe.moe_router_pre_softmax, family.pre_softmax);
        EXPECT_TRUE(c.moe.moe_router_norm_topk_prob);
        EXPECT_EQ(c.moe.moe_router_enable_expert_bias, family.bias);
        EXPECT_EQ(c.moe.moe_router_num_groups, 0);
        EXPECT_EQ(c.moe.moe_router_topk_scaling_factor, family.scaling);
        EXPECT_NO_THROW(require_own_layers(c));
    }
    for (const char* model : {"qwen3", "mixtral"})
        EXPECT_NO_THROW(require_own_layers(config_of(published(model))));
}

TEST(HfConfig, AttentionOfGlmOlmoeAndMiniMax) {
    const struct {
        const char *model, *patch, *attention;
    } cases[] = {
        {"glm4", "", "bias true, norm true, per_head, rotated 0.5 of 128"},
        {"glm4", R"("attention_bias": null, "use_qk_norm": null, "partial_rotary_factor": null)",
         "bias false, norm false, per_head, rotated 0.5 of 128"},
        {"glm4", R"("attention_bias": null, "use_qk_norm": null, "partial_rotary_factor": 1.0)",
         "bias false, norm false, per_head, rotated 1 of 128"},
        {"olmoe", "", "bias false, norm true, per_layer, rotated 1 of 128"},
        {"minimax_m2", "", "bias false, norm true, per_layer, rotated 0.5 of 128"},
        {"minimax_m2", R"("rotary_dim": null)", "bias false, norm true, per_layer, rotated 1 of 128"},
        {"qwen2", "", "bias true, norm false, per_head, rotated 1 of 128"},  // as its class
        {"qwen2", R"("qkv_bias": false)", "bias false, norm false, per_head, rotated 1 of 128"},
    };
    for (const auto& [model, patch, attention] : cases) {
        const ModelSpec m = config_of(published(model, patch)).model;
        EXPECT_EQ(fmt::format("bias {}, norm {}, {}, rotated {} of {}", m.add_qkv_bias, m.qk_layernorm,
                              m.qk_layernorm_type == QkLayernormType::per_layer ? "per_layer" : "per_head",
                              m.rope.rotary_percent, m.kv_channels),
                  attention)
            << model << " " << patch;
    }
}

// Columns of queries' and keys' latents, of a head without and with rotation and of its values, then what
// scores are multiplied by.
TEST(HfConfig, LatentsOfTheFamilies) {
    const std::vector<int64_t> v3 = {1536, 512, 128, 64, 128}, direct = {0, 512, 128, 64, 128},
                               glm = {768, 512, 192, 64, 256};
    const std::pair<Json, std::vector<int64_t>> cases[] = {
        {published("deepseek_v3"), v3},  // the classes' values of what is left out
        {published("deepseek_v3", R"("q_lora_rank": null)"), v3},
        {published("kimi_k2"), v3},
        {published("moonlight"), direct},
        {with_null(published("deepseek_v2_lite"), "q_lora_rank"), direct},
        {published("sarvam"), direct},
        {published("glm4_flash"), glm},
        {published("glm4_flash", R"("q_lora_rank": null, "qk_nope_head_dim": null, "v_head_dim": null)"),
         glm},
    };
    for (const auto& [json, latents] : cases) {
        const ModelSpec m = config_of(json).model;
        EXPECT_TRUE(m.attention && m.multi_latent_attention) << json;
        EXPECT_EQ((std::vector<int64_t>{m.q_lora_rank, m.kv_lora_rank, m.qk_head_dim, m.qk_pos_emb_head_dim,
                                        m.v_head_dim}),
                  latents)
            << json;
    }
    const auto factor = [](const Json& json) { return rope_softmax_factor(config_of(json).model.rope); };
    EXPECT_NEAR(factor(published("sarvam")), 1.8739, 1e-4);
    EXPECT_EQ(factor(published("deepseek_v3")), 1);
    EXPECT_EQ(factor(published("glm4_flash")), 1);
    Json lite =
        published("deepseek_v2_lite", R"("rope_scaling": {"mscale": 0.707, "mscale_all_dim": 0.707})");
    EXPECT_NEAR(factor(lite), 1.5896, 1e-4);
    // without mscale, cos and sin are multiplied by m(1)
    const double log = std::log(40.0);
    lite["rope_scaling"].erase("mscale");
    EXPECT_NEAR(factor(lite), 1.5896, 1e-4);
    const RopeSpec rope = config_of(lite).model.rope;
    EXPECT_NEAR((1 + 0.1 * rope.mscale * log) / (1 + 0.1 * rope.mscale_all_dim * log), 1 + 0.1 * log, 1e-12);
}

// DeepSeek-V3.2 and GLM-5: sparse attention equals dense attention up to index_topk tokens.
TEST(HfConfig, SequencesAreNoLongerThanAnIndexChoosesAllKeysOf) {
    Json json = family("glm_moe_dsa", R"("num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["indexed_attention", "indexed_attention"])");
    const auto read = [&](const char* settings) {
        return parse_config(settings, "run.yaml", {}, std::nullopt,
                            parse_hf_config(json.dump(), "config.json"));
    };
    const Config c = read("model: {seq_length: 2048}");
    EXPECT_TRUE(c.model.attention);
    EXPECT_EQ(c.model.q_lora_rank, 2048);
    EXPECT_EQ(c.model.qk_head_dim + c.model.v_head_dim, 192 + 256);
    const auto error = [&](const char* settings) {
        return error_of(ExitCode::usage, [&] { read(settings); });
    };
    expect_contains(error("model: {seq_length: 2176}"),
                    "run.yaml:1:21: model.seq_length: got 2176, want at most index_topk = 2048");
    EXPECT_NO_THROW(read("model: {seq_length: 2176, attention: false}"));
    // what a run writes of itself is enough
    EXPECT_EQ(c.model.max_position_embeddings, 2048);
    const auto again = [&](const char* override_text) {
        return parse_config(dump_config(c), "config.yaml", {override_text});
    };
    EXPECT_EQ(again("model.seq_length=1024").family, "glm_moe_dsa");
    expect_contains(error_of(ExitCode::usage, [&] { again("model.seq_length=2176"); }),
                    "want at most index_topk = 2048");
    expect_contains(error_of(ExitCode::usage, [&] { again("model.hf_family=llama5"); }),
                    "model.hf_family: want a model_type that fp8flow families lists");
    json["index_topk"] = 1024;
    expect_contains(error("model: {seq_length: 256}"),
                    "index_topk: got 1024, want 2048: sequences have at most");
}

// Files of configs/ after the config.json that its authors publish: nothing of the model changes.
TEST(HfConfig, ShippedModelsArePublishedOnes) {
    const auto with_yarn = [](const char* model, double mscale) {
        const Json yarn = {{"original_max_position_embeddings", 4096},
                           {"beta_fast", 32},
                           {"beta_slow", 1},
                           {"mscale", mscale},
                           {"mscale_all_dim", mscale}};
        return published(model, "\"rope_scaling\": " + yarn.dump());
    };
    const std::pair<const char*, Json> files[] = {
        {"deepseek_v2_lite", with_null(with_yarn("deepseek_v2_lite", 0.707), "q_lora_rank")},
        {"moonlight_16b_a3b", published("moonlight")},
        {"deepseek_v3", with_yarn("deepseek_v3", 1.0)},
        {"qwen3_30b_a3b", published("qwen3")},
        {"mixtral_8x7b", published("mixtral")}};
    for (const auto& [name, json] : files) {
        SCOPED_TRACE(name);
        const std::string file = std::string(FP8FLOW_SOURCE_DIR "/configs/") + name + ".yaml";
        const Config c = config_of(json, read_whole(file));
        for (const std::string& warning : c.warnings)
            EXPECT_EQ(warning.find("changes its model"), std::string::npos) << warning;
    }
}

// alpha, offset and limit of the gated unit.
TEST(HfConfig, ClampedGatedUnits) {
    const Json hunyuan = family("hy_v4"), m3 = family("minimax_m3_vl");
    const std::pair<Json, const char*> cases[] = {
        {published("qwen3"), "false 0 0 false"},
        {family("glm5_next"), "false 0 10 false"},
        {hunyuan, "false 0 10 true"},
        {changed(hunyuan, R"("swiglu_limit": 4.5)"), "false 0 4.5 true"},
        {m3, "true 1 7 false"},
        {changed(m3, R"("swiglu_limit": null)"), "true 1 7 false"},
    };
    for (const auto& [json, unit] : cases) {
        const GluSpec g = config_of(json).model.glu;
        EXPECT_EQ(fmt::format("{} {} {} {}", g.quick_geglu, g.glu_linear_offset,
                              g.activation_func_clamp_value, g.activation_func_clamp_routed_only),
                  unit)
            << json;
    }
    expect_contains(refused(changed(hunyuan, R"("swiglu_limit": 0.0)")),
                    "swiglu_limit: got 0, want more than 0");
    const char* const dense = R"("moe_layer_freq": [0, 1], "num_hidden_layers": 2, "mlp_layer_types": null)";
    expect_settings(config_of(changed(m3, dense)), {"ffn_hidden_size: 12288"});
}

// 10944 = 85.5 x 128: the dense layer is planned a little wider, and the log says so.
TEST(HfConfig, ADenseWidthThatIsNoMultipleOfABlockIsRoundedUpAndSaid) {
    const Json json = published("deepseek_v2_lite", R"("aux_loss_alpha": null)");
    const Config c = config_of(json);
    EXPECT_EQ(c.model.ffn_hidden_size, 11008);
    ASSERT_EQ(c.warnings.size(), 1u);
    expect_contains(c.warnings[0], "config.json: intermediate_size 10944 of dense layers is taken as 11008");
    EXPECT_TRUE(config_of(published("moonlight")).warnings.empty());
    const Config no_dense =
        config_of(changed(json, R"("first_k_dense_replace": 0)"));  // no layer has that width
    EXPECT_TRUE(no_dense.warnings.empty());
}

// A balancing loss that Transformers or the model's own code adds is trained with here; every other
// coefficient is said, with our keys.
TEST(HfConfig, BalancingLossesAreFollowed) {
    // attention is decided, so that no note says that it is left out
    const auto read = [](const Json& json, const std::vector<double>& coefficients) {
        const Config c = config_of(json, kYaml, {"model.attention=false"});
        EXPECT_EQ(c.warnings.size(), 1u);
        EXPECT_EQ(c.moe.moe_aux_loss_coeff, coefficients);
        EXPECT_EQ(c.moe.moe_router_load_balancing_type.size(), coefficients.size());
        return c.warnings.empty() ? "" : c.warnings[0];
    };
    // coef x top-k / layers
    expect_contains(
        read(published("olmoe"), {}),
        "config.json: router_aux_loss_coef = 0.01 has no effect without output_router_logits, so "
        "there is no balancing loss; near it (Transformers' loss is of all layers together): --set "
        "moe.moe_router_load_balancing_type=aux_loss --set moe.moe_aux_loss_coeff=0.005");
    expect_contains(read(published("olmoe", R"("output_router_logits": true)"), {0.005}),
                    "router_aux_loss_coef = 0.01 is followed by aux_loss with coefficient 0.005, near it");
    expect_contains(read(published("qwen3"), {}), "moe.moe_aux_loss_coeff=0.0001667");
    expect_contains(read(published("kimi_k2"), {0.001}),
                    "aux_loss_alpha = 0.001 is followed: seq_aux_loss with coefficient 0.001");
    expect_contains(read(published("minimax_m2", R"("router_aux_loss_coef": 0.001)"), {}),
                    "and of softmax scores)");
    EXPECT_TRUE(config_of(published("qwen3", R"("router_aux_loss_coef": 0.0)")).warnings.empty());
    // The user's choice comes after it, and is no change of the model.
    const Json adds = published("qwen3", R"("output_router_logits": true)");
    EXPECT_TRUE(
        config_of(adds, kYaml, {"moe.moe_router_load_balancing_type=none"}).moe.moe_aux_loss_coeff.empty());
    const Config own =
        config_of(adds, "moe: {moe_router_load_balancing_type: [seq_aux_loss], moe_aux_loss_coeff: [0.01]}");
    EXPECT_EQ(own.moe.moe_aux_loss_coeff, std::vector<double>{0.01});
    EXPECT_TRUE(own.warnings.empty());
}

// The shipped configuration for text does not shrink an imported model.
TEST(HfConfig, AFileMayYieldToIt) {
    const std::string text = FP8FLOW_SOURCE_DIR "/configs/text.yaml";
    const ImportedModel imported =
        parse_hf_config(published("qwen3", R"("max_position_embeddings": 4096)").dump(), "c.json");
    const Config c = parse_config(read_whole(text), text, {"moe.num_experts=64", "data.data_path=x"},
                                  std::nullopt, imported);
    EXPECT_EQ(c.model.num_layers, 48);
    EXPECT_EQ(c.model.hidden_size, 2048);
    EXPECT_TRUE(c.moe.moe_router_load_balancing_type.empty());
    EXPECT_EQ(c.model.seq_length, 256);  // no key of theirs
    EXPECT_EQ(c.moe.num_experts, 64);    // --set comes last
    for (const std::string& warning : c.warnings)
        EXPECT_EQ(warning.find("changes its model"), std::string::npos);
    EXPECT_FALSE(c.model.yields_to_hf_config);  // its config.yaml has what it took
    const Config alone = parse_config(read_whole(text), text, {"data.data_path=x"});
    EXPECT_EQ(alone.model.num_layers, 4);
    EXPECT_TRUE(alone.model.yields_to_hf_config);
}

TEST(HfConfig, TheYamlFileAndTheCommandLineComeAfterIt) {
    const Config c =
        config_of(published("qwen3"), "model: {num_layers: 2, moe_layer_freq: 1}\nmoe: {num_experts: 16}",
                  {"moe.num_experts=32"});
    EXPECT_EQ(c.model.num_layers, 2);
    EXPECT_EQ(c.moe.num_experts, 32);
    EXPECT_EQ(c.model.hidden_size, 2048);
    ASSERT_EQ(c.warnings.size(), 2u);
    expect_contains(c.warnings[1],
                    "t.yaml comes after config.json: model_type qwen3_moe and changes its model: "
                    "model.num_layers 2 (48 there), ");
    expect_contains(c.warnings[1], "moe.num_experts 32 (128 there)");
    EXPECT_EQ(
        config_of(published("qwen3"), "model: {num_layers: 48}", {"moe.num_experts=64"}).warnings.size(), 1u);
    // where every layer is MoE, so is one
    EXPECT_EQ(
        config_of(published("qwen3"), "model: {seq_length: 64}", {"model.num_layers=1"}).model.moe_layer_freq,
        std::vector<int>{1});
    // a rule that a key of the user's breaks is that key's
    expect_contains(
        refused(published("deepseek_v3"), "model: {seq_length: 64,\n num_layers: 4}"),
        "t.yaml:2:14: model.moe_layer_freq: got 61 entries, want num_layers = 4\n"
        "t.yaml comes after config.json: model_type deepseek_v3 and changes its model: model.num_layers "
        "4 (61 there): remove these keys to take the model as it is");
}

TEST(HfConfig, OtherModelsAreRefusedByNameWithTheReason) {
    expect_contains(refused({{"model_type", "gpt_oss"}}),
                    "config.json: model_type gpt_oss is not supported: its experts have biases");
    expect_contains(refused({{"model_type", "llama4"}}), "its experts weight their input");
    expect_contains(refused({{"model_type", "llama"}}),
                    "it has no experts; fp8flow families lists those that are");
    expect_contains(refused({{"model_type", "qwen3moe"}}),
                    "model_type \"qwen3moe\" is not supported; did you mean 'qwen3_moe'; fp8flow families");
    expect_contains(refused({{"model_type", "something_new"}}),
                    "model_type \"something_new\" is not supported");
    expect_contains(refused(Json::object()), "has no model_type");
    expect_contains(refused({{"model_type", 3}}), "has no model_type");
    expect_contains(refused(Json::array()), "is no JSON object");
}

TEST(HfConfig, OptionsThatWeDoNotComputeAreAllListed) {
    const Json json = published("qwen3", R"(
        "hidden_act": "gelu", "attention_bias": true, "rope_scaling": {"rope_type": "longrope"},
        "sliding_window": 4096, "use_sliding_window": true, "quantization_config": {"quant_method": "awq"},
        "num_experts": null, "rms_norm_eps": "small", "num_key_value_heads": 4.5)");
    const std::string text = refused(json);
    for (const char* part :
         {"hidden_act: got gelu, want silu", "attention_bias: got true, want false",
          "rope_scaling: got rope_type \"longrope\"", "sliding_window: got 4096, want null",
          "quantization_config: got {\"quant_method\":\"awq\"}, want quant_method fp8",
          "num_experts: is missing", "rms_norm_eps: got \"small\", want a number",
          "num_key_value_heads: got 4.5, want an integer"})
        expect_contains(text, std::string("config.json: ") + part);
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 7);
}

// Every family as its class writes it: number of experts, top-k, widths of an expert and of the shared
// one, dense layers, scaling factor, whether the class keeps the router's weight in FP32. glm4_moe has the
// head_dim of its published files, without which half a head is no even number.
TEST(HfConfig, EveryFamilyIsReadAsItsClassWritesIt) {
    const Json families = data_of("hf_families.json");
    for (const HfFamily& family : hf_families()) {
        SCOPED_TRACE(family.type);
        if (family.refused != nullptr || family.type == std::string("kimi_k2")) continue;
        ASSERT_TRUE(families.contains(family.type));
        const Json& made = families[family.type];
        const Config c = config_of(made["config"]);
        EXPECT_EQ(c.model.attention, family.whole());
        EXPECT_EQ(c.family, family.type);
        const Json got = {c.moe.num_experts,
                          c.moe.moe_router_topk,
                          c.moe.moe_ffn_hidden_size,
                          c.moe.moe_shared_expert_intermediate_size,
                          std::count(c.model.moe_layer_freq.begin(), c.model.moe_layer_freq.end(), 0),
                          c.moe.moe_router_topk_scaling_factor,
                          c.moe.moe_router_dtype == RouterDtype::fp32};
        EXPECT_EQ(got, made["want"]);
        EXPECT_EQ(c.moe.moe_shared_expert_gate, family.shared_gate);
    }
}

// A key that the class does not read changes nothing, or is refused by name. "reads" of
// tests/data/hf_families.json has those that it reads, which scripts/compare_torch.py fixtures asks it for.
TEST(HfConfig, KeysOfOtherFamiliesAreNotRead) {
    const Json families = data_of("hf_families.json"), &keys = families["keys"];
    const auto settings_of = [](const Json& json) {
        Texts lines;
        for (const ConfigSetting& one : parse_hf_config(json.dump(), "config.json").settings)
            lines.push_back(one.key + ": " + one.value);
        return lines;
    };
    for (const HfFamily& family : hf_families()) {
        if (family.refused != nullptr || family.type == std::string("kimi_k2")) continue;
        const Json &config = families[family.type]["config"], &reads = families[family.type]["reads"];
        const auto is_read = [&](const std::string& key) {
            return std::find(reads.begin(), reads.end(), key) != reads.end();
        };
        for (const auto& [key, alias] : family.aliases)
            EXPECT_TRUE(key == nullptr || keys.contains(alias)) << alias << " is not tried";
        for (const auto& [key, value] : keys.items()) {
            if (is_read(key)) continue;
            SCOPED_TRACE(fmt::format("{}: {}", family.type, key));
            Json changed = config;
            changed[key] = value;
            const std::string error =
                error_or_none(ExitCode::usage, [&] { EXPECT_EQ(settings_of(changed), settings_of(config)); });
            if (!error.empty()) expect_contains(error, key);
        }
    }
}

TEST(HfConfig, ScaledFrequenciesAreRead) {
    const auto rope_of = [](const Json& scaling) {
        return config_of(changed(published("qwen3"), "\"rope_scaling\": " + scaling.dump())).model.rope;
    };
    const RopeSpec yarn = rope_of({{"type", "yarn"},
                                   {"factor", 4.0},
                                   {"original_max_position_embeddings", 32768},
                                   {"mscale", 1.0},
                                   {"mscale_all_dim", 0.5}});
    EXPECT_EQ(yarn.rope_type, RopeType::yarn);
    EXPECT_EQ(yarn.rotary_scaling_factor, 4.0);
    EXPECT_EQ(yarn.original_max_position_embeddings, 32768);
    EXPECT_EQ(yarn.mscale_all_dim, 0.5);
    // m(mscale) is the factor that is given
    const RopeSpec given = rope_of({{"rope_type", "yarn"},
                                    {"factor", 8.0},
                                    {"original_max_position_embeddings", 4096},
                                    {"attention_factor", 1.5}});
    EXPECT_NEAR(1 + 0.1 * given.mscale * std::log(8.0), 1.5, 1e-12);
    EXPECT_EQ(rope_of({{"rope_type", "linear"}, {"factor", 2.0}}).rope_type, RopeType::linear);
    EXPECT_EQ(rope_of({{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}})
                  .original_max_position_embeddings,
              8192);
    // rope_scaling comes before rope_parameters, and the length at the top level before that of a group, as
    // in Transformers
    const Json both = published("glm4", R"("rope_parameters": {"rope_theta": 5e5}, "rope_theta": 2e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 32)");
    const Config c = config_of(both);
    EXPECT_EQ(c.model.rope.rope_type, RopeType::yarn);
    EXPECT_EQ(c.model.rotary_base, 2e5);
    EXPECT_EQ(c.model.rope.rotary_percent, 0.5);
    EXPECT_EQ(c.model.rope.original_max_position_embeddings, 32);
}

TEST(HfConfig, HeadDimAndTiedEmbeddingsThatAreLeftOut) {
    for (const HfFamily& one : hf_families()) {
        if (one.refused != nullptr || std::string("kimi_k2 dbrx").find(one.type) != std::string::npos)
            continue;
        SCOPED_TRACE(one.type);
        const bool wide = std::string("hy_v3 solar_open minimax_m2").find(one.type) != std::string::npos,
                   tied = std::string("lara_mini cohere2_moe lfm2_moe").find(one.type) != std::string::npos;
        const Json whole = family(one.type);
        const Config c = config_of(changed(whole.value("text_config", whole), R"("head_dim": null,
            "tie_word_embeddings": null, "hidden_size": 1024, "num_attention_heads": 16,
            "num_key_value_heads": 16)"));
        EXPECT_EQ(c.model.untie_embeddings_and_output_weights, !tied);
        if (!c.model.attention || c.model.multi_latent_attention) continue;
        EXPECT_EQ(c.model.kv_channels, wide ? 128 : 64);
    }
}

// Frequencies of dynamic follow the length of the sequence, beyond that of the model.
TEST(HfConfig, DynamicFrequenciesEndWithTheModelsLength) {
    const auto read = [](const std::string& length, const std::string& yaml) {
        config_of(published("qwen3", R"("rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, )" + length),
                  yaml);
    };
    const std::string length = R"("max_position_embeddings": 1024)";
    EXPECT_NO_THROW(read(length, "model: {seq_length: 1024}"));
    EXPECT_NO_THROW(read(length, "model: {seq_length: 2048, rope_type: ntk, rotary_scaling_factor: 3}"));
    expect_contains(error_of(ExitCode::usage, [&] { read(length, "model: {seq_length: 2048}"); }),
                    "model.seq_length: got 2048, want at most max_position_embeddings = 1024");
    expect_contains(
        error_of(ExitCode::usage,
                 [&] { read(R"("max_position_embeddings": null)", "model: {seq_length: 1024}"); }),
        "max_position_embeddings: is missing");
}

// The text model of one with other inputs; and the constants of Granite, which go into the weights.
TEST(HfConfig, NestedModelsAndFoldedConstants) {
    Json inner = published("deepseek_v3");
    const Config c = config_of({{"model_type", "kimi_k25"}, {"text_config", inner}});
    EXPECT_EQ(c.family, "deepseek_v3");
    EXPECT_EQ(c.moe.num_experts, 256);
    const Json unnamed = changed(inner, R"("model_type": null)");
    EXPECT_EQ(config_of({{"model_type", "deepseek_v3"}, {"text_config", unnamed}}).family, "deepseek_v3");
    expect_contains(refused({{"model_type", "other"},
                             {"hidden_size", 128},
                             {"vocab_size", inner["vocab_size"]},
                             {"pad_token_id", 5},
                             {"text_config", inner}}),
                    "config.json: hidden_size: differs from that of text_config, want one of them");
    inner["model_type"] = "deepseek_v3_text";
    EXPECT_EQ(config_of({{"model_type", "other"}, {"text_config", inner}}).family, "deepseek_v3");

    const Json granite = published("mixtral", R"("model_type": "granitemoe", "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25, "attention_multiplier": 0.0625, "logits_scaling": 6.0)");
    WeightFolds folds = config_of(granite).folds;
    EXPECT_EQ(folds.embedding, 12);
    EXPECT_EQ(folds.residual, 0.25);
    EXPECT_EQ(folds.query, 0.0625 * std::sqrt(128.0));
    EXPECT_EQ(folds.final_norm, 1 / 6.0);
    EXPECT_EQ(config_of(changed(granite, R"("tie_word_embeddings": true)")).folds.final_norm, 1 / 72.0);
    const Json cohere = published("mixtral", R"("model_type": "cohere2_moe", "num_shared_experts": 1,
        "shared_expert_combination_strategy": "average", "num_experts": 8, "layer_norm_eps": 1e-5)");
    EXPECT_EQ(config_of(cohere).folds.mlp_output, 0.5);
    EXPECT_EQ(config_of(published("deepseek_v3", R"("shared_expert_combination_strategy": "average")"))
                  .folds.mlp_output,
              1);
    EXPECT_EQ(config_of(changed(cohere, R"("shared_expert_combination_strategy": null)")).folds.mlp_output,
              0.5);
}

TEST(HfConfig, HostileJson) {
    const auto error = [](const std::string& text) {
        return error_of(ExitCode::usage, [&] { parse_hf_config(text, "config.json"); });
    };
    std::string twice = published("qwen3").dump();
    twice.insert(1, "\"hidden_size\": 128, ");
    expect_contains(error(twice), "config.json: key \"hidden_size\" appears twice");
    const std::string deep = "{\"model_type\": \"mixtral\", \"rope_scaling\": ";
    expect_contains(error(deep + std::string(200000, '[') + std::string(200000, ']') + "}"),
                    "config.json: nested deeper than 64");
    const std::string long_value = error("{\"model_type\": \"" + std::string(5000, 'x') + "\\n\\u001b\"}");
    EXPECT_LT(long_value.size(), 400u);
}

TEST(HfConfig, IsReadFromAFileOrAFolder) {
    const TemporaryFolder folder;
    folder.write("config.json", published("qwen3").dump());
    const std::string yaml = folder.write("run.yaml", kYaml);
    for (const std::string& path : {folder.path(), folder.path("config.json")})
        EXPECT_EQ(load_config(yaml, {}, std::nullopt, path).moe.num_experts, 128);
    const auto error = [&](const std::string& path) {
        return error_of(ExitCode::usage, [&] { load_config(yaml, {}, std::nullopt, path); });
    };
    expect_contains(error(folder.path("absent.json")),
                    "--hf-config " + folder.path("absent.json") + ": No such file");
    expect_contains(error(folder.write("empty.json", "")), "no JSON at byte 1");
    expect_contains(error(folder.write("large.json", std::string((1 << 20) + 1, ' '))),
                    "at most 1048576 are read");
}

}  // namespace
}  // namespace fp8flow
