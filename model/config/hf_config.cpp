// SPDX-License-Identifier: MIT
// config.json of a family as settings. Everything that is read is checked for its type; everything wrong is
// listed at once. Long because each part of a layer reads its keys together with their checks.
#include "model/config/hf_config.h"

#include "kernels/core/scaled_tensor.h"
#include "model/config/fields.h"
#include "model/config/hf_families.h"
#include "model/safetensors/json.h"
#include "model/safetensors/tensor_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace fp8flow {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int64_t kMostLayers = 4096, kWidest = 1 << 20;

class HfReader {
public:
    HfReader(const nlohmann::json& json, const std::string& file, const HfFamily& family)
        : json_(json), file_(file), family_(family) {}

    ImportedModel read() {
        model_.name = fmt::format("{}: model_type {}", file_, family_.type);
        model_.family = family_.type;
        set("model.hf_family", family_.type, "model_type");
        aliases();
        common();
        activation();
        only();
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
    // ---- one key: under its own name, another one that the class reads, or as a.b inside of an object; a
    // list with one value for all layers is that value
    const Json& find(std::string_view name) const {
        const Json* value = at(name);
        for (const auto& [key, alias] : family_.aliases)
            if (value == nullptr && key != nullptr && key == name) value = at(alias);
        static const Json kAbsent = Json::value_t::discarded;
        if (value == nullptr) return kAbsent;
        const bool same =
            value->is_array() && !value->empty() && value->front().is_number() &&
            std::all_of(value->begin(), value->end(), [&](const Json& v) { return v == value->front(); });
        return same ? value->front() : *value;
    }
    const Json* at(std::string_view path) const {
        const Json* value = &json_;
        while (!path.empty()) {
            const std::string key(path.substr(0, path.find('.')));
            if (!value->is_object() || !value->contains(key)) return nullptr;
            value = &(*value)[key];
            path.remove_prefix(std::min(path.size(), key.size() + 1));
        }
        return value;
    }
    bool contains(std::string_view name) const { return !find(name).is_discarded(); }
    bool present(std::string_view name) const { return contains(name) && !find(name).is_null(); }
    static std::string shown(const Json& value) {
        return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    template <class... Args>
    void problem(const char* name, fmt::format_string<Args...> message, Args&&... args) {
        const std::string text =
            fmt::format("{}: {}: {}", file_, name, fmt::format(message, std::forward<Args>(args)...));
        if (std::ranges::count(problems_, text) == 0) problems_.push_back(text);
    }
    template <class Value> void set(const char* key, const Value& value, const char* name) {
        model_.settings.push_back({key, fmt::format("{}", value), fmt::format("{}: {}", file_, name)});
    }
    // Said unless the user sets `key`.
    template <class... Args> void note(const char* key, fmt::format_string<Args...> text, Args&&... args) {
        model_.notes.push_back(
            {key, fmt::format("{}: {}", file_, fmt::format(text, std::forward<Args>(args)...))});
    }
    template <class Got, class Wanted>
    void want(const char* name, const Got& got, const Wanted& wanted, const char* reason) {
        const std::string is = fmt::format("{}", got);
        if (is != fmt::format("{}", wanted))
            problem(name, "got {}, want {}: {}", printable(is), wanted, reason);
    }
    std::optional<int64_t> whole(const char* name) {
        const auto value = whole_number(find(name));
        if (!value) problem(name, "got {}, want an integer", shown(find(name)));
        return value;
    }
    int64_t integer(const char* name, int64_t otherwise) {
        return present(name) ? whole(name).value_or(otherwise) : otherwise;
    }
    // Of a key that may be left out; null is none.
    int64_t absent_or_null(const char* name, int64_t absent, int64_t null) {
        return integer(name, contains(name) ? null : absent);
    }
    // null is false, as in Python.
    bool boolean(const char* name, bool absent) {
        if (!present(name)) return absent && !contains(name);
        if (find(name).is_boolean()) return find(name).get<bool>();
        problem(name, "got {}, want true or false", shown(find(name)));
        return absent;
    }
    std::string text(const char* name, const char* otherwise) const {
        if (!present(name)) return otherwise;
        return find(name).is_string() ? find(name).get<std::string>() : shown(find(name));
    }
    // `absent`: the value where it is left out; 0: it must be there.
    void copy(const char* name, const char* key, int64_t absent = 0) {
        if (absent > 0 && !contains(name)) return set(key, absent, name);
        if (!present(name)) return problem(name, "is missing");
        if (const auto value = whole(name)) set(key, *value, name);
    }
    std::optional<double> number_in(const Json& value, const char* name) {
        if (value.is_number()) return value.get<double>();
        problem(name, "got {}, want a number", shown(value));
        return std::nullopt;
    }
    double real(const char* name, double otherwise) {
        return present(name) ? number_in(find(name), name).value_or(otherwise) : otherwise;
    }
    void number(const char* name, const char* key) {
        if (!present(name)) return problem(name, "is missing");
        if (const auto value = number_in(find(name), name)) set(key, *value, name);
    }

    // The class takes the one that comes last.
    void aliases() {
        for (const auto& [key, alias] : family_.aliases)
            if (key != nullptr && present(key) && present(alias) && find(key) != find(alias))
                problem(key, "got {}, and {} = {}: want one of them", shown(find(key)), alias,
                        shown(find(alias)));
    }

    // ---- what all families have
    void common() {
        copy("num_hidden_layers", "model.num_layers");
        copy("hidden_size", "model.hidden_size");
        copy("vocab_size", "model.vocab_size");
        if (present("max_position_embeddings"))
            copy("max_position_embeddings", "model.max_position_embeddings");
        if (family_.epsilon != nullptr) number(family_.epsilon, "model.norm_epsilon");
        if (present("initializer_range")) number("initializer_range", "model.init_method_std");
        set("model.untie_embeddings_and_output_weights", !boolean("tie_word_embeddings", family_.tied),
            "tie_word_embeddings");
    }

    void activation() {
        const std::string named = text("hidden_act", "silu");
        const GluSpec glu = family_.glu.value_or(GluSpec{});
        if (!glu.quick_geglu || named != "swigluoai")
            want("hidden_act", named, "silu", "SwiGLU with another activation is not implemented");
        if (!family_.glu) return;
        set("model.quick_geglu", glu.quick_geglu, "model_type");
        set("model.glu_linear_offset", glu.glu_linear_offset, "model_type");
        const double limit = real("swiglu_limit", glu.activation_func_clamp_value);
        if (!(limit > 0)) problem("swiglu_limit", "got {}, want more than 0", limit);
        set("model.activation_func_clamp_value", limit, "swiglu_limit");
        set("model.activation_func_clamp_routed_only", glu.activation_func_clamp_routed_only, "model_type");
    }

    void only() {
        for (const HfOnly& one : family_.only) {
            if (one.key == nullptr || !contains(one.key)) continue;
            const Json may = Json::parse(one.value), &is = find(one.key);
            if (may.is_array() ? std::ranges::find(may, is) == may.end() : is != may)
                want(one.key, shown(is), one.value, one.reason);
        }
    }

    // Every key of dropout or of noise in the router, whatever its family calls it.
    void no_noise() {
        Json all = json_;
        if (const Json* inner = at("ffn_config"); inner != nullptr && inner->is_object()) all.update(*inner);
        for (const auto& [name, value] : all.items()) {
            const auto has = [&name = name](const char* part) {
                return name.find(part) != std::string::npos;
            };
            if (!has("jitter") && !has("dropout") && !has("pdrop")) continue;
            const bool off = value.is_null() || value == false || (value.is_number() && value == 0);
            if (!off)
                problem(printable(name).c_str(),
                        "got {}, want 0: neither dropout nor router noise is implemented", shown(value));
        }
    }

    void quantization() {
        if (!present("quantization_config")) return;
        const Json& q = json_["quantization_config"];
        const bool blocks = q.is_object() && q.value("quant_method", Json()) == "fp8" &&
                            q.value("weight_block_size", Json()) == Json::array({128, 128});
        if (!blocks)
            problem("quantization_config",
                    "got {}, want quant_method fp8 with weight_block_size [128, 128], or none", shown(q));
    }

    // ---- the parts of a layer
    void attention() {
        set("model.attention", family_.foreign == nullptr, "model_type");
        if (family_.foreign != nullptr) {  // only the layers around attention are known here
            model_.foreign = family_.foreign;
            return;
        }
        set("model.multi_latent_attention", family_.latent.has_value(), "model_type");
        copy("num_attention_heads", "model.num_attention_heads");
        family_.latent ? latents(*family_.latent) : heads();
        rope();
        windows();
        if (family_.qkv_bias)
            set("model.add_qkv_bias", boolean(family_.bias_of_qkv, *family_.qkv_bias), family_.bias_of_qkv);
        else if (family_.reads_attention_bias)
            want("attention_bias", boolean("attention_bias", false), false,
                 "linear layers have no bias here");
        if (family_.granite) granite();
    }

    void heads() {
        const bool norm = family_.query_key_norm;
        set("model.qk_layernorm", family_.reads_qk_norm ? boolean("use_qk_norm", norm) : norm, "model_type");
        if (family_.all_heads_norm) set("model.qk_layernorm_type", "per_layer", "model_type");
        copy("num_key_value_heads", "model.num_query_groups");
        set("model.kv_channels", head_dim(), present("head_dim") ? "head_dim" : "num_attention_heads");
    }
    int64_t head_dim() {
        const int64_t heads = std::max<int64_t>(1, integer("num_attention_heads", 1)),
                      absent = family_.head_dim > 0 ? family_.head_dim : integer("hidden_size", 0) / heads;
        return integer("head_dim", absent);
    }

    void latents(const HfLatent& absent) {
        set("model.q_lora_rank", absent_or_null("q_lora_rank", absent.q, 0), "q_lora_rank");
        copy("kv_lora_rank", "model.kv_lora_rank", absent.kv);
        copy("qk_nope_head_dim", "model.qk_head_dim", absent.nope);
        copy("qk_rope_head_dim", "model.qk_pos_emb_head_dim", absent.rope);
        copy("v_head_dim", "model.v_head_dim", absent.v);
        if (family_.index_topk > 0) {
            set("model.max_position_embeddings",
                std::min(integer("max_position_embeddings", family_.index_topk), family_.index_topk),
                "index_topk");
            note("model.multi_latent_attention",
                 "index_topk: attention is over all keys, which is the same up to {} tokens; the indexer is "
                 "not imported, and an export is deepseek_v3 without it",
                 family_.index_topk);
        }
        want("rope_interleave", boolean("rope_interleave", true), true,
             "pairs that rotate are neighbours in files of this family");
    }

    void windows() {
        if (present("layer_types")) {
            if (!json_["layer_types"].is_array()) return problem("layer_types", "want a list");
            for (const Json& type : find("layer_types"))
                if (type != "full_attention" && (type != "indexed_attention" || family_.index_topk == 0))
                    return problem("layer_types",
                                   "got {}, want full_attention: attention is over the whole sequence here",
                                   shown(type));
            return;
        }
        if (!family_.query_key_norm && !family_.sparse_step) return no_window(nullptr);
        // a key that Mixtral's class does not have
        if (boolean("use_sliding_window", false)) no_window(4096);
    }

    // `absent`: the value that the class gives the key where it is left out.
    void no_window(const Json& absent) {
        const Json window = json_.value("sliding_window", absent);
        if (!window.is_null())
            problem("sliding_window", "got {}, want null: attention is over the whole sequence here",
                    shown(window));
    }

    // Multipliers of embeddings, residuals, scores and logits become factors of weights.
    void granite() {
        const double embedding = real("embedding_multiplier", 1.0), logits = real("logits_scaling", 1.0),
                     depth = f64(head_dim());
        const bool tied = boolean("tie_word_embeddings", family_.tied);
        model_.folds.embedding = embedding;
        model_.folds.final_norm = 1 / (tied ? embedding * logits : logits);
        model_.folds.query = real("attention_multiplier", 1.0) * std::sqrt(depth);
        model_.folds.residual = real("residual_multiplier", 1.0);
        for (const double factor : {embedding, logits})
            if (!(factor > 0)) problem("logits_scaling", "want multipliers above 0");
    }

    // rope_theta is a key of its own, or since Transformers 5 one of rope_parameters, which rope_scaling
    // replaces.
    void rope() {
        const char* const group = present("rope_scaling") ? "rope_scaling" : "rope_parameters";
        const Json scaling = present(group) ? find(group) : Json::object();
        if (!scaling.is_object()) return problem(group, "got {}, want an object", shown(scaling));
        const auto inner = [&](const char* name) {
            const Json value = scaling.value(name, Json());
            return value.is_null() ? json_.value(name, Json()) : value;
        };
        const Json theta = inner("rope_theta"), partial = inner("partial_rotary_factor");
        if (const auto base = number_in(theta, "rope_theta")) set("model.rotary_base", *base, "rope_theta");
        const auto head = f64(std::max<int64_t>(1, head_dim()));
        const auto written = partial.is_null() ? std::nullopt : number_in(partial, "partial_rotary_factor");
        const double share = written ? *written
                             : family_.reads_rotary_dim
                                 ? real("rotary_dim", head * *family_.rotary_percent) / head
                                 : family_.rotary_percent.value_or(1);
        if (!family_.rotary_percent)
            want("partial_rotary_factor", shown(share), "1.0",
                 family_.latent ? "qk_rope_head_dim says how much of a head rotates"
                                : "whole heads rotate in this family");
        else
            set("model.rotary_percent", share, "partial_rotary_factor");
        const Json type =
            scaling.contains("rope_type") ? scaling["rope_type"] : scaling.value("type", Json("default"));
        if (type != "default") scaled_rope(group, scaling, type);
    }

    void scaled_rope(const char* group, const Json& scaling, const Json& type) {
        const auto inside = [&](const char* name) { return fmt::format("{}.{}", group, name); };
        const auto given = [&](const char* name) {
            const std::string path = inside(name);
            return present(path) ? std::optional(real(path.c_str(), 0)) : std::nullopt;
        };
        const int64_t longest = integer("max_position_embeddings", 0);
        if (type != "yarn" && type != "deepseek_yarn" && family_.latent && given("mscale_all_dim"))
            problem(group, "has mscale_all_dim, want rope_type yarn with it");
        if (type == "dynamic") {
            if (scaling.contains("alpha"))
                problem(group, "has alpha, want none: this family does not scale by it");
            if (longest <= 0)
                problem("max_position_embeddings", "is missing, want it with rope_type dynamic");
            model_.unscaled_length = longest;
            return note("model.rope_type",
                        "{}: rope_type dynamic scales sequences longer than {} alone, which this program "
                        "does not, nor do its exports",
                        group, longest);
        }
        const std::string name = type == "deepseek_yarn" ? "yarn"
                                 : type.is_string()      ? type.get<std::string>()
                                                         : "";
        if (name != "linear" && name != "yarn" && name != "llama3")
            return problem(group,
                           "got rope_type {}, want default, linear, dynamic, yarn or llama3: "
                           "no other rotary embedding is implemented",
                           shown(type));
        const auto take = [&](const char* name, const char* key) {
            if (const auto value = given(name)) set(key, *value, group);
        };
        if (!given("factor")) return problem(group, "has no number factor");
        set("model.rope_type", name, group);
        take("factor", "model.rotary_scaling_factor");
        if (name == "linear") return;
        // at the top level it comes first
        constexpr const char* kOriginal = "original_max_position_embeddings";
        set("model.original_max_position_embeddings",
            integer(kOriginal, integer(inside(kOriginal).c_str(), longest)), group);
        for (const char* key : {"beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"})
            take(key, (std::string("model.") + key).c_str());
        if (scaling.value("truncate", Json(true)) != true)
            problem(group, "got truncate false, want true: bounds of the ramp are whole numbers here");
        if (name == "yarn")
            mscale(group, std::log(*given("factor")), given("attention_factor"), given("mscale").value_or(0),
                   given("mscale_all_dim").value_or(0));
    }

    // cos and sin are multiplied by attention_factor, or m(mscale) / m(mscale_all_dim) if both are given, or
    // m(1); scores of multi-latent attention by m(mscale_all_dim)^2 in any case. Here the two numbers say
    // all.
    void mscale(const char* group, double log, std::optional<double> factor, double mscale, double all) {
        if (factor && (*factor <= 0 || (log <= 0 && *factor != 1)))
            problem(group, "got attention_factor {}, want {}", *factor,
                    log <= 0 ? "1 where factor is 1" : "more than 0");
        if (log <= 0 || factor || mscale == 0 || all == 0) {
            if (!family_.latent) all = 0;
            if (log <= 0 || (!factor && all == 0)) return;
            mscale = (factor.value_or(1 + 0.1 * log) * (1 + 0.1 * all * log) - 1) / (0.1 * log);
        }
        set("model.mscale", mscale, group);
        if (all != 0) set("model.mscale_all_dim", all, group);
    }

    void experts() {
        copy(family_.experts, "moe.num_experts", family_.num_experts);
        copy(family_.topk_key, "moe.moe_router_topk", family_.topk);
        copy(family_.expert_width, "moe.moe_ffn_hidden_size");
        const char* const width_key =
            family_.shared_width != nullptr ? family_.shared_width : family_.expert_width;
        if (family_.shared_width == nullptr)
            want("shared_intermediate_size", integer("shared_intermediate_size", 0), 0,
                 "a shared expert of this kind is not implemented");
        if (family_.shared == HfFamily::kNone) return;
        const char* const count = family_.shared_key;
        const int64_t shared = count == nullptr ? family_.shared : absent_or_null(count, family_.shared, 0),
                      width = integer(width_key, family_.shared_width_default);
        if (shared < 0 || shared > 64)
            problem(count, "got {}, want 0 to 64", shared);
        else if (width >= 0 && width <= kWidest)
            set("moe.moe_shared_expert_intermediate_size", shared * width,
                count != nullptr ? count : width_key);
        if (family_.shared_gate) set("moe.moe_shared_expert_gate", shared * width > 0, "model_type");
        if (family_.shared_strategy == nullptr) return;
        const std::string sum = text("shared_expert_combination_strategy", family_.shared_strategy);
        if (sum == "average" && shared > 0)
            model_.folds.mlp_output = 0.5;
        else if (sum != "average")
            want("shared_expert_combination_strategy", sum, "sum", "shared experts are added here");
    }

    void router() {
        const std::string named =
            text(family_.scores_key, family_.scores == ScoreFunction::sigmoid ? "sigmoid" : "softmax");
        const bool sigmoid =
            family_.any_scores ? named == "sigmoid" : family_.scores == ScoreFunction::sigmoid;
        const char* const scores = sigmoid ? "sigmoid" : "softmax";
        want(family_.scores_key, named, scores, "this family routes by the scores of another function");
        if (family_.choice != nullptr)
            want("topk_method", text("topk_method", family_.choice), family_.choice, family_.choice_reason);
        const bool normalised =
            family_.reads_norm ? boolean("norm_topk_prob", family_.normalised) : family_.normalised;
        if (family_.norm_reason != nullptr) want("norm_topk_prob", normalised, false, family_.norm_reason);
        set("moe.moe_router_score_function", scores, "model_type");
        if (family_.fp32_router) set("moe.moe_router_dtype", "fp32", "model_type");
        // Cohere's softmax is always over the chosen ones
        set("moe.moe_router_pre_softmax", !sigmoid && !normalised && !family_.any_scores, "norm_topk_prob");
        if (sigmoid && normalised && integer(family_.topk_key, family_.topk) == 1)
            problem("norm_topk_prob",
                    "got true with num_experts_per_tok = 1, want false: the weight of the one "
                    "expert is 1 there, its score here");
        if (sigmoid) {
            set("moe.moe_router_norm_topk_prob", normalised, "norm_topk_prob");
            set("moe.moe_router_enable_expert_bias",
                family_.has_bias && (family_.bias == nullptr || boolean(family_.bias, true)),
                family_.bias == nullptr ? "topk_method" : family_.bias);
        }
        const char* const scaling = family_.scaling_key;
        if (family_.scaling != HfFamily::kNone && contains(scaling))
            number(scaling, "moe.moe_router_topk_scaling_factor");
        else if (family_.scaling != HfFamily::kNone)
            set("moe.moe_router_topk_scaling_factor", family_.scaling, scaling);
        if (family_.groups != HfFamily::kNone) groups(sigmoid);
    }

    // A group is scored by the sum of its two best experts there, of its K / topk_group best here.
    void groups(bool sigmoid) {
        const int64_t groups = absent_or_null("n_group", family_.groups, 1),
                      chosen = absent_or_null("topk_group", family_.chosen_groups, 1),
                      topk = absent_or_null(family_.topk_key, family_.topk, 0);
        const bool grouped = groups > 1;
        if (groups < 1) problem("n_group", "got {}, want at least 1", groups);
        if (grouped && !sigmoid)
            problem("n_group", "got {}, want 1: groups are scored by their logits here", groups);
        if (grouped && chosen * 2 != topk)
            problem("topk_group",
                    "got {} with num_experts_per_tok = {}, want half of it: a group is scored by its "
                    "num_experts_per_tok / topk_group best experts here, by 2 there",
                    chosen, topk);
        set("moe.moe_router_num_groups", grouped ? groups : 0, "n_group");
        set("moe.moe_router_group_topk", grouped ? chosen : 0, "topk_group");
    }

    // ---- which layers are MoE
    void layers() {
        for (const char* list : family_.layer_lists)
            if (list != nullptr && json_.contains(list) && json_[list].is_array()) return listed_layers(list);
        if (family_.sparse_step)
            sparse_layers();
        else if (family_.period)
            periodic_layers();
        else if (family_.dense != HfFamily::kNone)
            dense_layers();
    }

    // 1, every layer, holds for any number of layers.
    void set_moe_layers(const std::vector<int>& moe, const char* key) {
        const bool all = std::ranges::count(moe, 0) == 0;
        set("model.moe_layer_freq", all ? "1" : fmt::format("[{}]", fmt::join(moe, ", ")), key);
    }

    void listed_layers(const char* list) {
        std::vector<int> moe;
        for (const Json& type : json_[list]) {
            moe.push_back(type == "sparse" || type == 1 ? 1 : 0);
            if (moe.back() == 0 && type != "dense" && type != 0)
                problem(list, "got {}, want dense (0) or sparse (1)", shown(type));
        }
        set_moe_layers(moe, list);
        dense_width(std::ranges::count(moe, 0) > 0);
    }

    void dense_layers() {
        const bool read = family_.dense_key != nullptr;
        const char* const key = read ? family_.dense_key : "first_k_dense_replace";
        const int64_t layers = integer("num_hidden_layers", 0),
                      dense = read ? absent_or_null(key, family_.dense, 0) : std::min(family_.dense, layers);
        if (!read) want(key, integer(key, dense), dense, kUnread);
        unread_lists(dense, layers);
        if (dense < 0 || dense > layers)
            return problem(key, "got {}, want 0 to num_hidden_layers = {}", dense, layers);
        set("model.moe_layer_freq",
            dense == 0 ? "1" : fmt::format("\"([0]*{}+[1]*{})\"", dense, layers - dense), key);
        dense_width(dense > 0);
    }

    // Keys that the class does not read may say what it does without them.
    static constexpr const char* kUnread = "this family's class in Transformers does not read the key";
    void unread_lists(int64_t dense, int64_t layers) {
        for (const char* list : {"mlp_layer_types", "moe_layer_freq"}) {
            if (!json_.contains(list) || !json_[list].is_array()) continue;
            int64_t i = 0;
            bool same = std::ssize(json_[list]) == layers;
            for (const Json& type : json_[list])
                same = same && (type == "sparse" || type == 1) == (i++ >= dense);
            if (!same) problem(list, "want the first {} layers dense: {}", dense, kUnread);
        }
        if (json_.contains("moe_layer_freq") && !json_["moe_layer_freq"].is_array())
            want("moe_layer_freq", integer("moe_layer_freq", 1), 1,
                 "every layer after the dense ones is MoE");
    }

    // Rounded up where it is no multiple of a block.
    void dense_width(bool any) {
        const char* const key = family_.dense_width;
        if (!any && !present(key)) return;
        const int64_t width = integer(key, 0);
        if (width <= 0 || width > kWidest || width % kBlock == 0) return copy(key, "model.ffn_hidden_size");
        const int64_t wider = round_up(width, kBlock);
        set("model.ffn_hidden_size", wider, key);
        if (any)
            note("model.ffn_hidden_size", "{} {} of dense layers is taken as {}, the next multiple of {}",
                 key, width, wider, kBlock);
    }

    void periodic_layers() {
        const int64_t period = integer("expert_layer_period", 2), offset = integer("expert_layer_offset", 1),
                      layers = integer("num_hidden_layers", 0);
        if (period < 1 || offset < 0) return problem("expert_layer_period", "want at least 1, and an offset");
        std::vector<int> moe;
        for (int64_t i = 0; i < layers && i < kMostLayers; ++i) moe.push_back(i % period == offset ? 1 : 0);
        set_moe_layers(moe, "expert_layer_period");
        dense_width(true);
    }

    void sparse_layers() {
        const int64_t step = integer("decoder_sparse_step", 1), layers = integer("num_hidden_layers", 0);
        if (step < 1) problem("decoder_sparse_step", "got {}, want at least 1", step);
        std::vector<int> moe;
        for (int64_t i = 0; step >= 1 && i < layers && i < kMostLayers; ++i)
            moe.push_back((i + 1) % step == 0 ? 1 : 0);
        if (!contains("mlp_only_layers"))  // the class's first ones
            std::fill_n(moe.begin(), std::min<int64_t>(std::max<int64_t>(family_.dense, 0), std::ssize(moe)),
                        0);
        if (present("mlp_only_layers")) {
            const Json& dense = json_["mlp_only_layers"];
            if (!dense.is_array()) problem("mlp_only_layers", "want a list of layers");
            for (const Json& layer : dense) {
                if (!layer.is_number_unsigned() || layer.get<uint64_t>() >= moe.size())
                    problem("mlp_only_layers", "got {}, want layers below {}", shown(layer), moe.size());
                else
                    moe[layer.get<size_t>()] = 0;
            }
        }
        set_moe_layers(moe, "decoder_sparse_step");
        dense_width(std::ranges::count(moe, 0) > 0);
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
            note(kType, "{} = {} is followed: {} with coefficient {}", kAlpha, shown(json_[kAlpha]), type,
                 coeff);
        } else if (const int64_t layers = integer("num_hidden_layers", 0);
                   coefficient(kCoefficient) > 0 && layers > 0) {
            const auto topk = f64(integer(family_.topk_key, 0));
            coeff = fmt::format("{:.4g}", coefficient(kCoefficient) * topk / f64(layers));
            const bool adds = boolean("output_router_logits", false);
            if (adds) type = "aux_loss";
            const std::string near =
                fmt::format("near it (Transformers' loss is of all layers together{})",
                            family_.scores == ScoreFunction::sigmoid ? " and of softmax scores" : "");
            note(kType, "{} = {} {}", kCoefficient, shown(json_[kCoefficient]),
                 adds ? fmt::format("is followed by aux_loss with coefficient {}, {}", coeff, near)
                      : fmt::format("has no effect without output_router_logits, so there is no balancing "
                                    "loss; {}: --set {}=aux_loss --set moe.moe_aux_loss_coeff={}",
                                    near, kType, coeff));
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
    constexpr const char* kList = "fp8flow families lists those that are";
    const HfFamily* const found = hf_family(type);
    std::vector<std::string> all;
    for (const HfFamily& family : hf_families()) all.emplace_back(family.type);
    const std::string meant = found != nullptr ? "" : did_you_mean(printable(type), all);
    require(found != nullptr, ExitCode::usage, "{}: model_type \"{}\" is not supported{}{}; {}", file,
            printable(type), meant.empty() ? "" : "; ", meant, kList);
    require(found->refused == nullptr, ExitCode::usage, "{}: model_type {} is not supported: {}; {}", file,
            type, found->refused, kList);
    return *found;
}

// Whether a value says what a model computes.
bool describes_layers(const std::string& key, const nlohmann::json& value) {
    if (!value.is_primitive() || value.is_null()) return false;
    const auto is_in = [&](std::string_view part) { return key.find(part) != std::string::npos; };
    return !is_in("model_type") && !is_in("dtype") && !is_in("token_id") && !is_in("version") &&
           !is_in("_name_or_path") && !is_in("initializer") && !is_in("use_cache");
}

// The language model of one with other inputs: text_config, with what only the outer object says.
nlohmann::json text_model(nlohmann::json json, const std::string& file) {
    if (!json.contains("text_config") || !json["text_config"].is_object()) return json;
    nlohmann::json inner = json["text_config"];
    std::vector<std::string> problems;
    for (const auto& [key, value] : inner.items())
        if (const auto outer = json.value(key, nlohmann::json());
            describes_layers(key, value) && describes_layers(key, outer) && outer != value)
            problems.push_back(fmt::format("{}: {}: differs from that of text_config, want one of them", file,
                                           printable(key)));
    throw_problems(problems, ExitCode::usage);
    for (const char* key : {"model_type", "tie_word_embeddings", "quantization_config"})
        if (!inner.contains(key) && json.contains(key)) inner[key] = json[key];
    const auto known = [](const nlohmann::json& of) {
        const nlohmann::json type = of.value("model_type", nlohmann::json());
        return type.is_string() && hf_family(type.get<std::string>()) != nullptr;
    };
    if (!known(inner) && known(json)) inner["model_type"] = json["model_type"];
    return inner;
}

}  // namespace

ImportedModel parse_hf_config(std::string_view text, const std::string& file) {
    const nlohmann::json read = parse_json(text, file, ExitCode::usage);
    require(read.is_object(), ExitCode::usage, "{}: is no JSON object, want a Hugging Face config.json",
            file);
    const nlohmann::json json = text_model(read, file);
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
