// SPDX-License-Identifier: MIT
// The families of models, one entry each (hf_families.cpp): what config.json says of them and what it means
// where it is silent, how their tensors are named, and what of them is not implemented. A new family is an
// entry there and a line in scripts/compare_torch.py, if its layers compute what ours do.
#pragma once

#include "layers/spec.h"

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fp8flow {

// How the experts of a layer are stored.
enum class ExpertNames {
    projections,  // experts.E.gate_proj.weight, up_proj, down_proj (DeepSeek-V3, Qwen3-MoE)
    numbered,     // experts.E.w1.weight (gate), w3 (up), w2 (down): Mixtral
    fused,        // experts.gate_up_proj [E, 2F, H], experts.down_proj [E, H, F]: Transformers 5
    linear,       // input_linear.weight [E, 2F, H], output_linear.weight [E, H, F]: Granite
    stacked       // experts.mlp.w1 (gate), v1 (up), w2 (down, transposed), each [E * F, H]: DBRX
};

// Names of tensors. Those of a block begin with `block`, those of attention with `attention`.
struct HfStorage {
    const char *root = "model.", *layers = "layers.";
    const char *embedding = "embed_tokens.weight", *final_norm = "norm.weight";
    const char *input_norm = "input_layernorm.weight", *mlp_norm = "post_attention_layernorm.weight";
    const char* attention = "self_attn.";
    const char *qkv = nullptr, *proj = "o_proj.weight";  // qkv: queries, keys, values in one; null: three
    const char *q_norm = "q_norm.weight", *k_norm = "k_norm.weight";
    const char *block = "mlp.", *router = "gate.weight", *bias = "gate.e_score_correction_bias";
    const char* shared = "shared_experts.";  // in the block; with a slash in front, next to it
    const char* shared_gate = "shared_expert_gate.weight";
    ExpertNames experts = ExpertNames::projections;
};

// A key that may have one value, and why.
struct HfOnly {
    const char *key = nullptr, *value = nullptr, *reason = nullptr;
};

// Another name of a key that the class reads as well.
struct HfAlias {
    const char *key = nullptr, *alias = nullptr;
};

// Multi-latent attention: values for what is left out; q 0: no latent of the queries.
struct HfLatent {
    int64_t q = 1536, kv = 512, nope = 128, rope = 64, v = 128;
};

struct HfFamily {
    const char* type;               // model_type
    const char* models = "";        // for the table of documents
    const char* refused = nullptr;  // why it is not supported
    // What of it is not implemented and left out, so that its MoE layers are known alone. Null: the model is
    // whole, and `architecture` is its class; without one it is exported as another family.
    const char* foreign = nullptr;
    const char* architecture = nullptr;
    std::optional<HfLatent> latent = {};
    // index_topk of sparse attention (DSA), the keys that an indexer chooses for a query: all of them in
    // sequences of at most so many tokens. The indexer's own tensors are not imported. 0: none.
    int64_t index_topk = 0;
    bool query_key_norm = false, reads_attention_bias = true;
    int64_t head_dim = 0;         // where it is left out; 0: hidden_size / num_attention_heads
    bool tied = false;            // tie_word_embeddings, where it is left out
    bool reads_qk_norm = false;   // use_qk_norm may say otherwise
    bool all_heads_norm = false;  // that norm is over all heads of a token
    // attention_bias, or the key of another name, is of queries, keys and values alone; its value where it is
    // left out.
    std::optional<bool> qkv_bias = {};
    const char* bias_of_qkv = "attention_bias";
    // partial_rotary_factor, where it is left out; none: the class rotates whole heads
    std::optional<double> rotary_percent = {};
    bool reads_rotary_dim = false;  // rotary_dim says it as well
    bool granite = false;           // embedding_, residual_ and attention_multiplier, logits_scaling

    std::optional<GluSpec> glu = {};  // where it is not SwiGLU; swiglu_limit may say another limit

    const char *experts = "num_local_experts", *expert_width = "intermediate_size";
    const char* epsilon = "rms_norm_eps";  // null: none
    // As the class calls them; a key that it does not read is none of its own. Null: it has no such key.
    const char *shared_key = "n_shared_experts", *scaling_key = "routed_scaling_factor",
               *topk_key = "num_experts_per_tok", *scores_key = "scoring_func",
               *dense_key = "first_k_dense_replace";
    std::array<HfAlias, 7> aliases = {};
    // Lists of dense and MoE layers that the class reads, the first one first.
    std::array<const char*, 2> layer_lists = {};
    // shared_expert_combination_strategy, where it is left out; null: the class has no such key
    const char* shared_strategy = nullptr;
    ScoreFunction scores = ScoreFunction::softmax;
    // norm_topk_prob, whether the weights of a token's experts are divided by their sum. `norm_reason`: why
    // it may have no other value. `reads_norm`: false where the class has no such key.
    bool normalised = false, reads_norm = true;
    const char* norm_reason = nullptr;
    bool fp32_router = false;  // the class keeps the router's weight in FP32
    // topk_method, how experts are chosen, and why it may have no other value; null: the class has no such
    // key.
    const char *choice = nullptr, *choice_reason = nullptr;
    bool any_scores = false;     // scores_key may say either
    bool has_bias = true;        // sigmoid scores: a bias chooses experts
    const char* bias = nullptr;  // the key that says so, where there is one
    std::array<HfOnly, 3> only = {};

    // Values for what is left out; 0: it must be there, kNone: the class has no such key.
    static constexpr int64_t kNone = -1;
    int64_t num_experts = 0, topk = 0;
    int64_t shared = kNone;              // n_shared_experts
    const char* shared_width = nullptr;  // the key of a shared expert's width; null: that of an expert
    int64_t shared_width_default = 0;    // with the key; 0: none
    bool shared_gate = false;            // the shared expert has a gate
    int64_t groups = kNone, chosen_groups = kNone;
    int64_t dense = kNone;  // of dense_key, or of layers that a list would say
    const char* dense_width = "intermediate_size";
    double scaling = kNone;
    // decoder_sparse_step and mlp_only_layers, or expert_layer_period and _offset, say which layers are MoE
    bool sparse_step = false, period = false;

    HfStorage storage = {};

    bool whole() const { return refused == nullptr && foreign == nullptr; }
};

std::span<const HfFamily> hf_families();
const HfFamily* hf_family(std::string_view type);  // null: unknown

// `fp8flow families`: a line per family, or a Markdown table.
std::string families_page(bool markdown);

}  // namespace fp8flow
