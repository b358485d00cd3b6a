// SPDX-License-Identifier: MIT
// What a run needs, computed from the configuration only, without running anything: parameters, FLOPs per
// token, memory per GPU by category, wire bytes per rank. Every figure is a closed formula, which tests
// compare with counts made by hand.
#pragma once

#include "model/config/config.h"

#include <algorithm>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

namespace fp8flow::plan {

struct ParameterPart {
    std::string part;
    int64_t total = 0;     // whole model
    int64_t active = 0;    // that one token uses
    int64_t per_rank = 0;  // of one GPU: experts divided by expert_model_parallel_size, all else replicated
    int64_t trained = 0;   // of these, without what training.freeze names
    int64_t active_trained = 0;  // of active, likewise
    int64_t tensors = 0, trained_tensors = 0;
};

// Per token; a multiply-add counts 2. Attention counts the causal half: (seq_length + 1) / 2 keys per query
// on average.
struct FlopPart {
    std::string part;
    double forward = 0;
    double backward = 0;  // a GEMM for each operand's gradient, not of frozen weights; without recomputation
    double both() const { return forward + backward; }
};

struct MemoryItem {
    std::string category;
    double bytes = 0;
    std::string formula;  // in words, with numbers
};

// Bytes to other ranks for one layer and one micro-batch, experts chosen evenly.
struct WireItem {
    std::string leg;
    double forward = 0;
    double backward = 0;
    double between_hosts = 0;  // of both, where parallel.hosts says how ranks are spread
    double both() const { return forward + backward; }
};

// Saved activations of one micro-batch over all layers, evenly loaded experts.
struct RecomputeChoice {
    std::string mode;
    RecomputeSpec spec;
    double saved_bytes = 0;
    double extra_flops_per_token = 0;  // of the second run in the backward
    double extra_wire_bytes = 0;       // per layer
};

// Over all items.
template <class Item, class Value> auto sum_of(const std::vector<Item>& items, Value value) {
    std::remove_cvref_t<std::invoke_result_t<Value, const Item&>> sum = 0;
    for (const Item& item : items) sum += std::invoke(value, item);
    return sum;
}
inline double sum_of(const std::vector<MemoryItem>& items) { return sum_of(items, &MemoryItem::bytes); }

struct RunPlan {
    int64_t gpus = 1;
    int64_t tokens = 0;  // per rank and micro-batch
    std::vector<ParameterPart> parameters;
    std::vector<FlopPart> flops;
    double balanced_rows = 0;  // received rows of one rank and layer with even load, pads included
    double row_capacity = 0;   // rows that memory is reserved for
    std::vector<MemoryItem> memory;
    MemoryItem host;                                    // step_tokens
    double saved_reserved = 0;                          // saved activations with row_capacity rows per layer
    double saved_used = 0;                              // with balanced_rows
    double workspace_reserved = 0, workspace_used = 0;  // of one MoE layer, likewise
    std::vector<RecomputeChoice> recompute;
    std::vector<WireItem> wire;
    double distinct_ranks = 0;  // expected number of ranks a token is sent to, its own included

    int64_t total_parameters() const { return sum_of(parameters, &ParameterPart::total); }
    int64_t active_parameters() const { return sum_of(parameters, &ParameterPart::active); }
    double total_bytes() const { return sum_of(memory); }
    double wire_bytes() const { return sum_of(wire, &WireItem::both); }  // per layer and micro-batch
};

// Throws Error(usage) if the configuration is not legal on that many GPUs, or its sizes cannot be counted.
RunPlan make_plan(const Config& config, int64_t gpus);

// Throws Error(usage) if parameters or rows exceed what 63 bits count: the functions below rely on it.
void check_countable(const Config& config);
// The projections [n, k] of attention in one layer, none without attention. Those of mla_up_proj run again.
struct AttentionWeight {
    std::string_view name;  // linear_qkv
    int64_t n = 0, k = 0;
    bool fp8 = true;  // with precision.fp8_attention_linears
    enum class Input { normed, latent, heads } input = Input::normed;
    bool again = false;
};
std::vector<AttentionWeight> attention_weights(const ModelSpec& model);
std::vector<ParameterPart> count_parameters(const Config& config);
std::vector<FlopPart> count_flops(const Config& config);
// Expected number of distinct ranks that hold at least one of a token's experts.
double expected_distinct_ranks(const MoeSpec& moe, int64_t ranks);
// Of a rank and step.
int64_t micro_batches_of(const Config& config, int64_t gpus);
// Rows that a rank receives at most (ids are distinct), or that the capacity factor allows; pads included.
double rank_row_capacity(const Config& config);
std::vector<WireItem> wire_bytes(const Config& config);
std::vector<MemoryItem> memory_items(const Config& config, int64_t gpus);
double bytes_of(const std::vector<MemoryItem>& items, const std::string& category);  // 0: not in them
// What a rank has in page-locked host memory next to that: the tokens of the steps in flight.
MemoryItem step_tokens(const Config& config, int64_t gpus);
// Rows that a rank receives, each once for all its experts: at most, which memory is reserved for
// (saved_rows: received), and expected.
double received_capacity(const Config& config);
double expected_received_rows(const Config& config);
// Saved activations in bytes: per token (all parts outside the experts), per routed row and per received row,
// of one layer.
struct SavedBytes {
    double per_token = 0;
    double per_row = 0;
    double per_received = 0;
};
SavedBytes saved_activation_bytes(const Config& config, int64_t layer, const RecomputeSpec& recompute);
std::vector<RecomputeChoice> recompute_choices(const Config& config);
inline bool is_moe(const Config& config, int64_t layer) {
    return config.model.moe_layer_freq[to_size(layer)] == 1;
}
inline int64_t num_moe_layers(const Config& config) {
    return std::ranges::count(config.model.moe_layer_freq, 1);
}
// Precision of one layer: the first and last layers may be kept in BF16.
PrecisionSpec layer_precision(const Config& config, int64_t layer);

}  // namespace fp8flow::plan
