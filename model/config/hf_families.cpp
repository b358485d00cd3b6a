// SPDX-License-Identifier: MIT
// One entry per family. Values are those of the classes of Transformers 5.24; names are those of the
// published files. Long because every family has its entry.
#include "model/config/hf_families.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace fp8flow {

namespace {

constexpr const char* kSparseLatent = "its attention is multi-latent (MLA) with an index of keys (DSA)";
constexpr const char* kDeltaNet = "most of its layers are linear attention (gated delta net)";
constexpr const char* kWindows = "its attention has windows";
constexpr const char* kNoExperts = "it has no experts";
constexpr auto kSigmoid = ScoreFunction::sigmoid;
constexpr const char *kList = "mlp_layer_types", *kLocal = "num_local_experts";
constexpr HfAlias kNumExperts = {"num_experts", kLocal}, kLocalExperts = {kLocal, "num_experts"};

// ---- DeepSeek-V3 and the families that took its MoE layers over
constexpr HfFamily kDeepSeekV3 = {.type = "",
                                  .architecture = "DeepseekV3ForCausalLM",
                                  .experts = "n_routed_experts",
                                  .expert_width = "moe_intermediate_size",
                                  .aliases = {{{"n_routed_experts", kLocal}}},
                                  .scores = kSigmoid,
                                  .normalised = true,
                                  .fp32_router = true,
                                  .choice = "noaux_tc",
                                  .choice_reason = "this family chooses with a bias and groups",
                                  .num_experts = 256,
                                  .topk = 8,
                                  .shared = 1,
                                  .groups = 8,
                                  .chosen_groups = 4,
                                  .dense = 3,
                                  .scaling = 2.5};
// The same with other values. `foreign`: why the layers around its MoE layers are not known; null: they are.
template <class Change>
constexpr HfFamily as_v3(const char* type, const char* models, const char* foreign, Change change) {
    HfFamily family = kDeepSeekV3;
    family.type = type;
    family.models = models;
    family.foreign = foreign;
    change(family);
    return family;
}
constexpr void without_groups(HfFamily& f, int64_t experts, int64_t topk, int64_t dense, double scaling) {
    f.num_experts = experts;
    f.topk = topk;
    f.dense = dense;
    f.scaling = scaling;
    f.groups = f.chosen_groups = 1;
}
// A list alone says which layers are dense.
constexpr void listed(HfFamily& f) {
    f.layer_lists = {kList};
    f.dense_key = nullptr;
}
// As the files of KDA models are written.
constexpr void renamed(HfFamily& f) {
    f.experts = "num_experts";
    f.layer_lists = {kList};
    f.aliases = {{kNumExperts,
                  {"max_position_embeddings", "model_max_length"},
                  {"norm_topk_prob", "moe_renormalize"},
                  {"n_group", "num_expert_group"},
                  {"num_experts_per_tok", "num_experts_per_token"},
                  {"n_shared_experts", "num_shared_experts"}}};
}
constexpr void whole(HfFamily& f, const char* architecture, bool query_key_norm) {
    f.architecture = architecture;
    f.query_key_norm = query_key_norm;
}
// The class has no groups and calls the factor of the weights otherwise (null: it has none).
constexpr void ungrouped(HfFamily& f, int64_t experts, int64_t topk, int64_t dense, double scaling,
                         const char* key) {
    without_groups(f, experts, topk, dense, scaling);
    f.groups = HfFamily::kNone;
    if (key != nullptr) f.scaling_key = key;
}
// Exported as deepseek_v3, which is the same model without an indexer.
constexpr void indexed(HfFamily& f, HfLatent latent) {
    f.architecture = nullptr;
    f.latent = latent;
    f.index_topk = 2048;
    f.layer_lists = {kList};
    f.only = {{{"index_topk", "2048", "sequences have at most 2048 tokens, for which every key is chosen"},
               {"mlp_bias", "false", "linear layers have no bias here"}}};
}
constexpr void named_as_sarvam(HfFamily& f) {
    f.aliases[1] = {"n_routed_experts", "num_experts"};
    f.aliases[2] = {"n_shared_experts", "num_shared_experts"};
}
// Softmax over the chosen ones, without a bias.
constexpr void softmax(HfFamily& f) {
    f.scores = ScoreFunction::softmax;
    f.choice = nullptr;
}

constexpr std::array kOfDeepSeekV3 = {
    as_v3("deepseek_v3", "DeepSeek-V3, Moonlight", nullptr, [](HfFamily& f) { f.latent = HfLatent{}; }),
    as_v3("kimi_k2", "Kimi-K2", nullptr,
          [](HfFamily& f) {
              f.architecture = nullptr;
              f.latent = HfLatent{};
          }),
    as_v3("glm4_moe", "GLM-4.5, GLM-4.5-Air", nullptr,
          [](HfFamily& f) {
              without_groups(f, 128, 8, 1, 1.0);
              whole(f, "Glm4MoeForCausalLM", false);
              f.reads_qk_norm = true;
              f.qkv_bias = false;
              f.rotary_percent = 0.5;
          }),
    as_v3("deepseek_v32", "DeepSeek-V3.2", nullptr, [](HfFamily& f) { indexed(f, {}); }),
    as_v3("glm_moe_dsa", "GLM-5", nullptr,
          [](HfFamily& f) {
              without_groups(f, 256, 8, 3, 2.5);
              indexed(f, {.q = 2048, .nope = 192, .v = 256});
          }),
    as_v3("glm4_moe_lite", "GLM-4.7-Flash", nullptr,
          [](HfFamily& f) {
              without_groups(f, 64, 4, 1, 1.8);
              f.architecture = "Glm4MoeLiteForCausalLM";
              f.latent = HfLatent{.q = 768, .nope = 192, .v = 256};
              listed(f);
              f.aliases[1] = {"qk_rope_head_dim", "head_dim"};
          }),
    as_v3("sarvam_mla", "Sarvam-105B", nullptr,
          [](HfFamily& f) {
              without_groups(f, 128, 8, 1, 2.5);
              f.architecture = "SarvamMLAForCausalLM";
              f.latent = HfLatent{.q = 0};
              named_as_sarvam(f);
          }),
    as_v3("mistral4", "Mistral Small 4", "its multi-latent attention scales queries by their position",
          [](HfFamily& f) {
              without_groups(f, 128, 4, 0, 1.0);
              f.fp32_router = false;
              softmax(f);
          }),
    as_v3("mistral_large4", "Mistral Large 4", kSparseLatent,
          [](HfFamily& f) {
              without_groups(f, 128, 4, 1, 1.0);
              softmax(f);
              f.layer_lists = {kList};
              f.reads_norm = false;
              f.storage.root = f.storage.block = "";
              f.storage.experts = ExpertNames::numbered;
          }),
    as_v3("axk1", "A.X-K1", "its attention is multi-latent (MLA), a norm follows the MoE layer",
          [](HfFamily& f) {
              f.num_experts = 192;
              f.dense = 1;
              f.layer_lists = {kList, "moe_layer_freq"};
          }),
    as_v3("axk2", "A.X-K2", kSparseLatent,
          [](HfFamily& f) {
              without_groups(f, 128, 8, 1, 2.5);
              f.layer_lists = {kList, "moe_layer_freq"};
              f.only[0] = {"n_group", "[null, 1]", "experts of other groups have a score of 0 there"};
          }),
    as_v3("kimi_linear", "Kimi-Linear", "most of its layers are linear attention (KDA)",
          [](HfFamily& f) {
              without_groups(f, 256, 8, 1, 2.446);
              renamed(f);
              f.storage.block = "block_sparse_moe.";
              f.storage.experts = ExpertNames::numbered;
          }),
    as_v3("bailing_hybrid", "Ling", "most of its layers are linear attention (KDA)",
          [](HfFamily& f) {
              f.num_experts = 512;
              f.dense = 2;
              renamed(f);
              f.storage.bias = "gate.expert_bias";
          }),
    as_v3("dots3_note", "dots3", kSparseLatent,
          [](HfFamily& f) {
              without_groups(f, 256, 8, 1, 1.0);
              f.layer_lists = {kList, "moe_layer_freq"};
              f.shared_width = "shared_experts_intermediate_size";
              f.shared_width_default = 1536;
          }),
    as_v3("exaone_moe", "K-EXAONE", kWindows,
          [](HfFamily& f) {
              without_groups(f, 64, 8, 1, 2.5);
              f.experts = "num_experts";
              f.shared_key = "num_shared_experts";
              f.layer_lists = {kList};
              f.storage.bias = "e_score_correction_bias";
          }),
    as_v3("mimo_v2_flash", "MiMo-V2-Flash", "its attention has windows and sinks",
          [](HfFamily& f) {
              without_groups(f, 256, 8, 1, 1.0);
              f.shared = HfFamily::kNone;
              listed(f);
          }),
    as_v3("laguna", "Laguna", "its attention has windows and a gate",
          [](HfFamily& f) {
              ungrouped(f, 256, 8, 1, 1.0, "moe_routed_scaling_factor");
              f.fp32_router = false;
              f.experts = "num_experts";
              f.reads_norm = false;
              listed(f);
              f.shared_key = nullptr;
              f.shared_width = "shared_expert_intermediate_size";
              f.shared_width_default = 512;
              f.only = {{{"moe_apply_router_weight_on_input", "false", "experts weight their output here"},
                         {"moe_router_logit_softcapping", "0.0", "router logits are not capped here"}}};
              f.storage.bias = "experts.e_score_correction_bias";
              f.storage.shared = "shared_expert.";
          }),
    as_v3("afmoe", "Trinity", "its attention has windows and a gate, norms follow its layers",
          [](HfFamily& f) {
              ungrouped(f, 64, 6, 1, 1.0, "route_scale");
              f.fp32_router = false;
              f.experts = "num_experts";
              f.reads_norm = false;
              f.shared = 2;
              f.shared_key = "num_shared_experts";
              f.dense_key = "num_dense_layers";
              f.storage.router = "router.gate.weight";
              f.storage.bias = "expert_bias";
              f.storage.mlp_norm = "pre_mlp_layernorm.weight";
          }),
    as_v3("flint", "Flint", "its attention has windows and sinks",
          [](HfFamily& f) {
              ungrouped(f, 256, 6, 2, HfFamily::kNone, nullptr);
              f.experts = "num_experts";
              f.has_bias = false;
              f.sparse_step = true;
              f.shared_key = nullptr;
              f.shared_width = "shared_expert_intermediate_size";
              f.shared_width_default = 1024;
              f.storage.shared = "shared_expert.";
          }),
    as_v3("beam", "Beam", "its attention has windows and a gate, norms follow its layers",
          [](HfFamily& f) {
              f.experts = "num_experts";
              listed(f);
              f.shared = HfFamily::kNone;
              f.storage.mlp_norm = "pre_feedforward_layernorm.weight";
          }),
    as_v3("glm5_next", "GLM-5-Next",
          "most of its layers are linear attention (KDA), its residual has several streams",
          [](HfFamily& f) {
              without_groups(f, 288, 8, 3, 2.5);
              listed(f);
              f.glu = GluSpec{.activation_func_clamp_value = 10};
          }),
    as_v3("hy_v4", "Hunyuan 4",
          "its attention is multi-latent (MLA) with sinks, its residual has several streams",
          [](HfFamily& f) {
              without_groups(f, 256, 8, 1, 2.827);
              listed(f);
              f.glu = GluSpec{.activation_func_clamp_value = 10, .activation_func_clamp_routed_only = true};
          }),
    as_v3("lfm2_moe", "LFM2-8B-A1B", "most of its layers are convolutions",
          [](HfFamily& f) {
              ungrouped(f, 32, 4, 2, 1.0, nullptr);
              f.fp32_router = false;
              f.tied = true;
              f.experts = "num_experts";
              f.dense_key = "num_dense_layers";
              f.epsilon = "norm_eps";
              f.bias = "use_expert_bias";
              f.shared = HfFamily::kNone;
              f.storage.block = "feed_forward.";
              f.storage.bias = "expert_bias";
              f.storage.mlp_norm = "ffn_norm.weight";
              f.storage.experts = ExpertNames::numbered;
          }),
    as_v3("dots1", "dots.llm1", nullptr,
          [](HfFamily& f) {
              without_groups(f, 0, 0, 0, 1.0);
              whole(f, "Dots1ForCausalLM", true);
              f.normalised = false;
              f.shared = 0;
          }),
    as_v3("hy_v3", "Hunyuan 3", nullptr,
          [](HfFamily& f) {
              ungrouped(f, 192, 8, 1, 2.826, "router_scaling_factor");
              whole(f, "HYV3ForCausalLM", true);
              f.experts = "num_experts";
              f.shared_key = "num_shared_experts";
              listed(f);
              f.head_dim = 128;
              f.aliases[1] = kNumExperts;
              f.reads_norm = false;
              f.only[0] = {"mlp_bias", "false", "linear layers have no bias here"};
              f.storage.router = "router.gate.weight";
              f.storage.bias = "expert_bias";
              f.storage.shared = "shared_mlp.";
          }),
    as_v3("sarvam_moe", "Sarvam-30B", nullptr,
          [](HfFamily& f) {
              without_groups(f, 128, 6, 1, 2.5);
              whole(f, "SarvamMoEForCausalLM", true);
              f.rotary_percent = 1.0;
              f.reads_qk_norm = true;
              named_as_sarvam(f);
              f.aliases[3] = {"attention_bias", "use_qkv_bias"};
              f.storage.embedding = "word_embeddings.weight";
              f.storage.attention = "attention.";
              f.storage.qkv = "query_key_value.weight";
              f.storage.proj = "dense.weight";
              f.storage.q_norm = "query_layernorm.weight";
              f.storage.k_norm = "key_layernorm.weight";
              f.storage.bias = "gate.expert_bias";
          }),
    as_v3("solar_open", "Solar-Open-100B", nullptr,
          [](HfFamily& f) {
              without_groups(f, 128, 8, HfFamily::kNone, 1.0);
              whole(f, "SolarOpenForCausalLM", false);
              f.qkv_bias = false;
              f.head_dim = 128;
          }),
};

// ---- Granite
constexpr HfFamily granite(const char* type, const char* models, const char* foreign, int64_t shared) {
    HfFamily f = {.type = type, .models = models, .foreign = foreign};
    f.granite = true;
    f.normalised = true;
    f.reads_norm = false;
    f.num_experts = 8;
    f.topk = 2;
    if (shared != HfFamily::kNone) {
        f.shared = 1;
        f.shared_key = nullptr;
        f.shared_width = "shared_intermediate_size";
        f.shared_width_default = shared;
    }
    f.storage.block = "block_sparse_moe.";
    f.storage.router = "router.layer.weight";
    f.storage.shared = "/shared_mlp.";
    f.storage.experts = ExpertNames::linear;
    return f;
}

// ---- Qwen, with a gate of the shared expert
constexpr HfFamily gated_qwen(const char* type, const char* models, const char* foreign) {
    HfFamily f = {.type = type, .models = models, .foreign = foreign};
    f.experts = "num_experts";
    f.expert_width = "moe_intermediate_size";
    f.shared = 1;
    f.shared_width = "shared_expert_intermediate_size";
    f.shared_gate = true;
    f.shared_key = nullptr;
    f.storage.shared = "shared_expert.";
    return f;
}

// ---- families of their own
template <class Change> constexpr HfFamily changed(HfFamily family, Change change) {
    change(family);
    return family;
}
constexpr std::array kOthers = {
    HfFamily{.type = "qwen3_moe",
             .models = "Qwen3-MoE",
             .architecture = "Qwen3MoeForCausalLM",
             .query_key_norm = true,
             .experts = "num_experts",
             .expert_width = "moe_intermediate_size",
             .aliases = {{kNumExperts}},
             .sparse_step = true},
    changed(gated_qwen("qwen3_next", "Qwen3-Next", kDeltaNet),
            [](HfFamily& f) {
                f.num_experts = 512;
                f.topk = 10;
                f.shared_width_default = 512;
                f.normalised = true;
                f.sparse_step = true;
            }),
    changed(gated_qwen("qwen3_5_moe", "Qwen3.5-MoE", kDeltaNet),
            [](HfFamily& f) {
                f.num_experts = 256;
                f.topk = 8;
                f.shared_width_default = 512;
                f.normalised = true;
                f.reads_norm = false;
                f.storage.root = "model.language_model.";
                f.storage.experts = ExpertNames::fused;
            }),
    HfFamily{.type = "mixtral",
             .models = "Mixtral",
             .architecture = "MixtralForCausalLM",
             .reads_attention_bias = false,
             .aliases = {{kLocalExperts}},
             .normalised = true,
             .reads_norm = false,
             .storage = {.block = "block_sparse_moe.", .experts = ExpertNames::numbered}},
    // DeepSeek-V2-Lite. The larger V2 scores a group by its best expert alone.
    HfFamily{.type = "deepseek_v2",
             .models = "DeepSeek-V2-Lite (`topk_method: greedy`)",
             .architecture = "DeepseekV2ForCausalLM",
             .latent = HfLatent{},
             .experts = "n_routed_experts",
             .expert_width = "moe_intermediate_size",
             .aliases = {{{"n_routed_experts", "num_experts"}}},
             .norm_reason = "its implementations differ in what they do then",
             .fp32_router = true,
             .choice = "greedy",
             .choice_reason = "a group is scored by its best expert alone there, by several here",
             .num_experts = 64,
             .shared = 2,
             .groups = 1,
             .chosen_groups = 1,
             .dense = 0,
             .scaling = 1.0},
    HfFamily{.type = "olmoe",
             .models = "OLMoE",
             .architecture = "OlmoeForCausalLM",
             .query_key_norm = true,
             .all_heads_norm = true,
             .experts = "num_experts",
             .aliases = {{kNumExperts}},
             .only = {{{"clip_qkv", "null", "queries, keys and values are not clipped here"}}}},
    HfFamily{.type = "flex_olmo",
             .models = "FlexOlmo",
             .foreign = "its attention normalises queries and keys over all heads together, its norms follow "
                        "its layers",
             .experts = "num_experts",
             .aliases = {{kNumExperts}},
             .num_experts = 7,
             .topk = 5},
    HfFamily{.type = "minimax_m2",
             .models = "MiniMax-M2",
             .architecture = "MiniMaxM2ForCausalLM",
             .query_key_norm = true,
             .reads_attention_bias = false,
             .head_dim = 128,
             .all_heads_norm = true,
             .rotary_percent = 1.0,
             .reads_rotary_dim = true,
             .aliases = {{kLocalExperts}},
             .scores = kSigmoid,
             .normalised = true,
             .reads_norm = false,
             .only = {{{"use_qk_norm", "true", "queries and keys are normalised"},
                       {"use_routing_bias", "true", "a bias chooses experts"},
                       {"qk_norm_type", "\"per_layer\"", "queries and keys are normalised over all heads"}}},
             .storage = {.block = "block_sparse_moe.",
                         .bias = "e_score_correction_bias",
                         .experts = ExpertNames::numbered}},
    HfFamily{.type = "minimax_m3_vl",
             .models = "MiniMax-M3",
             .foreign = "its attention selects blocks of keys, its norms add 1 to their weights",
             .glu = GluSpec{.quick_geglu = true, .glu_linear_offset = 1, .activation_func_clamp_value = 7},
             .shared_key = nullptr,
             .dense_key = nullptr,
             .aliases = {{kLocalExperts}},
             .layer_lists = {kList, "moe_layer_freq"},
             .scores = kSigmoid,
             .normalised = true,
             .reads_norm = false,
             .only = {{{"swiglu_alpha", "1.702", "quick_geglu has this factor"}}},
             .num_experts = 128,
             .topk = 4,
             .shared = 1,
             .shared_width = "shared_intermediate_size",
             .shared_width_default = 3072,
             .dense = 0,
             .dense_width = "dense_intermediate_size",
             .scaling = 2.0,
             .storage = {.block = "block_sparse_moe.",
                         .bias = "e_score_correction_bias",
                         .experts = ExpertNames::numbered}},
    HfFamily{.type = "minimax",
             .models = "MiniMax-Text-01",
             .foreign = "most of its layers are linear attention",
             .aliases = {{kLocalExperts}},
             .normalised = true,
             .reads_norm = false,
             .num_experts = 8,
             .topk = 2,
             .storage = {.block = "block_sparse_moe.", .experts = ExpertNames::numbered}},
    HfFamily{.type = "hunyuan_v1_moe",
             .models = "Hunyuan-A13B",
             .foreign = "its attention normalises queries and keys after rotating them",
             .experts = "num_experts",
             .shared_key = nullptr,
             .aliases = {{kNumExperts, {"num_experts_per_tok", "moe_topk"}}},
             .normalised = true,
             .reads_norm = false,
             .shared = 1,
             .storage = {.router = "gate.wg.weight", .shared = "shared_mlp."}},
    HfFamily{.type = "mellum",
             .models = "Mellum",
             .foreign = kWindows,
             .expert_width = "moe_intermediate_size",
             .dense_key = nullptr,
             .aliases = {{kLocalExperts}},
             .layer_lists = {kList},
             .normalised = true,
             .num_experts = 64,
             .topk = 8,
             .dense = 0},
    HfFamily{.type = "lara_mini",
             .models = "Lara-mini",
             .foreign = "most of its layers are linear attention",
             .tied = true,
             .experts = "num_experts",
             .expert_width = "moe_intermediate_size",
             .shared_key = nullptr,
             .normalised = true,
             .num_experts = 128,
             .topk = 4,
             .shared = 1,
             .shared_width = "shared_expert_intermediate_size",
             .shared_width_default = 512,
             .storage = {.shared = "shared_expert.", .experts = ExpertNames::fused}},
    changed(granite("granitemoe", "Granite 3 MoE", nullptr, HfFamily::kNone),
            [](HfFamily& f) { f.architecture = "GraniteMoeForCausalLM"; }),
    changed(granite("granitemoeshared", "Granite MoE with a shared expert", nullptr, 0),
            [](HfFamily& f) { f.architecture = "GraniteMoeSharedForCausalLM"; }),
    changed(gated_qwen("qwen2_moe", "Qwen2-MoE", nullptr),
            [](HfFamily& f) {
                f.architecture = "Qwen2MoeForCausalLM";
                f.bias_of_qkv = "qkv_bias";
                f.qkv_bias = true;
                f.num_experts = 60;
                f.topk = 4;
                f.shared_width_default = 5632;
                f.sparse_step = true;
            }),
    granite("granitemoehybrid", "Granite 4", "most of its layers are state-space models", 1024),
    changed(granite("granitemoe_swa", "Granite with windows", "its attention has windows and sinks", 0),
            [](HfFamily& f) {
                f.storage.router = "router.weight";
                f.storage.experts = ExpertNames::fused;
            }),
    HfFamily{.type = "cohere2_moe",
             .models = "Command A MoE",
             .foreign = "it uses LayerNorm, and attention with windows runs in parallel with the MoE layer",
             .tied = true,
             .experts = "num_experts",
             .epsilon = "layer_norm_eps",
             .shared_key = "num_shared_experts",
             .scores_key = "expert_selection_fn",
             .layer_lists = {kList},
             .shared_strategy = "average",
             .normalised = true,
             .any_scores = true,
             .has_bias = false,
             .num_experts = 8,
             .topk = 2,
             .shared = 0,
             .dense = 0},
    HfFamily{.type = "jamba",
             .models = "Jamba",
             .foreign = "most of its layers are state-space models",
             .experts = "num_experts",
             .aliases = {{kNumExperts}},
             .reads_norm = false,
             .num_experts = 16,
             .topk = 2,
             .period = true,
             .storage = {.mlp_norm = "pre_ff_layernorm.weight",
                         .block = "feed_forward.",
                         .router = "router.weight"}},
    HfFamily{.type = "dbrx",
             .models = "DBRX",
             .foreign = "it uses LayerNorm and clips queries, keys and values",
             .experts = "ffn_config.moe_num_experts",
             .expert_width = "ffn_config.ffn_hidden_size",
             .epsilon = nullptr,
             .topk_key = "ffn_config.moe_top_k",
             .aliases = {{{"num_hidden_layers", "n_layers"},
                          {"hidden_size", "d_model"},
                          {"max_position_embeddings", "max_seq_len"}}},
             .normalised = true,
             .reads_norm = false,
             .only = {{{"ffn_config.moe_normalize_expert_weights", "1.0",
                        "the weights of a token's experts are divided by their sum"},
                       {"ffn_config.ffn_act_fn.name", "\"silu\"",
                        "SwiGLU with another activation is not implemented"}}},
             .num_experts = 4,
             .topk = 1,
             .storage = {.root = "transformer.",
                         .layers = "blocks.",
                         .block = "ffn.",
                         .router = "router.layer.weight",
                         .experts = ExpertNames::stacked}},
};

constexpr HfFamily refused(const char* type, const char* models, const char* reason) {
    return {.type = type, .models = models, .refused = reason};
}
constexpr std::array kRefused = {
    refused("gpt_oss", "gpt-oss", "its experts have biases, its attention has sinks, its weights are MXFP4"),
    refused("llama4", "Llama 4", "its experts weight their input, not their output"),
    refused("deepseek_v4", "DeepSeek-V4", "it routes by the square root of softplus, some layers by a hash"),
    refused("ernie4_5_moe", "ERNIE 4.5", "it chooses by softmax scores and a bias"),
    refused("longcat_flash", "LongCat-Flash", "some of its experts are the identity"),
    refused("nemotron_h", "Nemotron-H", "its activation is the square of ReLU, without a gate"),
    refused("gemma4", "Gemma 4", "its router has a norm, its activation is GELU"),
    refused("phimoe", "Phi-3.5-MoE", "it uses LayerNorm with biases and its router samples"),
    refused("llama", "Llama", kNoExperts),
    refused("mistral", "Mistral", kNoExperts),
    refused("qwen2", "Qwen2", kNoExperts),
    refused("qwen3", "Qwen3", kNoExperts),
    refused("gemma3", "Gemma 3", kNoExperts),
};

// Whole families first, then the ones known by their layers.
std::vector<HfFamily> sorted() {
    std::vector<HfFamily> all(kOthers.begin(), kOthers.end());
    all.insert(all.end(), kOfDeepSeekV3.begin(), kOfDeepSeekV3.end());
    std::stable_partition(all.begin(), all.end(), [](const HfFamily& family) { return family.whole(); });
    all.insert(all.end(), kRefused.begin(), kRefused.end());
    return all;
}

}  // namespace

std::span<const HfFamily> hf_families() {
    static const std::vector<HfFamily> all = sorted();
    return all;
}

const HfFamily* hf_family(std::string_view type) {
    if (type.ends_with("_text")) type.remove_suffix(5);
    for (const HfFamily& family : hf_families())
        if (type == family.type) return &family;
    return nullptr;
}

std::string families_page(bool markdown) {
    std::string page = markdown ? "| `model_type` | models | supported | router | not supported |\n"
                                  "| --- | --- | --- | --- | --- |\n"
                                : "";
    for (const HfFamily& f : hf_families()) {
        if (markdown && f.refused == kNoExperts) continue;
        const std::string why =
            f.refused != nullptr   ? f.refused
            : f.foreign != nullptr ? f.foreign
            : f.index_topk > 0 ? fmt::format("more than {} tokens, its sparse attention (DSA)", f.index_topk)
                               : "";
        const char* const support = f.refused != nullptr ? "refused" : f.whole() ? "whole" : "layer";
        std::string router = f.scores == kSigmoid ? "sigmoid" : "softmax";
        if (f.scores == kSigmoid && f.has_bias) router += ", bias";
        if (f.scores == kSigmoid && f.groups > 1) router += ", groups";
        if (f.scores != kSigmoid && !f.normalised) router += " over all experts";
        if (f.refused != nullptr) router.clear();
        page += markdown
                    ? fmt::format("| `{}` | {} | {} | {} | {} |\n", f.type, f.models, support, router, why)
                    : fmt::format("{:<17} {:<8} {}\n", f.type, support, why);
    }
    return page;
}

}  // namespace fp8flow
