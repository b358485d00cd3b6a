// SPDX-License-Identifier: MIT
// The answer to a key that the field table does not have: the nearest key, what other trainers call it,
// or why its feature is refused.
#include "model/config/builders.h"
#include "model/config/fields.h"

#include "model/safetensors/input.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fp8flow {
namespace {

struct Known {
    std::string_view key;
    std::string_view answer;
};

constexpr std::string_view kDropless =
    "routing is dropless; moe_expert_rank_capacity_factor limits memory instead";

constexpr Known kRefusedKeys[] = {
    {"mtp_num_layers", "multi-token prediction is not implemented"},
    {"moe_expert_capacity_factor", kDropless},
    {"moe_pad_expert_input_to_capacity", kDropless},
    {"moe_token_drop_policy", kDropless},
    {"moe_apply_probs_on_input",
     "probabilities multiply in SwiGLU or in combine (moe_apply_probs_in), never the experts' input"},
    {"moe_input_jitter_eps", "router jitter is not implemented"},
    {"recompute_method", "recompute_granularity: full always re-runs every layer"},
    {"recompute_num_layers", "recompute_granularity: full always re-runs every layer"},
};

// Names that other trainers (torchtitan, Hugging Face, Megatron's core and fork), and earlier versions of
// this one, use for our keys.
constexpr Known kForeign[] = {
    {"moe_delay_wgrad_compute", "moe_wgrad_micro_batches"},
    {"n_layers", "num_layers"},
    {"num_hidden_layers", "num_layers"},
    {"dim", "hidden_size"},
    {"n_heads", "num_attention_heads"},
    {"n_kv_heads", "num_query_groups"},
    {"num_key_value_heads", "num_query_groups"},
    {"head_dim", "kv_channels"},
    {"qk_nope_head_dim", "qk_head_dim"},
    {"qk_rope_head_dim", "qk_pos_emb_head_dim"},
    {"norm_eps", "norm_epsilon"},
    {"layernorm_epsilon", "norm_epsilon"},
    {"rms_norm_eps", "norm_epsilon"},
    {"apply_layernorm_1p", "zero_centered_gamma"},
    {"rope_theta", "rotary_base"},
    {"intermediate_size", "ffn_hidden_size"},
    {"num_moe_experts", "num_experts"},
    {"swiglu_limit", "activation_func_clamp_value"},
    {"n_routed_experts", "num_experts"},
    {"num_local_experts", "num_experts"},
    {"top_k", "moe_router_topk"},
    {"num_experts_per_tok", "moe_router_topk"},
    {"moe_intermediate_size", "moe_ffn_hidden_size"},
    {"n_shared_experts", "moe_shared_expert_intermediate_size"},
    {"first_k_dense_replace", "moe_layer_freq"},
    {"decoder_sparse_step", "moe_layer_freq"},
    {"score_func", "moe_router_score_function"},
    {"scoring_func", "moe_router_score_function"},
    {"route_scale", "moe_router_topk_scaling_factor"},
    {"routed_scaling_factor", "moe_router_topk_scaling_factor"},
    {"n_group", "moe_router_num_groups"},
    {"num_expert_groups", "moe_router_num_groups"},
    {"topk_group", "moe_router_group_topk"},
    {"num_limited_groups", "moe_router_group_topk"},
    {"load_balance_coeff", "moe_router_bias_update_rate"},
    {"router_aux_loss_coef", "moe_aux_loss_coeff"},
    {"tie_word_embeddings", "untie_embeddings_and_output_weights"},
    {"initializer_range", "init_method_std"},
    {"moe_fp8_flow", "recipe"},
    {"fp8_recipe", "recipe"},
    {"fp8", "recipe"},
    {"bf16", "recipe"},
    {"moe_router_padding_for_quantization", "moe_row_alignment"},
    {"moe_router_padding_for_fp8", "moe_row_alignment"},
    {"expert_parallel_degree", "expert_model_parallel_size"},
    {"tensor_parallel_degree", "tensor_model_parallel_size"},
    {"steps", "train_iters"},
    {"warmup_steps", "lr_warmup_iters"},
    {"max_norm", "clip_grad"},
    {"mock_data", "data_kind"},
    {"tokenizer_type", "data_kind"},
    {"split", "held_out_fraction"},
    {"keep_latest_k", "most_recent_k"},
    {"keep_last_n", "most_recent_k"},
    {"checkpoint_interval", "save_interval"},
    {"resume", "load"},
};

// Arguments of Megatron-LM's that are no keys here, in a file of nothing but arguments. No value: any, which
// is the key's. No key: what every model here has.
struct MegatronArgument {
    std::string_view name, value, key, set;
};
constexpr MegatronArgument kMegatron[] = {
    {"num_moe_experts", "", "num_experts", ""},
    {"layernorm_epsilon", "", "norm_epsilon", ""},
    {"apply_layernorm_1p", "", "zero_centered_gamma", ""},
    {"bf16", "true", "recipe", "bf16"},
    {"fp8", "e4m3", "", ""},
    {"fp8_recipe", "blockwise", "recipe", "fp8_blockwise"},
    {"fp8_recipe", "mxfp8", "recipe", "mxfp8"},
    {"group_query_attention", "true", "", ""},
    {"use_flash_attn", "true", "", ""},
    {"attention_dropout", "0", "", ""},
    {"hidden_dropout", "0", "", ""},
};

// Keys that hold no setting: Megatron's that have one legal value here, and those of earlier versions. With
// a value of `ignored` they change nothing.
struct NoSetting {
    std::string_view name;
    std::array<std::string_view, 2> ignored;
    std::string_view answer;
    bool removed = true;  // ignored with a note; false: of Megatron's, ignored silently
};
constexpr std::string_view kOnlyDataAndExperts = "only data and expert parallelism are implemented";
constexpr NoSetting kNoSettings[] = {
    {"model.normalization", {"RMSNorm"}, "no other norm is implemented", false},
    {"model.position_embedding_type", {"rope"}, "no other position embedding is implemented", false},
    {"model.swiglu", {"true"}, "units are gated; quick_geglu: true is the other one", false},
    {"model.disable_bias_linear", {"true"}, "linear layers have no bias", false},
    {"moe.moe_grouped_gemm", {"true"}, "experts always run as one grouped GEMM", false},
    {"parallel.tensor_model_parallel_size", {"1"}, kOnlyDataAndExperts, false},
    {"parallel.pipeline_model_parallel_size", {"1"}, kOnlyDataAndExperts, false},
    {"parallel.context_parallel_size", {"1"}, kOnlyDataAndExperts, false},
    {"parallel.expert_tensor_parallel_size", {"1"}, kOnlyDataAndExperts, false},
    {"training.deterministic_mode", {"true"}, "same seed gives the same bits, always", false},
    {"training.optimizer", {"adam"}, "AdamW with FP32 masters is the one optimizer", false},
    {"training.main_params_dtype", {"fp32"}, "master weights are FP32", false},
    {"kernels.gemm_backend",
     {"auto", "native"},
     "grouped GEMMs run on this project's kernels; docs/performance/kernels.md compares them with "
     "cuBLASLt's"},
    {"parallel.wire_self_test",
     {"false"},
     "nccl-tests measures the bandwidth between ranks, and the profile command the exchange"},
    {"precision.fault_wrong_scale_index",
     {"false"},
     "the plugin examples/planted_faults.cpp has recipes with this fault and others"},
    {"training.max_skipped_iters", {"10"}, "with training.on_divergence: skip the limit is 10 in a row"},
    {"training.max_rollbacks", {"3"}, "with training.on_divergence: rollback the limit is 3"},
    {"training.zero_grad_iters", {"0"}, "training.grad_norm_limit bounds gradients; grad_norm is logged"},
};

constexpr size_t kLongest = 64;  // no name is longer; keeps hostile input cheap

// Edits (insert, delete, replace, swap of neighbours) that turn a into b; both have at most kLongest bytes.
size_t edit_distance(std::string_view a, std::string_view b) {
    using Row = std::array<size_t, kLongest + 1>;
    Row rows[3];  // of the two prefixes of a before this one, and of this one
    for (size_t j = 0; j <= b.size(); ++j) rows[0][j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        const Row &before = rows[(i - 1) % 3], &twice_before = rows[(i + 1) % 3];
        Row& row = rows[i % 3];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t replace = before[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
            row[j] = std::min({before[j] + 1, row[j - 1] + 1, replace});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], twice_before[j - 2] + 1);
        }
    }
    return rows[a.size() % 3][b.size()];
}

// YAML's spellings of true and false as one.
std::string plain(std::string_view value) {
    const auto truth = builders::read_truth(value);
    return truth ? (*truth ? "true" : "false") : std::string(value);
}

}  // namespace

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
    std::vector<std::string> meant;
    for (const auto& candidate : candidates)
        if (!word.empty() &&
            fmt::format("_{}_", candidate).find(fmt::format("_{}_", word)) != std::string::npos)
            meant.push_back(candidate);
    if (meant.empty()) meant.push_back(nearest_name(word, candidates));
    if (meant.front().empty()) return {};
    std::string text = "did you mean ";
    for (size_t i = 0; i < meant.size(); ++i)
        text += fmt::format("{}'{}'", i == 0 ? "" : i + 1 == meant.size() ? " or " : ", ", meant[i]);
    return text;
}

std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates) {
    if (word.empty() || word.size() > kLongest) return {};
    std::string best;
    size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
    for (const auto& candidate : candidates) {
        const size_t shorter = std::min(word.size(), candidate.size()),
                     longer = std::max(word.size(), candidate.size());
        if (longer > kLongest || longer - shorter >= best_distance) continue;  // that many edits at least
        const size_t distance = edit_distance(word, candidate);
        if (distance < best_distance && distance < candidate.size()) {
            best = candidate;
            best_distance = distance;
        }
    }
    if (!best.empty() || word.size() < 2) return best;
    // a part of one name alone: flow for fp8_flow
    for (const auto& candidate : candidates) {
        if (candidate.find(word) == std::string::npos) continue;
        if (!best.empty()) return {};
        best = candidate;
    }
    return best;
}

std::optional<KeyWithoutSetting> key_without_setting(std::string_view section, std::string_view key,
                                                     std::string_view value) {
    for (const NoSetting& known : kNoSettings) {
        const size_t dot = known.name.find('.');
        if (known.name.substr(dot + 1) != key || (!section.empty() && known.name.substr(0, dot) != section))
            continue;
        const bool ignored = std::ranges::find(known.ignored, plain(value)) != known.ignored.end();
        if (ignored && !known.removed) return KeyWithoutSetting{true, ""};
        if (ignored)
            return KeyWithoutSetting{
                true, fmt::format("{} is no key any more and is ignored: {}", known.name, known.answer)};
        const std::string got = fmt::format("{}: got {}", known.name, printable(value));
        return KeyWithoutSetting{
            false, known.removed
                       ? fmt::format("{}, which is no longer there: {}; remove the key", got, known.answer)
                       : fmt::format("{}, want {} ({})", got, known.ignored[0], known.answer)};
    }
    return std::nullopt;
}

std::optional<MegatronSetting> megatron_setting(std::string_view name, std::string_view value) {
    const std::string text = value == "0.0" ? "0" : plain(value);
    for (const MegatronArgument& known : kMegatron)
        if (known.name == name && (known.value.empty() || known.value == text))
            return MegatronSetting{std::string(known.key),
                                   std::string(known.set.empty() ? value : known.set)};
    return std::nullopt;
}

std::string without_old_keys(std::string_view dump) {
    std::string kept, section;
    for (size_t begin = 0, end = 0; begin < dump.size(); begin = end + 1) {
        end = std::min(dump.find('\n', begin), dump.size());
        const std::string_view line = dump.substr(begin, end - begin);
        const size_t colon = line.find(": ");
        if (!line.starts_with("  ")) section = line.substr(0, line.find(':'));
        const auto old =
            colon == std::string_view::npos || !line.starts_with("  ")
                ? std::nullopt
                : key_without_setting(section, line.substr(2, colon - 2), line.substr(colon + 2));
        if (!old) kept += std::string(line) + "\n";
    }
    return kept;
}

std::string explain_unknown_key(std::string_view key) {
    const Known* refused = std::ranges::find(kRefusedKeys, key, &Known::key);
    if (refused != std::end(kRefusedKeys)) return std::string(refused->answer);
    const Known* foreign = std::ranges::find(kForeign, key, &Known::key);
    std::vector<std::string> keys;
    for (const auto& field : config_fields()) keys.push_back(field.key);
    const std::string name =
        foreign != std::end(kForeign) ? std::string(foreign->answer) : nearest_name(key, keys);
    if (name.empty()) return {};
    return fmt::format("did you mean '{}'", find_leaf(name)->name());
}

}  // namespace fp8flow
