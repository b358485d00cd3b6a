// SPDX-License-Identifier: MIT
// The table of names: our parameters on the left, theirs on the right.
#include "model/weights/hf_names.h"

#include <charconv>

namespace fp8flow::weights {

namespace {

class Pieces {
public:
    Pieces(const ParameterSpec& spec, const ModelSpec& model, const MoeSpec& moe, const HfNames& names)
        : spec_(spec), model_(model), moe_(moe), names_(names) {}

    std::vector<WeightPiece> list() {
        const std::string& name = spec_.name;
        if (name == "embedding.word_embeddings.weight") {
            table(names_.root + "embed_tokens.weight");
        } else if (name == "output_layer.weight") {
            table("lm_head.weight");
        } else if (name == "final_layernorm.weight") {
            whole(names_.root + "norm.weight");
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
        const std::string prefix = names_.layer(layer), ffn = names_.ffn(layer);
        if (name == "input_layernorm.weight") return whole(prefix + "input_layernorm.weight");
        if (name == "pre_mlp_layernorm.weight") return whole(prefix + "post_attention_layernorm.weight");
        if (name == "self_attention.linear_qkv.weight") return query_key_value(prefix + "self_attn.");
        if (name == "self_attention.linear_proj.weight") return whole(prefix + "self_attn.o_proj.weight");
        if (name == "self_attention.q_layernorm.weight") return whole(prefix + "self_attn.q_norm.weight");
        if (name == "self_attention.k_layernorm.weight") return whole(prefix + "self_attn.k_norm.weight");
        if (name == "moe.router.weight") return whole(ffn + "gate.weight");
        if (name == "moe.router.expert_bias") return whole(ffn + names_.bias);
        if (name == "moe.shared_experts.linear_fc1.weight") return gate_up(ffn + "shared_experts.");
        if (name == "moe.shared_experts.linear_fc2.weight")
            return matrix(ffn + "shared_experts.down_proj.weight");
        if (name == "mlp.linear_fc1.weight") return gate_up(ffn);
        if (name == "mlp.linear_fc2.weight") return matrix(ffn + "down_proj.weight");
        FP8FLOW_CHECK(name.starts_with("moe.experts.linear_fc"), "parameter {}", spec_.name);
        experts(ffn + "experts.", name.ends_with("fc1.weight"));
    }

    void add(const std::string& tensor, std::vector<int64_t> shape, int64_t file_row, int64_t rows) {
        const int64_t cols = shape.size() == 1 ? 1 : shape.back();
        pieces_.push_back({tensor, std::move(shape), file_row, row_, rows, cols});
        row_ += rows;
    }
    void whole(const std::string& tensor) {
        if (spec_.rank == 1) return add(tensor, {spec_.shape[0]}, 0, spec_.shape[0]);
        add(tensor, {spec_.shape[0], spec_.shape[1]}, 0, spec_.shape[0]);
    }
    void table(const std::string& tensor) {
        add(tensor, {model_.vocab_size, spec_.shape[1]}, 0, model_.vocab_size);
    }
    // One group [1, rows, cols] as a matrix.
    void matrix(const std::string& tensor) {
        add(tensor, {spec_.shape[1], spec_.shape[2]}, 0, spec_.shape[1]);
    }
    void gate_up(const std::string& prefix) {
        for (const char* which : {"gate_proj.weight", "up_proj.weight"})
            add(prefix + which, {spec_.shape[1] / 2, spec_.shape[2]}, 0, spec_.shape[1] / 2);
    }
    void query_key_value(const std::string& prefix) {
        const int64_t query = model_.num_attention_heads * model_.kv_channels,
                      key = model_.num_query_groups * model_.kv_channels;
        add(prefix + "q_proj.weight", {query, model_.hidden_size}, 0, query);
        add(prefix + "k_proj.weight", {key, model_.hidden_size}, 0, key);
        add(prefix + "v_proj.weight", {key, model_.hidden_size}, 0, key);
    }
    void experts(const std::string& prefix, bool first) {
        const int64_t rows = spec_.shape[1], cols = spec_.shape[2];
        for (int64_t e = spec_.first_expert; e < spec_.first_expert + spec_.shape[0]; ++e) {
            if (names_.experts == ExpertNames::fused) {
                add(prefix + (first ? "gate_up_proj" : "down_proj"), {moe_.num_experts, rows, cols}, e * rows,
                    rows);
                continue;
            }
            const bool numbered = names_.experts == ExpertNames::numbered;
            const std::string expert = fmt::format("{}{}.", prefix, e);
            if (!first) {
                add(expert + (numbered ? "w2.weight" : "down_proj.weight"), {rows, cols}, 0, rows);
                continue;
            }
            add(expert + (numbered ? "w1.weight" : "gate_proj.weight"), {rows / 2, cols}, 0, rows / 2);
            add(expert + (numbered ? "w3.weight" : "up_proj.weight"), {rows / 2, cols}, 0, rows / 2);
        }
    }

    const ParameterSpec& spec_;
    const ModelSpec& model_;
    const MoeSpec& moe_;
    const HfNames& names_;
    std::vector<WeightPiece> pieces_;
    int64_t row_ = 0;
};

// What the names of a file without a router that we know give away.
std::string reason_of(const std::vector<std::string>& names) {
    const auto any = [&](const char* part) {
        for (const std::string& name : names)
            if (name.find(part) != std::string::npos) return true;
        return false;
    };
    if (any("_blocks") && any("_scales")) return "its experts are MXFP4 (gpt-oss): not supported";
    if (any(".mlp.router."))
        return "its router is named mlp.router (gpt-oss): its experts have biases, which is not supported";
    if (any(".feed_forward.")) return "its layers are named feed_forward (Llama 4, Jamba): not supported";
    if (any(".language_model.")) return "it is a model with other inputs than text: not supported";
    if (any("mlp.gate_proj.weight")) return "that layer is dense or in another file";
    return "supported are the names of deepseek_v3, qwen3_moe, mixtral and families like them";
}

}  // namespace

std::string scale_name(const std::string& tensor) { return tensor + "_scale_inv"; }

std::vector<int64_t> scale_shape(std::vector<int64_t> shape) {
    for (size_t i = shape.size() - 2; i < shape.size(); ++i) shape[i] = ceil_div(shape[i], kScaleBlock);
    return shape;
}

std::string HfNames::layer(int64_t ours) const {
    return only_block ? "" : fmt::format("{}layers.{}.", root, first_layer + ours);
}
std::string HfNames::ffn(int64_t our_layer) const {
    return only_block ? block_prefix : layer(our_layer) + block + ".";
}

HfNames find_names(const TensorSet& set, int64_t layer) {
    HfNames names;
    names.first_layer = layer;
    bool found = false;
    for (const char* root : {"model.", ""})
        for (const char* block : {"mlp", "block_sparse_moe"}) {
            if (found) break;
            names.root = root;
            names.block = block;
            found = set.contains(names.ffn(0) + "gate.weight");
        }
    for (const char* prefix : {"mlp.", "block_sparse_moe.", ""}) {
        if (found) break;
        names.only_block = true;
        names.block_prefix = prefix;
        found = set.contains(names.ffn(0) + "gate.weight");
    }
    if (!found) {
        const auto all = set.names();
        fail(set.code(), "{}: no router of layer {} (model.layers.{}.mlp.gate.weight) among {} tensors{}: {}",
             set.path(), layer, layer, all.size(),
             all.empty() ? "" : fmt::format(", e.g. \"{}\"", printable(all.front())), reason_of(all));
    }
    if (set.contains(names.ffn(0) + "e_score_correction_bias")) names.bias = "e_score_correction_bias";
    const std::string experts = names.ffn(0) + "experts.";
    if (set.contains(experts + "gate_up_proj"))
        names.experts = ExpertNames::fused;
    else if (set.contains(experts + "0.w1.weight"))
        names.experts = ExpertNames::numbered;
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
