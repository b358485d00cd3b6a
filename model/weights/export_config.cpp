// SPDX-License-Identifier: MIT
// config.json of an export. A family is right for a configuration if its own file, read back, gives it: no
// rule about families is written twice.
#include "model/config/fields.h"
#include "model/config/hf_config.h"
#include "model/weights/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace fp8flow::weights {

namespace {

using Json = nlohmann::ordered_json;

void add_rope(Json& json, const ModelSpec& m, const HfFamily& family) {
    const RopeSpec& rope = m.rope;
    const bool partial = rope.rotary_percent != family.rotary_percent.value_or(1) || rope.rotary_percent != 1;
    if (rope.rope_type == RopeType::rope && !partial) return;
    Json group = {{"rope_type", "default"}, {"rope_theta", m.rotary_base}};
    if (partial) group["partial_rotary_factor"] = rope.rotary_percent;
    const auto scaled = [&](const char* type) {
        group["rope_type"] = type;
        group["factor"] = rope.rotary_scaling_factor;
        group["original_max_position_embeddings"] = rope.original_max_position_embeddings;
    };
    if (rope.rope_type == RopeType::linear) scaled("linear");
    if (rope.rope_type == RopeType::yarn) {
        scaled("yarn");
        group["beta_fast"] = rope.beta_fast;
        group["beta_slow"] = rope.beta_slow;
        const double log = std::log(rope.rotary_scaling_factor);
        if (rope.mscale_all_dim == 0 && rope.mscale != 1)
            group["attention_factor"] = 1 + 0.1 * rope.mscale * log;
        if (rope.mscale_all_dim != 0) {
            group["mscale"] = rope.mscale;
            group["mscale_all_dim"] = rope.mscale_all_dim;
        }
    }
    if (rope.rope_type == RopeType::llama3) {
        scaled("llama3");
        group["low_freq_factor"] = rope.low_freq_factor;
        group["high_freq_factor"] = rope.high_freq_factor;
    }
    json["rope_parameters"] = group;
}

void add_layers(Json& json, const ModelSpec& m, const HfFamily& family) {
    const auto& layers = m.moe_layer_freq;
    Json only_dense = Json::array(), types = Json::array();
    for (size_t i = 0; i < layers.size(); ++i) {
        if (layers[i] == 0) only_dense.push_back(i);
        types.push_back(layers[i] == 0 ? "dense" : "sparse");
    }
    if (family.sparse_step) {
        json["decoder_sparse_step"] = 1;
        json["mlp_only_layers"] = only_dense;
    } else if (family.dense_key == nullptr) {
        json[family.layer_lists[0]] = types;
    } else if (family.dense != HfFamily::kNone) {
        json[family.dense_key] = std::find(layers.begin(), layers.end(), 1) - layers.begin();
    }
}

void add_experts(Json& json, const Config& config, const HfFamily& family) {
    const MoeSpec& moe = config.moe;
    const int64_t shared = moe.moe_shared_expert_intermediate_size, width = moe.moe_ffn_hidden_size;
    json[family.experts] = moe.num_experts;
    if (family.expert_width != std::string_view("intermediate_size"))
        json["intermediate_size"] = config.model.ffn_hidden_size;
    json[family.expert_width] = width;
    if (family.reads_norm)
        json["norm_topk_prob"] = moe.moe_router_score_function == ScoreFunction::sigmoid
                                     ? moe.moe_router_norm_topk_prob
                                     : !moe.moe_router_pre_softmax;
    if (family.shared != HfFamily::kNone && family.shared_width == nullptr)
        json[family.shared_key] = shared / width;
    if (family.shared_width != nullptr) json[family.shared_width] = shared;
    if (family.scaling != HfFamily::kNone) json[family.scaling_key] = moe.moe_router_topk_scaling_factor;
    if (family.latent) {  // what other programs read
        json["scoring_func"] =
            moe.moe_router_score_function == ScoreFunction::sigmoid ? "sigmoid" : "softmax";
        json["topk_method"] = family.choice;
        json["num_nextn_predict_layers"] = 0;
    }
    if (family.groups != HfFamily::kNone) {
        json["n_group"] = std::max<int64_t>(1, moe.moe_router_num_groups);
        json["topk_group"] = std::max<int64_t>(1, moe.moe_router_group_topk);
    }
}

void add_heads(Json& json, const ModelSpec& m) {
    json["num_attention_heads"] = m.num_attention_heads;
    json["num_key_value_heads"] = m.kv_heads();
    if (!m.multi_latent_attention) {
        json["head_dim"] = m.kv_channels;
        return;
    }
    json["q_lora_rank"] = m.q_lora_rank > 0 ? Json(m.q_lora_rank) : Json(nullptr);
    json["kv_lora_rank"] = m.kv_lora_rank;
    json["qk_nope_head_dim"] = m.qk_head_dim;
    json["qk_rope_head_dim"] = m.qk_pos_emb_head_dim;
    json["v_head_dim"] = m.v_head_dim;
}

Json config_as(const Config& config, const HfFamily& family) {
    const ModelSpec& m = config.model;
    Json json = {{"architectures", {family.architecture}},
                 {"model_type", family.type},
                 {"hidden_act", "silu"},
                 {"hidden_size", m.hidden_size},
                 {"num_hidden_layers", m.num_layers},
                 {"max_position_embeddings", std::max(m.seq_length, m.max_position_embeddings)},
                 {"rms_norm_eps", m.norm_epsilon},
                 {"rope_theta", m.rotary_base},
                 {"vocab_size", m.vocab_size},
                 {"tie_word_embeddings", !m.untie_embeddings_and_output_weights},
                 {"initializer_range", m.init_method_std},
                 {family.bias_of_qkv, m.add_qkv_bias},
                 {"num_experts_per_tok", config.moe.moe_router_topk}};
    add_heads(json, m);
    add_experts(json, config, family);
    add_layers(json, m, family);
    add_rope(json, m, family);
    if (!family.sparse_step) json["sliding_window"] = nullptr;
    if (family.reads_qk_norm) json["use_qk_norm"] = m.qk_layernorm;
    if (family.granite)  // the multipliers are in the weights
        json["attention_multiplier"] = 1 / std::sqrt(f64(m.kv_channels));
    return json;
}

// Keys of this program alone; moe_layer_freq, which is compared separately.
constexpr std::string_view kNotInTheFile[] = {"model.seq_length",
                                              "model.make_vocab_size_divisible_by",
                                              "model.moe_layer_freq",
                                              "model.num_layers_at_start_in_bf16",
                                              "model.num_layers_at_end_in_bf16",
                                              "model.yields_to_hf_config",
                                              "moe.moe_router_force_load_balancing",
                                              "moe.moe_router_force_biased",
                                              "moe.moe_router_dtype",
                                              "moe.moe_combine_order"};

// Whether `key` belongs to the kind of attention that the model does not have.
bool is_unread(const ModelSpec& m, std::string_view key) {
    constexpr std::string_view kHeads[] = {"model.num_query_groups", "model.kv_channels",
                                           "model.qk_layernorm"},
                               kLatents[] = {"model.q_lora_rank", "model.kv_lora_rank", "model.qk_head_dim",
                                             "model.qk_pos_emb_head_dim", "model.v_head_dim"};
    return m.multi_latent_attention ? std::ranges::find(kHeads, key) != std::end(kHeads)
                                    : std::ranges::find(kLatents, key) != std::end(kLatents);
}

// The keys of the configuration that a family's own file does not give back.
std::vector<std::string> lost_as(const Config& config, const HfFamily& family) {
    const std::string name = family.type;
    std::vector<std::string> lost;
    const auto& layers = config.model.moe_layer_freq;
    const bool has_dense = std::find(layers.begin(), layers.end(), 0) != layers.end();
    try {
        const Config back = parse_config("output: {log_interval: 1}", name, {}, std::nullopt,
                                         parse_hf_config(config_as(config, family).dump(), name));
        for (const ConfigField& field : config_fields()) {
            const std::string key = field.section + "." + field.key;
            const bool counts = changes_the_model(key) && !is_unread(config.model, key) &&
                                std::ranges::find(kNotInTheFile, key) == std::end(kNotInTheFile);
            const bool of_dense = key == "model.ffn_hidden_size";
            if (counts && (!of_dense || has_dense) && field.get(back) != field.get(config))
                lost.push_back(key);
        }
        if (back.model.moe_layer_freq != config.model.moe_layer_freq)
            lost.emplace_back("model.moe_layer_freq");
    } catch (const Error& error) {
        lost.emplace_back(error.what());
    }
    return lost;
}

}  // namespace

const HfFamily& export_family(const Config& config) {
    std::vector<const HfFamily*> candidates;
    const auto is_candidate = [](const HfFamily& family) {
        return family.whole() && family.architecture != nullptr;
    };
    if (const HfFamily* own = hf_family(config.family); own != nullptr && is_candidate(*own))
        candidates.push_back(own);
    for (const HfFamily& family : hf_families())
        if (is_candidate(family)) candidates.push_back(&family);
    std::vector<std::string> nearest;
    const HfFamily* near = nullptr;
    for (const HfFamily* family : candidates) {
        std::vector<std::string> lost = lost_as(config, *family);
        if (lost.empty()) return *family;
        if (near == nullptr || lost.size() < nearest.size()) {
            near = family;
            nearest = std::move(lost);
        }
    }
    fail(ExitCode::usage, "export: no family computes what this configuration says; {} differs in {}",
         near->type, fmt::join(nearest, ", "));
}

std::string hf_config_of(const Config& config, ExportFormat format, int64_t dense_width) {
    const HfFamily& family = export_family(config);
    const HfStorage& names = family.storage;
    Json json = config_as(config, family);
    if (dense_width > 0) json["intermediate_size"] = dense_width;
    if (format == ExportFormat::fp8) {
        const auto& layers = config.model.moe_layer_freq;
        Json plain = Json::array({"lm_head"});
        const auto module = [&](size_t layer, std::string_view weight) {
            weight.remove_suffix(std::string_view(".weight").size());
            plain.push_back(fmt::format("{}{}{}.{}", names.root, names.layers, layer, weight));
        };
        const auto attention = [&](const char* name) { return std::string(names.attention) + name; };
        for (size_t i = 0; i < layers.size(); ++i) {
            std::vector<const char*> inputs = {"q_proj.weight", "k_proj.weight", "v_proj.weight"};
            if (names.qkv != nullptr) inputs = {names.qkv};
            if (config.model.multi_latent_attention)
                inputs = {"q_proj.weight", "q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight",
                          "kv_b_proj.weight"};
            for (const char* name : inputs) module(i, attention(name));
            module(i, attention(names.proj));
        }
        for (size_t i = 0; i < layers.size(); ++i)
            if (layers[i] != 0)
                module(i, std::string(names.block) + names.router);
            else if (dense_width > 0)  // has no whole blocks
                for (const char* name : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"})
                    module(i, std::string(names.block) + name);
        json["quantization_config"] = {{"quant_method", "fp8"},
                                       {"fmt", "e4m3"},
                                       {"activation_scheme", "dynamic"},
                                       {"weight_block_size", {kScaleBlock, kScaleBlock}},
                                       {"modules_to_not_convert", plain}};
    }
    json["torch_dtype"] = format == ExportFormat::f32 ? "float32" : "bfloat16";
    return json.dump(2) + "\n";
}

}  // namespace fp8flow::weights
