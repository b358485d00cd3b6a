// SPDX-License-Identifier: MIT
// Fields of config.json by family. Everything that is read is checked for its type; everything wrong is
// listed at once.
#include "model/config/hf_config.h"

#include "kernels/core/scaled_tensor.h"
#include "model/config/hf_fields.h"
#include "model/safetensors/json.h"
#include "model/safetensors/tensor_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

namespace fp8flow {

namespace {

namespace fs = std::filesystem;
constexpr uintmax_t kMaxConfigBytes = 1 << 20;

struct Refused {
    std::string_view type, reason;
};
// Known models that are refused, and what their layers have that ours do not.
constexpr std::array<Refused, 16> kRefused = {{
    {"gpt_oss",
     "its experts have biases and a clamped activation, its attention has sinks, its weights are MXFP4"},
    {"qwen2_moe", "its shared expert is weighted by a gate of its own, and its attention has biases"},
    {"qwen3_next",
     "its shared expert is weighted by a gate of its own, and most of its layers are linear attention"},
    {"qwen3_5_moe",
     "its shared expert is weighted by a gate of its own, and most of its layers are linear attention"},
    {"llama4", "its experts weight their input, not their output"},
    {"llama4_text", "its experts weight their input, not their output"},
    {"dbrx", "it uses LayerNorm and clips queries, keys and values"},
    {"phimoe", "it uses LayerNorm with biases and its router samples"},
    {"granitemoe", "it multiplies embeddings, residuals and logits by constants"},
    {"jamba", "most of its layers are state-space models"},
    {"minimax", "most of its layers are linear attention (MiniMax-M2 is minimax_m2)"},
    {"llama", "it has no experts"},
    {"mistral", "it has no experts"},
    {"qwen2", "it has no experts"},
    {"qwen3", "it has no experts"},
    {"gemma3", "it has no experts"},
}};
constexpr std::array<std::string_view, 8> kKnown = {"qwen3_moe", "mixtral",     "deepseek_v3", "kimi_k2",
                                                    "glm4_moe",  "deepseek_v2", "olmoe",       "minimax_m2"};

constexpr const char* kLatentAttention = "its attention is multi-latent (MLA)";

// The values that the class of a family gives to keys that config.json leaves out.
struct DeepSeekDefaults {
    int64_t experts, topk, shared, groups, chosen_groups, dense;
    double scaling;
};
constexpr DeepSeekDefaults kDeepSeekV3 = {
    .experts = 256, .topk = 8, .shared = 1, .groups = 8, .chosen_groups = 4, .dense = 3, .scaling = 2.5};
constexpr DeepSeekDefaults kGlm4 = {
    .experts = 128, .topk = 8, .shared = 1, .groups = 1, .chosen_groups = 1, .dense = 1, .scaling = 1.0};

class HfReader : public HfFields {
public:
    using HfFields::HfFields;

    ImportedModel read(const std::string& type) {
        model_.name = fmt::format("{}: model_type {}", file_, type);
        common();
        if (type == "mixtral") {
            mixtral();
        } else if (type == "qwen3_moe") {
            qwen3();
        } else if (type == "olmoe") {
            olmoe();
        } else if (type == "minimax_m2") {
            minimax();
        } else if (type == "deepseek_v2") {
            deepseek_v2();
        } else if (type == "glm4_moe") {
            foreign_attention(boolean("attention_bias", false)
                                  ? "its attention rotates a part of each head and has biases"
                                  : "its attention rotates a part of each head");
            deepseek_v3(kGlm4);
        } else {
            foreign_attention(kLatentAttention);
            deepseek_v3(kDeepSeekV3);
        }
        balancing();
        throw_problems(problems_, ExitCode::usage);
        return std::move(model_);
    }

private:
    // ---- the families
    void common() {
        copy("num_hidden_layers", "model.num_layers");
        copy("hidden_size", "model.hidden_size");
        copy("vocab_size", "model.vocab_size");
        if (present("max_position_embeddings"))
            copy("max_position_embeddings", "model.max_position_embeddings");
        number("rms_norm_eps", "model.norm_epsilon");
        if (present("initializer_range")) number("initializer_range", "model.init_method_std");
        set("model.untie_embeddings_and_output_weights",
            boolean("tie_word_embeddings", false) ? "false" : "true", "tie_word_embeddings");
        want("hidden_act", text("hidden_act", "silu"), "silu",
             "SwiGLU with another activation is not implemented");
        no_noise();
        quantization();
    }

    // Every key of dropout or of noise in the router, whatever its family calls it.
    void no_noise() {
        for (const auto& [name, value] : json_.items()) {
            const auto has = [&name = name](const char* part) {
                return name.find(part) != std::string::npos;
            };
            if (!has("jitter") && !has("dropout") && !has("pdrop")) continue;
            const bool off = value.is_null() || value == false || (value.is_number() && value == 0);
            if (!off)
                problem(printable(name).c_str(),
                        fmt::format("got {}, want 0: neither dropout nor router noise is implemented",
                                    shown(value)));
        }
    }

    void mixtral() {
        copy("num_experts_per_tok", "moe.moe_router_topk");
        copy("num_local_experts", "moe.num_experts");
        copy("intermediate_size", "moe.moe_ffn_hidden_size");
        attention("false");
        no_window(nullptr);  // the class knows neither use_sliding_window nor attention_bias
        softmax_router(true);
    }

    void qwen3() {
        copy("num_experts_per_tok", "moe.moe_router_topk");
        copy(present("num_local_experts") ? "num_local_experts"
                                          : "num_experts",  // the former since Transformers 5
             "moe.num_experts");
        copy("moe_intermediate_size", "moe.moe_ffn_hidden_size");
        copy("intermediate_size", "model.ffn_hidden_size");
        attention("true");
        if (boolean("use_sliding_window", false)) no_window(4096);
        want("attention_bias", boolean("attention_bias", false) ? "true" : "false", "false",
             "linear layers have no bias here");
        softmax_router(boolean("norm_topk_prob", false));
        const int64_t step = integer("decoder_sparse_step", 1), layers = integer("num_hidden_layers", 0);
        if (step < 1) problem("decoder_sparse_step", fmt::format("got {}, want at least 1", step));
        std::vector<int> moe;
        for (int64_t i = 0; step >= 1 && i < layers && i < kMostLayers; ++i)
            moe.push_back((i + 1) % step == 0 ? 1 : 0);
        if (present("mlp_only_layers")) {
            const Json& dense = json_["mlp_only_layers"];
            if (!dense.is_array()) problem("mlp_only_layers", "want a list of layers");
            for (const Json& layer : dense) {
                if (!layer.is_number_unsigned() || layer.get<uint64_t>() >= moe.size())
                    problem("mlp_only_layers",
                            fmt::format("got {}, want layers below {}", shown(layer), moe.size()));
                else
                    moe[layer.get<size_t>()] = 0;
            }
        }
        set("model.moe_layer_freq", fmt::format("[{}]", fmt::join(moe, ", ")), "decoder_sparse_step");
    }

    // Only the layers around attention are known here.
    void foreign_attention(const char* reason) {
        model_.foreign = reason;
        set("model.attention", "false", "model_type");
    }

    void olmoe() {
        foreign_attention("its attention normalises queries and keys over all heads together");
        copy("num_experts_per_tok", "moe.moe_router_topk");
        copy(present("num_local_experts") ? "num_local_experts" : "num_experts", "moe.num_experts");
        copy("intermediate_size", "moe.moe_ffn_hidden_size");
        softmax_router(boolean("norm_topk_prob", false));
    }

    void minimax() {
        foreign_attention("its attention rotates a part of each head and normalises over all heads together");
        copy("num_experts_per_tok", "moe.moe_router_topk");
        copy("num_local_experts", "moe.num_experts");
        copy("intermediate_size", "moe.moe_ffn_hidden_size");
        want("shared_intermediate_size", std::to_string(integer("shared_intermediate_size", 0)), "0",
             "minimax_m2 has no shared expert");
        want("scoring_func", text("scoring_func", "sigmoid"), "sigmoid",
             "minimax_m2 routes by sigmoid scores");
        sigmoid_router(boolean("use_routing_bias", true), true, "use_routing_bias");
    }

    // A key that is absent has the value that its class in Transformers gives it; null is none.
    int64_t absent_or_null(const char* name, int64_t absent, int64_t null) {
        return integer(name, json_.contains(name) ? null : absent);
    }

    void deepseek_v3(const DeepSeekDefaults& absent) {
        copy_or("n_routed_experts", "moe.num_experts", absent.experts);
        copy_or("num_experts_per_tok", "moe.moe_router_topk", absent.topk);
        copy("moe_intermediate_size", "moe.moe_ffn_hidden_size");
        shared_experts(absent.shared);
        want("scoring_func", text("scoring_func", "sigmoid"), "sigmoid",
             "this family routes by sigmoid scores");
        want("topk_method", text("topk_method", "noaux_tc"), "noaux_tc",
             "this family chooses with a bias and groups");
        sigmoid_router(true, boolean("norm_topk_prob", true), "topk_method");
        if (json_.contains("routed_scaling_factor"))
            number("routed_scaling_factor", "moe.moe_router_topk_scaling_factor");
        else
            set("moe.moe_router_topk_scaling_factor", fmt::format("{}", absent.scaling),
                "routed_scaling_factor");
        groups(absent);
        dense_layers(absent.dense);
    }

    // DeepSeek-V2-Lite. The larger V2 scores a group by its best expert alone.
    void deepseek_v2() {
        foreign_attention(kLatentAttention);
        copy_or("n_routed_experts", "moe.num_experts", 64);
        copy("num_experts_per_tok", "moe.moe_router_topk");
        copy("moe_intermediate_size", "moe.moe_ffn_hidden_size");
        shared_experts(2);
        want("scoring_func", text("scoring_func", "softmax"), "softmax",
             "deepseek_v2 routes by softmax scores");
        want("topk_method", text("topk_method", "greedy"), "greedy",
             "a group is scored by its best expert alone there, by several here");
        want("norm_topk_prob", boolean("norm_topk_prob", false) ? "true" : "false", "false",
             "its implementations differ in what they do then");
        softmax_router(false);
        if (present("routed_scaling_factor"))
            number("routed_scaling_factor", "moe.moe_router_topk_scaling_factor");
        dense_layers(0);
    }

    void shared_experts(int64_t absent) {
        const int64_t shared = absent_or_null("n_shared_experts", absent, 0),
                      width = integer("moe_intermediate_size", 0);
        if (shared < 0 || shared > 64)
            problem("n_shared_experts", fmt::format("got {}, want 0 to 64", shared));
        else if (width >= 0 && width <= kWidest)
            set("moe.moe_shared_expert_intermediate_size", std::to_string(shared * width),
                "n_shared_experts");
    }

    void sigmoid_router(bool bias, bool normalised, const char* bias_key) {
        sigmoid_ = true;
        set("moe.moe_router_score_function", "sigmoid", "scoring_func");
        set("moe.moe_router_pre_softmax", "false", "scoring_func");
        set("moe.moe_router_norm_topk_prob", normalised ? "true" : "false", "norm_topk_prob");
        set("moe.moe_router_enable_expert_bias", bias ? "true" : "false", bias_key);
    }

    // The first layers are dense, their width is rounded up where it is no multiple of a block.
    void dense_layers(int64_t absent) {
        const int64_t dense = absent_or_null("first_k_dense_replace", absent, 0),
                      layers = integer("num_hidden_layers", 0), width = integer("intermediate_size", 0);
        want("moe_layer_freq", std::to_string(integer("moe_layer_freq", 1)), "1",
             "every layer after the dense ones is MoE");
        if (dense < 0 || dense > layers)
            return problem("first_k_dense_replace",
                           fmt::format("got {}, want 0 to num_hidden_layers = {}", dense, layers));
        set("model.moe_layer_freq",
            dense == 0 ? "1" : fmt::format("\"([0]*{}+[1]*{})\"", dense, layers - dense),
            "first_k_dense_replace");
        if (width <= 0 || width > kWidest || width % kBlock == 0)
            return copy("intermediate_size", "model.ffn_hidden_size");
        const int64_t wider = round_up(width, kBlock);
        set("model.ffn_hidden_size", std::to_string(wider), "intermediate_size");
        if (dense > 0)
            note("model.ffn_hidden_size",
                 fmt::format("intermediate_size {} of dense layers is taken as {}, the next multiple of {}",
                             width, wider, kBlock));
    }

    // A group is scored by the sum of its two best experts there, of its K / topk_group best here.
    void groups(const DeepSeekDefaults& absent) {
        const int64_t groups = absent_or_null("n_group", absent.groups, 1),
                      chosen = absent_or_null("topk_group", absent.chosen_groups, 1),
                      topk = absent_or_null("num_experts_per_tok", absent.topk, 0);
        const bool grouped = groups > 1;
        if (grouped && chosen * 2 != topk)
            problem("topk_group",
                    fmt::format("got {} with num_experts_per_tok = {}, want half of it: a group is scored by "
                                "its num_experts_per_tok / topk_group best experts here, by 2 there",
                                chosen, topk));
        set("moe.moe_router_num_groups", std::to_string(grouped ? groups : 0), "n_group");
        set("moe.moe_router_group_topk", std::to_string(grouped ? chosen : 0), "topk_group");
    }

    // A coefficient is not read: training by a loss that no key selects is a surprise, and
    // Transformers' loss is another function (docs/numerics.md, balancing losses).
    void balancing() {
        const auto said = [&](const char* key, const char* why, const char* type, double coefficient) {
            note("moe.moe_router_load_balancing_type",
                 fmt::format("{} = {} is not read{}: --set moe.moe_router_load_balancing_type={} --set "
                             "moe.moe_aux_loss_coeff={:.4g}",
                             key, shown(json_[key]), why, type, coefficient));
        };
        const auto above_0 = [&](const char* key) {
            return present(key) && json_[key].is_number() && json_[key].get<double>() > 0;
        };
        if (above_0("aux_loss_alpha")) {
            const bool by_sequence = boolean("seq_aux", true);
            said("aux_loss_alpha", ", the same loss is", by_sequence ? "seq_aux_loss" : "aux_loss",
                 json_["aux_loss_alpha"].get<double>());
        } else if (above_0("router_aux_loss_coef")) {
            const int64_t layers = integer("num_hidden_layers", 0), topk = integer("num_experts_per_tok", 0);
            if (layers > 0)
                said("router_aux_loss_coef",
                     sigmoid_
                         ? " (Transformers' loss is of all layers together and of softmax scores), near it is"
                         : " (Transformers' loss is of all layers together), near it is",
                     "aux_loss",
                     json_["router_aux_loss_coef"].get<double>() * static_cast<double>(topk) /
                         static_cast<double>(layers));
        }
    }

    void softmax_router(bool renormalised) {
        set("moe.moe_router_score_function", "softmax", "model_type");
        set("moe.moe_router_pre_softmax", renormalised ? "false" : "true", "norm_topk_prob");
    }

    void attention(const char* query_key_norm) {
        set("model.attention", "true", "model_type");
        set("model.qk_layernorm", query_key_norm, "model_type");
        copy("num_attention_heads", "model.num_attention_heads");
        copy("num_key_value_heads", "model.num_query_groups");
        if (present("head_dim")) {
            copy("head_dim", "model.kv_channels");
        } else {
            const int64_t heads = integer("num_attention_heads", 0);
            if (heads > 0)
                set("model.kv_channels", std::to_string(integer("hidden_size", 0) / heads),
                    "num_attention_heads");
        }
        rope();
    }
    // A key that is absent has the value that its class gives it.
    void no_window(const Json& absent) {
        const Json window = json_.value("sliding_window", absent);
        if (!window.is_null())
            problem(
                "sliding_window",
                fmt::format("got {}, want null: attention is over the whole sequence here", shown(window)));
    }

    // rope_theta is a key of its own, or since Transformers 5 one of rope_parameters.
    void rope() {
        const char* const group = present("rope_parameters") ? "rope_parameters" : "rope_scaling";
        const Json scaling = present(group) ? json_[group] : Json::object();
        if (!scaling.is_object())
            return problem(group, fmt::format("got {}, want an object", shown(scaling)));
        for (const char* key : {"rope_type", "type"})
            if (scaling.contains(key) && scaling[key] != "default")
                problem(group,
                        fmt::format("got {} {}, want default: no other rotary embedding is implemented", key,
                                    shown(scaling[key])));
        const Json& theta =
            scaling.contains("rope_theta") ? scaling["rope_theta"] : json_.value("rope_theta", Json());
        if (theta.is_number())
            return set("model.rotary_base", fmt::format("{}", theta.get<double>()), "rope_theta");
        problem("rope_theta", fmt::format("got {}, want a number", shown(theta)));
    }

    void quantization() {
        if (!present("quantization_config")) return;
        const Json& q = json_["quantization_config"];
        const bool blocks = q.is_object() && q.value("quant_method", Json()) == "fp8" &&
                            q.value("weight_block_size", Json()) == Json::array({128, 128});
        if (!blocks)
            problem("quantization_config",
                    fmt::format("got {}, want quant_method fp8 with weight_block_size [128, 128], or none",
                                shown(q)));
    }

    static constexpr int64_t kMostLayers = 4096, kWidest = 1 << 20;
    bool sigmoid_ = false;  // scores of the router
};

}  // namespace

void require_known_model_type(const std::string& type, const std::string& file) {
    if (std::find(kKnown.begin(), kKnown.end(), type) != kKnown.end()) return;
    const std::string known = fmt::format("{}", fmt::join(kKnown, ", "));
    for (const Refused& refused : kRefused)
        require(type != refused.type, ExitCode::usage,
                "{}: model_type {} is not supported: {}; supported are {}", file, type, refused.reason,
                known);
    fail(ExitCode::usage, "{}: model_type \"{}\" is not supported; supported are {}", file, printable(type),
         known);
}

ImportedModel parse_hf_config(std::string_view text, const std::string& file) {
    const nlohmann::json json = parse_json(text, file, ExitCode::usage);
    require(json.is_object(), ExitCode::usage, "{}: is no JSON object, want a Hugging Face config.json",
            file);
    require(json.contains("model_type") && json["model_type"].is_string(), ExitCode::usage,
            "{}: has no model_type, want a Hugging Face config.json", file);
    const auto type = json["model_type"].get<std::string>();
    require_known_model_type(type, file);
    return HfReader(json, file).read(type);
}

void require_own_layers(const Config& config) {
    require(
        config.foreign.empty(), ExitCode::usage,
        "{}; it is known by its MoE layers alone: fp8flow plan, profile, validate and replay take them; {}",
        config.foreign,
        config.checkpoint.pretrained_checkpoint.empty()
            ? "train does with --set model.attention=false, without attention"
            : "train cannot begin with its weights, as --weights says; replay can, one layer at a time");
}

ImportedModel read_hf_config(const std::string& path) {
    std::error_code error;
    const fs::path file = fs::is_directory(path, error) ? fs::path(path) / "config.json" : fs::path(path);
    require(fs::is_regular_file(file, error), ExitCode::usage, "--hf-config {}: no such file", file.string());
    const uintmax_t size = fs::file_size(file, error);
    require(!error && size <= kMaxConfigBytes, ExitCode::usage,
            "--hf-config {}: has {} bytes, at most {} are read", file.string(), size, kMaxConfigBytes);
    std::ifstream stream(file, std::ios::binary);
    std::string text(static_cast<size_t>(size), '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    require(stream.good() || size == 0, ExitCode::usage, "--hf-config {}: cannot be read", file.string());
    return parse_hf_config(text, file.string());
}

}  // namespace fp8flow
