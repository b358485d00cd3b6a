// SPDX-License-Identifier: MIT
// The table of configuration keys. Adding a key is adding a line here and a member to its struct.
// Long because it is one table.
#include "model/config/fields.h"

#include "model/config/builders.h"
#include "model/config/layer_pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

// The accessor of a struct member; `auto&` serves reading and writing.
#define AT(member) \
    [](auto& config) -> auto& { return config.member; }

namespace fp8flow {
namespace {

using namespace builders;

// Smaller ones do not bound a quotient: rows of zeros to the power -3 in the norm's backward, or a moment of
// 1e-23 over the root of its square, which is 0 in FP32.
constexpr double kLeastEpsilon = 1e-20;

const Names kNamesOfRecipes(kRecipeNames.begin(), kRecipeNames.end());
const Names kRecomputeModules = {"core_attn", "layernorm", "moe_act", "moe_expert", "moe", "shared_experts"};

// A switch for each module in the spec, a list of names in the file (Megatron's recompute_modules).
template <class Spec> auto recompute_flags(Spec& recompute) {
    return std::array{&recompute.core_attn,  &recompute.layernorm, &recompute.moe_act,
                      &recompute.moe_expert, &recompute.moe,       &recompute.shared_experts};
}

ConfigField recompute_modules() {
    const std::string want = "a list of " + joined(kRecomputeModules);
    ConfigField field{"recompute", "recompute_modules",
                      want,        "what selective recompute re-runs in the backward instead of saving",
                      {},          {},
                      false,       {}};
    field.get = [](const Config& config) {
        Names names;
        const auto flags = recompute_flags(config.recompute);
        for (size_t i = 0; i < flags.size(); ++i) {
            if (*flags[i]) names.push_back(kRecomputeModules[i]);
        }
        return yaml_list(names, [](const std::string& name) { return name; });
    };
    field.set = [want](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        const auto flags = recompute_flags(config.recompute);
        for (bool* flag : flags) *flag = false;
        if (!written.is_list && written.items.at(0) == "none") return std::nullopt;
        for (const auto& item : written.items) {
            const auto index = index_of(item, kRecomputeModules);
            if (!index) return refuse_name(item, kRecomputeModules, want);
            *flags[*index] = true;
        }
        return std::nullopt;
    };
    return field;
}

// Kept as written until num_layers is known (resolve_config).
ConfigField layer_frequency() {
    const std::string want = "N (every N-th layer is MoE), a list of 0 and 1, or ([0]*3+[1]*58)";
    ConfigField field{
        "model", "moe_layer_freq", want, "which layers are MoE; the others have a dense FFN", {}, {}, false,
        {}};
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

void add_model(std::vector<ConfigField>& fields) {
    const std::string s = "model";
    fields.push_back(
        integer(s, "num_layers", AT(model.num_layers), {.min = 1, .max = kMaxLayers}, "transformer blocks"));
    fields.push_back(integer(s, "hidden_size", AT(model.hidden_size),
                             {.min = 128, .max = 1 << 20, .multiple_of = 128},
                             "width of the residual stream"));
    fields.push_back(
        boolean(s, "attention", AT(model.attention), "false: no attention, to measure MoE layers alone"));
    fields.push_back(integer(s, "num_attention_heads", AT(model.num_attention_heads), {.min = 1, .max = 1024},
                             "query heads"));
    fields.push_back(integer(s, "num_query_groups", AT(model.num_query_groups), {.min = 1, .max = 1024},
                             "key and value heads (grouped-query attention)"));
    fields.push_back(integer(s, "kv_channels", AT(model.kv_channels),
                             {.min = 2, .max = 1024, .multiple_of = 2}, "dimension of one head"));
    fields.push_back(
        boolean(s, "qk_layernorm", AT(model.qk_layernorm), "RMSNorm of queries and keys, per head"));
    fields.push_back(
        number(s, "rotary_base", AT(model.rotary_base), {.min = 1, .above_min = true}, "RoPE's theta"));
    fields.push_back(number(s, "norm_epsilon", AT(model.norm_epsilon), {.min = kLeastEpsilon, .max = 1},
                            "added to the mean square in RMSNorm"));
    fields.push_back(boolean(s, "zero_centered_gamma", AT(model.zero_centered_gamma),
                             "norm weights are stored as gamma - 1 (Megatron: apply_layernorm_1p)"));
    fields.push_back(integer(s, "ffn_hidden_size", AT(model.ffn_hidden_size),
                             {.min = 128, .max = 1 << 20, .multiple_of = 128}, "width of dense-FFN layers"));
    fields.push_back(layer_frequency());
    fields.push_back(
        integer(s, "vocab_size", AT(model.vocab_size), {.min = 1, .max = 1 << 24},
                "token ids of the data; byte text needs 257 (256 bytes and the end of a document)"));
    fields.push_back(integer(s, "make_vocab_size_divisible_by", AT(model.make_vocab_size_divisible_by),
                             {.min = 1, .max = 1 << 16},
                             "embedding and head are padded to a multiple of this"));
    fields.push_back(boolean(s, "untie_embeddings_and_output_weights",
                             AT(model.untie_embeddings_and_output_weights),
                             "false: the LM head is the embedding"));
    fields.push_back(number(s, "init_method_std", AT(model.init_method_std), {.min = 0, .max = 10},
                            "standard deviation of initial weights"));
    fields.push_back(number(
        s, "embedding_init_method_std", AT(model.embedding_init_method_std), {.min = 0, .max = 10},
        "standard deviation of initial embeddings; 0: init_method_std. With an untied head, training is "
        "more stable near 1: the first norm does not amplify small rows"));
    fields.push_back(
        integer(s, "seq_length", AT(model.seq_length), {.min = 1, .max = 1 << 24}, "tokens of a sequence"));
    fields.push_back(
        integer(s, "max_position_embeddings", AT(model.max_position_embeddings), {.min = 0, .max = 1 << 30},
                "longest sequence of an imported model, written to config.json by --export; changes "
                "nothing in training; 0 or less than seq_length: seq_length"));
    fields.push_back(integer(s, "num_layers_at_start_in_bf16", AT(model.num_layers_at_start_in_bf16),
                             {.min = 0, .max = kMaxLayers}, "first layers that ignore the FP8 recipe"));
    fields.push_back(integer(s, "num_layers_at_end_in_bf16", AT(model.num_layers_at_end_in_bf16),
                             {.min = 0, .max = kMaxLayers}, "last layers that ignore the FP8 recipe"));
    fields.push_back(fixed(s, "normalization", "RMSNorm", "no other norm is implemented"));
    fields.push_back(
        fixed(s, "position_embedding_type", "rope", "no other position embedding is implemented"));
    fields.push_back(fixed(s, "swiglu", "true", "no other activation is implemented"));
    fields.push_back(fixed(s, "disable_bias_linear", "true", "linear layers have no bias"));
    fields.push_back(
        fixed(s, "multi_latent_attention", "false",
              "MLA is not implemented; use the one-layer configs, e.g. configs/layer_deepseek_v3.yaml"));
}

void add_moe(std::vector<ConfigField>& fields) {
    const std::string s = "moe";
    fields.push_back(
        integer(s, "num_experts", AT(moe.num_experts), {.min = 1, .max = 4096}, "routed experts E"));
    fields.push_back(integer(s, "moe_router_topk", AT(moe.moe_router_topk), {.min = 1, .max = 4096},
                             "experts per token, K"));
    fields.push_back(integer(s, "moe_ffn_hidden_size", AT(moe.moe_ffn_hidden_size),
                             {.min = 128, .max = 1 << 20, .multiple_of = 128}, "width F of one expert"));
    fields.push_back(integer(
        s, "moe_shared_expert_intermediate_size", AT(moe.moe_shared_expert_intermediate_size),
        {.min = 0, .max = 1 << 20, .multiple_of = 128}, "total width of the shared experts; 0: none"));
    fields.push_back(choice(s, "moe_router_score_function", AT(moe.moe_router_score_function),
                            {"softmax", "sigmoid"}, "logits to scores"));
    fields.push_back(boolean(s, "moe_router_pre_softmax", AT(moe.moe_router_pre_softmax),
                             "softmax over all experts, then top-k without renormalising"));
    fields.push_back(boolean(s, "moe_router_norm_topk_prob", AT(moe.moe_router_norm_topk_prob),
                             "sigmoid: the weights of a token's experts are divided by their sum"));
    fields.push_back(integer(s, "moe_router_num_groups", AT(moe.moe_router_num_groups),
                             {.min = 0, .max = 4096}, "groups of experts for group-limited routing; 0: off"));
    fields.push_back(integer(s, "moe_router_group_topk", AT(moe.moe_router_group_topk),
                             {.min = 0, .max = 4096}, "groups a token may use; 0: off"));
    fields.push_back(number(s, "moe_router_topk_scaling_factor", AT(moe.moe_router_topk_scaling_factor),
                            {.min = 0, .above_min = true}, "factor on the weights after normalisation"));
    fields.push_back(boolean(s, "moe_router_enable_expert_bias", AT(moe.moe_router_enable_expert_bias),
                             "balance without a loss: a bias on the selection only"));
    fields.push_back(number(s, "moe_router_bias_update_rate", AT(moe.moe_router_bias_update_rate),
                            {.min = 0, .max = 1}, "step of the expert bias, once per global batch"));
    fields.push_back(choices(s, "moe_router_load_balancing_type", AT(moe.moe_router_load_balancing_type),
                             {"aux_loss", "seq_aux_loss", "global_aux_loss"},
                             "balancing losses; none or []: off"));
    fields.push_back(numbers(s, "moe_aux_loss_coeff", AT(moe.moe_aux_loss_coeff), {.min = 0},
                             "one coefficient per balancing loss"));
    fields.push_back(choice(s, "moe_global_aux_loss_gradient", AT(moe.moe_global_aux_loss_gradient),
                            {"mean", "sum"},
                            "of global_aux_loss on several ranks: the mean of the ranks' gradients, as in "
                            "Megatron-LM; or their sum, the gradient of the whole loss"));
    fields.push_back(number(s, "moe_z_loss_coeff", AT(moe.moe_z_loss_coeff), {.min = 0},
                            "coefficient of mean(logsumexp(logits)^2)"));
    fields.push_back(boolean(s, "moe_router_force_load_balancing", AT(moe.moe_router_force_load_balancing),
                             "benchmarks: ignore the router, spread tokens evenly over the experts"));
    fields.push_back(number(s, "moe_router_force_biased", AT(moe.moe_router_force_biased), {.min = 0},
                            "benchmarks: force this max/mean load of experts; 0: off"));
    fields.push_back(number(s, "moe_expert_rank_capacity_factor", AT(moe.moe_expert_rank_capacity_factor),
                            {.min = 0},
                            "room for rows of a rank at the start over its balanced share T*K; a step that "
                            "needs more is done again with more; 0: room for the worst case"));
    fields.push_back(
        integer(s, "moe_row_alignment", AT(moe.moe_row_alignment), {.min = 1, .max = 128},
                "rows of every expert are padded to a multiple of 1, 16, 32 or 128, as the recipe allows"));
    fields.push_back(
        choice(s, "moe_combine_order", AT(moe.moe_combine_order), {"rank", "invariant"},
               "rank: fast; invariant: a number of ranks trains to the same bits with every "
               "expert_model_parallel_size, at a cost in memory and time; not in fp8_tensorwise"));
    fields.push_back(fixed(s, "moe_router_dtype", "fp32", "scores are always FP32"));
    fields.push_back(fixed(s, "moe_grouped_gemm", "true", "experts always run as one grouped GEMM"));
}

void add_precision(std::vector<ConfigField>& fields) {
    const std::string s = "precision";
    const std::vector<Recipe> flow = {Recipe::fp8_flow};
    std::vector<Recipe> fp8(kRecipes.begin(), kRecipes.end());
    std::erase(fp8, Recipe::bf16);
    const auto add = [&](ConfigField field, std::vector<Recipe> recipes) {
        field.recipes = std::move(recipes);
        fields.push_back(std::move(field));
    };
    add(choice(s, "recipe", AT(precision.recipe), kNamesOfRecipes,
               "the precision recipe of MoE, shared-expert and FFN layers"),
        {});
    add(optional_text(s, "flow", AT(precision.flow),
                      "a recipe of your own instead, by the name that the library of --plugin gives it "
                      "(docs/usage/new_recipe.md); of one library with one recipe that one; \"\": none"),
        {});
    add(choice(s, "fp8_format", AT(precision.fp8_format), {"e4m3", "hybrid"}, "hybrid: gradients in E5M2"),
        fp8);
    add(boolean(s, "fp8_wgrad", AT(precision.fp8_wgrad), "false: weight gradients from BF16 operands"), fp8);
    add(boolean(s, "moe_wgrad_pair_micro_batches", AT(precision.moe_wgrad_pair_micro_batches),
                "delay expert weight gradients to the second of two micro-batches: one GEMM for both"),
        {Recipe::fp8_blockwise, Recipe::fp8_flow});
    add(choice(s, "moe_apply_probs_in", AT(precision.moe_apply_probs_in), {"swiglu", "combine"},
               "where the routing probability multiplies: in SwiGLU, before fc2; or in combine, where the "
               "backward makes SwiGLU's output again instead of keeping it"),
        {});
    add(choice(s, "scale_format", AT(precision.scale_format), {"pow2", "fp32"},
               "scales as powers of two, or free FP32 scales"),
        {Recipe::fp8_tensorwise, Recipe::fp8_blockwise, Recipe::fp8_flow, Recipe::fp8_rowwise});
    add(choice(s, "mx_rounding", AT(precision.mx_rounding), {"floor", "rceil"}, "rounding of MXFP8's scales"),
        {Recipe::mxfp8});
    add(boolean(s, "moe_quantize_before_dispatch", AT(precision.moe_quantize_before_dispatch),
                "flow: FP8 on the wire; false: BF16, quantised after"),
        flow);
    add(boolean(s, "moe_scaling_aware_transpose", AT(precision.moe_scaling_aware_transpose),
                "flow: transpose the saved FP8 rows directly; false: dequantise and quantise again"),
        flow);
    add(boolean(s, "moe_permute_padding_for_fp8", AT(precision.moe_permute_padding_for_fp8),
                "flow: permute and pad in one step"),
        flow);
    add(boolean(s, "moe_act_quantize_fusion", AT(precision.moe_act_quantize_fusion),
                "flow: SwiGLU x prob and quantise in one step, forward and backward"),
        flow);
    add(boolean(s, "moe_norm_quantize_fusion", AT(precision.moe_norm_quantize_fusion),
                "flow: the norm writes FP8 rows; false: one more cast, as the paper counts"),
        flow);
    add(integer(s, "fp8_amax_history_len", AT(precision.fp8_amax_history_len), {.min = 1, .max = 1024},
                "length of delayed scaling's amax history, in steps"),
        {Recipe::fp8_tensorwise});
    add(boolean(s, "fault_wrong_scale_index", AT(precision.fault_wrong_scale_index),
                "test only: a planted bug that `validate` must catch"),
        {});
}

void add_recompute(std::vector<ConfigField>& fields) {
    fields.push_back(choice("recompute", "recompute_granularity", AT(recompute.recompute_granularity),
                            {"none", "selective", "full"},
                            "full: whole layers; selective: recompute_modules"));
    fields.push_back(recompute_modules());
    ConfigField saved =
        choice("recompute", "saved_rows", AT(recompute.saved_rows), {"sorted", "received", "none"},
               "what moe_expert keeps of received rows: sorted by expert; each once, as it came "
               "over the wire; or none, and the backward dispatches again");
    saved.recipes = {Recipe::fp8_flow};
    fields.push_back(std::move(saved));
}

void add_schedule(std::vector<ConfigField>& fields) {
    const std::string s = "schedule";
    fields.push_back(boolean(s, "moe_shared_expert_overlap", AT(schedule.moe_shared_expert_overlap),
                             "GPUs: the shared expert on a stream beside route, plan and dispatch"));
    fields.push_back(boolean(s, "delay_wgrad_compute", AT(schedule.delay_wgrad_compute),
                             "GPUs: expert weight gradients, with their transposes, on a stream beside data "
                             "gradients and the combine of dX"));
    fields.push_back(
        boolean(s, "overlap_moe_expert_parallel_comm", AT(schedule.overlap_moe_expert_parallel_comm),
                "the forward of a micro-batch beside the backward of the one before: the wire of "
                "one beside the GEMMs of the other; twice the activations"));
    fields.push_back(boolean(s, "overlap_grad_reduce", AT(schedule.overlap_grad_reduce),
                             "GPUs: gradients of a layer are reduced over ranks beside the backward of the "
                             "layers below"));
    fields.push_back(
        boolean(s, "overlap_param_gather", AT(schedule.overlap_param_gather),
                "GPUs, with training.use_distributed_optimizer: the working copies of a layer are "
                "gathered beside the forward of the layer before, in the step after the update"));
    fields.push_back(integer(s, "wire_sms", AT(schedule.wire_sms), {.min = 0, .max = 132},
                             "SMs of calls of the exchange beside another micro-batch or in gradient "
                             "reduction beside the backward, with several ranks; 0: all"));
    fields.push_back(
        choice(s, "cuda_graph_impl", AT(schedule.cuda_graph_impl), {"none", "full_iteration"},
               "full_iteration: a step is captured in a CUDA graph and launched as a whole; over "
               "NCCL messages then have a fixed size. none: for debuggers and profilers"));
}

// 2x4: two hosts of four ranks.
ConfigField hosts_field() {
    const std::string want = "hosts x ranks on each, e.g. 2x4, or \"\"";
    ConfigField field{
        "parallel", "hosts",
        want,       "as if ranks ran on so many hosts, to try on one what crosses hosts; \"\": as launched",
        {},         {},
        false,      {}};
    field.get = [](const Config& config) {
        const ParallelSpec& p = config.parallel;
        return quoted(p.hosts == 0 ? "" : fmt::format("{}x{}", p.hosts, p.ranks_per_host));
    };
    field.set = [want](Config& config, const WrittenValue& written) -> std::optional<Refusal> {
        ParallelSpec& p = config.parallel;
        p.hosts = p.ranks_per_host = 0;
        if (written.is_list) return refuse(want);
        const std::string& text = written.items.at(0);
        if (text.empty()) return std::nullopt;
        const auto number = [](const char* begin, const char* end, int64_t& value) {
            const auto [stop, error] = std::from_chars(begin, end, value);
            return error == std::errc() && stop == end && value >= 1 && value <= 4096;
        };
        const size_t cross = text.find('x');
        const char *begin = text.data(), *end = begin + text.size();
        int64_t hosts = 0, ranks = 0;
        if (cross == std::string::npos || !number(begin, begin + cross, hosts) ||
            !number(begin + cross + 1, end, ranks))
            return refuse(want);
        p.hosts = hosts;
        p.ranks_per_host = ranks;
        return std::nullopt;
    };
    return field;
}

void add_parallel(std::vector<ConfigField>& fields) {
    const std::string s = "parallel";
    fields.push_back(integer(s, "expert_model_parallel_size", AT(parallel.expert_model_parallel_size),
                             {.min = 1, .max = 4096},
                             "ranks that share the experts of a layer; divides the world size"));
    fields.push_back(choice(
        s, "moe_token_dispatcher_type", AT(parallel.moe_token_dispatcher_type),
        {"alltoall", "flex", "hierarchical"},
        "GPUs: NCCL send and receive; rows written directly to peer memory over NVLink; or two levels: "
        "a row crosses to another host once and is fanned out there, over peer memory on GPUs"));
    fields.push_back(choice(s, "moe_flex_dispatcher_backend", AT(parallel.moe_flex_dispatcher_backend),
                            {"nvlink", "cuda_ipc", "nccl_window"},
                            "how flex maps peers' memory; nvlink: the first of the others that works"));
    fields.push_back(
        choice(s, "moe_message_sizes", AT(parallel.moe_message_sizes), {"routed", "fixed"},
               "of NCCL's messages: as the routing makes them, and the host waits twice in each "
               "dispatch and combine; or always for every token, and the host waits for nothing"));
    fields.push_back(hosts_field());
    fields.push_back(number(s, "peer_deadline_seconds", AT(parallel.peer_deadline_seconds),
                            {.min = 0, .max = 86400, .above_min = true},
                            "longest wait for another rank; then the job ends with a report"));
    for (const char* key : {"tensor_model_parallel_size", "pipeline_model_parallel_size",
                            "context_parallel_size", "expert_tensor_parallel_size"}) {
        fields.push_back(fixed(s, key, "1", "only data and expert parallelism are implemented"));
    }
}

void add_training(std::vector<ConfigField>& fields) {
    const std::string s = "training";
    fields.push_back(integer(s, "micro_batch_size", AT(training.micro_batch_size), {.min = 1, .max = 1 << 20},
                             "sequences per rank in one forward pass"));
    fields.push_back(integer(s, "global_batch_size", AT(training.global_batch_size),
                             {.min = 1, .max = 1 << 24}, "sequences per step over all ranks"));
    fields.push_back(integer(s, "train_iters", AT(training.train_iters), {.min = 1}, "optimizer steps"));
    fields.push_back(
        integer(s, "seed", AT(training.seed), {.max = INT64_MAX}, "seed of initial weights and data order"));
    fields.push_back(number(s, "lr", AT(training.lr), {.min = 0}, "peak learning rate"));
    fields.push_back(
        number(s, "min_lr", AT(training.min_lr), {.min = 0}, "learning rate at the end of the decay"));
    fields.push_back(choice(s, "lr_decay_style", AT(training.lr_decay_style), {"constant", "cosine"},
                            "learning-rate schedule after warm-up"));
    fields.push_back(
        integer(s, "lr_warmup_iters", AT(training.lr_warmup_iters), {.min = 0}, "linear warm-up steps"));
    fields.push_back(
        choice(s, "lr_warmup_style", AT(training.lr_warmup_style), {"from_zero", "from_first_step"},
               "step n of a warm-up over W steps has lr x (n - 1) / W, as in Megatron-LM; or lr x n / W"));
    fields.push_back(integer(s, "lr_decay_iters", AT(training.lr_decay_iters), {.min = 0},
                             "step at which min_lr is reached; 0: train_iters"));
    fields.push_back(
        number(s, "weight_decay", AT(training.weight_decay), {.min = 0}, "decoupled weight decay (AdamW)"));
    const NumberRange beta{.min = 0, .max = 1, .below_max = true};
    fields.push_back(number(s, "adam_beta1", AT(training.adam_beta1), beta, "decay of the first moment"));
    fields.push_back(number(s, "adam_beta2", AT(training.adam_beta2), beta, "decay of the second moment"));
    fields.push_back(number(s, "adam_eps", AT(training.adam_eps), {.min = kLeastEpsilon},
                            "added to the root of the second moment"));
    fields.push_back(choice(s, "main_params_dtype", AT(training.state.main_params_dtype), {"fp32"},
                            "master weights of the optimizer"));
    fields.push_back(choice(s, "main_grads_dtype", AT(training.state.main_grads_dtype), {"fp32", "bf16"},
                            "gradients of the routed experts' weights, in which micro-batches add up; bf16: "
                            "sums of two or more are rounded stochastically. All other gradients are FP32"));
    fields.push_back(choice(s, "exp_avg_dtype", AT(training.state.exp_avg_dtype), {"fp32", "bf16"},
                            "first moments; bf16: rounded stochastically when they are written"));
    fields.push_back(choice(s, "exp_avg_sq_dtype", AT(training.state.exp_avg_sq_dtype), {"fp32", "bf16"},
                            "second moments; bf16: rounded stochastically when they are written"));
    fields.push_back(boolean(s, "use_distributed_optimizer", AT(training.use_distributed_optimizer),
                             "masters and moments divided over the ranks that have the same parameters (all "
                             "ranks; of experts, their replicas): each updates its slice and the working "
                             "copies are gathered; the same bits"));
    fields.push_back(
        number(s, "clip_grad", AT(training.clip_grad), {.min = 0}, "global gradient norm; 0: no clipping"));
    fields.push_back(
        number(s, "loss_spike_factor", AT(training.loss_spike_factor), {.min = 0},
               "a step whose loss is above this many times the median of the last 32 has diverged; 0: off"));
    fields.push_back(
        number(s, "grad_norm_limit", AT(training.grad_norm_limit), {.min = 0},
               "a step whose gradient norm, before clipping, is above this has diverged; 0: off"));
    fields.push_back(integer(s, "zero_grad_iters", AT(training.zero_grad_iters), {.min = 0},
                             "the run stops after so many steps in a row whose gradient is 0; 0: off"));
    fields.push_back(
        choice(s, "on_divergence", AT(training.on_divergence), {"stop", "skip", "rollback"},
               "a step that diverged, or has a NaN, is not applied; then: stop with a checkpoint, skip "
               "the step, or go back to the last checkpoint and on with the data after the step"));
    fields.push_back(integer(s, "max_skipped_iters", AT(training.max_skipped_iters), {.min = 1},
                             "skip: the run stops after so many in a row"));
    fields.push_back(integer(s, "max_rollbacks", AT(training.max_rollbacks), {.min = 1},
                             "rollback: the run stops after so many"));
    fields.push_back(integer(s, "eval_interval", AT(training.eval_interval), {.min = 0},
                             "steps between held-out evaluations; 0: only at the end"));
    fields.push_back(integer(s, "eval_iters", AT(training.eval_iters), {.min = 0},
                             "global batches of an evaluation; 0: none"));
    fields.push_back(fixed(s, "deterministic_mode", "true", "same seed gives the same bits, always"));
    fields.push_back(fixed(s, "optimizer", "adam", "AdamW with FP32 masters is the one optimizer"));
}

void add_data(std::vector<ConfigField>& fields) {
    const std::string s = "data";
    fields.push_back(choice(s, "data_kind", AT(data.data_kind), {"text", "synthetic", "shards", "megatron"},
                            "bytes of files; seeded Markov chain; llm.c .bin token shards; Megatron's .bin "
                            "and .idx"));
    fields.push_back(texts(s, "data_path", AT(data.data_path), "files, folders and globs"));
    fields.push_back(
        texts(s, "file_extensions", AT(data.file_extensions),
              "text: only these in folders, e.g. [.h, .txt]; \"\": names without one; []: every file"));
    fields.push_back(
        number(s, "held_out_fraction", AT(data.held_out_fraction), {.min = 0, .max = 0.5},
               "share held out for evaluation, never trained on; text: of the files; megatron: of the "
               "documents of each file, the last ones"));
    fields.push_back(
        integer(s, "max_bytes", AT(data.max_bytes), {.min = 1}, "text: read at most this many bytes"));
    fields.push_back(integer(s, "synthetic_vocab_size", AT(data.synthetic_vocab_size),
                             {.min = 2, .max = 65536}, "states of the Markov chain"));
    fields.push_back(integer(s, "synthetic_order", AT(data.synthetic_order), {.min = 1, .max = 16},
                             "tokens of context of the chain"));
    fields.push_back(number(s, "synthetic_zipf_exponent", AT(data.synthetic_zipf_exponent),
                            {.min = 0, .max = 4}, "Zipf exponent of the token frequencies"));
    fields.push_back(integer(s, "synthetic_successors", AT(data.synthetic_successors), {.min = 1, .max = 32},
                             "likely next tokens per context"));
    fields.push_back(number(s, "synthetic_noise", AT(data.synthetic_noise), {.min = 0.01, .max = 1},
                            "share of draws that ignore the context"));
    fields.push_back(integer(s, "synthetic_seed", AT(data.synthetic_seed), {.max = INT64_MAX},
                             "seed of the chain itself"));
}

void add_output(std::vector<ConfigField>& fields) {
    const std::string s = "output";
    fields.push_back(text(s, "out", AT(output.out), "folder of everything a run writes; --out overrides"));
    fields.push_back(
        integer(s, "log_interval", AT(output.log_interval), {.min = 1}, "steps between lines of the log"));
    fields.push_back(boolean(s, "metrics", AT(output.metrics), "write metrics.jsonl"));
    fields.push_back(
        optional_text(s, "tensorboard_dir", AT(output.tensorboard_dir),
                      "name of a folder below output.out for TensorBoard's event files; \"\": none"));
    fields.push_back(integer(s, "tensorboard_log_interval", AT(output.tensorboard_log_interval), {.min = 1},
                             "steps between TensorBoard scalars"));
    fields.push_back(boolean(s, "moe_per_layer_logging", AT(output.moe_per_layer_logging),
                             "TensorBoard: balancing losses and z-loss of each layer, too"));
    fields.push_back(boolean(s, "time_stages", AT(output.time_stages),
                             "seconds per stage of every step in metrics.jsonl, from device clocks"));
    fields.push_back(boolean(s, "tensor_stats", AT(output.tensor_stats),
                             "underflow, saturation, scale range and error of every FP8 tensor, and what "
                             "transposed copies lose"));
    fields.push_back(integer(s, "tensor_stats_interval", AT(output.tensor_stats_interval), {.min = 1},
                             "steps between tensor statistics"));
    fields.push_back(choice(s, "export_format", AT(output.export_format), {"none", "bf16", "f32", "fp8"},
                            "in the end, train writes the weights with Hugging Face names to hf below "
                            "output.out; --export sets it"));
}

void add_validate(std::vector<ConfigField>& fields) {
    const std::string s = "validate";
    fields.push_back(choices(s, "recipes", AT(validate.recipes), kNamesOfRecipes,
                             "runs to compare; bf16 is the baseline"));
    fields.push_back(number(s, "max_relative_loss_error", AT(validate.max_relative_loss_error),
                            {.min = 0, .above_min = true}, "largest relative loss error that passes"));
    fields.push_back(number(s, "ema_decay", AT(validate.ema_decay), {.min = 0, .max = 1, .below_max = true},
                            "smoothing of the loss curves that are compared"));
    fields.push_back(
        integer(s, "warmup_iters", AT(validate.warmup_iters), {.min = 0}, "steps left out of the verdict"));
    fields.push_back(boolean(s, "control_arm", AT(validate.control_arm),
                             "run bf16 again with another summation order: the noise floor"));
}

void add_profile(std::vector<ConfigField>& fields) {
    const std::string s = "profile";
    fields.push_back(integer(s, "profile_step_start", AT(profile.profile_step_start), {.min = 1},
                             "first step that is measured, counted from 0; the steps before it warm up"));
    fields.push_back(integer(s, "profile_step_end", AT(profile.profile_step_end), {.min = 2},
                             "end of the measured steps, exclusive"));
    fields.push_back(choices(s, "profile_recipes", AT(profile.profile_recipes), kNamesOfRecipes,
                             "recipes to compare; speed-ups are over the first"));
    fields.push_back(
        choice(s, "routing", AT(profile.routing), {"balanced", "skewed_1.25", "skewed_2.0", "data"},
               "loads of experts: equal, or forced to that max/mean; data: as the router chooses"));
    fields.push_back(number(s, "energy_seconds", AT(profile.energy_seconds), {.min = 0, .max = 3600},
                            "GPUs: seconds of steps over which energy is measured, for each recipe; 0: not"));
}

void add_kernels(std::vector<ConfigField>& fields) {
    const std::string s = "kernels";
    fields.push_back(choice(s, "attention_backend", AT(kernels.attention_backend),
                            {"auto", "native", "cudnn"}, "GPUs: this project's attention, or cuDNN's"));
}

void add_checkpoint(std::vector<ConfigField>& fields) {
    const std::string s = "checkpoint";
    fields.push_back(optional_text(s, "save", AT(checkpoint.save),
                                   "folder of this run's checkpoints; \"\": checkpoints below output.out"));
    fields.push_back(integer(s, "save_interval", AT(checkpoint.save_interval), {.min = 0},
                             "steps between checkpoints, and one after the last step; 0: none"));
    fields.push_back(optional_text(s, "pretrained_checkpoint", AT(checkpoint.pretrained_checkpoint),
                                   "a Hugging Face model that train begins with: a .safetensors file, an "
                                   "index, or a folder; --weights sets it"));
    fields.push_back(
        optional_text(s, "load", AT(checkpoint.load),
                      "resume from: auto (the newest complete checkpoint of this run, if any), a run's "
                      "folder, a folder of checkpoints, or one checkpoint; --resume sets it"));
    fields.push_back(integer(s, "most_recent_k", AT(checkpoint.most_recent_k), {.min = 0, .max = 1 << 20},
                             "newest checkpoints that are kept; 0: all"));
    fields.push_back(boolean(s, "async_save", AT(checkpoint.async_save),
                             "write in the background; training pauses only for the copy to host memory"));
    fields.push_back(boolean(s, "finetune", AT(checkpoint.finetune),
                             "load weights only; moments, step and data position start afresh"));
    fields.push_back(
        choice(s, "on_error", AT(checkpoint.on_error), {"stop", "warn"},
               "where a checkpoint cannot be written: stop, or warn and try again at the next interval"));
}

std::vector<ConfigField> build_table() {
    std::vector<ConfigField> fields;
    add_model(fields);
    add_moe(fields);
    add_precision(fields);
    add_recompute(fields);
    add_schedule(fields);
    add_parallel(fields);
    add_training(fields);
    add_data(fields);
    add_output(fields);
    add_validate(fields);
    add_profile(fields);
    add_kernels(fields);
    add_checkpoint(fields);
    return fields;
}

}  // namespace

const std::vector<ConfigField>& config_fields() {
    static const std::vector<ConfigField> fields = build_table();
    return fields;
}

const std::vector<std::string>& config_sections() {
    static const std::vector<std::string> sections = {
        "model", "moe",    "precision", "recompute", "schedule", "parallel",  "training",
        "data",  "output", "validate",  "profile",   "kernels",  "checkpoint"};
    return sections;
}

const ConfigField* find_field(std::string_view section, std::string_view key) {
    const ConfigField* field = find_leaf(key);
    return field && field->section == section ? field : nullptr;
}

const ConfigField* find_leaf(std::string_view key) {
    const auto& fields = config_fields();
    const auto found =
        std::find_if(fields.begin(), fields.end(), [&](const auto& field) { return field.key == key; });
    return found == fields.end() ? nullptr : &*found;
}

std::vector<Recipe> default_validate_recipes() {
    return {Recipe::bf16, Recipe::fp8_blockwise, Recipe::fp8_flow};
}

std::string WrittenValue::text() const {
    return is_list ? fmt::format("[{}]", fmt::join(items, ", ")) : items.at(0);
}

std::string_view recipe_name(Recipe recipe) {
    const auto index = static_cast<size_t>(recipe);
    return index < kRecipeNames.size() ? kRecipeNames[index] : "fp32";
}

std::string_view recipe_name(const PrecisionSpec& precision) {
    return precision.flow.empty() ? recipe_name(precision.recipe) : std::string_view(precision.flow);
}

}  // namespace fp8flow
