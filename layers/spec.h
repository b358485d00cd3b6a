// SPDX-License-Identifier: MIT
// The structs that describe a model to the layers. model/config/config.h fills them from YAML. Field names
// are Megatron's keys, so a search for a key of a configuration finds the code that reads it.
#pragma once

#include "kernels/core/scaled_tensor.h"
#include "kernels/exchange.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fp8flow {

// fp32: tests only
enum class Recipe : uint8_t { bf16, fp8_tensorwise, fp8_blockwise, fp8_flow, fp8_rowwise, mxfp8, fp32 };
inline constexpr std::array kRecipeNames = {"bf16",     "fp8_tensorwise", "fp8_blockwise",
                                            "fp8_flow", "fp8_rowwise",    "mxfp8"};
inline constexpr std::array kRecipes = {Recipe::bf16,     Recipe::fp8_tensorwise, Recipe::fp8_blockwise,
                                        Recipe::fp8_flow, Recipe::fp8_rowwise,    Recipe::mxfp8};
enum class ScoreFunction : uint8_t { softmax, sigmoid };
enum class RouterDtype : uint8_t { bf16, fp32 };  // of the router's weight in its GEMMs
enum class BalancingLoss : uint8_t { aux_loss, seq_aux_loss, global_aux_loss };
// Over ranks, of the gradients of their parts of global_aux_loss.
enum class GlobalLossGradient : uint8_t { mean, sum };
enum class Fp8Format : uint8_t { e4m3, hybrid };  // hybrid: gradients in E5M2
// Where the routing probability multiplies: SwiGLU, before fc2; or the sums of combine, after it.
enum class ProbsIn : uint8_t { swiglu, combine };
// One RMS and gamma of qk_layernorm is over a head, or over all heads of a token.
enum class QkLayernormType : uint8_t { per_head, per_layer };
enum class RecomputeGranularity : uint8_t { none, selective, full };

// How the frequencies of the rotary embedding are scaled (layers/rope.h). none: nothing rotates.
enum class RopeType : uint8_t { rope, none, linear, ntk, yarn, llama3 };

struct RopeSpec {
    RopeType rope_type = RopeType::rope;
    double rotary_percent = 1.0;                           // part of a head's dimensions that rotates
    double rotary_scaling_factor = 1.0;                    // of all types but rope and none
    int64_t original_max_position_embeddings = 4096;       // yarn, llama3: length before scaling
    double beta_fast = 32.0, beta_slow = 1.0;              // yarn
    double mscale = 1.0, mscale_all_dim = 0.0;             // yarn
    double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
};

// The GLU activation of experts and FFNs: g sigmoid(alpha g) (u + offset) of a gate g and an up u.
struct GluSpec {
    bool quick_geglu = false;                        // alpha is 1.702; false: 1, SwiGLU
    double glu_linear_offset = 0;                    // offset
    double activation_func_clamp_value = 0;          // g at most this, u within +-this; 0: no clamp
    bool activation_func_clamp_routed_only = false;  // no clamp in shared experts and dense FFNs
};

struct ModelSpec {
    int64_t num_layers = 2;
    int64_t hidden_size = 256;
    bool attention = true;  // false: pure MoE layers, to measure them alone
    int64_t num_attention_heads = 4;
    int64_t num_query_groups = 4;
    int64_t kv_channels = 64;  // head dimension
    bool add_qkv_bias = false;
    bool qk_layernorm = false;
    QkLayernormType qk_layernorm_type = QkLayernormType::per_head;
    bool multi_latent_attention = false;
    // Of multi_latent_attention: columns of the latents (q_lora_rank 0: none, queries from one projection),
    // and of a head of queries and keys without and with rotation, and of values.
    int64_t q_lora_rank = 512, kv_lora_rank = 512;
    int64_t qk_head_dim = 128, qk_pos_emb_head_dim = 64, v_head_dim = 128;
    double rotary_base = 10000.0;
    RopeSpec rope;
    double norm_epsilon = 1e-5;
    bool zero_centered_gamma = false;  // Megatron: apply_layernorm_1p
    int64_t ffn_hidden_size = 512;     // dense-FFN layers
    GluSpec glu;
    int64_t vocab_size = 257;  // byte text: 256 and the end of a document
    int64_t make_vocab_size_divisible_by = 128;
    int64_t padded_vocab_size = 384;  // vocab_size rounded up to the line above
    bool untie_embeddings_and_output_weights = true;
    double init_method_std = 0.02;
    double embedding_init_method_std = 0;  // 0: init_method_std
    int64_t seq_length = 256;
    bool yields_to_hf_config = false;     // --hf-config comes after the file that says so
    int64_t max_position_embeddings = 0;  // of the model that was imported, for its export; 0: seq_length
    std::vector<int> moe_layer_freq;      // one entry per layer: 1 MoE, 0 dense FFN
    int64_t num_layers_at_start_in_bf16 = 0;
    int64_t num_layers_at_end_in_bf16 = 0;

    // Of core attention: columns of a head of queries and keys, and of values; heads of keys.
    int64_t qk_dim() const {
        return multi_latent_attention ? qk_head_dim + qk_pos_emb_head_dim : kv_channels;
    }
    int64_t v_dim() const { return multi_latent_attention ? v_head_dim : kv_channels; }
    int64_t kv_heads() const { return multi_latent_attention ? num_attention_heads : num_query_groups; }

    // Heads of q or k that share an RMS of qk_layernorm, of `heads`.
    int64_t heads_per_norm(int64_t heads) const {
        return qk_layernorm_type == QkLayernormType::per_layer ? heads : 1;
    }
    int64_t qkv_rows() const { return (num_attention_heads + 2 * num_query_groups) * kv_channels; }
};

struct MoeSpec {
    int64_t num_experts = 8;
    int64_t moe_router_topk = 2;
    int64_t moe_ffn_hidden_size = 256;
    int64_t moe_shared_expert_intermediate_size = 0;  // 0: none
    bool moe_shared_expert_gate = false;              // its rows times sigmoid(w x), w [1, H]
    RouterDtype moe_router_dtype = RouterDtype::bf16;
    ScoreFunction moe_router_score_function = ScoreFunction::softmax;
    bool moe_router_pre_softmax = false;
    bool moe_router_norm_topk_prob = true;  // sigmoid: the chosen scores are divided by their sum
    int64_t moe_router_num_groups = 0;      // 0: no group-limited routing
    int64_t moe_router_group_topk = 0;
    double moe_router_topk_scaling_factor = 1.0;
    bool moe_router_enable_expert_bias = false;
    double moe_router_bias_update_rate = 1e-3;
    std::vector<BalancingLoss> moe_router_load_balancing_type;  // empty: none
    bool balances_by(BalancingLoss loss) const {
        return std::ranges::find(moe_router_load_balancing_type, loss) !=
               moe_router_load_balancing_type.end();
    }
    std::vector<double> moe_aux_loss_coeff;  // one per entry above
    GlobalLossGradient moe_global_aux_loss_gradient = GlobalLossGradient::mean;
    double moe_z_loss_coeff = 0.0;
    // benchmarks: uniform assignment; wanted max/mean load, 0: off. They take effect through given_ids
    bool moe_router_force_load_balancing = false;
    double moe_router_force_biased = 0.0;
    // Row capacity of a rank at the start, in units of T*K; grown by redoing the step. 0: worst case
    double moe_expert_rank_capacity_factor = 1.25;
    int64_t moe_row_alignment = 128;  // rows every expert group is padded to
    CombineOrder moe_combine_order = CombineOrder::rank;
    // The experts [tokens, K] of the tokens of a rank in a layer, in place of the router's choice. Null: the
    // router chooses.
    std::function<std::vector<int32_t>(const MoeSpec& moe, int layer, int64_t rank, int64_t tokens)>
        given_ids;
};
// Number of source ranks with their own row groups and weight-gradient sums.
inline int64_t gradient_sources(const MoeSpec& moe, int64_t expert_parallel_size) {
    return moe.moe_combine_order == CombineOrder::invariant ? expert_parallel_size : 1;
}

// The recipe and the switches of the flow: each moe_* is true in fp8_flow, ablations turn one off.
struct PrecisionSpec {
    Recipe recipe = Recipe::fp8_flow;
    std::string flow;  // a registered one (flows/flow.h) instead of the recipe's; "": none
    Fp8Format fp8_format = Fp8Format::e4m3;
    bool fp8_wgrad = true;               // false: weight gradients from BF16 operands
    bool fp8_attention_linears = false;  // QKV and output projection as the recipe's linear layers
    // Expert weight gradients of so many consecutive micro-batches in one GEMM. 0: decided before training
    // from what the run can do (decide_joined of model/predict/fit.h); layers read it as 1.
    int64_t moe_wgrad_micro_batches = 0;
    ProbsIn moe_apply_probs_in = ProbsIn::swiglu;
    ScaleFormat scale_format = ScaleFormat::pow2;
    MxRounding mx_rounding = MxRounding::rceil;
    bool moe_quantize_before_dispatch = true;
    bool moe_scaling_aware_transpose = true;
    bool moe_permute_padding_for_fp8 = true;  // fused permute + pad
    bool moe_act_quantize_fusion = true;      // fused SwiGLU x prob + quantise
    // the norm emits the FP8 rows (1 cast per layer); false: 2, the paper's count
    bool moe_norm_quantize_fusion = true;
    int64_t fp8_amax_history_len = 16;  // delayed scaling of the norm's output (fp8_tensorwise)

    // Rows cross the wire as FP8 values with their scales, not as BF16.
    bool sends_fp8_rows() const { return recipe == Recipe::fp8_flow && moe_quantize_before_dispatch; }
};

// What moe_expert keeps of the received rows: expert-sorted rows; each row once, as it came over the wire; or
// nothing, and the backward dispatches them again.
enum class SavedRows : uint8_t { sorted, received, none };

// Each module is one of recompute_modules; moe_expert is part of the flow as published.
struct RecomputeSpec {
    RecomputeGranularity recompute_granularity = RecomputeGranularity::none;
    bool core_attn = false, layernorm = false, moe_act = false, moe_expert = false, moe = false,
         shared_experts = false, mla_up_proj = false;
    SavedRows saved_rows = SavedRows::sorted;  // fp8_flow
};

// Types of the optimizer's tensors, with Megatron's names. Masters are FP32.
enum class StateDtype : uint8_t { fp32, bf16 };
struct StateDtypes {
    StateDtype main_grads_dtype = StateDtype::fp32;  // of routed experts; all others have FP32 gradients
    StateDtype exp_avg_dtype = StateDtype::fp32;
    StateDtype exp_avg_sq_dtype = StateDtype::fp32;
};
// Parameters that are not trained: no update, no part in the gradient norm, and no weight-gradient GEMM.
struct Freeze {
    std::vector<std::string> names;  // each a part of a parameter's name, with wildcards as in file names
    bool keeps_moments = false;      // in memory, for a run that trains them later
};
inline DType state_dtype(StateDtype dtype) { return dtype == StateDtype::bf16 ? DType::bf16 : DType::f32; }

// full_iteration: a step is one CUDA graph, captured once and launched again.
enum class CudaGraphImpl : uint8_t { none, full_iteration };

// What may run at the same time (docs/architecture.md, Schedules). No schedule changes a bit.
struct ScheduleSpec {
    bool moe_shared_expert_overlap = false;  // shared expert in parallel with router and exchange
    // expert weight gradients in parallel with data gradients and the combine of dX
    bool delay_wgrad_compute = false;
    // forward of a micro-batch in parallel with the backward of the one before
    bool overlap_moe_expert_parallel_comm = false;
    // reduction of a layer's gradients in parallel with the backward of the layers below
    bool overlap_grad_reduce = false;
    // gathering of a layer's copies in parallel with the forward of the layer before
    bool overlap_param_gather = false;
    // SMs of exchange calls in parallel with the other micro-batch, with several ranks; 0: all
    int64_t wire_sms = 64;
    // GEMMs take tiles from a queue, and exchange calls next to side work use wire_sms SMs
    bool gemm_tile_queue = false;
    CudaGraphImpl cuda_graph_impl = CudaGraphImpl::none;

    bool has_side_stream() const { return moe_shared_expert_overlap || delay_wgrad_compute; }
    bool overlaps() const {
        return has_side_stream() || overlap_moe_expert_parallel_comm || overlap_grad_reduce ||
               overlap_param_gather;
    }
};

// What one transformer block, or a MoE layer alone, is built from.
struct BlockSpec {
    ModelSpec model;
    MoeSpec moe;
    PrecisionSpec precision;  // of the model; a block takes its layer's (precision_of_layer)
    RecomputeSpec recompute;
    DType plain_dtype = DType::bf16;  // of plain weight copies and activations
    int layer = 0;
    int expert_parallel_rank = 0;
    int expert_parallel_size = 1;
};

}  // namespace fp8flow
