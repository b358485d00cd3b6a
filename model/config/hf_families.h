// SPDX-License-Identifier: MIT
// The families of models: what config.json calls things in each of them, and which values its class in
// Transformers gives to keys that are left out. What a family has and we have not is named here, too.
#pragma once

#include "layers/spec.h"

namespace fp8flow {

struct HfFamily {
    const char* type;               // model_type
    const char* refused = nullptr;  // why it is not supported
    // What of its attention is not implemented, which is left out. Null: attention is grouped-query with
    // rotary positions, as in Mixtral, and with query_key_norm as in Qwen3.
    const char* foreign = nullptr;
    bool query_key_norm = false;

    // Keys: the number of experts (num_local_experts comes first, as Transformers 5 writes it), and their
    // width.
    const char *experts = "num_local_experts", *expert_width = "intermediate_size";
    ScoreFunction scores = ScoreFunction::softmax;
    // norm_topk_prob, whether the weights of a token's experts are divided by their sum. `norm_reason`: why
    // it may have no other value. `reads_norm`: false where the class has no such key.
    bool normalised = false, reads_norm = true;
    const char* norm_reason = nullptr;
    // topk_method, how experts are chosen, and why it may have no other value; null: the class has no such
    // key.
    const char *choice = nullptr, *choice_reason = nullptr;
    const char* bias = nullptr;  // the key of the bias that chooses experts; null: sigmoid scores have one

    // Values for what is left out; 0: it must be there, kNone: the class has no such key.
    static constexpr int64_t kNone = -1;
    int64_t num_experts = 0, topk = 0;
    int64_t shared = kNone;  // n_shared_experts
    int64_t groups = kNone, chosen_groups = kNone;
    int64_t dense = kNone;  // first_k_dense_replace
    double scaling = kNone;
    bool sparse_step = false;  // decoder_sparse_step and mlp_only_layers say which layers are MoE
};

inline constexpr const char* kLatentAttention = "its attention is multi-latent (MLA)";
inline constexpr const char* kSharedGate = "its shared expert is weighted by a gate of its own";
inline constexpr const char* kNoExperts = "it has no experts";
// DeepSeek-V3 and the families that took its MoE layers over.
constexpr HfFamily as_deepseek_v3(const char* type) {
    return {.type = type,
            .foreign = kLatentAttention,
            .experts = "n_routed_experts",
            .expert_width = "moe_intermediate_size",
            .scores = ScoreFunction::sigmoid,
            .normalised = true,
            .choice = "noaux_tc",
            .choice_reason = "this family chooses with a bias and groups",
            .num_experts = 256,
            .topk = 8,
            .shared = 1,
            .groups = 8,
            .chosen_groups = 4,
            .dense = 3,
            .scaling = 2.5};
}
constexpr HfFamily glm4_moe() {
    HfFamily family = as_deepseek_v3("glm4_moe");
    family.foreign = "its attention rotates a part of each head";
    family.num_experts = 128;
    family.groups = family.chosen_groups = family.dense = 1;
    family.scaling = 1.0;
    return family;
}

inline constexpr HfFamily kHfFamilies[] = {
    {.type = "qwen3_moe",
     .query_key_norm = true,
     .experts = "num_experts",
     .expert_width = "moe_intermediate_size",
     .sparse_step = true},
    {.type = "mixtral", .normalised = true, .reads_norm = false},
    as_deepseek_v3("deepseek_v3"),
    as_deepseek_v3("kimi_k2"),
    glm4_moe(),
    // DeepSeek-V2-Lite. The larger V2 scores a group by its best expert alone.
    {.type = "deepseek_v2",
     .foreign = kLatentAttention,
     .experts = "n_routed_experts",
     .expert_width = "moe_intermediate_size",
     .norm_reason = "its implementations differ in what they do then",
     .choice = "greedy",
     .choice_reason = "a group is scored by its best expert alone there, by several here",
     .num_experts = 64,
     .shared = 2,
     .dense = 0,
     .scaling = 1.0},
    {.type = "olmoe",
     .foreign = "its attention normalises queries and keys over all heads together",
     .experts = "num_experts"},
    {.type = "minimax_m2",
     .foreign = "its attention rotates a part of each head and normalises over all heads together",
     .scores = ScoreFunction::sigmoid,
     .normalised = true,
     .reads_norm = false,
     .bias = "use_routing_bias"},
    {.type = "gpt_oss",
     .refused = "its experts have biases and a clamped activation, its attention has sinks, its weights are "
                "MXFP4"},
    {.type = "qwen2_moe", .refused = kSharedGate},
    {.type = "qwen3_next", .refused = kSharedGate},
    {.type = "qwen3_5_moe", .refused = kSharedGate},
    {.type = "llama4", .refused = "its experts weight their input, not their output"},
    {.type = "llama4_text", .refused = "its experts weight their input, not their output"},
    {.type = "dbrx", .refused = "it uses LayerNorm and clips queries, keys and values"},
    {.type = "phimoe", .refused = "it uses LayerNorm with biases and its router samples"},
    {.type = "granitemoe", .refused = "it multiplies embeddings, residuals and logits by constants"},
    {.type = "jamba", .refused = "most of its layers are state-space models"},
    {.type = "minimax", .refused = "most of its layers are linear attention (MiniMax-M2 is minimax_m2)"},
    {.type = "llama", .refused = kNoExperts},
    {.type = "mistral", .refused = kNoExperts},
    {.type = "qwen2", .refused = kNoExperts},
    {.type = "qwen3", .refused = kNoExperts},
    {.type = "gemma3", .refused = kNoExperts},
};

}  // namespace fp8flow
