// SPDX-License-Identifier: MIT
// A Hugging Face config.json becomes the configuration that computes the same; what a layer of ours does not
// compute is listed, all of it at once. Long because every family has its case.
#include "model/config/hf_config.h"
#include "layers/rope.h"
#include "model/config/config.h"
#include "model/config/hf_families.h"
#include "model/safetensors/tensor_set.h"

#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace fp8flow {
namespace {

using Json = nlohmann::json;

Json qwen3() {
    return Json::parse(R"({
        "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": null, "vocab_size": 151936, "tie_word_embeddings": false,
        "initializer_range": 0.02, "attention_bias": false, "sliding_window": null,
        "use_sliding_window": false, "router_aux_loss_coef": 0.001})");
}
Json mixtral() {
    return Json::parse(R"({
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        "vocab_size": 32000, "tie_word_embeddings": false, "sliding_window": null})");
}
Json deepseek() {
    return Json::parse(R"({
        "model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40}, "vocab_size": 129280,
        "tie_word_embeddings": false,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}})");
}

// The sizes that the authors publish.
Json kimi_k2() {
    Json json = deepseek();
    json.update({{"model_type", "kimi_k2"},
                 {"n_routed_experts", 384},
                 {"n_group", 1},
                 {"topk_group", 1},
                 {"routed_scaling_factor", 2.827},
                 {"first_k_dense_replace", 1},
                 {"num_attention_heads", 64},
                 {"aux_loss_alpha", 0.001},
                 {"seq_aux", true},
                 {"vocab_size", 163840}});
    return json;
}
Json moonlight() {
    return Json::parse(R"({
        "model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": null, "kv_lora_rank": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "vocab_size": 163840, "tie_word_embeddings": false})");
}
Json glm4() {
    return Json::parse(R"({
        "model_type": "glm4_moe", "hidden_act": "silu", "hidden_size": 5120, "num_hidden_layers": 92,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true,
        "attention_dropout": 0.0, "partial_rotary_factor": 0.5, "use_qk_norm": true,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": null,
        "vocab_size": 151552, "tie_word_embeddings": false})");
}
Json olmoe() {
    return Json::parse(R"({
        "model_type": "olmoe", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": false, "router_aux_loss_coef": 0.01, "clip_qkv": null,
        "attention_bias": false, "attention_dropout": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": null, "vocab_size": 50304, "tie_word_embeddings": false,
        "output_router_logits": false})");
}
Json qwen2() {
    return Json::parse(R"({
        "model_type": "qwen2_moe", "hidden_act": "silu", "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
        "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": false, "decoder_sparse_step": 1,
        "attention_dropout": 0.0, "max_window_layers": 28, "sliding_window": 65536,
        "use_sliding_window": false, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936,
        "tie_word_embeddings": false})");
}
Json minimax_m2() {
    return Json::parse(R"({
        "model_type": "minimax_m2", "hidden_act": "silu", "hidden_size": 3072, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536,
        "shared_intermediate_size": 0, "num_local_experts": 256, "num_experts_per_tok": 8,
        "scoring_func": "sigmoid", "use_routing_bias": true, "use_qk_norm": true,
        "qk_norm_type": "per_layer", "rotary_dim": 64, "num_mtp_modules": 3, "rms_norm_eps": 1e-6,
        "rope_theta": 5000000, "vocab_size": 200064, "tie_word_embeddings": false,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}})");
}
Json deepseek_v2_lite() {
    return Json::parse(R"({
        "model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": false, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": true,
        "kv_lora_rank": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40}, "vocab_size": 102400,
        "tie_word_embeddings": false})");
}

const std::string kYaml = "training: {train_iters: 1}";
Config config_of(const Json& json, const std::string& yaml = kYaml,
                 const std::vector<std::string>& overrides = {}) {
    return parse_config(yaml, "t.yaml", overrides, std::nullopt, parse_hf_config(json.dump(), "config.json"));
}
std::string refused(const Json& json, const std::string& yaml = kYaml) {
    try {
        config_of(json, yaml);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::usage);
        return error.what();
    }
    ADD_FAILURE() << "was not refused: " << json.dump();
    return "";
}
Json with(Json json, const std::string& key, const Json& value) {
    json[key] = value;
    return json;
}
Json without(Json json, std::initializer_list<const char*> keys) {
    for (const char* key : keys) json.erase(key);
    return json;
}

TEST(HfConfig, Qwen3Moe) {
    const Config c = config_of(qwen3());
    EXPECT_EQ(c.model.num_layers, 48);
    EXPECT_EQ(c.model.hidden_size, 2048);
    EXPECT_EQ(c.model.num_attention_heads, 32);
    EXPECT_EQ(c.model.num_query_groups, 4);
    EXPECT_EQ(c.model.kv_channels, 128);
    EXPECT_TRUE(c.model.attention && c.model.qk_layernorm);
    EXPECT_EQ(c.model.rotary_base, 1e6);
    EXPECT_EQ(c.model.norm_epsilon, 1e-6);
    EXPECT_EQ(c.model.vocab_size, 151936);
    EXPECT_EQ(c.model.padded_vocab_size, 151936);
    EXPECT_TRUE(c.model.untie_embeddings_and_output_weights);
    EXPECT_EQ(c.model.ffn_hidden_size, 6144);
    EXPECT_EQ(c.model.moe_layer_freq, std::vector<int>(48, 1));
    EXPECT_EQ(c.moe.num_experts, 128);
    EXPECT_EQ(c.moe.moe_router_topk, 8);
    EXPECT_EQ(c.moe.moe_ffn_hidden_size, 768);
    EXPECT_EQ(c.moe.moe_router_score_function, ScoreFunction::softmax);
    EXPECT_FALSE(c.moe.moe_router_pre_softmax);  // renormalised over the chosen: a softmax over their logits
    EXPECT_EQ(c.moe.moe_shared_expert_intermediate_size, 0);
    EXPECT_TRUE(config_of(with(qwen3(), "norm_topk_prob", false)).moe.moe_router_pre_softmax);
    EXPECT_FALSE(
        config_of(with(qwen3(), "tie_word_embeddings", true)).model.untie_embeddings_and_output_weights);
}

TEST(HfConfig, Qwen3DenseLayers) {
    Json json = with(with(qwen3(), "num_hidden_layers", 6), "decoder_sparse_step", 2);
    EXPECT_EQ(config_of(json).model.moe_layer_freq, (std::vector<int>{0, 1, 0, 1, 0, 1}));
    EXPECT_EQ(config_of(with(json, "mlp_only_layers", {1, 2})).model.moe_layer_freq,
              (std::vector<int>{0, 0, 0, 1, 0, 1}));
    expect_contains(refused(with(json, "mlp_only_layers", {6})),
                    "config.json: mlp_only_layers: got 6, want layers below 6");
    expect_contains(refused(with(json, "mlp_only_layers", 3)), "want a list of layers");
    expect_contains(refused(with(json, "decoder_sparse_step", 0)),
                    "decoder_sparse_step: got 0, want at least 1");
}

// Transformers 5 writes Qwen3's number of experts under Mixtral's name.
TEST(HfConfig, Qwen3AsTransformers5WritesIt) {
    Json json = with(with(qwen3(), "num_local_experts", 64), "rope_parameters",
                     {{"rope_theta", 10000.0}, {"rope_type", "default"}});
    for (const char* old : {"num_experts", "rope_theta", "rope_scaling"}) json.erase(old);
    EXPECT_EQ(config_of(json).moe.num_experts, 64);
    EXPECT_EQ(config_of(json).model.rotary_base, 10000.0);
    json.erase("num_local_experts");
    expect_contains(refused(json), "num_experts: is missing");
}

TEST(HfConfig, Mixtral) {
    const Config c = config_of(mixtral());
    EXPECT_EQ(c.model.num_layers, 32);
    EXPECT_EQ(c.model.kv_channels, 128);  // hidden_size / heads
    EXPECT_FALSE(c.model.qk_layernorm);
    EXPECT_EQ(c.moe.num_experts, 8);
    EXPECT_EQ(c.moe.moe_router_topk, 2);
    EXPECT_EQ(c.moe.moe_ffn_hidden_size, 14336);
    EXPECT_FALSE(c.moe.moe_router_pre_softmax);
    EXPECT_EQ(c.model.moe_layer_freq, std::vector<int>(32, 1));
}

TEST(HfConfig, DeepSeekV3) {
    const Config c = config_of(deepseek());
    EXPECT_TRUE(c.model.attention && c.model.multi_latent_attention);
    EXPECT_EQ(c.model.hidden_size, 7168);
    EXPECT_EQ(c.moe.num_experts, 256);
    EXPECT_EQ(c.moe.moe_router_topk, 8);
    EXPECT_EQ(c.moe.moe_ffn_hidden_size, 2048);
    EXPECT_EQ(c.moe.moe_shared_expert_intermediate_size, 2048);
    EXPECT_EQ(c.moe.moe_router_score_function, ScoreFunction::sigmoid);
    EXPECT_TRUE(c.moe.moe_router_enable_expert_bias);
    EXPECT_EQ(c.moe.moe_router_num_groups, 8);
    EXPECT_EQ(c.moe.moe_router_group_topk, 4);
    EXPECT_EQ(c.moe.moe_router_topk_scaling_factor, 2.5);
    std::vector<int> layers(61, 1);
    layers[0] = layers[1] = layers[2] = 0;
    EXPECT_EQ(c.model.moe_layer_freq, layers);
    EXPECT_EQ(config_of(with(deepseek(), "n_shared_experts", 2)).moe.moe_shared_expert_intermediate_size,
              4096);
    EXPECT_EQ(config_of(with(with(deepseek(), "n_group", 1), "topk_group", 1)).moe.moe_router_num_groups, 0);
    expect_contains(refused(with(deepseek(), "topk_group", 2)),
                    "topk_group: got 2 with num_experts_per_tok = 8");
    expect_contains(refused(with(deepseek(), "scoring_func", "softmax")),
                    "scoring_func: got softmax, want sigmoid");
    expect_contains(refused(with(deepseek(), "topk_method", "greedy")),
                    "topk_method: got greedy, want noaux_tc");
    EXPECT_TRUE(c.moe.moe_router_norm_topk_prob);
    EXPECT_FALSE(config_of(with(deepseek(), "norm_topk_prob", false)).moe.moe_router_norm_topk_prob);
    expect_contains(refused(with(deepseek(), "first_k_dense_replace", 62)), "first_k_dense_replace: got 62");
    expect_contains(refused(with(deepseek(), "moe_layer_freq", 2)), "moe_layer_freq: got 2, want 1");
}

struct Family {
    const char* name;
    Json json;
    const char* foreign;  // null: nothing
    int64_t experts, topk, width, shared, dense;
    ScoreFunction score;
    bool pre_softmax, bias;
    double scaling;
};

// What each family says of its MoE layers, and which part is foreign; none: the model is whole.
TEST(HfConfig, MoeLayersOfFamilies) {
    const ScoreFunction sigmoid = ScoreFunction::sigmoid, softmax = ScoreFunction::softmax;
    const Family families[] = {
        {"Kimi-K2", kimi_k2(), nullptr, 384, 8, 2048, 2048, 1, sigmoid, false, true, 2.827},
        {"Moonlight", moonlight(), nullptr, 64, 6, 1408, 2816, 1, sigmoid, false, true, 2.446},
        {"GLM-4.5", glm4(), nullptr, 160, 8, 1536, 1536, 3, sigmoid, false, true, 2.5},
        {"Qwen2-MoE", qwen2(), nullptr, 64, 8, 2560, 20480, 0, softmax, true, false, 1.0},
        {"OLMoE", olmoe(), nullptr, 64, 8, 1024, 0, 0, softmax, true, false, 1.0},
        {"MiniMax-M2", minimax_m2(), nullptr, 256, 8, 1536, 0, 0, sigmoid, false, true, 1.0},
        {"DeepSeek-V2-Lite", deepseek_v2_lite(), nullptr, 64, 6, 1408, 2816, 1, softmax, true, false, 1.0},
    };
    for (const Family& family : families) {
        SCOPED_TRACE(family.name);
        const Config c = config_of(family.json);
        EXPECT_EQ(c.model.attention, family.foreign == nullptr);
        EXPECT_EQ(c.moe.num_experts, family.experts);
        EXPECT_EQ(c.moe.moe_router_topk, family.topk);
        EXPECT_EQ(c.moe.moe_ffn_hidden_size, family.width);
        EXPECT_EQ(c.moe.moe_shared_expert_intermediate_size, family.shared);
        EXPECT_EQ(std::count(c.model.moe_layer_freq.begin(), c.model.moe_layer_freq.end(), 0), family.dense);
        EXPECT_EQ(c.moe.moe_router_score_function, family.score);
        EXPECT_EQ(c.moe.moe_router_pre_softmax, family.pre_softmax);
        EXPECT_TRUE(c.moe.moe_router_norm_topk_prob);
        EXPECT_EQ(c.moe.moe_router_enable_expert_bias, family.bias);
        EXPECT_EQ(c.moe.moe_router_num_groups, 0);
        EXPECT_EQ(c.moe.moe_router_topk_scaling_factor, family.scaling);
        EXPECT_NO_THROW(require_own_layers(config_of(family.json, kYaml, {"model.attention=false"})));
        if (family.foreign == nullptr) {
            EXPECT_NO_THROW(require_own_layers(c));
            continue;
        }
        ASSERT_FALSE(c.warnings.empty());
        expect_contains(c.warnings[0], family.foreign);
        expect_contains(c.warnings[0], ", which is not implemented and left out");
        // training is refused and says why, unless the user has decided about attention
        const std::string why = error_of(ExitCode::usage, [&] { require_own_layers(c); });
        expect_contains(why, "config.json: model_type " + family.json["model_type"].get<std::string>());
        expect_contains(why, family.foreign);
    }
    EXPECT_NO_THROW(require_own_layers(config_of(qwen3())));
    EXPECT_NO_THROW(require_own_layers(config_of(mixtral())));
}

TEST(HfConfig, AttentionOfGlmOlmoeAndMiniMax) {
    const auto attention = [](const Json& json) {
        const ModelSpec m = config_of(json).model;
        return fmt::format("bias {}, norm {}, {}, rotated {} of {}", m.add_qkv_bias, m.qk_layernorm,
                           m.qk_layernorm_type == QkLayernormType::per_layer ? "per_layer" : "per_head",
                           m.rope.rotary_percent, m.kv_channels);
    };
    EXPECT_EQ(attention(glm4()), "bias true, norm true, per_head, rotated 0.5 of 128");
    // what is left out
    const Json silent = without(glm4(), {"attention_bias", "use_qk_norm", "partial_rotary_factor"});
    EXPECT_EQ(attention(silent), "bias false, norm false, per_head, rotated 0.5 of 128");
    EXPECT_EQ(attention(with(silent, "partial_rotary_factor", 1.0)),
              "bias false, norm false, per_head, rotated 1 of 128");
    EXPECT_EQ(attention(olmoe()), "bias false, norm true, per_layer, rotated 1 of 128");
    EXPECT_EQ(attention(minimax_m2()), "bias false, norm true, per_layer, rotated 0.5 of 128");
    EXPECT_EQ(attention(without(minimax_m2(), {"rotary_dim"})),
              "bias false, norm true, per_layer, rotated 1 of 128");
    EXPECT_EQ(attention(qwen2()), "bias true, norm false, per_head, rotated 1 of 128");  // as its class
    EXPECT_EQ(attention(with(qwen2(), "qkv_bias", false)),
              "bias false, norm false, per_head, rotated 1 of 128");
    expect_contains(refused(with(qwen2(), "use_sliding_window", true)), "sliding_window: got 65536");
    expect_contains(refused(with(olmoe(), "attention_bias", true)), "attention_bias: got true, want false");
    expect_contains(refused(with(olmoe(), "clip_qkv", 8.0)), "clip_qkv: got 8.0, want null");
    expect_contains(refused(with(minimax_m2(), "qk_norm_type", "per_head")),
                    "qk_norm_type: got \"per_head\", want \"per_layer\"");
}

// The keys that the authors publish.
Json glm4_flash() {
    return Json::parse(R"({
        "model_type": "glm4_moe_lite", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 47,
        "num_attention_heads": 20, "num_key_value_heads": 20, "attention_bias": false,
        "attention_dropout": 0.0, "intermediate_size": 10240, "moe_intermediate_size": 1536,
        "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
        "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": null,
        "vocab_size": 154880, "tie_word_embeddings": false})");
}
Json sarvam() {
    return Json::parse(R"({
        "model_type": "sarvam_mla", "hidden_act": "silu", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 64, "head_dim": 576, "q_head_dim": 192, "intermediate_size": 16384,
        "moe_intermediate_size": 2048, "num_experts": 128, "num_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "vocab_size": 262144, "tie_word_embeddings": false,
        "rope_scaling": {"type": "deepseek_yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}})");
}

// Columns of queries' and keys' latents, of a head without and with rotation and of its values, then what
// scores are multiplied by.
TEST(HfConfig, LatentsOfTheFamilies) {
    const auto latents = [](const Json& json) {
        const ModelSpec m = config_of(json).model;
        EXPECT_TRUE(m.attention && m.multi_latent_attention);
        return std::vector<int64_t>{m.q_lora_rank, m.kv_lora_rank, m.qk_head_dim, m.qk_pos_emb_head_dim,
                                    m.v_head_dim};
    };
    const auto factor = [](const Json& json) { return rope_softmax_factor(config_of(json).model.rope); };
    const std::vector<int64_t> v3 = {1536, 512, 128, 64, 128}, direct = {0, 512, 128, 64, 128};
    EXPECT_EQ(latents(deepseek()), v3);  // the classes' values of what is left out
    EXPECT_EQ(latents(without(deepseek(), {"q_lora_rank"})), v3);
    EXPECT_EQ(latents(kimi_k2()), v3);
    EXPECT_EQ(latents(moonlight()), direct);
    EXPECT_EQ(latents(with(deepseek_v2_lite(), "q_lora_rank", nullptr)), direct);
    EXPECT_EQ(latents(sarvam()), direct);
    const std::vector<int64_t> glm = {768, 512, 192, 64, 256};
    EXPECT_EQ(latents(glm4_flash()), glm);
    EXPECT_EQ(latents(without(glm4_flash(), {"q_lora_rank", "qk_nope_head_dim", "v_head_dim"})), glm);

    EXPECT_NEAR(factor(sarvam()), 1.8739, 1e-4);
    EXPECT_EQ(factor(deepseek()), 1);
    EXPECT_EQ(factor(glm4_flash()), 1);
    Json lite = deepseek_v2_lite();
    lite["rope_scaling"] = {{"type", "yarn"}, {"factor", 40}, {"mscale", 0.707}, {"mscale_all_dim", 0.707}};
    EXPECT_NEAR(factor(lite), 1.5896, 1e-4);
    // without mscale, cos and sin are multiplied by m(1)
    const double log = std::log(40.0);
    lite["rope_scaling"].erase("mscale");
    EXPECT_NEAR(factor(lite), 1.5896, 1e-4);
    const RopeSpec rope = config_of(lite).model.rope;
    EXPECT_NEAR((1 + 0.1 * rope.mscale * log) / (1 + 0.1 * rope.mscale_all_dim * log), 1 + 0.1 * log, 1e-12);

    expect_contains(refused(with(deepseek(), "rope_interleave", false)),
                    "rope_interleave: got false, want true");
    expect_contains(refused(with(glm4_flash(), "partial_rotary_factor", 0.5)),
                    "partial_rotary_factor: got 0.5, want 1.0");
    expect_contains(refused(with(deepseek_v2_lite(), "n_group", 8)), "n_group: got 8, want 1");
}

TEST(HfConfig, OptionsOfTheFamilies) {
    EXPECT_FALSE(config_of(with(glm4(), "norm_topk_prob", false)).moe.moe_router_norm_topk_prob);
    EXPECT_EQ(config_of(without(deepseek_v2_lite(), {"n_routed_experts"})).moe.num_experts, 64);
    EXPECT_FALSE(config_of(with(olmoe(), "norm_topk_prob", true)).moe.moe_router_pre_softmax);
    EXPECT_FALSE(config_of(with(qwen2(), "norm_topk_prob", true)).moe.moe_router_pre_softmax);
    const Config gated = config_of(
        without(qwen2(), {"num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"}));
    EXPECT_EQ(gated.moe.num_experts, 60);
    EXPECT_EQ(gated.moe.moe_router_topk, 4);
    EXPECT_EQ(gated.moe.moe_shared_expert_intermediate_size, 5632);
    EXPECT_TRUE(gated.moe.moe_shared_expert_gate);
    EXPECT_EQ(config_of(with(with(qwen2(), "decoder_sparse_step", 2), "mlp_only_layers", {3}))
                  .model.moe_layer_freq[3],
              0);
    EXPECT_EQ(config_of(without(with(olmoe(), "num_local_experts", 32), {"num_experts"})).moe.num_experts,
              32);
    EXPECT_FALSE(config_of(with(minimax_m2(), "use_routing_bias", false)).moe.moe_router_enable_expert_bias);
    expect_contains(refused(with(minimax_m2(), "shared_intermediate_size", 1536)),
                    "shared_intermediate_size: got 1536, want 0");
    expect_contains(refused(with(minimax_m2(), "scoring_func", "softmax")),
                    "scoring_func: got softmax, want sigmoid");
    // the larger DeepSeek-V2
    expect_contains(refused(with(deepseek_v2_lite(), "topk_method", "group_limited_greedy")),
                    "topk_method: got group_limited_greedy, want greedy: a group is scored by its best");
    expect_contains(refused(with(deepseek_v2_lite(), "norm_topk_prob", true)), "norm_topk_prob: got true");
    // what is left out has the value of the family's own class (transformers 5.24)
    const Config c =
        config_of(without(glm4(), {"n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
                                   "routed_scaling_factor", "n_routed_experts", "num_experts_per_tok"}));
    EXPECT_EQ(c.moe.num_experts, 128);
    EXPECT_EQ(c.moe.moe_router_topk, 8);
    EXPECT_EQ(c.moe.moe_router_num_groups, 0);
    EXPECT_EQ(c.moe.moe_shared_expert_intermediate_size, 1536);
    EXPECT_EQ(c.moe.moe_router_topk_scaling_factor, 1.0);
    EXPECT_EQ(std::count(c.model.moe_layer_freq.begin(), c.model.moe_layer_freq.end(), 0), 1);
}

// DeepSeek-V3.2 and GLM-5: sparse attention equals dense attention up to index_topk tokens.
TEST(HfConfig, SequencesAreNoLongerThanAnIndexChoosesAllKeysOf) {
    nlohmann::json json =
        nlohmann::json::parse(read_text_file(FP8FLOW_SOURCE_DIR "/tests/data/hf_families.json",
                                             ExitCode::usage, "", 1 << 20))["glm_moe_dsa"]["config"];
    json["num_hidden_layers"] = 2;
    json["mlp_layer_types"] = {"dense", "sparse"};
    json["layer_types"] = {"indexed_attention", "indexed_attention"};
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
    json["index_topk"] = 1024;
    expect_contains(error("model: {seq_length: 256}"),
                    "index_topk: got 1024, want 2048: sequences have at most");
}

// Files of configs/ after the config.json that its authors publish: nothing of the model changes.
TEST(HfConfig, ShippedModelsArePublishedOnes) {
    const Json yarn = {{"type", "yarn"},       {"factor", 40},   {"original_max_position_embeddings", 4096},
                       {"beta_fast", 32},      {"beta_slow", 1}, {"mscale", 1.0},
                       {"mscale_all_dim", 1.0}};
    Json lite = deepseek_v2_lite(), v3 = deepseek();
    v3["rope_scaling"] = yarn;
    lite.update({{"rope_scaling", yarn}, {"q_lora_rank", nullptr}});
    lite["rope_scaling"].update({{"mscale", 0.707}, {"mscale_all_dim", 0.707}});
    const std::pair<const char*, Json> files[] = {{"deepseek_v2_lite", lite},
                                                  {"moonlight_16b_a3b", moonlight()},
                                                  {"deepseek_v3", v3},
                                                  {"qwen3_30b_a3b", qwen3()},
                                                  {"mixtral_8x7b", mixtral()}};
    for (const auto& [name, json] : files) {
        SCOPED_TRACE(name);
        const std::string file = std::string(FP8FLOW_SOURCE_DIR "/configs/") + name + ".yaml";
        const Config c = config_of(json, read_text_file(file, ExitCode::usage, "", 1 << 20));
        for (const std::string& warning : c.warnings)
            EXPECT_EQ(warning.find("changes its model"), std::string::npos) << warning;
    }
}

// alpha, offset and limit of the gated unit.
TEST(HfConfig, ClampedGatedUnits) {
    const Json families = Json::parse(
        read_text_file(FP8FLOW_SOURCE_DIR "/tests/data/hf_families.json", ExitCode::usage, "", 1 << 20));
    const auto glu = [](const Json& json) {
        const GluSpec g = config_of(json).model.glu;
        return fmt::format("{} {} {} {}", g.quick_geglu, g.glu_linear_offset, g.activation_func_clamp_value,
                           g.activation_func_clamp_routed_only);
    };
    EXPECT_EQ(glu(qwen3()), "false 0 0 false");
    const Json glm = families["glm5_next"]["config"], hunyuan = families["hy_v4"]["config"],
               m3 = families["minimax_m3_vl"]["config"];
    EXPECT_EQ(glu(glm), "false 0 10 false");
    EXPECT_EQ(glu(hunyuan), "false 0 10 true");
    EXPECT_EQ(glu(m3), "true 1 7 false");
    EXPECT_EQ(glu(without(m3, {"swiglu_limit"})), "true 1 7 false");
    EXPECT_EQ(glu(with(hunyuan, "swiglu_limit", 4.5)), "false 0 4.5 true");
    EXPECT_EQ(glu(with(hunyuan, "swiglu_limit", -1)), "false 0 0 false");
    EXPECT_NO_THROW(config_of(with(m3, "hidden_act", "swigluoai")));
    expect_contains(refused(with(qwen3(), "hidden_act", "swigluoai")),
                    "hidden_act: got swigluoai, want silu");
    expect_contains(refused(with(m3, "swiglu_alpha", 1.5)), "swiglu_alpha: got 1.5, want 1.702");
    const Config dense = config_of(
        without(with(with(m3, "moe_layer_freq", {0, 1}), "num_hidden_layers", 2), {"mlp_layer_types"}));
    EXPECT_EQ(dense.model.ffn_hidden_size, 12288);
}

// 10944 = 85.5 x 128: the dense layer is planned a little wider, and the user is told.
TEST(HfConfig, ADenseWidthThatIsNoMultipleOfABlockIsRoundedUpAndSaid) {
    const Json json = without(deepseek_v2_lite(), {"aux_loss_alpha"});
    const Config c = config_of(json);
    EXPECT_EQ(c.model.ffn_hidden_size, 11008);
    ASSERT_EQ(c.warnings.size(), 1u);
    expect_contains(c.warnings[0], "config.json: intermediate_size 10944 of dense layers is taken as 11008");
    EXPECT_TRUE(config_of(moonlight()).warnings.empty());
    const Config no_dense = config_of(with(json, "first_k_dense_replace", 0));  // no layer has that width
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
        read(olmoe(), {}),
        "config.json: router_aux_loss_coef = 0.01 has no effect without output_router_logits, so "
        "there is no balancing loss; near it (Transformers' loss is of all layers together): --set "
        "moe.moe_router_load_balancing_type=aux_loss --set moe.moe_aux_loss_coeff=0.005");
    expect_contains(read(with(olmoe(), "output_router_logits", true), {0.005}),
                    "router_aux_loss_coef = 0.01 is followed by aux_loss with coefficient 0.005, near it");
    expect_contains(read(qwen3(), {}), "moe.moe_aux_loss_coeff=0.0001667");
    expect_contains(read(kimi_k2(), {0.001}),
                    "aux_loss_alpha = 0.001 is followed: seq_aux_loss with coefficient 0.001");
    expect_contains(read(with(minimax_m2(), "router_aux_loss_coef", 0.001), {}), "and of softmax scores)");
    EXPECT_TRUE(config_of(with(qwen3(), "router_aux_loss_coef", 0.0)).warnings.empty());
    // The user's choice comes after it, and is no change of the model.
    const Json adds = with(qwen3(), "output_router_logits", true);
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
        parse_hf_config(with(qwen3(), "max_position_embeddings", 4096).dump(), "c.json");
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
    const Config c = config_of(qwen3(), "model: {num_layers: 2, moe_layer_freq: 1}\nmoe: {num_experts: 16}",
                               {"moe.num_experts=32"});
    EXPECT_EQ(c.model.num_layers, 2);
    EXPECT_EQ(c.moe.num_experts, 32);
    EXPECT_EQ(c.model.hidden_size, 2048);
    ASSERT_EQ(c.warnings.size(), 2u);
    expect_contains(c.warnings[1],
                    "t.yaml comes after config.json: model_type qwen3_moe and changes its model: "
                    "model.num_layers 2 (48 there), ");
    expect_contains(c.warnings[1], "moe.num_experts 32 (128 there)");
    EXPECT_EQ(config_of(qwen3(), "model: {num_layers: 48}", {"moe.num_experts=64"}).warnings.size(), 1u);
    // a rule that a key of the user's breaks is that key's
    expect_contains(
        refused(qwen3(), "model: {seq_length: 64,\n num_layers: 4}"),
        "t.yaml:2:14: model.moe_layer_freq: got 48 entries, want num_layers = 4\n"
        "t.yaml comes after config.json: model_type qwen3_moe and changes its model: model.num_layers "
        "4 (48 there): remove these keys to take the model as it is");
    // what it says is checked by the same rules, and named by its place
    expect_contains(refused(with(qwen3(), "hidden_size", 2050)),
                    "config.json: hidden_size: model.hidden_size: got 2050");
    expect_contains(refused(with(qwen3(), "num_experts_per_tok", 300)),
                    "moe.moe_router_topk: got 300, want at most num_experts = 128");
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
    Json json = with(with(with(qwen3(), "hidden_act", "gelu"), "attention_bias", true), "rope_scaling",
                     {{"rope_type", "longrope"}});
    json["sliding_window"] = 4096;
    json["use_sliding_window"] = true;
    json["quantization_config"] = {{"quant_method", "awq"}};
    json.erase("num_experts");
    json["rms_norm_eps"] = "small";
    json["num_key_value_heads"] = 4.5;
    const std::string text = refused(json);
    for (const char* part :
         {"hidden_act: got gelu, want silu", "attention_bias: got true, want false",
          "rope_scaling: got rope_type \"longrope\"", "sliding_window: got 4096, want null",
          "quantization_config: got {\"quant_method\":\"awq\"}, want quant_method fp8",
          "num_experts: is missing", "rms_norm_eps: got \"small\", want a number",
          "num_key_value_heads: got 4.5, want an integer"})
        expect_contains(text, std::string("config.json: ") + part);
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 7);
    // a window that is not used is none
    EXPECT_NO_THROW(config_of(with(qwen3(), "sliding_window", 4096)));
    EXPECT_NO_THROW(config_of(with(without(qwen3(), {"use_sliding_window"}), "sliding_window", 4096)));
    EXPECT_NO_THROW(config_of(with(qwen3(), "use_sliding_window", true)));
    expect_contains(refused(with(without(qwen3(), {"sliding_window"}), "use_sliding_window", true)),
                    "sliding_window: got 4096");
    // Mixtral's class knows its window alone
    expect_contains(refused(with(mixtral(), "sliding_window", 4096)), "sliding_window: got 4096");
    expect_contains(refused(with(with(mixtral(), "sliding_window", 4096), "use_sliding_window", false)),
                    "sliding_window: got 4096");
    EXPECT_NO_THROW(config_of(with(mixtral(), "attention_bias", true)));
    expect_contains(refused(without(mixtral(), {"rope_theta"})), "rope_theta: got null, want a number");
    // where Transformers 5 puts it
    const Json moved = with(without(mixtral(), {"rope_theta"}), "rope_parameters",
                            {{"rope_type", "default"}, {"rope_theta", 5e5}});
    EXPECT_EQ(config_of(moved).model.rotary_base, 5e5);
}

// transformers 4.57, DeepseekV3Config.
TEST(HfConfig, WhatDeepSeekV3LeavesOutHasTransformersDefaults) {
    const Config c = config_of(without(
        deepseek(), {"n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
                     "routed_scaling_factor", "norm_topk_prob", "n_routed_experts", "num_experts_per_tok"}));
    EXPECT_EQ(c.moe.moe_router_num_groups, 8);
    EXPECT_EQ(c.moe.moe_router_group_topk, 4);
    EXPECT_EQ(c.moe.moe_shared_expert_intermediate_size, 2048);
    EXPECT_EQ(c.moe.num_experts, 256);
    EXPECT_EQ(c.moe.moe_router_topk, 8);
    EXPECT_EQ(c.moe.moe_router_topk_scaling_factor, 2.5);
    EXPECT_EQ(std::count(c.model.moe_layer_freq.begin(), c.model.moe_layer_freq.end(), 0), 3);
    // null is no shared expert
    EXPECT_EQ(
        config_of(with(deepseek(), "n_shared_experts", nullptr)).moe.moe_shared_expert_intermediate_size, 0);
}

TEST(HfConfig, DropoutAndRouterNoiseAreRefusedByKey) {
    for (const char* key : {"attention_dropout", "resid_pdrop", "hidden_dropout"})
        expect_contains(refused(with(qwen3(), key, 0.1)),
                        std::string("config.json: ") + key + ": got 0.1, want 0");
    expect_contains(refused(with(mixtral(), "router_jitter_noise", 0.01)),
                    "router_jitter_noise: got 0.01, want 0");
    Json zero = with(with(mixtral(), "router_jitter_noise", 0.0), "attention_dropout", 0);
    EXPECT_NO_THROW(config_of(with(zero, "hidden_dropout", nullptr)));
}

TEST(HfConfig, LongestSequenceIsKept) {
    EXPECT_EQ(config_of(with(qwen3(), "max_position_embeddings", 40960)).model.max_position_embeddings,
              40960);
    EXPECT_EQ(config_of(qwen3()).model.max_position_embeddings, 0);
}

// Every family as its class writes it: number of experts, top-k, widths of an expert and of the shared
// one, dense layers, scaling factor, whether the class keeps the router's weight in FP32.
// tests/data/hf_families.json is made from the classes of Transformers 5.24; glm4_moe has the head_dim of its
// published files, without which half a head is no even number.
TEST(HfConfig, EveryFamilyIsReadAsItsClassWritesIt) {
    const Json families = Json::parse(
        read_text_file(FP8FLOW_SOURCE_DIR "/tests/data/hf_families.json", ExitCode::usage, "", 1 << 20));
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

TEST(HfConfig, ScaledFrequenciesAreRead) {
    const auto rope_of = [](const Json& scaling) {
        return config_of(with(qwen3(), "rope_scaling", scaling)).model.rope;
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
    const RopeSpec given = rope_of({{"rope_type", "yarn"}, {"factor", 8.0}, {"attention_factor", 1.5}});
    EXPECT_NEAR(1 + 0.1 * given.mscale * std::log(8.0), 1.5, 1e-12);
    EXPECT_EQ(rope_of({{"rope_type", "linear"}, {"factor", 2.0}}).rope_type, RopeType::linear);
    EXPECT_EQ(rope_of({{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}})
                  .original_max_position_embeddings,
              8192);
    expect_contains(refused(with(qwen3(), "rope_scaling", {{"rope_type", "yarn"}})), "has no number factor");
    // rope_scaling comes before rope_parameters, as in Transformers
    Json both = with(qwen3(), "rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}});
    both["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}, {"partial_rotary_factor", 0.5}};
    both.erase("rope_theta");
    const Config c = config_of(both);
    EXPECT_EQ(c.model.rope.rope_type, RopeType::linear);
    EXPECT_EQ(c.model.rotary_base, 5e5);
    EXPECT_EQ(c.model.rope.rotary_percent, 0.5);
}

// The text model of one with other inputs; and the constants of Granite, which go into the weights.
TEST(HfConfig, NestedModelsAndFoldedConstants) {
    Json inner = deepseek();
    inner["model_type"] = "deepseek_v3";
    const Config c = config_of({{"model_type", "kimi_k25"}, {"text_config", inner}});
    EXPECT_EQ(c.family, "deepseek_v3");
    EXPECT_EQ(c.moe.num_experts, 256);
    Json unnamed = without(inner, {"model_type"});
    EXPECT_EQ(config_of({{"model_type", "deepseek_v3"}, {"text_config", unnamed}}).family, "deepseek_v3");
    inner["model_type"] = "deepseek_v3_text";
    EXPECT_EQ(config_of({{"model_type", "other"}, {"text_config", inner}}).family, "deepseek_v3");

    Json granite = with(mixtral(), "model_type", "granitemoe");
    granite.update({{"embedding_multiplier", 12.0},
                    {"residual_multiplier", 0.25},
                    {"attention_multiplier", 0.0625},
                    {"logits_scaling", 6.0}});
    WeightFolds folds = config_of(granite).folds;
    EXPECT_EQ(folds.embedding, 12);
    EXPECT_EQ(folds.residual, 0.25);
    EXPECT_EQ(folds.query, 0.0625 * std::sqrt(128.0));
    EXPECT_EQ(folds.final_norm, 1 / 6.0);
    EXPECT_EQ(config_of(with(granite, "tie_word_embeddings", true)).folds.final_norm, 1 / 72.0);
    const Json cohere = {{"model_type", "cohere2_moe"},
                         {"num_shared_experts", 1},
                         {"shared_expert_combination_strategy", "average"}};
    Json whole = mixtral();
    whole.update(cohere);
    whole.update({{"num_experts", 8}, {"layer_norm_eps", 1e-5}});
    EXPECT_EQ(config_of(whole).folds.mlp_output, 0.5);
}

TEST(HfConfig, LayersWithAWindowAreRefused) {
    EXPECT_NO_THROW(
        config_of(with(qwen3(), "layer_types", Json(std::vector<std::string>(48, "full_attention")))));
    expect_contains(refused(with(qwen3(), "layer_types", {"full_attention", "sliding_attention"})),
                    "layer_types: got \"sliding_attention\", want full_attention");
}

TEST(HfConfig, HostileJson) {
    const auto error = [](const std::string& text) {
        return error_of(ExitCode::usage, [&] { parse_hf_config(text, "config.json"); });
    };
    std::string twice = qwen3().dump();
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
    folder.write("config.json", qwen3().dump());
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
