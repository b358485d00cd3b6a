// SPDX-License-Identifier: MIT
// config.json of a family as settings. Everything that is read is checked for its type; everything wrong is
// listed at once.
#include "model/config/hf_config.h"

#include "kernels/core/scaled_tensor.h"
#include "model/config/hf_families.h"
#include "model/safetensors/json.h"
#include "model/safetensors/tensor_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace fp8flow {

namespace {

namespace fs = std::filesystem;
constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int64_t kMostLayers = 4096, kWidest = 1 << 20;

class HfReader {
public:
    HfReader(const nlohmann::json& json, const std::string& file, const HfFamily& family)
        : json_(json), file_(file), family_(family) {}

    ImportedModel read() {
        model_.name = fmt::format("{}: model_type {}", file_, family_.type);
        common();
        no_noise();
        quantization();
        attention();
        experts();
        router();
        layers();
        balancing();
        throw_problems(problems_, ExitCode::usage);
        return std::move(model_);
    }

private:
    using Json = nlohmann::json;

    // ---- one key
    bool present(const char* name) const { return json_.contains(name) && !json_[name].is_null(); }
    static std::string shown(const Json& value) {
        return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    void problem(const char* name, const std::string& message) {
        const std::string text = fmt::format("{}: {}: {}", file_, name, message);
        if (std::find(problems_.begin(), problems_.end(), text) == problems_.end()) problems_.push_back(text);
    }
    void set(const char* key, const std::string& value, const char* name) {
        model_.settings.push_back({key, value, fmt::format("{}: {}", file_, name)});
    }
    void set(const char* key, bool value, const char* name) {
        set(key, std::string(value ? "true" : "false"), name);
    }
    void set(const char* key, int64_t value, const char* name) { set(key, std::to_string(value), name); }
    // Said unless the user sets `key`.
    void note(const char* key, const std::string& text) {
        model_.notes.push_back({key, fmt::format("{}: {}", file_, text)});
    }
    void want(const char* name, const std::string& got, const std::string& wanted, const char* reason) {
        if (got != wanted) problem(name, fmt::format("got {}, want {}: {}", printable(got), wanted, reason));
    }
    int64_t integer(const char* name, int64_t otherwise) {
        if (!present(name)) return otherwise;
        const auto value = whole_number(json_[name]);
        if (!value) problem(name, fmt::format("got {}, want an integer", shown(json_[name])));
        return value.value_or(otherwise);
    }
    // Of a key that may be left out; null is none.
    int64_t absent_or_null(const char* name, int64_t absent, int64_t null) {
        return integer(name, json_.contains(name) ? null : absent);
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
    // `absent`: the value where it is left out; 0: it must be there.
    void copy(const char* name, const char* key, int64_t absent = 0) {
        if (absent > 0 && !json_.contains(name)) return set(key, absent, name);
        if (!present(name)) return problem(name, "is missing");
        if (whole_number(json_[name]))
            set(key, *whole_number(json_[name]), name);
        else
            integer(name, 0);
    }
    void number(const char* name, const char* key) {
        if (!present(name)) return problem(name, "is missing");
        if (!json_[name].is_number())
            return problem(name, fmt::format("got {}, want a number", shown(json_[name])));
        set(key, fmt::format("{}", json_[name].get<double>()), name);
    }

    // ---- what all families have
    void common() {
        copy("num_hidden_layers", "model.num_layers");
        copy("hidden_size", "model.hidden_size");
        copy("vocab_size", "model.vocab_size");
        if (present("max_position_embeddings"))
            copy("max_position_embeddings", "model.max_position_embeddings");
        number("rms_norm_eps", "model.norm_epsilon");
        if (present("initializer_range")) number("initializer_range", "model.init_method_std");
        set("model.untie_embeddings_and_output_weights", !boolean("tie_word_embeddings", false),
            "tie_word_embeddings");
        want("hidden_act", text("hidden_act", "silu"), "silu",
             "SwiGLU with another activation is not implemented");
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

    // ---- the parts of a layer
    void attention() {
        set("model.attention", family_.foreign == nullptr, "model_type");
        if (family_.foreign != nullptr) {  // only the layers around attention are known here
            model_.foreign = family_.foreign;
            if (boolean("attention_bias", false)) model_.foreign += " and has biases";
            return;
        }
        set("model.qk_layernorm", family_.query_key_norm, "model_type");
        copy("num_attention_heads", "model.num_attention_heads");
        copy("num_key_value_heads", "model.num_query_groups");
        const int64_t heads = integer("num_attention_heads", 0);
        if (present("head_dim"))
            copy("head_dim", "model.kv_channels");
        else if (heads > 0)
            set("model.kv_channels", integer("hidden_size", 0) / heads, "num_attention_heads");
        rope();
        if (!family_.query_key_norm) return no_window(nullptr);
        // keys that Mixtral's class does not have
        if (boolean("use_sliding_window", false)) no_window(4096);
        want("attention_bias", boolean("attention_bias", false) ? "true" : "false", "false",
             "linear layers have no bias here");
    }

    // `absent`: the value that the class gives the key where it is left out.
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

    void experts() {
        copy(present("num_local_experts") ? "num_local_experts" : family_.experts, "moe.num_experts",
             family_.num_experts);
        copy("num_experts_per_tok", "moe.moe_router_topk", family_.topk);
        copy(family_.expert_width, "moe.moe_ffn_hidden_size");
        want("shared_intermediate_size", std::to_string(integer("shared_intermediate_size", 0)), "0",
             "a shared expert of this kind is not implemented");
        if (family_.shared == HfFamily::kNone) return;
        const int64_t shared = absent_or_null("n_shared_experts", family_.shared, 0),
                      width = integer(family_.expert_width, 0);
        if (shared < 0 || shared > 64)
            problem("n_shared_experts", fmt::format("got {}, want 0 to 64", shared));
        else if (width >= 0 && width <= kWidest)
            set("moe.moe_shared_expert_intermediate_size", shared * width, "n_shared_experts");
    }

    void router() {
        const bool sigmoid = family_.scores == ScoreFunction::sigmoid;
        const char* const scores = sigmoid ? "sigmoid" : "softmax";
        want("scoring_func", text("scoring_func", scores), scores,
             "this family routes by the scores of another function");
        if (family_.choice != nullptr)
            want("topk_method", text("topk_method", family_.choice), family_.choice, family_.choice_reason);
        const bool normalised =
            family_.reads_norm ? boolean("norm_topk_prob", family_.normalised) : family_.normalised;
        if (family_.norm_reason != nullptr)
            want("norm_topk_prob", normalised ? "true" : "false", "false", family_.norm_reason);
        set("moe.moe_router_score_function", std::string(scores), "model_type");
        set("moe.moe_router_pre_softmax", !sigmoid && !normalised, "norm_topk_prob");
        if (sigmoid) {
            set("moe.moe_router_norm_topk_prob", normalised, "norm_topk_prob");
            set("moe.moe_router_enable_expert_bias", family_.bias == nullptr || boolean(family_.bias, true),
                family_.bias == nullptr ? "topk_method" : family_.bias);
        }
        constexpr const char* kScaling = "routed_scaling_factor";
        if (family_.scaling != HfFamily::kNone && json_.contains(kScaling))
            number(kScaling, "moe.moe_router_topk_scaling_factor");
        else if (family_.scaling != HfFamily::kNone)
            set("moe.moe_router_topk_scaling_factor", fmt::format("{}", family_.scaling), kScaling);
        if (family_.groups != HfFamily::kNone) groups();
    }

    // A group is scored by the sum of its two best experts there, of its K / topk_group best here.
    void groups() {
        const int64_t groups = absent_or_null("n_group", family_.groups, 1),
                      chosen = absent_or_null("topk_group", family_.chosen_groups, 1),
                      topk = absent_or_null("num_experts_per_tok", family_.topk, 0);
        const bool grouped = groups > 1;
        if (grouped && chosen * 2 != topk)
            problem("topk_group",
                    fmt::format("got {} with num_experts_per_tok = {}, want half of it: a group is scored by "
                                "its num_experts_per_tok / topk_group best experts here, by 2 there",
                                chosen, topk));
        set("moe.moe_router_num_groups", std::to_string(grouped ? groups : 0), "n_group");
        set("moe.moe_router_group_topk", std::to_string(grouped ? chosen : 0), "topk_group");
    }

    void layers() {
        if (family_.dense != HfFamily::kNone) dense_layers();
        if (family_.sparse_step) sparse_layers();
    }

    // The first layers are dense, their width is rounded up where it is no multiple of a block.
    void dense_layers() {
        const int64_t dense = absent_or_null("first_k_dense_replace", family_.dense, 0),
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
        set("model.ffn_hidden_size", wider, "intermediate_size");
        if (dense > 0)
            note("model.ffn_hidden_size",
                 fmt::format("intermediate_size {} of dense layers is taken as {}, the next multiple of {}",
                             width, wider, kBlock));
    }

    void sparse_layers() {
        copy("intermediate_size", "model.ffn_hidden_size");
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

    // As in Transformers, which adds its loss where output_router_logits is true; DeepSeek's own code always
    // adds that of aux_loss_alpha. Transformers' loss is another function (docs/numerics.md, balancing
    // losses).
    void balancing() {
        const auto coefficient = [&](const char* key) {
            return present(key) && json_[key].is_number() ? json_[key].get<double>() : 0.0;
        };
        constexpr const char *kType = "moe.moe_router_load_balancing_type", *kAlpha = "aux_loss_alpha",
                             *kCoefficient = "router_aux_loss_coef";
        std::string type = "none", coeff;
        if (coefficient(kAlpha) > 0) {
            type = boolean("seq_aux", true) ? "seq_aux_loss" : "aux_loss";
            coeff = fmt::format("{:.4g}", coefficient(kAlpha));
            note(kType, fmt::format("{} = {} is followed: {} with coefficient {}", kAlpha,
                                    shown(json_[kAlpha]), type, coeff));
        } else if (const int64_t layers = integer("num_hidden_layers", 0);
                   coefficient(kCoefficient) > 0 && layers > 0) {
            const auto topk = static_cast<double>(integer("num_experts_per_tok", 0));
            coeff = fmt::format("{:.4g}", coefficient(kCoefficient) * topk / static_cast<double>(layers));
            const bool adds = boolean("output_router_logits", false);
            if (adds) type = "aux_loss";
            const std::string near =
                fmt::format("near it (Transformers' loss is of all layers together{})",
                            family_.scores == ScoreFunction::sigmoid ? " and of softmax scores" : "");
            note(kType, fmt::format(
                            "{} = {} {}", kCoefficient, shown(json_[kCoefficient]),
                            adds ? fmt::format("is followed by aux_loss with coefficient {}, {}", coeff, near)
                                 : fmt::format("has no effect without output_router_logits, so there "
                                               "is no balancing loss; {}: --set {}=aux_loss --set "
                                               "moe.moe_aux_loss_coeff={}",
                                               near, kType, coeff)));
        }
        set(kType, type, kCoefficient);
        set("moe.moe_aux_loss_coeff", type == "none" ? "[]" : "[" + coeff + "]", kCoefficient);
    }

    const Json& json_;
    const std::string& file_;
    const HfFamily& family_;
    ImportedModel model_;
    std::vector<std::string> problems_;
};

const HfFamily& known_family(const std::string& type, const std::string& file) {
    std::vector<std::string> known;
    for (const HfFamily& family : kHfFamilies)
        if (family.refused == nullptr) known.emplace_back(family.type);
    const auto* found = std::find_if(std::begin(kHfFamilies), std::end(kHfFamilies),
                                     [&](const HfFamily& family) { return type == family.type; });
    require(found != std::end(kHfFamilies), ExitCode::usage,
            "{}: model_type \"{}\" is not supported; supported are {}", file, printable(type),
            fmt::join(known, ", "));
    require(found->refused == nullptr, ExitCode::usage,
            "{}: model_type {} is not supported: {}; supported are {}", file, type, found->refused,
            fmt::join(known, ", "));
    return *found;
}

}  // namespace

ImportedModel parse_hf_config(std::string_view text, const std::string& file) {
    const nlohmann::json json = parse_json(text, file, ExitCode::usage);
    require(json.is_object(), ExitCode::usage, "{}: is no JSON object, want a Hugging Face config.json",
            file);
    require(json.contains("model_type") && json["model_type"].is_string(), ExitCode::usage,
            "{}: has no model_type, want a Hugging Face config.json", file);
    const auto type = json["model_type"].get<std::string>();
    return HfReader(json, file, known_family(type, file)).read();
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
    const std::string text = read_text_file(file.string(), ExitCode::usage, "--hf-config", kMaxConfigBytes);
    return parse_hf_config(text, file.string());
}

}  // namespace fp8flow
