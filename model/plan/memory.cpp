// SPDX-License-Identifier: MIT
// Memory per GPU by category: what each parameter and each saved activation costs under each recipe and
// recompute mode.
#include "kernels/core/error.h"
#include "layers/attention/latent_attention.h"
#include "layers/moe_layer.h"
#include "layers/transformer_block.h"
#include "model/config/check.h"
#include "model/data/batch_feed.h"
#include "model/plan/plan.h"
#include "model/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace fp8flow::plan {
namespace {

// FP8 copies of one weight [N, K] for fprop and dgrad, scales included; 0 without.
double weight_copies_bytes(const WeightFormat& format, int64_t n, int64_t k) {
    if (format.plain) return 0;
    const double values = 2 * f64(n * k);
    switch (format.fp8_layout) {
        case ScaleLayout::tensor: return values + 4;
        case ScaleLayout::row: return values + 4 * f64(n + k);
        case ScaleLayout::mx32: return values + values / f64(kMxBlock);
        case ScaleLayout::block128:
            return values + 4 * f64(ceil_div(n, kBlock) * round_up(ceil_div(k, kBlock), 4) +
                                    ceil_div(k, kBlock) * round_up(ceil_div(n, kBlock), 4));
        default: fail(ExitCode::internal, "no weight has scales {}", name_of(format.fp8_layout));
    }
}

// A parameter with FP8 copies: `count` weights [N, K], on `replicas` ranks.
struct QuantisedWeight {
    WeightFormat format;
    int64_t n = 0, k = 0, count = 1, replicas = 1;
    bool routed = false;
};
std::vector<QuantisedWeight> quantised_weights(const Config& config, int64_t gpus) {
    const ModelSpec& m = config.model;
    const MoeSpec& moe = config.moe;
    const int64_t ep = config.parallel.expert_model_parallel_size;
    std::vector<QuantisedWeight> weights;
    for (int64_t layer = 0; layer < m.num_layers; ++layer) {
        const PrecisionSpec precision = layer_precision(config, layer);
        const WeightFormat format = make_flow(precision, {})->weight_format();
        if (format.plain) continue;
        const auto add = [&](int64_t n, int64_t k, int64_t count = 1, int64_t replicas = 0) {
            if (n * k > 0)
                weights.push_back({format, n, k, count, replicas > 0 ? replicas : gpus, replicas > 0});
        };
        const auto ffn = [&](int64_t width, int64_t count = 1, int64_t replicas = 0) {
            add(2 * width, m.hidden_size, count, replicas);  // fc1 (gate and up), fc2
            add(m.hidden_size, width, count, replicas);
        };
        if (precision.fp8_attention_linears)
            for (const AttentionWeight& weight : attention_weights(m))
                if (weight.fp8) add(weight.n, weight.k);
        if (is_moe(config, layer)) {
            ffn(moe.moe_ffn_hidden_size, moe.num_experts / ep, gpus / ep);
            ffn(moe.moe_shared_expert_intermediate_size);
        } else {
            ffn(m.ffn_hidden_size);
        }
    }
    return weights;
}

struct WeightBytes {
    double bf16 = 0;        // copies that the BF16 GEMMs, the embedding and the head read
    double fp8_copies = 0;  // what the FP8 GEMMs read instead
};

WeightBytes weight_bytes(const Config& config, int64_t gpus) {
    double quantised = 0;  // parameters with FP8 copies only
    WeightBytes bytes;
    for (const QuantisedWeight& weight : quantised_weights(config, gpus)) {
        bytes.fp8_copies += f64(weight.count) * weight_copies_bytes(weight.format, weight.n, weight.k);
        quantised += f64(weight.count * weight.n * weight.k);
    }
    bytes.bf16 = 2 * (f64(sum_of(count_parameters(config), &ParameterPart::per_rank)) - quantised);
    return bytes;
}

int64_t tokens_of(const Config& config) { return config.training.micro_batch_size * config.model.seq_length; }

double balanced_rows(const Config& config) {
    const MoeSpec& moe = config.moe;
    const int64_t ranks = config.parallel.expert_model_parallel_size,
                  groups = moe.num_experts / ranks * gradient_sources(moe, ranks);
    const double pads = f64(groups) * f64(moe.moe_row_alignment - 1) / 2;  // half a block per group
    return f64(tokens_of(config) * moe.moe_router_topk) + pads;
}

// Per token, of the norm in front of a MoE layer or FFN: BF16 rows, and the FP8 rows that the recipe takes
// from the norm.
double norm_output_bytes(const PrecisionSpec& p, NormOutput output, double hidden, bool only_routed) {
    const double plain = 2 * hidden;
    if (output == NormOutput::wire_rows || output == NormOutput::gemm_rows) {
        const bool bytes = output == NormOutput::wire_rows && p.scale_format == ScaleFormat::pow2;
        const double scale = bytes ? 1 : 4;
        return plain + hidden + scale * hidden / f64(kBlock);
    }
    return output == NormOutput::tensor_scaled && !only_routed ? plain + 2 * hidden  // both orientations
                                                               : plain;
}

// Bytes per row that exist only during the backward pass of one MoE layer: dY [H], dA [F], dh [2F] and dX
// [H]; the FP8 copies of dY and dh; and what the backward pass computes again. fp8_flow has dY and dh in FP8
// only, and transposes dh and x for the weight gradient. There dX and the copies for fc1's weight gradient
// use the memory of dY, dA, h and a again, unless weight gradients run on the side stream.
double workspace_row_bytes(const Config& config) {
    const double hidden = f64(config.model.hidden_size), width = f64(config.moe.moe_ffn_hidden_size);
    const auto flow = make_flow(config.precision, {});
    const double operand = flow->operand_bytes(), plain = 2;
    const auto& layers = config.model.moe_layer_freq;
    const int64_t layer = std::ranges::find(layers, 1) - layers.begin();
    Config keeps_all = config;
    keeps_all.precision.moe_apply_probs_in = ProbsIn::swiglu;
    const double again = saved_activation_bytes(keeps_all, layer, {}).per_row -
                         saved_activation_bytes(config, layer, config.recompute).per_row;
    if (config.precision.recipe == Recipe::fp8_flow) {
        const double dh = operand * 2 * width, dy = operand * hidden, da = plain * width, dx = plain * hidden;
        const double fc2_copies = operand * (hidden + width), fc1_copies = operand * (2 * width + hidden);
        if (config.schedule.delay_wgrad_compute) return dh + dy + da + dx + fc1_copies + again;
        // what is computed again for fc2 and fc1: x, or all if the whole layer runs forward again
        const RecomputeSpec& r = config.recompute;
        const bool whole = r.recompute_granularity == RecomputeGranularity::full || r.moe;
        const double both = whole ? again : r.saved_rows == SavedRows::sorted ? 0 : operand * hidden;
        return both + dh + std::max(dy + again - both + std::max(da, fc2_copies), dx + fc1_copies);
    }
    double bytes = plain * (width + hidden) + plain * (hidden + 2 * width);
    if (!flow->weight_format().plain)
        bytes += (config.precision.fp8_wgrad ? 2 : 1) * operand * (hidden + 2 * width);
    return bytes + again;
}

// Bytes per row of all MoE layers that wait for the last of the micro-batches of one GEMM: transposed copies
// of dY [H] and a [F] for fc2, dh [2F] and x [H] for fc1. Frozen weights have none.
double delayed_row_bytes(const Config& config) {
    const int64_t hidden = config.model.hidden_size, width = config.moe.moe_ffn_hidden_size;
    double bytes = 0;
    for (int64_t layer = 0; layer < config.model.num_layers; ++layer) {
        const PrecisionSpec precision = layer_precision(config, layer);
        if (!is_moe(config, layer) || precision.moe_wgrad_micro_batches < 2) continue;
        // fp8_flow's scaling-aware transpose leaves one scale for each 128 x 128
        const bool tiles = precision.recipe == Recipe::fp8_flow && precision.moe_scaling_aware_transpose;
        int64_t values = 0;
        for (const auto& [fc, of_row] : {std::pair{"fc1", hidden + 2 * width}, {"fc2", hidden + width}})
            if (!is_frozen(config.training.freeze,
                           fmt::format("layers.{}.moe.experts.linear_{}.weight", layer, fc)))
                values += of_row;
        bytes += f64(values) * (1 + 4.0 / f64(tiles ? kBlock * kBlock : kBlock));
    }
    return bytes;
}

// The peer-visible buffers, an upper bound: two copies (even and odd calls) of everything a peer writes;
// dispatched rows and combined sums share them.
double exchange_bytes(const Config& config) {
    const int64_t ranks = config.parallel.expert_model_parallel_size;
    if (ranks == 1) return 0;
    const double tokens = f64(tokens_of(config)), hidden = f64(config.model.hidden_size);
    const double topk = f64(config.moe.moe_router_topk), peers = f64(ranks);
    const double row = config.precision.sends_fp8_rows() ? hidden + hidden / f64(kBlock) : 2 * hidden;
    return 2 *
           (peers * tokens * topk * (2 + 4) + tokens * row + peers * tokens * 2 * hidden + tokens * topk * 4);
}

}  // namespace

int64_t micro_batches_of(const Config& config, int64_t gpus) {
    const TrainingSpec& training = config.training;
    return std::max<int64_t>(training.global_batch_size / (training.micro_batch_size * gpus), 1);
}

double rank_row_capacity(const Config& config) {
    return f64(
        MoeLayer::row_capacity(config.moe, tokens_of(config), config.parallel.expert_model_parallel_size));
}

double received_capacity(const Config& config) {
    return f64(config.parallel.expert_model_parallel_size * tokens_of(config));
}
double expected_received_rows(const Config& config) {
    return f64(tokens_of(config)) *
           expected_distinct_ranks(config.moe, config.parallel.expert_model_parallel_size);
}

namespace {

// Per token, from the norm's output on: what the projections keep, q, k, v, and core attention's output.
double saved_attention_bytes(const ModelSpec& m, const PrecisionSpec& precision, const Flow& flow,
                             const RecomputeSpec& recompute) {
    using Input = AttentionWeight::Input;
    const double plain = 2, word = 4, heads = f64(m.num_attention_heads), groups = f64(m.kv_heads()),
                 dim = f64(m.qk_dim()), v_dim = f64(m.v_dim());
    const bool linears = precision.fp8_attention_linears, drops_up = recompute.mla_up_proj;
    const NormOutput output = latent_norm_output(linears ? &flow : nullptr);
    double bytes = 0;
    for (const AttentionWeight& weight : attention_weights(m)) {
        const bool dropped =
            (weight.again && drops_up) || (weight.input == Input::heads && recompute.core_attn);
        const bool normed = weight.input == Input::normed ||
                            (weight.input == Input::latent && output == NormOutput::gemm_rows);
        if (linears && weight.fp8 && !dropped)
            bytes += flow.saved_bytes_linear(weight.k, normed ? Flow::Input::normed : Flow::Input::plain);
    }
    if (!drops_up) bytes += plain * (heads * dim + groups * (dim + v_dim));  // q, k, v
    if (m.multi_latent_attention) {
        bytes += plain * f64(m.qk_pos_emb_head_dim);
        for (const int64_t rank : {m.q_lora_rank, m.kv_lora_rank})  // latents, 1/rms, output of the norm
            if (rank > 0)
                bytes += plain * f64(rank) + word +
                         (drops_up ? 0 : norm_output_bytes(precision, output, f64(rank), false));
    } else if (m.qk_layernorm) {
        const double rows = m.qk_layernorm_type == QkLayernormType::per_layer ? 2 : heads + groups;
        bytes += (heads + groups) * plain * dim + rows * word;  // q, k before their norm, and 1/rms
    }
    if (!recompute.core_attn) bytes += heads * (plain * v_dim + word);  // output, log-sum-exp
    return bytes;
}

}  // namespace

SavedBytes saved_activation_bytes(const Config& config, int64_t layer, const RecomputeSpec& recompute) {
    const ModelSpec& m = config.model;
    const MoeSpec& moe = config.moe;
    const PrecisionSpec precision = layer_precision(config, layer);
    const auto flow = make_flow(precision, experts_recompute(recompute));
    const double hidden = f64(m.hidden_size), plain = 2, word = 4;
    const bool routed = is_moe(config, layer);
    const double shared = routed ? f64(moe.moe_shared_expert_intermediate_size) : 0;
    SavedBytes saved;
    saved.per_token = plain * hidden;  // the layer's input, in every mode
    if (recompute.recompute_granularity == RecomputeGranularity::full) return saved;
    if (m.attention) {
        const bool linears = precision.fp8_attention_linears;
        NormOutput output = linears ? flow->norm_output() : NormOutput::plain;
        if (output == NormOutput::wire_rows) output = NormOutput::gemm_rows;
        const double normed = norm_output_bytes(precision, output, hidden, false);
        saved.per_token += word + (recompute.layernorm ? 0 : normed);  // norm: 1/rms, output
        saved.per_token += saved_attention_bytes(m, precision, *flow, recompute);
        saved.per_token += plain * hidden;  // input of the second norm
    }
    saved.per_token += word + (recompute.layernorm ? 0
                                                   : norm_output_bytes(precision, flow->norm_output(), hidden,
                                                                       routed && shared == 0));
    if (!routed) {
        saved.per_token += flow->saved_bytes_local(m.hidden_size, m.ffn_hidden_size);
        return saved;
    }
    if (recompute.moe) return saved;
    const double ranks = f64(config.parallel.expert_model_parallel_size), topk = f64(moe.moe_router_topk);
    saved.per_token += word * (f64(moe.num_experts) + 2 * topk);  // logits, ids, probs
    if (ranks > 1) saved.per_token += ranks * 2 * word * topk;    // plan: all ranks' routing,
    saved.per_token += ranks * word * (topk + 2);                 // received and sent rows
    if (shared > 0 && !recompute.shared_experts)
        saved.per_token += flow->saved_bytes_local(m.hidden_size, moe.moe_shared_expert_intermediate_size) +
                           (moe.moe_shared_expert_gate ? 3 * word : 0);  // logit, id, factor
    saved.per_row = 2 * word +                                           // source and prob of a row
                    flow->saved_bytes_routed(m.hidden_size, moe.moe_ffn_hidden_size);
    saved.per_received = flow->saved_bytes_received(m.hidden_size);
    return saved;
}

namespace {

double saved_bytes(const Config& config, const RecomputeSpec& recompute, double rows, double received) {
    const double hidden = f64(config.model.hidden_size), plain = 2, word = 4;
    // the final norm: input, output, 1/rms
    double bytes = f64(tokens_of(config)) * (2 * plain * hidden + word);
    for (int64_t layer = 0; layer < config.model.num_layers; ++layer) {
        const SavedBytes saved = saved_activation_bytes(config, layer, recompute);
        bytes +=
            f64(tokens_of(config)) * saved.per_token + rows * saved.per_row + received * saved.per_received;
    }
    return bytes;
}

double reserved_bytes(const Config& config) {
    return saved_bytes(config, config.recompute, rank_row_capacity(config), received_capacity(config));
}
double used_bytes(const Config& config, const RecomputeSpec& recompute) {
    return saved_bytes(config, recompute, balanced_rows(config), expected_received_rows(config));
}

// Bytes per token of the layer that runs forward again as a whole; its rows count in the MoE workspace.
double rerun_token_bytes(const Config& config) {
    RecomputeSpec kept = config.recompute;
    kept.moe = false;
    if (kept.recompute_granularity == RecomputeGranularity::full) kept = {};
    double most = 0;
    for (int64_t layer = 0; layer < config.model.num_layers; ++layer)
        most = std::max(most, saved_activation_bytes(config, layer, kept).per_token -
                                  saved_activation_bytes(config, layer, config.recompute).per_token);
    return most;
}

// Elements of masters that are gathered together: of weights with FP8 copies that ranks share the state of.
double gathered_masters(const Config& config, int64_t gpus) {
    std::vector<int64_t> dense, experts;
    for (const QuantisedWeight& weight : quantised_weights(config, gpus))
        if (weight.replicas > 1)
            (weight.routed ? experts : dense).push_back(weight.count * weight.n * weight.k);
    return f64(std::max(gathered_elements(dense), gathered_elements(experts)));
}

struct Held {
    double dense = 0, experts = 0;  // parameters of a rank
};

// The workspace of routed experts, but with the width of the shared expert.
MemoryItem side_stream(Config config) {
    config.moe.moe_ffn_hidden_size = config.moe.moe_shared_expert_intermediate_size;
    const double tokens = f64(tokens_of(config)), token = workspace_row_bytes(config);
    return {"side stream", tokens * token,
            fmt::format("{:.0f} tokens x {:.0f} bytes, the shared expert's backward pass", tokens, token)};
}

}  // namespace

std::vector<MemoryItem> memory_items(const Config& config, int64_t gpus) {
    const ModelSpec& m = config.model;
    const double tokens = f64(tokens_of(config)), capacity = rank_row_capacity(config);
    Held all, trained;
    for (const auto& part : count_parameters(config)) {
        const bool routed = part.part == "experts";
        (routed ? all.experts : all.dense) += f64(part.per_rank);
        (routed ? trained.experts : trained.dense) += f64(part.trained);
    }
    const StateDtypes& state = config.training.state;
    const double moments =
        f64(size_of(state_dtype(state.exp_avg_dtype)) + size_of(state_dtype(state.exp_avg_sq_dtype)));
    const bool bf16_gradients = state.main_grads_dtype == StateDtype::bf16;
    const int64_t sources = gradient_sources(config.moe, config.parallel.expert_model_parallel_size);
    const double main_grads = 4 * trained.dense + (bf16_gradients ? 2 : 4) * f64(sources) * trained.experts;
    const std::string by_source = sources > 1 ? fmt::format(", {} x (order invariant)", sources) : "";
    const WeightBytes weights = weight_bytes(config, gpus);
    const bool has_moe = num_moe_layers(config) > 0;
    const double head_tokens = f64(std::min(kHeadChunk, tokens_of(config)));
    const double vocabulary = f64(m.padded_vocab_size),
                 workspace_row = has_moe ? workspace_row_bytes(config) : 0;
    const TrainingSpec& training = config.training;
    const int64_t micro_batches = micro_batches_of(config, gpus);
    const double in_flight = config.schedule.overlap_moe_expert_parallel_comm && micro_batches > 1 ? 2 : 1;
    const bool divided = training.use_distributed_optimizer;
    const double replicas = f64(gpus / config.parallel.expert_model_parallel_size);
    // parameters with their master or moments on this rank
    const auto owned = [&](const Held& held) {
        return divided ? held.dense / f64(gpus) + held.experts / replicas : held.dense + held.experts;
    };
    const Held& with_moments = training.freeze.keeps_moments ? all : trained;
    const auto of = [&](const Held& held) {
        return fmt::format("{:.0f} {}parameters here", held.dense + held.experts,
                           &held == &all || training.freeze.names.empty() ? "" : "trained ");
    };
    const auto of_owned = [&](const Held& held) {
        return divided ? fmt::format("{:.0f} parameters, this rank's slices", owned(held)) : of(held);
    };
    std::vector<MemoryItem> items = {
        {"weights (BF16)", weights.bf16, "2 bytes for each parameter without FP8 copies"},
        {"weights (FP8 copies)", weights.fp8_copies,
         "fprop and dgrad copy with scales: experts, shared expert, dense FFN, FP8 projections"},
        {"master weights (FP32)", 4 * owned(all), "4 bytes x " + of_owned(all)},
        {moments == 8   ? "Adam moments (FP32)"
         : moments == 4 ? "Adam moments (BF16)"
                        : "Adam moments",
         moments * owned(with_moments), fmt::format("{:.0f} bytes x {}", moments, of_owned(with_moments))},
        bf16_gradients
            ? MemoryItem{"main gradients (BF16)", main_grads,
                         fmt::format("2 bytes x {:.0f} of routed experts{}, 4 x others", trained.experts,
                                     by_source)}
            : MemoryItem{"main gradients (FP32)", main_grads,
                         "4 bytes x " + of(trained) + (sources > 1 ? ", experts" + by_source.substr(1) : "")},
        {"saved activations", in_flight * reserved_bytes(config),
         fmt::format("reserved: {:.0f} tokens and {:.0f} rows, {} layers{}", tokens, capacity, m.num_layers,
                     in_flight > 1 ? ", two micro-batches" : "")},
        {"logits and their gradient", head_tokens * vocabulary * (4 + 2),
         fmt::format("{:.0f} tokens at a time x {:.0f} x 6", head_tokens, vocabulary)},
        {"MoE workspace", in_flight * capacity * workspace_row,
         fmt::format("{:.0f} rows x {:.0f} bytes, one layer's backward", capacity, workspace_row)},
        {"exchange buffers", has_moe ? exchange_bytes(config) : 0,
         "two sets of all that other ranks read or write"},
    };
    if (const double gathered = divided ? gathered_masters(config, gpus) : 0; gathered > 0)
        items.push_back({"gathered master", 4 * gathered,
                         fmt::format("4 bytes x {:.0f}, weights with FP8 copies at a time", gathered)});
    if (config.schedule.moe_shared_expert_overlap && has_moe &&
        config.moe.moe_shared_expert_intermediate_size > 0)
        items.push_back(side_stream(config));
    if (const double again = rerun_token_bytes(config); again > 0)
        items.push_back({"workspace, layer run again", tokens * again,
                         fmt::format("{:.0f} tokens x {:.0f} bytes, without its rows", tokens, again)});
    const double delayed = delayed_row_bytes(config);
    const int64_t waiting = std::min(config.precision.moe_wgrad_micro_batches, micro_batches) - 1;
    if (delayed > 0 && waiting > 0)
        items.push_back({"delayed weight gradients", f64(waiting) * capacity * delayed,
                         fmt::format("{:.0f} rows x {:.0f} bytes, operands of all layers, x {} micro-batches",
                                     capacity, delayed, waiting)});
    return items;
}

double bytes_of(const std::vector<MemoryItem>& items, const std::string& category) {
    const auto found = std::ranges::find(items, category, &MemoryItem::category);
    return found == items.end() ? 0 : found->bytes;
}

MemoryItem step_tokens(const Config& config, int64_t gpus) {
    const int64_t micro_batches = micro_batches_of(config, gpus);
    const int64_t feeds = config.schedule.overlap_moe_expert_parallel_comm && micro_batches > 1 ? 2 : 1;
    const int64_t slots = Trainer::kStepsInFlight * micro_batches * feeds;
    const int64_t bytes = data::BatchFeed::slot_bytes(tokens_of(config));
    return {"tokens of steps (host)", f64(slots) * f64(bytes),
            fmt::format("{} steps x {} micro-batches{} x {} bytes", Trainer::kStepsInFlight, micro_batches,
                        feeds > 1 ? " x 2" : "", bytes)};
}

std::vector<RecomputeChoice> recompute_choices(const Config& config) {
    using enum RecomputeGranularity;
    const std::pair<const char*, RecomputeSpec> modes[] = {
        {"none", {}},
        {"core_attn", {.recompute_granularity = selective, .core_attn = true}},
        {"mla_up_proj", {.recompute_granularity = selective, .mla_up_proj = true}},
        {"layernorm", {.recompute_granularity = selective, .layernorm = true}},
        {"moe_act", {.recompute_granularity = selective, .moe_act = true}},
        {"shared_experts", {.recompute_granularity = selective, .shared_experts = true}},
        {"moe_expert", {.recompute_granularity = selective, .moe_expert = true}},
        {"moe_expert, saved_rows: received",
         {.recompute_granularity = selective, .moe_expert = true, .saved_rows = SavedRows::received}},
        {"moe_expert, saved_rows: none",
         {.recompute_granularity = selective, .moe_expert = true, .saved_rows = SavedRows::none}},
        {"core_attn, layernorm, moe_expert",
         {.recompute_granularity = selective, .core_attn = true, .layernorm = true, .moe_expert = true}},
        {"moe", {.recompute_granularity = selective, .moe = true}},
        {"full", {.recompute_granularity = full}}};
    const auto flops = count_flops(config);
    const auto forward = [&](std::initializer_list<std::string_view> parts) {
        double sum = 0;
        for (const FlopPart& part : flops)
            if (std::ranges::find(parts, part.part) != parts.end()) sum += part.forward;
        return sum;
    };
    const std::vector<WireItem> wire = wire_bytes(config);
    const double dispatch = std::ranges::find(wire, "dispatch", &WireItem::leg)->forward;
    std::vector<RecomputeChoice> choices;
    for (const auto& [mode, r] : modes) {
        Config with = config;
        with.recompute = r;
        if (!is_legal(with)) continue;  // refused for this model or recipe
        RecomputeChoice choice{.mode = mode, .spec = r, .saved_bytes = used_bytes(config, r)};
        const bool whole = r.recompute_granularity == full;
        double& again = choice.extra_flops_per_token;
        if (whole) again += forward({"attention projections", "dense FFN"});
        if (r.mla_up_proj)
            for (const AttentionWeight& weight : attention_weights(config.model))
                again += weight.again ? 2 * f64(config.model.num_layers) * f64(weight.n * weight.k) : 0;
        if (whole || r.core_attn) again += forward({"attention core (causal)"});
        if (whole || r.moe) again += forward({"router", "experts", "shared expert"});
        // The backward pass needs fc1's output again, two thirds of an expert's FLOPs, and never fc2's.
        if (r.moe_expert) again += forward({"experts"}) * 2 / 3;
        if (r.shared_experts) again += forward({"shared expert"}) * 2 / 3;
        if (whole || r.moe) choice.extra_wire_bytes = sum_of(wire, &WireItem::forward);
        if (r.saved_rows == SavedRows::none) choice.extra_wire_bytes = dispatch;
        choices.push_back(choice);
    }
    return choices;
}

RunPlan make_plan(const Config& config, int64_t gpus) {
    check_config(config, gpus);
    check_countable(config);
    RunPlan plan;
    plan.gpus = gpus;
    plan.tokens = tokens_of(config);
    plan.parameters = count_parameters(config);
    plan.flops = count_flops(config);
    plan.balanced_rows = balanced_rows(config);
    plan.row_capacity = rank_row_capacity(config);
    plan.memory = memory_items(config, gpus);
    plan.host = step_tokens(config, gpus);
    for (const MemoryItem& item : plan.memory)
        require(
            item.bytes < 0x1p63, ExitCode::usage,
            "plan: {} take {:.1e} bytes of a GPU, more than 63 bits count; lower training.micro_batch_size, "
            "model.seq_length or the model's sizes",
            item.category, item.bytes);
    plan.saved_reserved = reserved_bytes(config);
    plan.saved_used = used_bytes(config, config.recompute);
    const double workspace_row = num_moe_layers(config) > 0 ? workspace_row_bytes(config) : 0;
    plan.workspace_reserved = plan.row_capacity * workspace_row;
    plan.workspace_used = plan.balanced_rows * workspace_row;
    plan.recompute = recompute_choices(config);
    plan.wire = wire_bytes(config);
    plan.distinct_ranks = expected_distinct_ranks(config.moe, config.parallel.expert_model_parallel_size);
    return plan;
}

}  // namespace fp8flow::plan
