// SPDX-License-Identifier: MIT
// Parameters, FLOPs and wire bytes of a configuration.
#include "kernels/core/error.h"
#include "layers/parameter.h"
#include "layers/transformer_block.h"
#include "model/plan/plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace fp8flow::plan {
namespace {

// log of the binomial coefficient.
double log_choose(int64_t n, int64_t k) {
    return std::lgamma(f64(n) + 1) - std::lgamma(f64(k) + 1) - std::lgamma(f64(n) - f64(k) + 1);
}

// Probability that `draws` distinct picks out of `all` avoid `marked` of them.
double probability_of_none(int64_t all, int64_t marked, int64_t draws) {
    if (draws > all - marked) return 0;
    return std::exp(log_choose(all - marked, draws) - log_choose(all, draws));
}

// The same when a token first picks `group_topk` groups and then its experts inside them.
double probability_of_none_grouped(const MoeSpec& moe, int64_t ranks) {
    const int64_t groups = moe.moe_router_num_groups, picked = moe.moe_router_group_topk;
    const int64_t group_size = moe.num_experts / groups, local = moe.num_experts / ranks;
    const int64_t reachable = picked * group_size;
    if (ranks >= groups) {  // a rank holds a part of one group
        const double share = f64(picked) / f64(groups);
        return 1 - share +
               share * probability_of_none(reachable, std::min(local, group_size), moe.moe_router_topk);
    }
    const int64_t groups_here = groups / ranks;
    double none = 0;
    for (int64_t here = 0; here <= std::min(groups_here, picked); ++here) {
        if (picked - here > groups - groups_here) continue;
        const double probability =
            std::exp(log_choose(groups_here, here) + log_choose(groups - groups_here, picked - here) -
                     log_choose(groups, picked));
        none += probability * probability_of_none(reachable, here * group_size, moe.moe_router_topk);
    }
    return none;
}

}  // namespace

void check_countable(const Config& config) {
    constexpr double kMost = 0x1p60;  // sums of a few such numbers fit 63 bits
    const ModelSpec& m = config.model;
    const MoeSpec& moe = config.moe;
    const double ffn = f64(m.num_layers) * 3 * f64(m.hidden_size);
    const double experts = ffn * f64(moe.num_experts) * f64(moe.moe_ffn_hidden_size);
    const int64_t attention =
        sum_of(attention_weights(m), [](const AttentionWeight& w) { return w.n * w.k; });
    const double others = ffn * f64(std::max(m.ffn_hidden_size, moe.moe_shared_expert_intermediate_size)) +
                          f64(m.num_layers) * f64(attention) +
                          2 * f64(m.padded_vocab_size) * f64(m.hidden_size);
    require(
        experts + others <= kMost, ExitCode::usage,
        "plan: about {:.1e} parameters are more than the {:.1e} that are counted; lower model.num_layers, "
        "model.hidden_size, moe.num_experts or moe.moe_ffn_hidden_size",
        experts + others, kMost);
    const int64_t ranks = config.parallel.expert_model_parallel_size;
    const double rows = f64(ranks) * f64(config.training.micro_batch_size) * f64(m.seq_length) *
                        f64(std::min(moe.moe_router_topk, moe.num_experts / ranks));
    require(rows <= kMost, ExitCode::usage,
            "plan: a rank may receive {:.1e} rows, more than the {:.1e} that are counted; lower "
            "training.micro_batch_size, model.seq_length or parallel.expert_model_parallel_size",
            rows, kMost);
}

PrecisionSpec layer_precision(const Config& config, int64_t layer) {
    return precision_of_layer(config.model, config.precision, static_cast<int>(layer));
}

std::vector<AttentionWeight> attention_weights(const ModelSpec& m) {
    using Input = AttentionWeight::Input;
    if (!m.attention) return {};
    const int64_t heads = m.num_attention_heads, hidden = m.hidden_size, rank = m.q_lora_rank;
    std::vector<AttentionWeight> weights;
    if (!m.multi_latent_attention) {
        weights = {{.name = "linear_qkv", .n = m.qkv_rows(), .k = hidden}};
    } else {
        if (rank > 0) weights = {{.name = "linear_q_down_proj", .n = rank, .k = hidden}};
        weights.push_back({.name = rank > 0 ? "linear_q_up_proj" : "linear_q_proj",
                           .n = heads * m.qk_dim(),
                           .k = rank > 0 ? rank : hidden,
                           .input = rank > 0 ? Input::latent : Input::normed,
                           .again = true});
        weights.push_back({.name = "linear_kv_down_proj",
                           .n = m.kv_lora_rank + m.qk_pos_emb_head_dim,
                           .k = hidden,
                           .fp8 = false});
        weights.push_back({.name = "linear_kv_up_proj",
                           .n = heads * (m.qk_head_dim + m.v_head_dim),
                           .k = m.kv_lora_rank,
                           .input = Input::latent,
                           .again = true});
    }
    weights.push_back({.name = "linear_proj", .n = hidden, .k = heads * m.v_dim(), .input = Input::heads});
    return weights;
}

std::vector<ParameterPart> count_parameters(const Config& config) {
    const ModelSpec& m = config.model;
    const MoeSpec& moe = config.moe;
    const Freeze& freeze = config.training.freeze;
    std::vector<ParameterPart> parts;
    for (const std::string_view part : {"embedding", "attention", "norms", "biases", "router", "experts",
                                        "shared expert", "dense FFN", "head"})
        if ((m.attention && m.add_qkv_bias) || part != "biases") parts.push_back({.part = std::string(part)});
    struct Matrices {
        int64_t all = 1, active = 1, per_rank = 1;
    };
    const auto add = [&](const char* part, const std::string& name, int64_t count, const Matrices& of = {}) {
        const auto found = std::ranges::find(parts, part, &ParameterPart::part);
        found->total += of.all * count;
        found->active += of.active * count;
        found->per_rank += of.per_rank * count;
        const int64_t trained = is_frozen(freeze, name) ? 0 : 1, tensors = count > 0 ? 1 : 0;
        found->trained += trained * of.per_rank * count;
        found->active_trained += trained * of.active * count;
        found->tensors += tensors;
        found->trained_tensors += trained * tensors;
    };
    const int64_t h = m.hidden_size;
    std::vector<std::pair<const char*, int64_t>> head_norms;
    if (m.multi_latent_attention)
        head_norms = {{"q_layernorm", m.q_lora_rank}, {"kv_layernorm", m.kv_lora_rank}};
    else if (m.qk_layernorm)
        head_norms = {{"q_layernorm", m.heads_per_norm(m.num_attention_heads) * m.kv_channels},
                      {"k_layernorm", m.heads_per_norm(m.num_query_groups) * m.kv_channels}};
    const Matrices experts = {moe.num_experts, moe.moe_router_topk,
                              moe.num_experts / config.parallel.expert_model_parallel_size};
    const auto add_ffn = [&](const char* part, const std::string& name, int64_t width, const Matrices& of) {
        add(part, name + ".linear_fc1.weight", 2 * width * h, of);
        add(part, name + ".linear_fc2.weight", width * h, of);
    };
    add("embedding", "embedding.word_embeddings.weight", m.padded_vocab_size * h);
    for (int64_t i = 0; i < m.num_layers; ++i) {
        const std::string layer = fmt::format("layers.{}.", i), attention = layer + "self_attention.";
        if (m.attention) {
            add("norms", layer + "input_layernorm.weight", h);
            for (const AttentionWeight& weight : attention_weights(m))
                add("attention", fmt::format("{}{}.weight", attention, weight.name), weight.n * weight.k);
            for (const auto& [norm, width] : head_norms)
                add("norms", fmt::format("{}{}.weight", attention, norm), width);
            if (m.add_qkv_bias) add("biases", attention + "linear_qkv.bias", m.qkv_rows());
        }
        add("norms", layer + "pre_mlp_layernorm.weight", h);
        if (is_moe(config, i)) {
            add("router", layer + "moe.router.weight", h * moe.num_experts);
            add_ffn("experts", layer + "moe.experts", moe.moe_ffn_hidden_size, experts);
            add_ffn("shared expert", layer + "moe.shared_experts", moe.moe_shared_expert_intermediate_size,
                    {});
            if (moe.moe_shared_expert_gate) add("shared expert", layer + "moe.shared_experts.gate_weight", h);
        } else {
            add_ffn("dense FFN", layer + "mlp", m.ffn_hidden_size, {});
        }
    }
    add("norms", "final_layernorm.weight", h);
    if (m.untie_embeddings_and_output_weights) add("head", "output_layer.weight", m.padded_vocab_size * h);
    return parts;
}

std::vector<FlopPart> count_flops(const Config& config) {
    const ModelSpec& m = config.model;
    const std::vector<ParameterPart> parameters = count_parameters(config);
    std::vector<FlopPart> parts;
    const auto add = [&](const char* part, std::string_view weights) {
        const auto& of = *std::ranges::find(parameters, weights, &ParameterPart::part);
        parts.push_back({part, 2 * f64(of.active), 2 * f64(of.active) + 2 * f64(of.active_trained)});
    };
    add("attention projections", "attention");
    const double keys = (f64(m.seq_length) + 1) / 2;
    const double core =
        m.attention ? f64(m.num_layers) * f64(m.num_attention_heads * (m.qk_dim() + m.v_dim())) * keys : 0;
    parts.push_back({"attention core (causal)", 2 * core, 4 * core});
    for (const char* part : {"router", "experts", "shared expert", "dense FFN"}) add(part, part);
    add("head", m.untie_embeddings_and_output_weights ? "head" : "embedding");
    return parts;
}

double expected_distinct_ranks(const MoeSpec& moe, int64_t ranks) {
    const int64_t groups = moe.moe_router_num_groups;
    const bool grouped = groups > 0 && (groups % ranks == 0 || ranks % groups == 0);
    const double none =
        grouped ? probability_of_none_grouped(moe, ranks)
                : probability_of_none(moe.num_experts, moe.num_experts / ranks, moe.moe_router_topk);
    return f64(ranks) * (1 - none);
}

namespace {

// Mean number of copies that a rank sends of a token's row, and of the values of its choices.
struct WireRows {
    struct Sent {
        double all = 0, between_hosts = 0;
    };
    Sent routing, rows, choices;
    Sent values;  // of choices, with the sums of combine order `rank`
};

// hierarchical: a row goes once to each other host, to the rank in the same place as the sender, and from
// there to the other ranks of the host. The values of choices take the same way back.
WireRows wire_rows(const MoeSpec& moe, const ParallelSpec& parallel) {
    const int64_t ep = parallel.expert_model_parallel_size;
    const bool spread =
        parallel.hosts > 1 && ep > parallel.ranks_per_host && ep % parallel.ranks_per_host == 0;
    const int64_t on_host = spread ? parallel.ranks_per_host : ep, hosts = ep / on_host;
    const auto others = [](int64_t of) { return f64(of - 1) / f64(of); };
    const double each = expected_distinct_ranks(moe, ep);
    WireRows sent{.routing = {f64(ep - 1), f64(ep - on_host)},
                  .rows = {others(ep) * each, others(hosts) * each},
                  .choices = {others(ep), others(hosts)},
                  .values = {others(ep), others(hosts)}};
    if (spread && parallel.moe_token_dispatcher_type == TokenDispatcher::hierarchical) {
        sent.rows.between_hosts = others(hosts) * expected_distinct_ranks(moe, hosts);
        sent.rows.all = sent.rows.between_hosts + others(on_host) * each;
        sent.values.all = sent.values.between_hosts + others(on_host);
    }
    return sent;
}

}  // namespace

std::vector<WireItem> wire_bytes(const Config& config) {
    const ModelSpec& m = config.model;
    const MoeSpec& moe = config.moe;
    const PrecisionSpec& p = config.precision;
    const auto tokens = f64(config.training.micro_batch_size * m.seq_length);
    const auto hidden = f64(m.hidden_size);
    const auto topk = f64(moe.moe_router_topk);
    const WireRows rows = wire_rows(moe, config.parallel);
    const double copies = tokens * topk;
    const double scale_bytes = p.scale_format == ScaleFormat::pow2 ? 1 : 4;  // E8M0 or FP32 per 128 values
    const double dispatched = p.sends_fp8_rows() ? hidden + scale_bytes * hidden / f64(kBlock) : 2 * hidden;
    const bool sums = moe.moe_combine_order == CombineOrder::rank;
    const bool again = config.recompute.saved_rows == SavedRows::none;  // x too in the backward
    const double id_and_prob = 4 + 4;
    // `items` of so many bytes in each pass, by how many of them are sent and cross hosts
    const auto leg = [](const char* name, double items, double bytes, double forward, double backward,
                        const WireRows::Sent& sent) {
        const double all = items * bytes;
        return WireItem{name, all * sent.all * forward, all * sent.all * backward,
                        all * sent.between_hosts * (forward + backward)};
    };
    return {leg("routing", copies, id_and_prob, 1, 0, rows.routing),
            leg("dispatch", tokens, dispatched, 1, again ? 2 : 1, rows.rows),
            sums ? leg("combine", tokens, 2 * hidden, 1, 1, rows.rows)
                 : leg("combine", copies, 2 * hidden, 1, 1, rows.choices),
            leg("prob gradients", copies, 4, 0, 1, sums ? rows.values : rows.choices)};
}

}  // namespace fp8flow::plan
