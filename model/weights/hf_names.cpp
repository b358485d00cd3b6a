// SPDX-License-Identifier: MIT
// The table of names: our parameters on the left, theirs on the right.
#include "model/weights/hf_names.h"

#include "layers/rope.h"

#include <algorithm>
#include <charconv>
#include <optional>

namespace fp8flow::weights {

namespace {

class Pieces {
public:
    Pieces(const ParameterSpec& spec, const ModelSpec& model, const MoeSpec& moe, const HfNames& names)
        : spec_(spec), model_(model), moe_(moe), names_(names), store_(names.storage) {}

    std::vector<WeightPiece> list() {
        const std::string& name = spec_.name;
        if (name == "embedding.word_embeddings.weight") {
            table(std::string(store_.root) + store_.embedding);
            scale(names_.folds.embedding);
        } else if (name == "output_layer.weight") {
            table("lm_head.weight");
        } else if (name == "final_layernorm.weight") {
            whole(std::string(store_.root) + store_.final_norm);
            scale(names_.folds.final_norm);
        } else {
            FP8FLOW_CHECK(name.starts_with("layers."), "parameter {}", name);
            int64_t layer = 0;
            const char* end = std::from_chars(name.data() + 7, name.data() + name.size(), layer).ptr;
            of_layer(layer, std::string(end + 1));
        }
        return std::move(pieces_);
    }

private:
    void of_layer(int64_t layer, const std::string& name) {
        const std::string prefix = names_.layer(layer), ffn = names_.ffn(layer),
                          attention = prefix + store_.attention, shared = names_.shared_expert(layer);
        const WeightFolds& folds = names_.folds;
        if (name == "input_layernorm.weight") return whole(prefix + store_.input_norm);
        if (name == "pre_mlp_layernorm.weight") return whole(prefix + store_.mlp_norm);
        if (model_.multi_latent_attention && latent(attention, name)) return;
        if (name == "self_attention.linear_qkv.weight") return query_key_value(attention, "weight");
        if (name == "self_attention.linear_qkv.bias") return query_key_value(attention, "bias");
        if (name == "self_attention.q_layernorm.weight") return head_norm(attention + store_.q_norm);
        if (name == "self_attention.k_layernorm.weight") return head_norm(attention + store_.k_norm);
        if (name == "moe.router.weight") return whole(ffn + store_.router);
        if (name == "moe.router.expert_bias") return whole(ffn + store_.bias);
        if (name == "moe.shared_experts.linear_fc1.weight") return gate_up(shared, names_.shared);
        if (name == "moe.shared_experts.gate_weight") return whole(ffn + store_.shared_gate);
        if (name == "mlp.linear_fc1.weight")
            return gate_up(ffn, ExpertNames::projections, names_.dense_width);
        if (name == "moe.experts.linear_fc1.weight") return experts(ffn, true);
        if (name == "self_attention.linear_proj.weight") {
            whole(attention + store_.proj);
        } else if (name == "moe.shared_experts.linear_fc2.weight") {
            down(shared, names_.shared);
            scale(folds.mlp_output);
        } else if (name == "mlp.linear_fc2.weight") {
            down(ffn, ExpertNames::projections, names_.dense_width);
        } else {
            FP8FLOW_CHECK(name == "moe.experts.linear_fc2.weight", "parameter {}", spec_.name);
            experts(ffn, false);
            scale(folds.mlp_output);
        }
        scale(folds.residual);
    }

    void add(const std::string& tensor, std::vector<int64_t> shape, int64_t file_row, int64_t rows) {
        const int64_t cols = shape.size() == 1 ? 1 : shape.back();
        pieces_.push_back({tensor, std::move(shape), file_row, row_, rows, cols});
        row_ += rows;
    }
    void scale(double factor) {
        for (WeightPiece& piece : pieces_) piece.scale *= factor;
    }
    void whole(const std::string& tensor) {
        if (spec_.rank == 1) return add(tensor, {spec_.shape[0]}, 0, spec_.shape[0]);
        add(tensor, {spec_.shape[0], spec_.shape[1]}, 0, spec_.shape[0]);
    }
    void table(const std::string& tensor) {
        add(tensor, {model_.vocab_size, spec_.shape[1]}, 0, model_.vocab_size);
    }
    // Gate above up, [2 * rows, cols]; `width`: the rows that the files have of each, the rest is zero (0:
    // all).
    void gate_up(const std::string& prefix, ExpertNames names, int64_t width = 0) {
        const int64_t rows = spec_.shape[1] / 2, cols = spec_.shape[2], theirs = width > 0 ? width : rows;
        if (names == ExpertNames::linear)
            return add(prefix + "input_linear.weight", {2 * rows, cols}, 0, 2 * rows);
        const bool numbered = names == ExpertNames::numbered;
        for (const char* name :
             {numbered ? "w1.weight" : "gate_proj.weight", numbered ? "w3.weight" : "up_proj.weight"}) {
            add(prefix + name, {theirs, cols}, 0, theirs);
            pieces_.back().zero_rows = rows - theirs;
            row_ += rows - theirs;
        }
    }
    void down(const std::string& prefix, ExpertNames names, int64_t width = 0) {
        const int64_t rows = spec_.shape[1], ours = spec_.shape[2], theirs = width > 0 ? width : ours;
        const char* const name = names == ExpertNames::linear     ? "output_linear.weight"
                                 : names == ExpertNames::numbered ? "w2.weight"
                                                                  : "down_proj.weight";
        add(prefix + name, {rows, theirs}, 0, rows);
        if (theirs < ours) pieces_.back().wider = ours;
    }
    // Where a part of a head rotates: our heads have that part in front of both halves.
    std::vector<int64_t> head_order() const {
        const int64_t rotated = rotated_dims(model_);
        if (rotated == 0 || rotated == model_.kv_channels) return {};
        return rope_rows({.dim = model_.kv_channels, .rotated = rotated});
    }
    void head_norm(const std::string& tensor) {
        whole(tensor);
        pieces_.back().order = head_order();
    }
    // Multi-latent attention without its output. In the files the pairs that rotate are neighbours.
    bool latent(const std::string& prefix, const std::string& name) {
        constexpr std::pair<std::string_view, const char*> kNames[] = {
            {"self_attention.linear_q_down_proj.weight", "q_a_proj.weight"},
            {"self_attention.q_layernorm.weight", "q_a_layernorm.weight"},
            {"self_attention.linear_q_up_proj.weight", "q_b_proj.weight"},
            {"self_attention.linear_q_proj.weight", "q_proj.weight"},
            {"self_attention.linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight"},
            {"self_attention.kv_layernorm.weight", "kv_a_layernorm.weight"},
            {"self_attention.linear_kv_up_proj.weight", "kv_b_proj.weight"}};
        const auto* const found =
            std::ranges::find(kNames, std::string_view(name), [](auto& of) { return of.first; });
        if (found == std::end(kNames)) return false;
        whole(prefix + found->second);
        const int64_t rotated = model_.qk_pos_emb_head_dim;
        const auto order = [&](int64_t first) {
            pieces_.back().order =
                rope_rows({.dim = first + rotated, .rotated = rotated, .first = first, .interleaved = true});
        };
        if (name.ends_with("q_up_proj.weight") || name.ends_with("linear_q_proj.weight"))
            order(model_.qk_head_dim);
        if (name.ends_with("kv_down_proj.weight")) order(model_.kv_lora_rank);
        return true;
    }
    void query_key_value(const std::string& prefix, const char* what) {
        const int64_t query = model_.num_attention_heads * model_.kv_channels,
                      key = model_.num_query_groups * model_.kv_channels;
        const auto shape = [&](int64_t rows) {
            return spec_.rank == 1 ? std::vector{rows} : std::vector{rows, model_.hidden_size};
        };
        const std::pair<const char*, int64_t> parts[] = {
            {"q_proj.", query}, {"k_proj.", key}, {"v_proj.", key}};
        for (const auto& [name, rows] : parts) {
            if (store_.qkv != nullptr)
                add(prefix + store_.qkv, shape(query + 2 * key), row_, rows);
            else
                add(prefix + name + what, shape(rows), 0, rows);
            if (name[0] != 'v') pieces_.back().order = head_order();
        }
        pieces_[0].scale = names_.folds.query;
    }
    void experts(const std::string& ffn, bool first) {
        if (store_.experts == ExpertNames::stacked)
            return first ? stacked_gate_up(ffn + "experts.mlp.") : stacked_down(ffn + "experts.mlp.");
        const bool fused = store_.experts == ExpertNames::fused,
                   linear = store_.experts == ExpertNames::linear;
        const std::string joined = fused   ? first ? "experts.gate_up_proj" : "experts.down_proj"
                                   : first ? "input_linear.weight"
                                           : "output_linear.weight";
        const int64_t rows = spec_.shape[1];
        for (int64_t e = spec_.first_expert; e < spec_.first_expert + spec_.shape[0]; ++e) {
            const std::string expert = fmt::format("{}experts.{}.", ffn, e);
            if (fused || linear)
                add(ffn + joined, {moe_.num_experts, rows, spec_.shape[2]}, e * rows, rows);
            else if (first)
                gate_up(expert, store_.experts);
            else
                down(expert, store_.experts);
        }
    }
    // The files have all gates, then all ups; our parameter has gate above up, expert by expert.
    void stacked_gate_up(const std::string& prefix) {
        const int64_t width = spec_.shape[1] / 2, hidden = spec_.shape[2], all = moe_.num_experts * width;
        for (const auto& [name, part] : {std::pair("w1", 0), std::pair("v1", 1)})
            for (int64_t i = 0; i < spec_.shape[0]; ++i) {
                row_ = (2 * i + part) * width;
                add(prefix + name, {all, hidden}, (spec_.first_expert + i) * width, width);
            }
    }
    void stacked_down(const std::string& prefix) {
        const int64_t hidden = spec_.shape[1], width = spec_.shape[2], all = moe_.num_experts * width;
        for (int64_t i = 0; i < spec_.shape[0]; ++i) {
            row_ = i * hidden;
            add(prefix + "w2", {all, hidden}, (spec_.first_expert + i) * width, width);
            pieces_.back().transposed = true;
        }
    }

    const ParameterSpec& spec_;
    const ModelSpec& model_;
    const MoeSpec& moe_;
    const HfNames& names_;
    const HfStorage& store_;
    std::vector<WeightPiece> pieces_;
    int64_t row_ = 0;
};

// Why no router was found, as far as the names in the file show it.
std::string reason_of(const std::vector<std::string>& names) {
    const auto any = [&](const char* part) {
        return std::ranges::any_of(names,
                                   [&](const auto& name) { return name.find(part) != std::string::npos; });
    };
    if (any("_blocks") && any("_scales")) return "its experts are MXFP4 (gpt-oss): not supported";
    if (any(".mlp.router."))
        return "its router is named mlp.router (gpt-oss): its experts have biases, which is not supported";
    if (any(".feed_forward.")) return "its layers are named feed_forward (Llama 4): not supported";
    if (any(".language_model.")) return "it is a model with other inputs than text: not supported";
    if (any("mlp.gate_proj.weight")) return "that layer is dense or in another file";
    return "supported are the names of deepseek_v3, qwen3_moe, mixtral and families like them";
}

// The names under which the files have the router of a layer: of a whole model, or else of one block alone.
std::optional<HfNames> find_router(const TensorSet& set, int64_t layer,
                                   const std::vector<HfStorage>& families) {
    HfNames names;
    names.first_layer = layer;
    for (const HfStorage& storage : families) {
        names.storage = storage;
        for (const char* root : {storage.root, "", "model.", "language_model.model."}) {
            names.storage.root = root;
            if (set.contains(names.ffn(0) + storage.router)) return names;
        }
    }
    names.only_block = true;
    for (const HfStorage& storage : families) {
        names.storage = storage;
        for (const char* prefix : {storage.block, ""}) {
            names.block_prefix = prefix;
            if (set.contains(prefix + std::string(storage.router))) return names;
        }
    }
    return std::nullopt;
}

// `names` with the name of the shared expert that the files have, if they have one.
HfNames find_shared(const TensorSet& set, const HfNames& names, const std::vector<HfStorage>& families) {
    const std::pair<const char*, ExpertNames> kinds[] = {{"gate_proj.weight", ExpertNames::projections},
                                                         {"w1.weight", ExpertNames::numbered},
                                                         {"input_linear.weight", ExpertNames::linear}};
    HfNames found = names;
    for (const HfStorage& storage : families) {
        found.storage.shared = storage.shared;
        for (const auto& [name, kind] : kinds) {
            found.shared = kind;
            if (set.contains(found.shared_expert(0) + name)) return found;
        }
    }
    return names;
}

}  // namespace

std::string scale_name(const std::string& tensor) { return tensor + "_scale_inv"; }

std::vector<int64_t> scale_shape(std::vector<int64_t> shape) {
    for (size_t i = shape.size() - 2; i < shape.size(); ++i) shape[i] = ceil_div(shape[i], kScaleBlock);
    return shape;
}

std::string HfNames::layer(int64_t ours) const {
    return only_block ? "" : fmt::format("{}{}{}.", storage.root, storage.layers, first_layer + ours);
}
std::string HfNames::ffn(int64_t our_layer) const {
    return only_block ? block_prefix : layer(our_layer) + storage.block;
}
std::string HfNames::shared_expert(int64_t our_layer) const {
    const std::string_view name = storage.shared;
    return name.starts_with('/') ? layer(our_layer) + std::string(name.substr(1))
                                 : ffn(our_layer) + storage.shared;
}
std::vector<std::string> HfNames::scopes() const {
    const std::string block = ffn(0);
    if (block != layer(0) || only_block) return {block, shared_expert(0)};
    return {block + storage.router, block + storage.bias, block + "experts.", shared_expert(0)};
}

HfNames find_names(const TensorSet& set, int64_t layer, const std::string& family) {
    std::vector<HfStorage> families;  // that of `family` first
    if (const HfFamily* own = hf_family(family)) families.push_back(own->storage);
    for (const HfFamily& other : hf_families())
        if (other.refused == nullptr) families.push_back(other.storage);
    const std::optional<HfNames> found = find_router(set, layer, families);
    if (!found) {
        const auto all = set.names();
        fail(ExitCode::data,
             "{}: no router of layer {} (model.layers.{}.mlp.gate.weight) among {} tensors{}: {}", set.path(),
             layer, layer, all.size(),
             all.empty() ? "" : fmt::format(", e.g. \"{}\"", printable(all.front())), reason_of(all));
    }
    HfNames names = find_shared(set, *found, families);
    const std::string block = names.ffn(0);
    const auto bias = std::ranges::find_if(
        families, [&](const HfStorage& storage) { return set.contains(block + storage.bias); });
    if (bias != families.end()) names.storage.bias = bias->bias;
    const std::pair<const char*, ExpertNames> layouts[] = {{"experts.gate_up_proj", ExpertNames::fused},
                                                           {"experts.0.w1.weight", ExpertNames::numbered},
                                                           {"input_linear.weight", ExpertNames::linear},
                                                           {"experts.mlp.w1", ExpertNames::stacked}};
    names.storage.experts = ExpertNames::projections;
    for (const auto& [name, layout] : layouts)
        if (set.contains(block + name)) names.storage.experts = layout;
    return names;
}

std::vector<WeightPiece> pieces_of(const ParameterSpec& spec, const ModelSpec& model, const MoeSpec& moe,
                                   const HfNames& names) {
    return Pieces(spec, model, moe, names).list();
}

ParameterSpec of_all_experts(const ParameterSpec& spec, const MoeSpec& moe) {
    ParameterSpec all = spec;
    if (!spec.expert) return all;
    all.shape[0] = moe.num_experts;
    all.first_expert = 0;
    return all;
}

}  // namespace fp8flow::weights
