// SPDX-License-Identifier: MIT
// The rules between fields: every refusal names the key, what was got and what is wanted, with numbers.
#include "model/config/check.h"

#include "model/config/fields.h"
#include "model/config/hf_families.h"

#include "kernels/core/error.h"
#include "layers/flows/flow.h"
#include "layers/rope.h"

#include <algorithm>
#include <array>

namespace fp8flow {

bool ConfigProblems::usable(std::span<const char* const> names) const {
    return std::ranges::none_of(names, [&](const char* name) { return bad_.count(name) > 0; });
}

void ConfigProblems::throw_if_any() const {
    if (!lines_.empty()) throw Error(ExitCode::usage, fmt::format("{}", fmt::join(lines_, "\n")));
}

namespace {

// The nearest values below and above `got` among `legal` (ascending), as text: "4 or 8".
std::string nearest_of(int64_t got, const std::vector<int64_t>& legal) {
    const auto above = std::ranges::lower_bound(legal, got);
    std::vector<int64_t> near;
    if (above != legal.begin()) near.push_back(*(above - 1));
    if (above != legal.end()) near.push_back(*above);
    return fmt::format("{}", fmt::join(near, " or "));
}

template <class Legal> std::vector<int64_t> numbers_where(int64_t first, int64_t last, Legal legal) {
    std::vector<int64_t> numbers;
    for (int64_t n = first; n <= last; ++n)
        if (legal(n)) numbers.push_back(n);
    return numbers;
}

// "1 or 4": the multiples of `step` around `got`.
std::string multiples_near(int64_t got, int64_t step) {
    const int64_t below = got / step * step;
    return below > 0 ? fmt::format("{} or {}", below, below + step) : fmt::format("{}", below + step);
}

bool has_moe_layer(const Config& c) { return std::ranges::count(c.model.moe_layer_freq, 1) > 0; }
bool sigmoid(const Config& c) { return c.moe.moe_router_score_function == ScoreFunction::sigmoid; }
bool interleaved(const Config& c) { return c.schedule.overlap_moe_expert_parallel_comm; }
bool any_module(const RecomputeSpec& r) {
    return r.core_attn || r.layernorm || r.moe_act || r.moe_expert || r.moe || r.shared_experts ||
           r.mla_up_proj;
}
bool is(const Config& c, RecomputeGranularity granularity) {
    return c.recompute.recompute_granularity == granularity;
}
bool selects(const Config& c, bool RecomputeSpec::*module) {
    return is(c, RecomputeGranularity::selective) && c.recompute.*module;
}

// A value that is legal only with another key's value. The message names the first key; {} in its text is
// that key's value.
struct Clash {
    std::array<const char*, 3> keys;
    bool (*broken)(const Config&);
    const char* text;
};
using R = RecomputeSpec;
using enum RecomputeGranularity;
constexpr int64_t kMostHeadDim = 256;  // of attention (kernels/ops/attention.h)
constexpr const char* kModules = "recompute.recompute_modules";
constexpr const char* kGranularity = "recompute.recompute_granularity";
constexpr const char* kScore = "moe.moe_router_score_function";
constexpr const char* kInterleaved = "schedule.overlap_moe_expert_parallel_comm";
constexpr const char* kNotInterleaved =
    "got true, want false with schedule.overlap_moe_expert_parallel_comm: true, which overlaps one "
    "micro-batch's exchange with the other's GEMMs";
constexpr const char* kNoSkippedData =
    "got a file, want none with training.on_divergence: rollback, which skips data, so that the last steps "
    "read tokens that the file does not have";
#define WHEN(condition) [](const Config& c) { return condition; }
constexpr Clash kClashes[] = {
    {{"moe.moe_router_pre_softmax", "moe.moe_router_topk", kScore},
     WHEN(!sigmoid(c) && c.moe.moe_router_topk == 1 && !c.moe.moe_router_pre_softmax),
     "got false, want true with moe_router_topk = 1: a softmax over one expert is always 1 and teaches the "
     "router nothing"},
    {{"moe.moe_router_pre_softmax", kScore},
     WHEN(sigmoid(c) && c.moe.moe_router_pre_softmax),
     "got true, want false with moe_router_score_function: sigmoid"},
    {{"moe.moe_router_norm_topk_prob", kScore},
     WHEN(!sigmoid(c) && !c.moe.moe_router_norm_topk_prob),
     "got false, want true with moe_router_score_function: softmax (without normalisation: "
     "moe_router_pre_softmax: true)"},
    {{"moe.moe_router_enable_expert_bias", kScore},
     WHEN(!sigmoid(c) && c.moe.moe_router_enable_expert_bias),
     "got true, want moe_router_score_function: sigmoid with it (or false)"},
    {{"precision.scale_format", "precision.moe_scaling_aware_transpose", "precision.recipe"},
     WHEN(c.precision.recipe == Recipe::fp8_flow && c.precision.scale_format == ScaleFormat::fp32 &&
          c.precision.moe_scaling_aware_transpose),
     "got fp32, want pow2 with moe_scaling_aware_transpose: true, which shifts exponents and ignores "
     "mantissas of scales (or set moe_scaling_aware_transpose: false)"},
    {{"precision.moe_wgrad_micro_batches", "precision.fp8_wgrad"},
     WHEN(c.precision.moe_wgrad_micro_batches > 1 && !c.precision.fp8_wgrad),
     "got {}, want 1 with fp8_wgrad: false, since BF16 operands are not kept"},
    {{"precision.fp8_attention_linears", "model.attention"},
     WHEN(c.precision.fp8_attention_linears && !c.model.attention),
     "got true, want false with attention: false: there is nothing to project"},
    {{"precision.fp8_attention_linears", "model.num_attention_heads", "model.kv_channels"},
     WHEN(c.precision.fp8_attention_linears && !c.model.multi_latent_attention &&
          (c.model.num_attention_heads * c.model.kv_channels % kBlock != 0 ||
           2 * c.model.num_query_groups * c.model.kv_channels % kBlock != 0)),
     "got true, want heads x kv_channels, and twice num_query_groups x kv_channels, multiples of 128 with "
     "it"},
    {{"precision.fp8_attention_linears", "model.q_lora_rank", "model.kv_lora_rank"},
     WHEN(c.precision.fp8_attention_linears&& c.model.multi_latent_attention &&
          (c.model.q_lora_rank % kBlock != 0 || c.model.kv_lora_rank % kBlock != 0)),
     "got true, want q_lora_rank and kv_lora_rank multiples of 128 with it"},
    {{"precision.fp8_attention_linears", "model.num_attention_heads", "model.qk_head_dim"},
     WHEN(c.precision.fp8_attention_linears&& c.model.multi_latent_attention &&
          (c.model.num_attention_heads * c.model.qk_dim() % kBlock != 0 ||
           c.model.num_attention_heads * c.model.v_head_dim % kBlock != 0 ||
           c.model.num_attention_heads * c.model.qk_head_dim % kBlock != 0)),
     "got true, want heads x (qk_head_dim + qk_pos_emb_head_dim), heads x qk_head_dim and heads x v_head_dim "
     "multiples of 128 with it"},
    {{"model.add_qkv_bias", "model.multi_latent_attention"},
     WHEN(c.model.add_qkv_bias&& c.model.multi_latent_attention),
     "got true, want false with multi_latent_attention: its projections have no biases"},
    {{"model.qk_head_dim", "model.qk_pos_emb_head_dim"},
     WHEN(c.model.multi_latent_attention&& c.model.qk_dim() > kMostHeadDim),
     "got {}, want at most 256 together with qk_pos_emb_head_dim"},
    {{"model.rotary_percent", "model.kv_channels"},
     WHEN(rotated_dims(c.model) % 2 != 0),
     "got {}, want an even number of rotated dimensions of a head"},
    {{"model.high_freq_factor", "model.low_freq_factor"},
     WHEN(c.model.rope.high_freq_factor <= c.model.rope.low_freq_factor),
     "got {}, want more than low_freq_factor"},
    {{"model.rope_type", "model.kv_channels"},
     WHEN(c.model.rope.rope_type == RopeType::ntk && rotated_dims(c.model) <= 2),
     "got ntk, want more than 2 rotated dimensions of a head with it"},
    {{"moe.moe_combine_order", "precision.recipe", "parallel.expert_model_parallel_size"},
     WHEN(c.precision.recipe == Recipe::fp8_tensorwise && c.moe.moe_combine_order != CombineOrder::rank &&
          c.parallel.expert_model_parallel_size > 1),
     "got invariant, want rank with recipe fp8_tensorwise and expert_model_parallel_size > 1: a scale is the "
     "maximum of the experts of a rank"},
    {{"schedule.moe_shared_expert_overlap", kInterleaved},
     WHEN(interleaved(c) && c.schedule.moe_shared_expert_overlap),
     kNotInterleaved},
    {{"schedule.delay_wgrad_compute", kInterleaved},
     WHEN(interleaved(c) && c.schedule.delay_wgrad_compute),
     kNotInterleaved},
    {{"precision.moe_wgrad_micro_batches", kInterleaved},
     WHEN(interleaved(c) && c.precision.moe_wgrad_micro_batches > 1),
     "got {}, want 1 with schedule.overlap_moe_expert_parallel_comm: true"},
    {{"schedule.overlap_param_gather", "training.use_distributed_optimizer"},
     WHEN(c.schedule.overlap_param_gather && !c.training.use_distributed_optimizer),
     "got true, want false with use_distributed_optimizer: false: every rank has its working copies"},
    {{"recompute.saved_rows", kModules},
     WHEN(c.recompute.saved_rows != SavedRows::sorted && !c.recompute.moe_expert),
     "got {}, want sorted unless recompute_modules has moe_expert"},
    {{"recompute.saved_rows", "precision.moe_quantize_before_dispatch",
      "precision.moe_permute_padding_for_fp8"},
     WHEN(c.recompute.saved_rows != SavedRows::sorted && c.precision.recipe == Recipe::fp8_flow &&
          !(c.precision.moe_quantize_before_dispatch && c.precision.moe_permute_padding_for_fp8)),
     "got {}, want sorted with moe_quantize_before_dispatch: false or moe_permute_padding_for_fp8: false"},
    {{kModules, kGranularity},
     WHEN(is(c, full) && any_module(c.recompute)),
     "got modules, want [] with recompute_granularity: full, which re-runs whole layers"},
    {{kModules, kGranularity},
     WHEN(is(c, none) && any_module(c.recompute)),
     "got modules, want recompute_granularity: selective with them"},
    {{kModules, kGranularity},
     WHEN(is(c, selective) && !any_module(c.recompute)),
     "got [], want at least one module with recompute_granularity: selective"},
    {{kModules, "model.attention"},
     WHEN(selects(c, &R::core_attn) && !c.model.attention),
     "got core_attn, want it left out with attention: false"},
    {{kModules, "model.multi_latent_attention"},
     WHEN(selects(c, &R::mla_up_proj) && !c.model.multi_latent_attention),
     "got mla_up_proj, want it left out without multi_latent_attention: true"},
    {{kModules, "moe.moe_shared_expert_intermediate_size"},
     WHEN(selects(c, &R::shared_experts) && c.moe.moe_shared_expert_intermediate_size == 0),
     "got shared_experts, want it left out with moe_shared_expert_intermediate_size = 0"},
    {{"model.activation_func_clamp_routed_only", "model.activation_func_clamp_value"},
     WHEN(c.model.glu.activation_func_clamp_routed_only&& c.model.glu.activation_func_clamp_value == 0),
     "got true, want false with activation_func_clamp_value = 0: nothing is clamped"},
    {{"moe.moe_shared_expert_gate", "moe.moe_shared_expert_intermediate_size"},
     WHEN(c.moe.moe_shared_expert_gate&& c.moe.moe_shared_expert_intermediate_size == 0),
     "got true, want false with moe_shared_expert_intermediate_size = 0: there is no shared expert"},
    {{kModules, "model.moe_layer_freq"},
     WHEN(!has_moe_layer(c) && (selects(c, &R::moe_act) || selects(c, &R::moe_expert) ||
                                selects(c, &R::moe) || selects(c, &R::shared_experts))),
     "got MoE modules, want them left out: moe_layer_freq has no MoE layer"},
    {{kModules},
     WHEN(selects(c, &R::moe_expert) && selects(c, &R::moe)),
     "got moe_expert and moe, want one: moe re-runs the experts too"},
    {{kModules},
     WHEN(selects(c, &R::moe_expert) && selects(c, &R::moe_act)),
     "got moe_expert and moe_act, want one: moe_expert re-runs the activation too"},
    {{kModules},
     WHEN(selects(c, &R::moe) && selects(c, &R::moe_act)),
     "got moe and moe_act, want one: moe re-runs the activation too"},
    {{kModules},
     WHEN(selects(c, &R::moe) && selects(c, &R::shared_experts)),
     "got moe and shared_experts, want one: moe re-runs the shared expert too"},
    {{"training.on_divergence", "checkpoint.save_interval"},
     WHEN(c.training.on_divergence == OnDivergence::rollback && c.checkpoint.save_interval == 0),
     "rollback goes back to a checkpoint: set checkpoint.save_interval above 0"},
    {{"data.data_path", "data.data_kind"},
     WHEN(c.data.data_kind != DataKind::synthetic && c.data.data_path.empty()),
     "got no path, want files, folders or globs, e.g. --set data.data_path=/my/texts"},
    {{"data.data_path", "data.data_kind"},
     WHEN(c.data.data_kind == DataKind::synthetic && !c.data.data_path.empty()),
     "got a path, want data_kind: text, shards or megatron with it (synthetic data has none)"},
    {{"data.routing_path", "moe.moe_router_force_load_balancing", "moe.moe_router_force_biased"},
     WHEN(!c.data.routing_path.empty() &&
          (c.moe.moe_router_force_load_balancing || c.moe.moe_router_force_biased > 0)),
     "got a file, want none where moe_router_force_load_balancing or moe_router_force_biased sets the "
     "experts"},
    {{"data.routing_path", "training.on_divergence"},
     WHEN(!c.data.routing_path.empty() && c.training.on_divergence == OnDivergence::rollback),
     kNoSkippedData},
    {{"output.record_routing", "training.on_divergence"},
     WHEN(!c.output.record_routing.empty() && c.training.on_divergence == OnDivergence::rollback),
     kNoSkippedData},
    {{"validate.recipes"},
     WHEN(std::ranges::find(c.validate.recipes, Recipe::bf16) == c.validate.recipes.end()),
     "got a list without bf16, want bf16 in it: it is the baseline of every comparison"},
    {{"checkpoint.finetune", "checkpoint.load"},
     WHEN(c.checkpoint.load.empty() && c.checkpoint.finetune),
     "got true, want checkpoint.load with it: the checkpoint to take weights from"},
    {{"checkpoint.finetune", "checkpoint.load"},
     WHEN((c.checkpoint.load == "auto") && c.checkpoint.finetune),
     "got true with load: auto, want the folder of a checkpoint: auto goes on with this run's own"},
};
#undef WHEN

class Checker {
public:
    Checker(const Config& config, std::optional<int64_t> world_size, ConfigProblems& problems)
        : c_(config), world_size_(world_size), problems_(problems) {}

    void check() {
        check_model();
        check_router();
        check_groups();
        check_precision();
        for (const Clash& clash : kClashes) check_clash(clash);
        check_parallel();
        check_training();
        check_data();
    }

private:
    using Names = std::span<const char* const>;
    using List = std::initializer_list<const char*>;

    template <class... Args>
    void rule(bool holds, List names, fmt::format_string<Args...> text, Args&&... args) {
        if (!holds) report({names.begin(), names.size()}, fmt::format(text, std::forward<Args>(args)...));
    }

    // Reports `text` about the first of `names`, unless one of them has no usable value. The place is that of
    // the first name that the user wrote down, or else of one that an imported model has: a rule broken by a
    // default points at the key that clashes with it.
    void report(Names names, const std::string& text) {
        if (!problems_.usable(names)) return;
        std::string where = "configuration";
        bool by_user = false;
        for (const char* name : names) {
            const auto found = c_.origin.find(name);
            if (found == c_.origin.end() || by_user) continue;
            by_user = !problems_.imported(name);
            if (by_user || where == "configuration") where = found->second;
        }
        problems_.add(where, "{}: {}", names.front(), text);
    }

    // `got`, of the first name, divides `whole`, of the second.
    void divides(int64_t got, int64_t whole, List names) {
        if (whole % got == 0) return;
        const std::string_view of = *(names.begin() + 1);
        const auto legal = numbers_where(1, whole, [&](int64_t n) { return whole % n == 0; });
        rule(false, names, "got {}, want a divisor of {} = {}; nearest {}", got, of.substr(of.find('.') + 1),
             whole, nearest_of(got, legal));
    }

    void check_clash(const Clash& clash) {
        if (!clash.broken(c_)) return;
        const Names names(clash.keys);
        std::string text = clash.text;
        if (const size_t at = text.find("{}"); at != std::string::npos)
            text.replace(at, 2, field_named(names.front()).get(c_));
        report(names.first(to_size(std::ranges::find(names, nullptr) - names.begin())), text);
    }

    void check_model() {
        const ModelSpec& m = c_.model;
        rule(std::ssize(m.moe_layer_freq) == m.num_layers, {"model.moe_layer_freq", "model.num_layers"},
             "got {} entries, want num_layers = {}", m.moe_layer_freq.size(), m.num_layers);
        if (m.attention && !m.multi_latent_attention)
            divides(m.num_query_groups, m.num_attention_heads,
                    {"model.num_query_groups", "model.num_attention_heads"});
        const HfFamily* const family = hf_family(c_.family);
        rule(c_.family.empty() || family != nullptr, {"model.hf_family"},
             "want a model_type that fp8flow families lists");
        if (m.attention && family != nullptr && family->index_topk > 0)
            rule(m.seq_length <= family->index_topk, {"model.seq_length"},
                 "got {}, want at most index_topk = {}: in longer sequences {} attends to the keys that its "
                 "indexer chooses, which is not implemented (model.attention: false leaves it out)",
                 m.seq_length, family->index_topk, family->type);
        rule(c_.unscaled_length == 0 || m.seq_length <= c_.unscaled_length, {"model.seq_length"},
             "got {}, want at most max_position_embeddings = {}: rope_type dynamic changes the frequencies "
             "of longer sequences, which is not implemented (model.rope_type: ntk changes them for all)",
             m.seq_length, c_.unscaled_length);
        rule(m.num_layers_at_start_in_bf16 + m.num_layers_at_end_in_bf16 <= m.num_layers,
             {"model.num_layers_at_start_in_bf16", "model.num_layers_at_end_in_bf16", "model.num_layers"},
             "got {} at the start and {} at the end, want together at most num_layers = {}",
             m.num_layers_at_start_in_bf16, m.num_layers_at_end_in_bf16, m.num_layers);
    }

    void check_router() {
        const MoeSpec& m = c_.moe;
        rule(m.moe_router_topk <= m.num_experts, {"moe.moe_router_topk", "moe.num_experts"},
             "got {}, want at most num_experts = {}", m.moe_router_topk, m.num_experts);
        rule(!(m.moe_router_force_load_balancing && m.moe_router_force_biased > 0),
             {"moe.moe_router_force_biased", "moe.moe_router_force_load_balancing"},
             "got {}, want 0 with moe_router_force_load_balancing: true", m.moe_router_force_biased);
        const double worst = f64(m.num_experts) / f64(m.moe_router_topk);
        rule(m.moe_router_force_biased == 0 || m.moe_router_topk > m.num_experts ||
                 (m.moe_router_force_biased >= 1 && m.moe_router_force_biased <= worst),
             {"moe.moe_router_force_biased", "moe.num_experts", "moe.moe_router_topk"},
             "got {}, want 0 or a max/mean load in [1, num_experts / moe_router_topk = {}]",
             m.moe_router_force_biased, worst);
        rule(m.moe_aux_loss_coeff.size() == m.moe_router_load_balancing_type.size(),
             {"moe.moe_aux_loss_coeff", "moe.moe_router_load_balancing_type"},
             "got {} coefficients, want one for each of the {} in moe_router_load_balancing_type",
             m.moe_aux_loss_coeff.size(), m.moe_router_load_balancing_type.size());
    }

    void check_groups() {
        const MoeSpec& m = c_.moe;
        rule((m.moe_router_num_groups > 0) == (m.moe_router_group_topk > 0),
             {"moe.moe_router_num_groups", "moe.moe_router_group_topk"},
             "got {} with moe_router_group_topk = {}, want both above 0 or both 0", m.moe_router_num_groups,
             m.moe_router_group_topk);
        if (m.moe_router_num_groups == 0 || m.moe_router_group_topk == 0) return;
        divides(m.moe_router_num_groups, m.num_experts, {"moe.moe_router_num_groups", "moe.num_experts"});
        rule(m.moe_router_group_topk <= m.moe_router_num_groups,
             {"moe.moe_router_group_topk", "moe.moe_router_num_groups"},
             "got {}, want at most moe_router_num_groups = {}", m.moe_router_group_topk,
             m.moe_router_num_groups);
        rule(m.moe_router_topk % m.moe_router_group_topk == 0,
             {"moe.moe_router_group_topk", "moe.moe_router_topk"},
             "got {}, want a divisor of moe_router_topk = {} (a group is scored by its best "
             "topk / group_topk experts)",
             m.moe_router_group_topk, m.moe_router_topk);
        const int64_t reachable = m.moe_router_group_topk * (m.num_experts / m.moe_router_num_groups);
        rule(m.moe_router_topk <= reachable,
             {"moe.moe_router_topk", "moe.moe_router_group_topk", "moe.moe_router_num_groups",
              "moe.num_experts"},
             "got {}, want at most {}: moe_router_group_topk = {} groups of {} experts", m.moe_router_topk,
             reachable, m.moe_router_group_topk, m.num_experts / m.moe_router_num_groups);
    }

    void check_precision() {
        const PrecisionSpec& p = c_.precision;
        const Config defaults;
        for (const auto& field : config_fields()) {
            const std::string value = field.get(c_);
            if (field.recipes.empty() || value == field.get(defaults) || value == field.off) continue;
            std::vector<std::string_view> known;
            for (const Recipe recipe : field.recipes) known.push_back(recipe_name(recipe));
            rule(std::ranges::count(field.recipes, p.recipe) > 0, {field.name().c_str(), "precision.recipe"},
                 "got {}, want {} with recipe {}: only {} knows this option", value, field.get(defaults),
                 recipe_name(p.recipe), fmt::join(known, ", "));
        }
        const bool known = p.flow.empty() || base_of_flow(p.flow);
        rule(known, {"precision.flow"},
             "got {}, want the name of a flow that the library of --plugin registers{}", p.flow,
             registered_flows().empty() ? " (there is none: docs/usage/new_recipe.md)"
                                        : fmt::format(": {}", fmt::join(registered_flows(), ", ")));
        if (!known) return;
        const auto legal = make_flow(p, {})->row_alignments();
        rule(std::ranges::count(legal, c_.moe.moe_row_alignment) > 0,
             {"moe.moe_row_alignment", "precision.recipe"}, "got {}, want {} with recipe {}",
             c_.moe.moe_row_alignment, fmt::join(legal, " or "), recipe_name(p));
    }

    void check_parallel() {
        const int64_t ep = c_.parallel.expert_model_parallel_size;
        const int64_t experts = c_.moe.num_experts;
        const auto names = {"parallel.expert_model_parallel_size", "moe.num_experts"};
        if (has_moe_layer(c_)) divides(ep, experts, names);
        if (!world_size_) return;
        const int64_t world = *world_size_;
        const ParallelSpec& p = c_.parallel;
        rule(p.hosts == 0 || p.hosts * p.ranks_per_host == world, {"parallel.hosts"},
             "got {}x{}, want as many ranks as the job has, {}", p.hosts, p.ranks_per_host, world);
        rule(p.moe_token_dispatcher_type != TokenDispatcher::hierarchical || p.hosts == 0 ||
                 p.ranks_per_host % ep == 0 || ep % p.ranks_per_host == 0,
             {"parallel.moe_token_dispatcher_type", "parallel.hosts", "parallel.expert_model_parallel_size"},
             "hierarchical with {}x{} hosts and expert_model_parallel_size {}, want ranks that "
             "share the experts inside a host, or on whole hosts",
             p.hosts, p.ranks_per_host, ep);
        if (world % ep == 0) return;
        const auto legal = numbers_where(1, std::min(world, experts),
                                         [&](int64_t n) { return world % n == 0 && experts % n == 0; });
        rule(false, names,

             "got {}, want a divisor of the world size {} (world = expert parallel x data parallel); "
             "nearest expert_model_parallel_size {}, or mpirun -n {}",
             ep, world, nearest_of(ep, legal), multiples_near(world, ep));
    }

    void check_training() {
        const TrainingSpec& t = c_.training;
        const int64_t world = world_size_.value_or(1);
        const int64_t step = t.micro_batch_size * world;
        rule(t.global_batch_size % step == 0, {"training.global_batch_size", "training.micro_batch_size"},
             "got {}, want a multiple of micro_batch_size {} x world size {} = {}; nearest {}",
             t.global_batch_size, t.micro_batch_size, world, step, multiples_near(t.global_batch_size, step));
        constexpr int64_t kMostTokens = int64_t{1} << 62;
        const int64_t most_iters = kMostTokens / t.global_batch_size / c_.model.seq_length;
        const auto countable = [&](const char* key, int64_t iters) {
            rule(iters <= most_iters, {key, "training.global_batch_size", "model.seq_length"},
                 "got {}, want at most {}: with global_batch_size {} and seq_length {} they have "
                 "more tokens than are counted",
                 iters, most_iters, t.global_batch_size, c_.model.seq_length);
        };
        countable("training.train_iters", t.train_iters);
        countable("training.eval_iters", t.eval_iters);
        rule(t.lr_decay_style == LrDecayStyle::constant || t.min_lr <= t.lr,
             {"training.min_lr", "training.lr"}, "got {}, want at most lr = {}", t.min_lr, t.lr);
        rule(t.lr_warmup_init <= t.lr, {"training.lr_warmup_init", "training.lr"},
             "got {}, want at most lr = {}", t.lr_warmup_init, t.lr);
        const int64_t decay = (t.lr_decay_iters > 0 ? t.lr_decay_iters : t.train_iters) - t.lr_warmup_iters;
        rule(t.lr_decay_style != LrDecayStyle::wsd || t.lr_wsd_decay_iters <= decay,
             {"training.lr_wsd_decay_iters", "training.lr_decay_iters", "training.train_iters",
              "training.lr_warmup_iters"},
             "got {}, want at most {}, the steps after warm-up until lr_decay_iters", t.lr_wsd_decay_iters,
             decay);
        rule(t.lr_decay_iters == 0 || t.lr_decay_iters >= t.lr_warmup_iters,
             {"training.lr_decay_iters", "training.lr_warmup_iters"},
             "got {}, want 0 or at least lr_warmup_iters = {}", t.lr_decay_iters, t.lr_warmup_iters);
    }

    void check_data() {
        const DataSpec& d = c_.data;
        rule(d.data_kind != DataKind::text || c_.model.vocab_size >= kByteVocabulary,
             {"model.vocab_size", "data.data_kind"}, "got {}, want at least {} for data_kind: text",
             c_.model.vocab_size, kByteVocabulary);
        rule(d.data_kind != DataKind::synthetic || c_.model.vocab_size >= d.synthetic_vocab_size,
             {"model.vocab_size", "data.synthetic_vocab_size"},
             "got {}, want at least synthetic_vocab_size = {}", c_.model.vocab_size, d.synthetic_vocab_size);
        check_synthetic_table();
        const std::string& events = c_.output.tensorboard_dir;
        rule(!events.starts_with('.') && events.find('/') == std::string::npos, {"output.tensorboard_dir"},
             "got {}, want the name of a folder below output.out", events);
        const bool cut_here = d.data_kind == DataKind::text || d.data_kind == DataKind::megatron;
        rule(c_.training.eval_iters == 0 || !cut_here || d.held_out_fraction > 0,
             {"data.held_out_fraction", "training.eval_iters"},
             "got 0, want more than 0 with eval_iters = {} (or eval_iters: 0)", c_.training.eval_iters);
        rule(c_.profile.profile_step_end > c_.profile.profile_step_start,
             {"profile.profile_step_end", "profile.profile_step_start"},
             "got {}, want more than profile_step_start = {}", c_.profile.profile_step_end,
             c_.profile.profile_step_start);
    }

    // The chain's table has one row for every context of k tokens.
    void check_synthetic_table() {
        constexpr double kMaxEntries = 1 << 22;
        const DataSpec& d = c_.data;
        double entries = f64(d.synthetic_vocab_size);
        for (int64_t k = 0; k < d.synthetic_order; ++k) entries *= f64(d.synthetic_vocab_size);
        rule(d.data_kind != DataKind::synthetic || entries <= kMaxEntries,
             {"data.synthetic_order", "data.synthetic_vocab_size"},

             "got {}, want synthetic_vocab_size^(synthetic_order + 1) at most {:.0f}; {} ^ {} = {:.3g}",
             d.synthetic_order, kMaxEntries, d.synthetic_vocab_size, d.synthetic_order + 1, entries);
    }

    const Config& c_;
    std::optional<int64_t> world_size_;
    ConfigProblems& problems_;
};

}  // namespace

void collect_config_problems(const Config& config, std::optional<int64_t> world_size,
                             ConfigProblems& problems) {
    Checker(config, world_size, problems).check();
}

bool is_legal(const Config& config, std::optional<int64_t> world_size) {
    ConfigProblems problems;
    collect_config_problems(config, world_size, problems);
    return problems.empty();
}

bool set_if_legal(Config& config, const std::string& key, const std::string& value,
                  std::optional<int64_t> world_size) {
    Config with = config;
    if (field_named(key).set(with, {false, {value}}) || !is_legal(with, world_size)) return false;
    config = std::move(with);
    return true;
}

void check_config(const Config& config, std::optional<int64_t> world_size) {
    ConfigProblems problems;
    collect_config_problems(config, world_size, problems);
    problems.throw_if_any();
}

}  // namespace fp8flow
