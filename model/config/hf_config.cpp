// SPDX-License-Identifier: MIT
// Fields of config.json by family. Everything that is read is checked for its type; everything wrong is
// listed at once.
#include "model/config/hf_config.h"

#include "model/safetensors/json.h"
#include "model/safetensors/tensor_set.h"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

namespace fp8flow {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr uintmax_t kMaxConfigBytes = 1 << 20;

struct Refused {
    std::string_view type, reason;
};
// Known models that are refused, and what their layers have that ours do not.
constexpr std::array<Refused, 19> kRefused = {{
    {"deepseek_v2",
     "its router scores groups by their best expert alone, without a bias (supported: deepseek_v3)"},
    {"gpt_oss",
     "its experts have biases and a clamped activation, its attention has sinks, its weights are MXFP4"},
    {"qwen2_moe", "its shared expert is weighted by a gate of its own, and its attention has biases"},
    {"qwen3_next",
     "its shared expert is weighted by a gate of its own, and most of its layers are linear attention"},
    {"qwen3_5_moe",
     "its shared expert is weighted by a gate of its own, and most of its layers are linear attention"},
    {"llama4", "its experts weight their input, not their output"},
    {"llama4_text", "its experts weight their input, not their output"},
    {"olmoe", "its attention normalises queries and keys over all heads together"},
    {"dbrx", "it uses LayerNorm and clips queries, keys and values"},
    {"phimoe", "it uses LayerNorm with biases and its router samples"},
    {"granitemoe", "it multiplies embeddings, residuals and logits by constants"},
    {"glm4_moe", "it rotates only a part of each head"},
    {"jamba", "most of its layers are state-space models"},
    {"minimax", "most of its layers are linear attention"},
    {"llama", "it has no experts"},
    {"mistral", "it has no experts"},
    {"qwen2", "it has no experts"},
    {"qwen3", "it has no experts"},
    {"gemma3", "it has no experts"},
}};
constexpr const char* kKnown = "deepseek_v3, qwen3_moe, mixtral";

class HfReader {
public:
    HfReader(const Json& json, const std::string& file) : json_(json), file_(file) {}

    std::vector<ConfigSetting> read(const std::string& type) {
        common();
        if (type == "mixtral") {
            mixtral();
        } else if (type == "qwen3_moe") {
            qwen3();
        } else {
            deepseek();
        }
        throw_problems(problems_, ExitCode::usage);
        return std::move(settings_);
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

    // A key that is absent has the value that Transformers' DeepseekV3Config gives it; null is none.
    int64_t deepseek_integer(const char* name, int64_t absent, int64_t null) {
        return integer(name, json_.contains(name) ? null : absent);
    }

    void deepseek() {
        copy_or("n_routed_experts", "moe.num_experts", 256);
        copy_or("num_experts_per_tok", "moe.moe_router_topk", 8);
        copy("moe_intermediate_size", "moe.moe_ffn_hidden_size");
        copy("intermediate_size", "model.ffn_hidden_size");
        set("model.attention", "false", "model_type");
        const int64_t shared = deepseek_integer("n_shared_experts", 1, 0),
                      width = integer("moe_intermediate_size", 0);
        if (shared < 0 || shared > 64)
            problem("n_shared_experts", fmt::format("got {}, want 0 to 64", shared));
        else if (width >= 0 && width <= kWidest)
            set("moe.moe_shared_expert_intermediate_size", std::to_string(shared * width),
                "n_shared_experts");
        want("scoring_func", text("scoring_func", "sigmoid"), "sigmoid",
             "deepseek_v3 routes by sigmoid scores");
        want("topk_method", text("topk_method", "noaux_tc"), "noaux_tc",
             "deepseek_v3 chooses with a bias and groups");
        want("norm_topk_prob", boolean("norm_topk_prob", true) ? "true" : "false", "true",
             "sigmoid scores are always normalised here");
        set("moe.moe_router_score_function", "sigmoid", "scoring_func");
        set("moe.moe_router_pre_softmax", "false", "scoring_func");
        set("moe.moe_router_enable_expert_bias", "true", "topk_method");
        if (json_.contains("routed_scaling_factor"))
            number("routed_scaling_factor", "moe.moe_router_topk_scaling_factor");
        else
            set("moe.moe_router_topk_scaling_factor", "2.5", "routed_scaling_factor");
        groups();
        const int64_t dense = deepseek_integer("first_k_dense_replace", 3, 0),
                      layers = integer("num_hidden_layers", 0);
        want("moe_layer_freq", std::to_string(integer("moe_layer_freq", 1)), "1",
             "every layer after the dense ones is MoE");
        if (dense < 0 || dense > layers)
            problem("first_k_dense_replace",
                    fmt::format("got {}, want 0 to num_hidden_layers = {}", dense, layers));
        else
            set("model.moe_layer_freq",
                dense == 0 ? "1" : fmt::format("\"([0]*{}+[1]*{})\"", dense, layers - dense),
                "first_k_dense_replace");
    }

    // A group is scored by the sum of its two best experts there, of its K / topk_group best here.
    void groups() {
        const int64_t groups = deepseek_integer("n_group", 8, 1),
                      chosen = deepseek_integer("topk_group", 4, 1),
                      topk = deepseek_integer("num_experts_per_tok", 8, 0);
        const bool grouped = groups > 1;
        if (grouped && chosen * 2 != topk)
            problem("topk_group",
                    fmt::format("got {} with num_experts_per_tok = {}, want half of it: a group is scored by "
                                "its num_experts_per_tok / topk_group best experts here, by 2 there",
                                chosen, topk));
        set("moe.moe_router_num_groups", std::to_string(grouped ? groups : 0), "n_group");
        set("moe.moe_router_group_topk", std::to_string(grouped ? chosen : 0), "topk_group");
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
        want("attention_bias", boolean("attention_bias", false) ? "true" : "false", "false",
             "linear layers have no bias here");
        const bool window = present("sliding_window") && boolean("use_sliding_window", true);
        if (window)
            problem("sliding_window",
                    fmt::format("got {}, want null: attention is over the whole sequence here",
                                shown(json_["sliding_window"])));
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

    // ---- fields
    bool present(const char* name) const { return json_.contains(name) && !json_[name].is_null(); }
    static std::string shown(const Json& value) {
        return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    void problem(const char* name, const std::string& message) {
        problems_.push_back(fmt::format("{}: {}: {}", file_, name, message));
    }
    void set(const char* key, const std::string& value, const char* name) {
        settings_.push_back({key, value, fmt::format("{}: {}", file_, name)});
    }
    void want(const char* name, const std::string& got, const std::string& wanted, const char* reason) {
        if (got != wanted) problem(name, fmt::format("got {}, want {}: {}", printable(got), wanted, reason));
    }
    int64_t integer(const char* name, int64_t otherwise) {
        if (!present(name)) return otherwise;
        const Json& value = json_[name];
        if (value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX))
            return value.get<int64_t>();
        problem(name, fmt::format("got {}, want an integer", shown(value)));
        return otherwise;
    }
    bool boolean(const char* name, bool otherwise) {
        if (!present(name)) return otherwise;
        if (json_[name].is_boolean()) return json_[name].get<bool>();
        problem(name, fmt::format("got {}, want true or false", shown(json_[name])));
        return otherwise;
    }
    std::string text(const char* name, const char* otherwise) const {
        if (!present(name)) return otherwise;
        return json_[name].is_string() ? json_[name].get<std::string>() : shown(json_[name]);
    }
    void copy(const char* name, const char* key) {
        if (!present(name)) return problem(name, "is missing");
        const size_t before = problems_.size();
        const int64_t value = integer(name, 0);
        if (problems_.size() == before) set(key, std::to_string(value), name);
    }
    void copy_or(const char* name, const char* key, int64_t absent) {
        if (json_.contains(name)) return copy(name, key);
        set(key, std::to_string(absent), name);
    }
    void number(const char* name, const char* key) {
        if (!present(name)) return problem(name, "is missing");
        if (!json_[name].is_number())
            return problem(name, fmt::format("got {}, want a number", shown(json_[name])));
        set(key, fmt::format("{}", json_[name].get<double>()), name);
    }

    static constexpr int64_t kMostLayers = 4096, kWidest = 1 << 20;
    const Json& json_;
    const std::string& file_;
    std::vector<ConfigSetting> settings_;
    std::vector<std::string> problems_;
};

}  // namespace

void require_known_model_type(const std::string& type, const std::string& file) {
    if (type == "deepseek_v3" || type == "qwen3_moe" || type == "mixtral") return;
    for (const Refused& refused : kRefused)
        require(type != refused.type, ExitCode::usage,
                "{}: model_type {} is not supported: {}; supported are {}", file, type, refused.reason,
                kKnown);
    fail(ExitCode::usage, "{}: model_type \"{}\" is not supported; supported are {}", file, printable(type),
         kKnown);
}

std::vector<ConfigSetting> parse_hf_config(std::string_view text, const std::string& file) {
    const Json json = parse_json(text, file, ExitCode::usage);
    require(json.is_object(), ExitCode::usage, "{}: is no JSON object, want a Hugging Face config.json",
            file);
    require(json.contains("model_type") && json["model_type"].is_string(), ExitCode::usage,
            "{}: has no model_type, want a Hugging Face config.json", file);
    const auto type = json["model_type"].get<std::string>();
    require_known_model_type(type, file);
    return HfReader(json, file).read(type);
}

std::vector<ConfigSetting> read_hf_config(const std::string& path) {
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
