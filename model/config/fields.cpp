// SPDX-License-Identifier: MIT
// The table of configuration keys. Adding a key is adding a line here and a member to its struct.
// Long because it is one table.
#include "model/config/fields.h"

#include "kernels/core/error.h"
#include "kernels/ops/gemm.h"
#include "model/config/builders.h"
#include "model/config/layer_pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <regex>

// The accessor of a struct member; `auto&` serves reading and writing.
#define AT(member) \
    [](auto& config) -> auto& { return config.member; }

// "section", "key", and the accessor of section.key.
#define KEY(section, key) #section, #key, AT(section.key)
// The same of section.part.key.
#define KEY_IN(section, part, key) #section, #key, AT(section.part.key)

namespace fp8flow {
namespace {

using namespace builders;

// Smaller ones do not bound a quotient: rows of zeros to the power -3 in the norm's backward, or a moment of
// 1e-23 over the root of its square, which is 0 in FP32.
constexpr double kLeastEpsilon = 1e-20;

const Names kNamesOfRecipes(kRecipeNames.begin(), kRecipeNames.end());
const Names kRecomputeModules = {"core_attn", "layernorm",      "moe_act",    "moe_expert",
                                 "moe",       "shared_experts", "mla_up_proj"};

ConfigField only(std::vector<Recipe> recipes, ConfigField field) {
    field.recipes = std::move(recipes);
    return field;
}

// A switch for each module in the spec, a list of names in the file (Megatron's recompute_modules).
template <class Spec> auto recompute_flags(Spec& recompute) {
    return std::array{&recompute.core_attn,  &recompute.layernorm, &recompute.moe_act,
                      &recompute.moe_expert, &recompute.moe,       &recompute.shared_experts,
                      &recompute.mla_up_proj};
}

ConfigField recompute_modules() {
    const std::string want = "a list of " + joined(kRecomputeModules);
    ConfigField field{"recompute", "recompute_modules", want,
                      "what selective recompute runs again in the backward pass instead of saving"};
    field.get = [](const Config& config) {
        Names names;
        const auto flags = recompute_flags(config.recompute);
        for (size_t i = 0; i < flags.size(); ++i)
            if (*flags[i]) names.push_back(kRecomputeModules[i]);
        return yaml_list(names, [](const std::string& name) { return name; });
    };
    field.set = [want](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const auto flags = recompute_flags(config.recompute);
        for (bool* flag : flags) *flag = false;
        if (written.scalar() == "none") return std::nullopt;
        for (const auto& item : written.items) {
            const auto index = index_of(item, kRecomputeModules);
            if (!index) return refuse_name(item, kRecomputeModules, want);
            *flags[*index] = true;
        }
        return std::nullopt;
    };
    return field;
}

// Megatron's null: no latent of the queries.
ConfigField q_lora_rank() {
    ConfigField field = integer("model", "q_lora_rank", AT(model.q_lora_rank), {.min = 0, .max = 1 << 16},
                                "multi_latent_attention: columns of the queries' latent; 0 or null: queries "
                                "come from one projection");
    field.null = "0";
    return field;
}

// Kept as written until num_layers is known (resolve_config).
ConfigField layer_frequency() {
    const std::string want = "N (every N-th layer is MoE), a list of 0 and 1, or ([0]*3+[1]*58)";
    ConfigField field{"model", "moe_layer_freq", want, "layers with MoE; the others have a dense FFN"};
    field.get = [](const Config& config) { return quoted(config.moe_layer_freq); };
    field.set = [want](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const std::string pattern =
            written.is_list ? fmt::format("[{}]", fmt::join(written.items, ",")) : written.items.at(0);
        if (!expand_layer_pattern(pattern, 1)) return refuse(want);
        config.moe_layer_freq = pattern;
        return std::nullopt;
    };
    return field;
}

// Section model: its blocks and their attention.
std::vector<ConfigField> attention_fields() {
    return {
        integer(KEY(model, num_layers), {.min = 1, .max = kMaxLayers}, "transformer blocks"),
        integer(KEY(model, hidden_size), {.min = 128, .max = 1 << 20, .multiple_of = 128},
                "width of the residual stream"),
        boolean(KEY(model, attention), "false: no attention, to measure MoE layers alone"),
        integer(KEY(model, num_attention_heads), {.min = 1, .max = 1024}, "query heads"),
        integer(KEY(model, num_query_groups), {.min = 1, .max = 1024},
                "key and value heads (grouped-query attention)"),
        integer(KEY(model, kv_channels), {.min = 2, .max = 1024, .multiple_of = 2}, "dimension of one head"),
        boolean(KEY(model, add_qkv_bias), "biases of the QKV projection"),
        boolean(KEY(model, qk_layernorm),
                "RMSNorm of queries and keys; multi_latent_attention norms its latents in any case"),
        choice(KEY(model, qk_layernorm_type), {"per_head", "per_layer"},
               "what qk_layernorm takes an RMS over: a head, or all heads of a token"),
        boolean(KEY(model, multi_latent_attention),
                "queries, and keys with values, from latents of low rank; num_query_groups and kv_channels "
                "have no effect then"),
        q_lora_rank(),
        integer(KEY(model, kv_lora_rank), {.min = 1, .max = 1 << 16},
                "multi_latent_attention: columns of the latent of keys and values"),
        integer(KEY(model, qk_head_dim), {.min = 0, .max = 256},
                "multi_latent_attention: columns of a head of queries and keys without rotary embedding"),
        integer(
            KEY(model, qk_pos_emb_head_dim), {.min = 2, .max = 256, .multiple_of = 2},
            "multi_latent_attention: columns with rotary embedding; those of keys are the same in all heads"),
        integer(KEY(model, v_head_dim), {.min = 1, .max = 256},
                "multi_latent_attention: columns of a head of values"),
        number(KEY(model, rotary_base), {.min = 1, .above_min = true}, "RoPE's theta"),
        choice(KEY_IN(model, rope, rope_type), {"rope", "none", "linear", "ntk", "yarn", "llama3"},
               "how RoPE's frequencies are scaled; none: no position embedding"),
        number(KEY_IN(model, rope, rotary_percent), {.min = 0, .max = 1},
               "share of a head's dimensions that rotate"),
        number(KEY_IN(model, rope, rotary_scaling_factor), {.min = 1, .max = 1e6},
               "rope_type linear, ntk, yarn, llama3: how many times longer sequences may be"),
        integer(KEY_IN(model, rope, original_max_position_embeddings), {.min = 1, .max = 1 << 30},
                "rope_type yarn, llama3: longest sequence before scaling"),
        number(KEY_IN(model, rope, beta_fast), {.min = 0, .max = 1e6, .above_min = true},
               "rope_type yarn: pairs with more turns keep their frequency"),
        number(KEY_IN(model, rope, beta_slow), {.min = 0, .max = 1e6, .above_min = true},
               "rope_type yarn: the frequency of pairs with fewer turns is divided by the factor"),
        number(
            KEY_IN(model, rope, mscale), {.min = 0, .max = 100},
            "rope_type yarn: cos and sin are multiplied by m(mscale) / m(mscale_all_dim), m(x) = 1 + 0.1 x "
            "ln(rotary_scaling_factor)"),
        number(KEY_IN(model, rope, mscale_all_dim), {.min = 0, .max = 100},
               "rope_type yarn: see mscale; multi_latent_attention multiplies scores by m(mscale_all_dim)^2"),
        number(KEY_IN(model, rope, low_freq_factor), {.min = 0, .max = 1e6},
               "rope_type llama3: the frequency of pairs with fewer turns is divided by the factor"),
        number(KEY_IN(model, rope, high_freq_factor), {.min = 0, .max = 1e6},
               "rope_type llama3: pairs with more turns keep their frequency"),
    };
}

// Section model: the rest.
std::vector<ConfigField> model_fields() {
    return {
        number(KEY(model, norm_epsilon), {.min = kLeastEpsilon, .max = 1},
               "added to the mean square in RMSNorm"),
        boolean(KEY(model, zero_centered_gamma),
                "norm weights are stored as gamma - 1 (Megatron: apply_layernorm_1p)"),
        integer(KEY(model, ffn_hidden_size), {.min = 128, .max = 1 << 20, .multiple_of = 128},
                "width of dense-FFN layers"),
        boolean(KEY_IN(model, glu, quick_geglu),
                "experts and FFNs: gate * sigmoid(1.702 gate) in place of SiLU"),
        number(KEY_IN(model, glu, glu_linear_offset), {.min = -100, .max = 100},
               "experts and FFNs: added to the up half"),
        number(KEY_IN(model, glu, activation_func_clamp_value), {.min = 0, .max = 1e6},
               "experts and FFNs: gates are at most this, ups within this and its negative; 0: no clamp"),
        boolean(KEY_IN(model, glu, activation_func_clamp_routed_only),
                "true: shared experts and dense FFNs have no clamp"),
        layer_frequency(),
        integer(KEY(model, vocab_size), {.min = 1, .max = 1 << 24},
                "token ids of the data; byte text needs 257 (256 bytes and the end of a document)"),
        integer(KEY(model, make_vocab_size_divisible_by), {.min = 1, .max = 1 << 16},
                "embedding and head are padded to a multiple of this"),
        boolean(KEY(model, untie_embeddings_and_output_weights), "false: the LM head is the embedding"),
        number(KEY(model, init_method_std), {.min = 0, .max = 10}, "standard deviation of initial weights"),
        number(
            KEY(model, embedding_init_method_std), {.min = 0, .max = 10},
            "standard deviation of initial embeddings; 0: init_method_std. With an untied head, training is "
            "more stable near 1: the first norm does not amplify small rows"),
        integer(KEY(model, seq_length), {.min = 1, .max = 1 << 24}, "tokens of a sequence"),
        integer(KEY(model, max_position_embeddings), {.min = 0, .max = 1 << 30},
                "longest sequence of an imported model, written to config.json by --export; changes "
                "nothing in training; 0 or less than seq_length: seq_length"),
        optional_text("model", "hf_family", AT(family),
                      "model_type of the model that was imported (fp8flow families); \"\": none"),
        boolean(
            KEY(model, yields_to_hf_config),
            "true: with --hf-config, keys that it sets are not taken from this file (--set changes them)"),
        integer(KEY(model, num_layers_at_start_in_bf16), {.min = 0, .max = kMaxLayers},
                "first layers that ignore the FP8 recipe"),
        integer(KEY(model, num_layers_at_end_in_bf16), {.min = 0, .max = kMaxLayers},
                "last layers that ignore the FP8 recipe"),
    };
}

std::vector<ConfigField> moe_fields() {
    return {
        integer(KEY(moe, num_experts), {.min = 1, .max = 4096}, "routed experts E"),
        integer(KEY(moe, moe_router_topk), {.min = 1, .max = 4096}, "experts per token, K"),
        integer(KEY(moe, moe_ffn_hidden_size), {.min = 128, .max = 1 << 20, .multiple_of = 128},
                "width F of one expert"),
        integer(KEY(moe, moe_shared_expert_intermediate_size), {.min = 0, .max = 1 << 20, .multiple_of = 128},
                "total width of the shared experts; 0: none"),
        boolean(KEY(moe, moe_shared_expert_gate),
                "the shared expert's rows are multiplied by sigmoid(x w), w a weight of its own"),
        choice(KEY(moe, moe_router_dtype), {"bf16", "fp32"},
               "of the router's weight in its GEMMs; fp32: CUDA cores compute them, tensor cores otherwise"),
        choice(KEY(moe, moe_router_score_function), {"softmax", "sigmoid"}, "logits to scores"),
        boolean(KEY(moe, moe_router_pre_softmax),
                "softmax over all experts, then top-k without renormalising"),
        boolean(KEY(moe, moe_router_norm_topk_prob),
                "sigmoid: divide the weights of a token's experts by their sum"),
        integer(KEY(moe, moe_router_num_groups), {.min = 0, .max = 4096},
                "groups of experts for group-limited routing; 0: off"),
        integer(KEY(moe, moe_router_group_topk), {.min = 0, .max = 4096},
                "groups of experts that a token may use; 0: off"),
        number(KEY(moe, moe_router_topk_scaling_factor), {.min = 0, .above_min = true},
               "factor on the weights after normalisation"),
        boolean(KEY(moe, moe_router_enable_expert_bias),
                "balances without a loss: a bias that changes the selection only"),
        number(KEY(moe, moe_router_bias_update_rate), {.min = 0, .max = 1},
               "step of the expert bias, once per global batch"),
        choices(KEY(moe, moe_router_load_balancing_type), {"aux_loss", "seq_aux_loss", "global_aux_loss"},
                "balancing losses; none or []: off"),
        numbers(KEY(moe, moe_aux_loss_coeff), {.min = 0}, "one coefficient per balancing loss"),
        choice(KEY(moe, moe_global_aux_loss_gradient), {"mean", "sum"},
               "gradient of global_aux_loss on several ranks. mean: averaged over ranks, as in Megatron-LM; "
               "sum: the gradient of the whole loss"),
        number(KEY(moe, moe_z_loss_coeff), {.min = 0}, "coefficient of mean(logsumexp(logits)^2)"),
        boolean(KEY(moe, moe_router_force_load_balancing),
                "benchmarks: ignore the router and spread tokens evenly over the experts"),
        number(KEY(moe, moe_router_force_biased), {.min = 0},
               "benchmarks: force this ratio of largest to mean expert load; 0: off"),
        number(KEY(moe, moe_expert_rank_capacity_factor), {.min = 0},
               "size of a rank's row buffers at the start over its balanced share T*K; a step that needs "
               "more is redone with larger buffers; 0: the worst case"),
        integer(KEY(moe, moe_row_alignment), {.min = 1, .max = 128},
                "rows of every expert are padded to a multiple of 1, 16, 32 or 128, as the recipe allows"),
        choice(KEY(moe, moe_combine_order), {"rank", "invariant"},
               "rank: fast; invariant: the same bits for every expert_model_parallel_size on the same number "
               "of ranks; needs more memory and time; not for fp8_tensorwise"),
    };
}

std::vector<ConfigField> precision_fields() {
    const std::vector<Recipe> flow = {Recipe::fp8_flow};
    std::vector<Recipe> fp8(kRecipes.begin(), kRecipes.end());
    std::erase(fp8, Recipe::bf16);
    return {
        choice(KEY(precision, recipe), kNamesOfRecipes,
               "the precision recipe of MoE, shared-expert and FFN layers"),
        optional_text(KEY(precision, flow),
                      "your own recipe, by its name in the library of --plugin (docs/usage/new_recipe.md); "
                      "\"\": none, or the only recipe of the library"),
        only(fp8, choice(KEY(precision, fp8_format), {"e4m3", "hybrid"}, "hybrid: gradients in E5M2")),
        only(fp8, boolean(KEY(precision, fp8_wgrad), "false: weight gradients from BF16 operands")),
        only(fp8,
             boolean(KEY(precision, fp8_attention_linears),
                     "the QKV and output projections of attention in FP8, as the recipe's other layers")),
        only({Recipe::fp8_blockwise, Recipe::fp8_flow},
             joined(
                 KEY(precision, moe_wgrad_micro_batches), op::kMaxWgradSets,
                 "number of micro-batches with their expert weight gradients in one GEMM, which keeps the "
                 "operands of all; auto: until a GEMM has 2048 rows per expert, limited by the micro-batches "
                 "of a step and by GPU memory; the log has the number")),
        choice(KEY(precision, moe_apply_probs_in), {"swiglu", "combine"},
               "where the routing probability multiplies. swiglu: before fc2; combine: after fc2, and the "
               "backward pass recomputes SwiGLU's output"),
        only({Recipe::fp8_tensorwise, Recipe::fp8_blockwise, Recipe::fp8_flow, Recipe::fp8_rowwise},
             choice(KEY(precision, scale_format), {"pow2", "fp32"},
                    "pow2: scales are powers of two; fp32: any FP32 scale")),
        only({Recipe::mxfp8},
             choice(KEY(precision, mx_rounding), {"floor", "rceil"}, "rounding of MXFP8's scales")),
        only(flow, boolean(KEY(precision, moe_quantize_before_dispatch),
                           "fp8_flow: FP8 on the wire; false: BF16, quantised after dispatch")),
        only(
            flow,
            boolean(KEY(precision, moe_scaling_aware_transpose),
                    "fp8_flow: transpose the saved FP8 rows directly; false: dequantise and quantise again")),
        only(flow,
             boolean(KEY(precision, moe_permute_padding_for_fp8), "fp8_flow: permute and pad in one step")),
        only(flow, boolean(KEY(precision, moe_act_quantize_fusion),
                           "fp8_flow: SwiGLU and quantisation in one step, forward and backward")),
        only(flow, boolean(KEY(precision, moe_norm_quantize_fusion),
                           "fp8_flow: the norm writes FP8 rows; false: one more cast, as the paper counts")),
        only({Recipe::fp8_tensorwise}, integer(KEY(precision, fp8_amax_history_len), {.min = 1, .max = 1024},
                                               "length of delayed scaling's amax history, in steps")),
    };
}

std::vector<ConfigField> recompute_fields() {
    return {
        choice(KEY(recompute, recompute_granularity), {"none", "selective", "full"},
               "full: whole layers; selective: recompute_modules"),
        recompute_modules(),
        only({Recipe::fp8_flow},
             choice(KEY(recompute, saved_rows), {"sorted", "received", "none"},
                    "what moe_expert keeps of received rows. sorted: by expert; received: each once, as "
                    "received; none: the backward pass dispatches again")),
    };
}

std::vector<ConfigField> schedule_fields() {
    return {
        boolean(KEY(schedule, moe_shared_expert_overlap),
                "GPUs: run the shared expert in parallel with route, plan and dispatch"),
        boolean(KEY(schedule, delay_wgrad_compute),
                "GPUs: run expert weight gradients and their transposes in parallel with data gradients and "
                "the combine of dX"),
        boolean(KEY(schedule, overlap_moe_expert_parallel_comm),
                "interleave micro-batches: the forward pass of one runs in parallel with the backward pass "
                "of the one before, so that the exchange of one hides under the GEMMs of the other; twice "
                "the activations"),
        boolean(KEY(schedule, overlap_grad_reduce),
                "GPUs: reduce a layer's gradients over ranks in parallel with the backward pass of the "
                "layers below"),
        boolean(KEY(schedule, overlap_param_gather),
                "GPUs, with training.use_distributed_optimizer: gather a layer's working copies in parallel "
                "with the forward pass of the layer before, in the next step"),
        integer(KEY(schedule, wire_sms), {.min = 0, .max = 132},
                "SMs for exchange calls that run in parallel with another micro-batch or, in gradient "
                "reduction, with the backward pass; 0: all"),
        boolean(KEY(schedule, gemm_tile_queue),
                "GPUs, with work in parallel: GEMMs take tiles from a queue instead of an even share, and "
                "exchange calls in parallel with the shared expert or weight gradients use wire_sms SMs"),
        choice(KEY(schedule, cuda_graph_impl), {"none", "full_iteration"},
               "full_iteration: capture a step in a CUDA graph and launch it as a whole (NCCL messages then "
               "have a fixed size); none: for debuggers and profilers"),
    };
}

// 2x4: two hosts of four ranks.
ConfigField hosts_field() {
    const std::string want = "hosts x ranks on each, e.g. 2x4, or \"\"";
    ConfigField field{
        "parallel", "hosts", want,
        "treat the ranks as if they ran on this many hosts, to test on one machine; \"\": as launched"};
    field.get = [](const Config& config) {
        const ParallelSpec& p = config.parallel;
        return quoted(p.hosts == 0 ? "" : fmt::format("{}x{}", p.hosts, p.ranks_per_host));
    };
    field.set = [want](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        static const std::regex form("([1-9][0-9]{0,3})x([1-9][0-9]{0,3})");
        ParallelSpec& p = config.parallel;
        p.hosts = p.ranks_per_host = 0;
        const std::string text = written.text();
        if (text.empty()) return std::nullopt;
        std::smatch parts;
        if (written.is_list || !std::regex_match(text, parts, form)) return refuse(want);
        p.hosts = std::stoll(parts[1].str());
        p.ranks_per_host = std::stoll(parts[2].str());
        return std::nullopt;
    };
    return field;
}

std::vector<ConfigField> parallel_fields() {
    return {
        integer(KEY(parallel, expert_model_parallel_size), {.min = 1, .max = 4096},
                "ranks that share the experts of a layer; divides the world size"),
        choice(KEY(parallel, moe_token_dispatcher_type), {"alltoall", "flex", "hierarchical"},
               "alltoall: NCCL send and receive; flex: rows written to peer memory over NVLink; "
               "hierarchical: a row crosses to another host once and is fanned out there"),
        choice(KEY(parallel, moe_flex_dispatcher_backend), {"nvlink", "cuda_ipc", "nccl_window"},
               "how flex maps the memory of other GPUs; nvlink: the first of the others that works"),
        choice(KEY(parallel, moe_message_sizes), {"routed", "fixed"},
               "size of NCCL messages. routed: as the routing needs, and the host waits twice in each "
               "dispatch and combine; fixed: for every token, and the host never waits"),
        hosts_field(),
        number(KEY(parallel, peer_deadline_seconds), {.min = 0, .max = 86400, .above_min = true},
               "longest wait for another rank, in seconds; then the job ends with a report"),
    };
}

std::vector<ConfigField> training_fields() {
    const NumberRange beta{.min = 0, .max = 1, .below_max = true};
    return {
        integer(KEY(training, micro_batch_size), {.min = 1, .max = 1 << 20},
                "sequences per rank in one forward pass"),
        integer(KEY(training, global_batch_size), {.min = 1, .max = 1 << 24},
                "sequences per step over all ranks"),
        integer(KEY(training, train_iters), {.min = 1}, "optimizer steps"),
        integer(KEY(training, seed), {.max = INT64_MAX}, "seed of initial weights and data order"),
        number(KEY(training, lr), {.min = 0}, "peak learning rate"),
        number(KEY(training, min_lr), {.min = 0}, "learning rate at the end of the decay"),
        choice(KEY(training, lr_decay_style), {"constant", "cosine", "linear", "WSD"},
               "learning-rate schedule after warm-up; WSD: lr until the last lr_wsd_decay_iters steps"),
        integer(KEY(training, lr_warmup_iters), {.min = 0}, "linear warm-up steps"),
        number(KEY(training, lr_warmup_init), {.min = 0}, "learning rate from which warm-up rises"),
        choice(KEY(training, lr_warmup_style), {"from_zero", "from_first_step"},
               "step n of a warm-up over W steps has lr x (n - 1) / W, as in Megatron-LM; or lr x n / W"),
        integer(KEY(training, lr_decay_iters), {.min = 0},
                "steps after which min_lr is reached; 0: train_iters"),
        integer(KEY(training, lr_wsd_decay_iters), {.min = 0},
                "WSD: last steps of lr_decay_iters, in which lr falls; 0: a fifth of lr_decay_iters"),
        choice(KEY(training, lr_wsd_decay_style), {"exponential", "linear", "cosine", "minus_sqrt"},
               "WSD: how lr falls, as in Megatron-LM"),
        number(KEY(training, weight_decay), {.min = 0}, "decoupled weight decay (AdamW)"),
        number(KEY(training, adam_beta1), beta, "decay of the first moment"),
        number(KEY(training, adam_beta2), beta, "decay of the second moment"),
        number(KEY(training, adam_eps), {.min = kLeastEpsilon}, "added to the root of the second moment"),
        choice(KEY_IN(training, state, main_grads_dtype), {"fp32", "bf16"},
               "gradients of routed experts, summed over micro-batches; bf16: sums of two or more are "
               "rounded stochastically. Other gradients are FP32"),
        choice(KEY_IN(training, state, exp_avg_dtype), {"fp32", "bf16"},
               "first moments; bf16: rounded stochastically when they are written"),
        choice(KEY_IN(training, state, exp_avg_sq_dtype), {"fp32", "bf16"},
               "second moments; bf16: rounded stochastically when they are written"),
        texts("training", "freeze", AT(training.freeze.names),
              "parameters that are not trained: parts of their names, with * and ? as in file names, e.g. "
              "[router, word_embeddings, layers.0.]; a frozen router keeps its expert bias, too"),
        boolean("training", "freeze_keeps_moments", AT(training.freeze.keeps_moments),
                "frozen parameters keep their moments in memory and checkpoints, to be trained later; false: "
                "they have none, and begin with zeros then"),
        boolean(
            KEY(training, use_distributed_optimizer),
            "divide masters and moments over the ranks that have the same parameters (all ranks; for experts "
            "their replicas). Each rank updates its slice, then working copies are gathered; same bits"),
        number(KEY(training, clip_grad), {.min = 0}, "global gradient norm; 0: no clipping"),
        number(KEY(training, loss_spike_factor), {.min = 0},
               "a step has diverged if its loss is above this many times the median of the last 32; 0: off"),
        number(KEY(training, grad_norm_limit), {.min = 0},
               "a step has diverged if its gradient norm, before clipping, is above this; 0: off"),
        choice(KEY(training, on_divergence), {"stop", "skip", "rollback"},
               "after a step with a NaN or past a limit, which is never applied. stop: write a checkpoint "
               "and end; skip: go on; rollback: return to the last checkpoint and skip the data"),
        integer(KEY(training, eval_interval), {.min = 0},
                "steps between held-out evaluations; 0: only at the end"),
        integer(KEY(training, eval_iters), {.min = 0}, "global batches of an evaluation; 0: none"),
    };
}

std::vector<ConfigField> data_fields() {
    return {
        choice(KEY(data, data_kind), {"text", "synthetic", "shards", "megatron"},
               "text: bytes of files; synthetic: a seeded Markov chain; shards: llm.c .bin files; megatron: "
               ".bin and .idx files"),
        texts(KEY(data, data_path),
              "files, folders and globs; with a weight before each, as [0.7, a, 0.3, b], a blend"),
        optional_text(KEY(data, routing_path),
                      "a file with the experts of every token, in place of the routers' choices (train "
                      "--routing); \"\": none"),
        texts(KEY(data, file_extensions),
              "text: only these in folders, e.g. [.h, .txt]; \"\": names without one; []: every file"),
        number(KEY(data, held_out_fraction), {.min = 0, .max = 0.5},
               "share held out for evaluation. text: of the files; megatron: of each file's documents, the "
               "last ones"),
        integer(KEY(data, max_bytes), {.min = 1}, "text: read at most this many bytes"),
        integer(KEY(data, synthetic_vocab_size), {.min = 2, .max = 65536}, "states of the Markov chain"),
        integer(KEY(data, synthetic_order), {.min = 1, .max = 16}, "tokens of context of the chain"),
        number(KEY(data, synthetic_zipf_exponent), {.min = 0, .max = 4},
               "Zipf exponent of the token frequencies"),
        integer(KEY(data, synthetic_successors), {.min = 1, .max = 32}, "likely next tokens per context"),
        number(KEY(data, synthetic_noise), {.min = 0.01, .max = 1}, "share of draws that ignore the context"),
        integer(KEY(data, synthetic_seed), {.max = INT64_MAX}, "seed of the chain itself"),
    };
}

std::vector<ConfigField> output_fields() {
    return {
        text(KEY(output, out), "folder of everything a run writes; --out overrides"),
        integer(KEY(output, log_interval), {.min = 1}, "steps between lines of the log"),
        boolean(KEY(output, metrics), "write metrics.jsonl"),
        optional_text(KEY(output, tensorboard_dir),
                      "name of a folder below output.out for TensorBoard's event files; \"\": none"),
        integer(KEY(output, tensorboard_log_interval), {.min = 1}, "steps between TensorBoard scalars"),
        boolean(KEY(output, moe_per_layer_logging),
                "TensorBoard: balancing losses and z-loss also per layer"),
        optional_text(KEY(output, record_routing),
                      "a file for the experts that the routers choose (train --record-routing); \"\": none"),
        boolean(KEY(output, time_stages),
                "seconds per stage of every step in metrics.jsonl, from device clocks"),
        boolean(KEY(output, tensor_stats),
                "underflow, saturation, scales and error of every FP8 tensor of every layer, and what "
                "transposed copies lose"),
        integer(KEY(output, tensor_stats_interval), {.min = 1}, "steps between tensor statistics"),
        choice(KEY(output, export_format), {"none", "bf16", "f32", "fp8"},
               "at the end, train writes the weights with Hugging Face names to hf below output.out; "
               "--export sets it"),
    };
}

// Earlier versions had true and false.
ConfigField control_arm_field() {
    ConfigField field =
        choice(KEY(validate, control_arm), {"none", "ulp", "exact"},
               "the noise floor. ulp: bf16 from initial weights one unit in the last place away; exact: "
               "bf16 with another order of summation, up to twice as slow; true is ulp, false none");
    field.set = [by_name = field.set](Config& config, const WrittenValue& written) {
        const auto truth = read_truth(written.scalar());
        return by_name(config, truth ? WrittenValue{.items = {*truth ? "ulp" : "none"}} : written);
    };
    return field;
}

std::vector<ConfigField> validate_fields() {
    return {
        choices(KEY(validate, recipes), kNamesOfRecipes, "runs to compare; bf16 is the baseline"),
        number(KEY(validate, max_relative_loss_error), {.min = 0, .above_min = true},
               "limit of the relative difference of the loss: its 95 % interval must lie within"),
        number(KEY(validate, ema_decay), {.min = 0, .max = 1, .below_max = true},
               "smoothing of the loss curves that are compared"),
        integer(KEY(validate, warmup_iters), {.min = 0}, "steps left out of the verdict"),
        control_arm_field(),
    };
}

std::vector<ConfigField> profile_fields() {
    return {
        integer(KEY(profile, profile_step_start), {.min = 1},
                "first step that is measured, counted from 0; the steps before it warm up"),
        integer(KEY(profile, profile_step_end), {.min = 2}, "end of the measured steps, exclusive"),
        choices(KEY(profile, profile_recipes), kNamesOfRecipes,
                "recipes to compare; speed-ups are over the first"),
        choice(KEY(profile, routing), {"balanced", "skewed_1.25", "skewed_2.0", "data"},
               "expert loads. balanced: equal; skewed: forced to this ratio of largest to mean; data: as the "
               "router chooses"),
        number(KEY(profile, energy_seconds), {.min = 0, .max = 3600},
               "GPUs: seconds of steps for the energy measurement of each recipe; 0: off"),
    };
}

std::vector<ConfigField> kernels_fields() {
    return {
        choice(KEY(kernels, attention_backend), {"auto", "native", "cudnn"},
               "GPUs: native is this project's attention, cudnn is cuDNN's; auto takes cuDNN's where the "
               "program was built with it and it supports the shape, otherwise native"),
    };
}

std::vector<ConfigField> checkpoint_fields() {
    return {
        optional_text(KEY(checkpoint, save),
                      "folder of this run's checkpoints; \"\": checkpoints below output.out"),
        integer(KEY(checkpoint, save_interval), {.min = 0},
                "steps between checkpoints, and one after the last step; 0: none"),
        optional_text(KEY(checkpoint, pretrained_checkpoint),
                      "a Hugging Face model to start from: a .safetensors file, an index, or a folder; "
                      "--weights sets it"),
        optional_text(KEY(checkpoint, load),
                      "resume from: auto (the newest complete checkpoint of this run, if any), a run's "
                      "folder, a folder of checkpoints, or one checkpoint; --resume sets it"),
        integer(KEY(checkpoint, most_recent_k), {.min = 0, .max = 1 << 20},
                "number of newest checkpoints to keep; 0: all"),
        boolean(KEY(checkpoint, async_save),
                "write in the background; training pauses only for the copy to host memory"),
        boolean(KEY(checkpoint, finetune),
                "load weights only; moments, step and data position start from scratch"),
        choice(KEY(checkpoint, on_error), {"stop", "warn"},
               "if a checkpoint cannot be written. stop: end the run; warn: try again at the next interval"),
    };
}

std::vector<ConfigField> build_table() {
    std::vector<ConfigField> table;
    for (auto section : {attention_fields, model_fields, moe_fields, precision_fields, recompute_fields,
                         schedule_fields, parallel_fields, training_fields, data_fields, output_fields,
                         validate_fields, profile_fields, kernels_fields, checkpoint_fields})
        for (ConfigField& field : section()) table.push_back(std::move(field));
    return table;
}

}  // namespace

const std::vector<ConfigField>& config_fields() {
    static const std::vector<ConfigField> fields = build_table();
    return fields;
}

const std::vector<std::string>& config_sections() {
    static const std::vector<std::string> sections = [] {
        std::vector<std::string> names;
        for (const ConfigField& field : config_fields())
            if (names.empty() || names.back() != field.section) names.push_back(field.section);
        return names;
    }();
    return sections;
}

const ConfigField* find_field(std::string_view section, std::string_view key) {
    const ConfigField* field = find_leaf(key);
    return field && field->section == section ? field : nullptr;
}

const ConfigField* find_leaf(std::string_view key) {
    if (key == "moe_wgrad_pair_micro_batches") key = "moe_wgrad_micro_batches";  // of earlier versions
    const auto& fields = config_fields();
    const auto found = std::ranges::find(fields, key, &ConfigField::key);
    return found == fields.end() ? nullptr : &*found;
}

const ConfigField& field_named(std::string_view name) {
    const ConfigField* field = find_leaf(name.substr(name.find('.') + 1));
    FP8FLOW_CHECK(field != nullptr && field->name() == name, "no key {}", name);
    return *field;
}

std::vector<Recipe> default_validate_recipes() {
    return {Recipe::bf16, Recipe::fp8_blockwise, Recipe::fp8_flow};
}

std::string WrittenValue::text() const {
    return is_list ? fmt::format("[{}]", fmt::join(items, ", ")) : items.at(0);
}

std::string_view recipe_name(Recipe recipe) {
    const auto index = to_size(recipe);
    return index < kRecipeNames.size() ? kRecipeNames[index] : "fp32";
}

std::string_view recipe_name(const PrecisionSpec& precision) {
    return precision.flow.empty() ? recipe_name(precision.recipe) : std::string_view(precision.flow);
}

}  // namespace fp8flow
