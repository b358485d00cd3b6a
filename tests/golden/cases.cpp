// SPDX-License-Identifier: MIT
// The table of golden cases. It covers by pairs, not by the full product: see selection().
#include "tests/golden/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <stdexcept>

namespace fp8flow::golden {

namespace {

const std::vector<std::string> kRecompute = {
    "full",    "core_attn", "layernorm",  "shared_experts",
    "moe_act", "moe",       "moe_expert", "core_attn+layernorm+moe_act+shared_experts",
};
struct Layout {
    int expert_ranks, ranks;
};
constexpr Layout kLayouts[] = {{1, 1}, {1, 2}, {2, 2}, {1, 4}, {2, 4}, {4, 4}};
constexpr Layout kOne = {1, 1}, kPair = {2, 2},
                 kSome = {2, 4};  // kSome: groups share experts, and replicate them

// What a variant sets.
const std::map<std::string, std::vector<std::string>>& variants() {
    static const std::map<std::string, std::vector<std::string>> all = {
        {"standard", {}},
        // ---- precision
        {"hybrid", {"precision.fp8_format=hybrid"}},
        {"bf16_wgrad", {"precision.fp8_wgrad=false"}},
        {"delayed_wgrad", {"precision.moe_wgrad_micro_batches=2"}},
        {"fp32_scales", {"precision.scale_format=fp32"}},
        // ---- schedules, which give the bits of `standard` (no rows of their own)
        {"shared_expert_overlapped", {"schedule.moe_shared_expert_overlap=true"}},
        {"wgrad_overlapped", {"schedule.delay_wgrad_compute=true"}},
        {"overlapped", {"schedule.moe_shared_expert_overlap=true", "schedule.delay_wgrad_compute=true"}},
        {"interleaved",
         {"schedule.overlap_moe_expert_parallel_comm=true", "schedule.overlap_grad_reduce=true"}},
        {"graph", {"schedule.cuda_graph_impl=full_iteration"}},
        {"graph_overlapped",
         {"schedule.cuda_graph_impl=full_iteration", "schedule.moe_shared_expert_overlap=true",
          "schedule.delay_wgrad_compute=true"}},
        {"graph_interleaved",
         {"schedule.cuda_graph_impl=full_iteration", "schedule.overlap_moe_expert_parallel_comm=true",
          "schedule.overlap_grad_reduce=true"}},
        {"bf16_state",
         {"training.main_grads_dtype=bf16", "training.exp_avg_dtype=bf16", "training.exp_avg_sq_dtype=bf16"}},
        // ---- state divided over the ranks: the bits of `standard` or of `invariant`
        {"divided", {"training.use_distributed_optimizer=true"}},
        {"divided_invariant", {"training.use_distributed_optimizer=true", "moe.moe_combine_order=invariant"}},
        {"divided_overlapped",
         {"training.use_distributed_optimizer=true", "schedule.overlap_param_gather=true",
          "schedule.overlap_grad_reduce=true", "schedule.moe_shared_expert_overlap=true",
          "schedule.delay_wgrad_compute=true"}},
        {"divided_interleaved",
         {"training.use_distributed_optimizer=true", "schedule.overlap_param_gather=true",
          "schedule.overlap_grad_reduce=true", "schedule.overlap_moe_expert_parallel_comm=true"}},
        {"graph_divided",
         {"training.use_distributed_optimizer=true", "schedule.overlap_param_gather=true",
          "schedule.overlap_grad_reduce=true", "schedule.cuda_graph_impl=full_iteration"}},
        // ---- what moe_expert keeps of the received rows: the bits of `standard` or of `invariant`
        {"received", {"recompute.saved_rows=received"}},
        {"received_invariant", {"recompute.saved_rows=received", "moe.moe_combine_order=invariant"}},
        {"received_tight_rows", {"recompute.saved_rows=received", "moe.moe_expert_rank_capacity_factor=0.5"}},
        {"received_overlapped",
         {"recompute.saved_rows=received", "schedule.moe_shared_expert_overlap=true",
          "schedule.delay_wgrad_compute=true"}},
        {"received_interleaved",
         {"recompute.saved_rows=received", "schedule.overlap_moe_expert_parallel_comm=true",
          "schedule.overlap_grad_reduce=true"}},
        {"received_graph", {"recompute.saved_rows=received", "schedule.cuda_graph_impl=full_iteration"}},
        {"no_rows", {"recompute.saved_rows=none"}},
        {"no_rows_invariant", {"recompute.saved_rows=none", "moe.moe_combine_order=invariant"}},
        {"no_rows_tight_rows", {"recompute.saved_rows=none", "moe.moe_expert_rank_capacity_factor=0.5"}},
        {"no_rows_overlapped",
         {"recompute.saved_rows=none", "schedule.moe_shared_expert_overlap=true",
          "schedule.delay_wgrad_compute=true"}},
        {"no_rows_interleaved",
         {"recompute.saved_rows=none", "schedule.overlap_moe_expert_parallel_comm=true",
          "schedule.overlap_grad_reduce=true"}},
        {"no_rows_graph", {"recompute.saved_rows=none", "schedule.cuda_graph_impl=full_iteration"}},
        {"graph_tight_rows",
         {"schedule.cuda_graph_impl=full_iteration", "moe.moe_expert_rank_capacity_factor=0.5"}},
        {"graph_invariant", {"schedule.cuda_graph_impl=full_iteration", "moe.moe_combine_order=invariant"}},
        {"graph_merging_weights_invariant",
         {"schedule.cuda_graph_impl=full_iteration", "precision.moe_apply_probs_in=combine",
          "moe.moe_combine_order=invariant"}},
        {"graph_bf16_state",
         {"schedule.cuda_graph_impl=full_iteration", "training.main_grads_dtype=bf16",
          "training.exp_avg_dtype=bf16", "training.exp_avg_sq_dtype=bf16"}},
        {"overlapped_delayed_wgrad",
         {"schedule.moe_shared_expert_overlap=true", "schedule.delay_wgrad_compute=true",
          "precision.moe_wgrad_micro_batches=2"}},
        {"fp32_scales_requantized",
         {"precision.scale_format=fp32", "precision.moe_scaling_aware_transpose=false"}},
        {"mx_floor", {"precision.mx_rounding=floor"}},
        {"short_history", {"precision.fp8_amax_history_len=1"}},
        {"bf16_dispatch", {"precision.moe_quantize_before_dispatch=false"}},
        {"requantized", {"precision.moe_scaling_aware_transpose=false"}},
        {"padding_apart", {"precision.moe_permute_padding_for_fp8=false"}},
        {"act_quantize_apart", {"precision.moe_act_quantize_fusion=false"}},
        {"norm_quantize_apart", {"precision.moe_norm_quantize_fusion=false"}},
        {"merging_weights", {"precision.moe_apply_probs_in=combine"}},
        {"merging_weights_invariant",
         {"precision.moe_apply_probs_in=combine", "moe.moe_combine_order=invariant"}},
        {"merging_weights_padding_apart",
         {"precision.moe_apply_probs_in=combine", "precision.moe_permute_padding_for_fp8=false"}},
        {"all_apart",
         {"precision.moe_quantize_before_dispatch=false", "precision.moe_scaling_aware_transpose=false",
          "precision.moe_permute_padding_for_fp8=false", "precision.moe_act_quantize_fusion=false",
          "precision.moe_norm_quantize_fusion=false"}},
        // ---- the layer
        {"invariant", {"moe.moe_combine_order=invariant"}},
        {"narrow_padding", {"moe.moe_row_alignment=32"}},
        {"tight_rows", {"moe.moe_expert_rank_capacity_factor=0.5"}},  // steps are redone with larger buffers
        {"routed_only", {"model.moe_layer_freq=[1,1]", "moe.moe_shared_expert_intermediate_size=0"}},
        {"sigmoid",
         {"moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true",
          "moe.moe_router_num_groups=2", "moe.moe_router_group_topk=1",
          "moe.moe_router_topk_scaling_factor=2.5", "moe.moe_router_load_balancing_type=seq_aux_loss"}},
        {"losses",
         {"moe.moe_router_load_balancing_type=[aux_loss,seq_aux_loss,global_aux_loss]",
          "moe.moe_aux_loss_coeff=[0.01,0.02,0.03]", "moe.moe_global_aux_loss_gradient=sum",
          "moe.moe_z_loss_coeff=0.001"}},
        {"model",  // what else a model may have
         {"model.qk_layernorm=true", "model.zero_centered_gamma=true",
          "model.untie_embeddings_and_output_weights=false", "model.embedding_init_method_std=0.1"}},
        {"bf16_first_layer", {"model.num_layers_at_start_in_bf16=1", "model.moe_layer_freq=[1,1]"}},
    };
    return all;
}

// Variants by the recipes that know them.
const std::vector<std::pair<std::string, std::vector<std::string>>> kVariantsOf = {
    {"bf16",
     {"invariant", "narrow_padding", "tight_rows", "routed_only", "sigmoid", "losses", "model",
      "merging_weights", "merging_weights_invariant"}},
    {"fp8_tensorwise",
     {"hybrid", "bf16_wgrad", "fp32_scales", "short_history", "narrow_padding", "merging_weights"}},
    {"fp8_blockwise", {"hybrid", "bf16_wgrad", "fp32_scales", "delayed_wgrad", "merging_weights"}},
    {"fp8_flow",
     {"hybrid",
      "bf16_wgrad",
      "delayed_wgrad",
      "fp32_scales_requantized",
      "bf16_dispatch",
      "requantized",
      "padding_apart",
      "act_quantize_apart",
      "all_apart",
      "norm_quantize_apart",
      "invariant",
      "tight_rows",
      "routed_only",
      "sigmoid",
      "losses",
      "model",
      "bf16_first_layer",
      "merging_weights",
      "merging_weights_invariant",
      "merging_weights_padding_apart"}},
    {"fp8_rowwise", {"hybrid", "bf16_wgrad", "fp32_scales", "narrow_padding", "merging_weights"}},
    {"mxfp8", {"hybrid", "bf16_wgrad", "mx_floor", "narrow_padding", "merging_weights"}},
};

std::vector<Case> make_cases() {
    std::vector<Case> cases;
    const auto add = [&](Case c) {
        if (std::find(cases.begin(), cases.end(), c) == cases.end()) cases.push_back(std::move(c));
    };
    constexpr size_t kNumLayouts = std::size(kLayouts);
    const auto micro_batches = [](size_t recipe, size_t layout) {
        return static_cast<int>(1 + (recipe + layout) % 2);
    };
    const auto plain = [&](size_t r, size_t l) {
        return Case{.recipe = kRecipeNames[r],
                    .expert_ranks = kLayouts[l].expert_ranks,
                    .ranks = kLayouts[l].ranks,
                    .micro_batches = micro_batches(r, l)};
    };
    for (size_t r = 0; r < kRecipeNames.size(); ++r)
        for (size_t l = 0; l < kNumLayouts; ++l) add(plain(r, l));
    for (size_t r = 0; r < kRecipeNames.size(); ++r)
        for (size_t i = 0; i < kRecompute.size(); ++i) {
            Case c = plain(r, (r + i) % kNumLayouts);
            c.recompute = kRecompute[i];
            add(c);
        }
    for (size_t r = 0; r < kRecipeNames.size(); ++r)
        for (const size_t l : {size_t{2}, size_t{4}}) {
            Case c = plain(r, l);
            c.dispatcher = "alltoall";
            add(c);
        }
    for (const auto& [recipe, names] : kVariantsOf) {
        const bool often = recipe == "bf16" || recipe == "fp8_flow";
        for (const std::string& name : names)
            for (const Layout& layout : often ? std::vector{kOne, kSome} : std::vector{kPair})
                add({.recipe = recipe,
                     .expert_ranks = layout.expert_ranks,
                     .ranks = layout.ranks,
                     .micro_batches = layout.ranks == 4 && name != "delayed_wgrad" ? 1 : 2,
                     .variant = name});
    }
    // Where two switches share code: recompute under the flow's ablations, delayed weight gradients, merging
    // weights and both losses and recompute.
    for (const char* variant : {"all_apart", "delayed_wgrad", "bf16_wgrad", "losses", "merging_weights"})
        for (const char* recompute : {"moe_expert", "moe", "full"})
            add({.recipe = "fp8_flow", .recompute = recompute, .micro_batches = 2, .variant = variant});
    return cases;
}

}  // namespace

std::string Case::name() const {
    return fmt::format("{}, recompute {}, EP {} of {} ranks, {}, {} micro-batches, {}", recipe, recompute,
                       expert_ranks, ranks, dispatcher, micro_batches, variant);
}

Config Case::config() const {
    const int batch = std::max(8, ranks * micro_batches);
    std::vector<std::string> overrides = {
        fmt::format("precision.recipe={}", recipe),
        fmt::format("parallel.expert_model_parallel_size={}", expert_ranks),
        fmt::format("parallel.moe_token_dispatcher_type={}", dispatcher),
        fmt::format("training.global_batch_size={}", batch),
        fmt::format("training.micro_batch_size={}", batch / (ranks * micro_batches)),
    };
    // more ranks than the file has experts: one of its own for each
    if (ranks > 4) overrides.push_back(fmt::format("moe.num_experts={}", ranks));
    if (hosts > 1) overrides.push_back(fmt::format("parallel.hosts={}x{}", hosts, ranks / hosts));
    if (recompute == "full") overrides.emplace_back("recompute.recompute_granularity=full");
    if (recompute != "full" && recompute != "none") {
        std::string modules = recompute;
        std::replace(modules.begin(), modules.end(), '+', ',');
        overrides.emplace_back("recompute.recompute_granularity=selective");
        overrides.push_back(fmt::format("recompute.recompute_modules=[{}]", modules));
    }
    const auto set = variants().find(variant);
    if (set == variants().end()) throw std::logic_error("no golden variant " + variant);
    overrides.insert(overrides.end(), set->second.begin(), set->second.end());
    return load_config(FP8FLOW_SOURCE_DIR "/tests/golden/golden.yaml", overrides, ranks);
}

const std::vector<std::string>& selection() {
    static const std::vector<std::string> lines = {
        "Every recipe on every layout (EP 1, 2, 4 of 1, 2, 4 ranks); micro-batches 1 and 2 alternate, so "
        "each recipe has both.",
        "Every recipe with every recompute module, with four of them at once, and with full; the layouts "
        "rotate.",
        "Every recipe with the alltoall dispatcher, EP = ranks and EP < ranks.",
        "Every switch of fp8_flow, and with it and bf16 every kind of layer, loss and combine order, on one "
        "rank with 2 micro-batches and on EP 2 of 4 ranks.",
        "Every switch of the other recipes on EP 2 of 2 ranks with 2 micro-batches.",
        "fp8_flow: ablations, delayed weight gradients, BF16 weight gradients, balancing losses and merging "
        "weights, each with recompute of experts, layer, all.",
    };
    return lines;
}

const std::vector<Case>& all_cases() {
    static const std::vector<Case> cases = make_cases();
    return cases;
}

}  // namespace fp8flow::golden
