// SPDX-License-Identifier: MIT
// Memory against a GPU's, and a search over the keys that lower it.
#include "model/predict/fit.h"

#include "model/config/check.h"
#include "model/report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace fp8flow::predict {

namespace {

struct Setting {
    const char* text;  // as arguments of --set
    void (*apply)(Config&);
};

// The cheapest in time or accuracy first.
using enum RecomputeGranularity;
constexpr Setting kSettings[] = {
    {"precision.moe_wgrad_micro_batches=1", [](Config& c) { c.precision.moe_wgrad_micro_batches = 1; }},
    {"moe.moe_expert_rank_capacity_factor=1.25",
     [](Config& c) { c.moe.moe_expert_rank_capacity_factor = 1.25; }},
    {"recompute.recompute_granularity=selective, recompute.recompute_modules=[layernorm,moe_expert]",
     [](Config& c) {
         c.recompute = {.recompute_granularity = selective, .layernorm = true, .moe_expert = true};
     }},
    {"training.main_grads_dtype=bf16",
     [](Config& c) { c.training.state.main_grads_dtype = StateDtype::bf16; }},
    {"training.exp_avg_dtype=bf16, training.exp_avg_sq_dtype=bf16",
     [](Config& c) {
         c.training.state.exp_avg_dtype = c.training.state.exp_avg_sq_dtype = StateDtype::bf16;
     }},
    {"training.use_distributed_optimizer=true",
     [](Config& c) { c.training.use_distributed_optimizer = true; }},
    {"training.micro_batch_size=1", [](Config& c) { c.training.micro_batch_size = 1; }},
    {"recompute.recompute_granularity=full",
     [](Config& c) { c.recompute = {.recompute_granularity = full}; }},
};

// The keys that shrink a category of memory: of the first line with a word of its name that applies.
std::string key_for(const std::string& category, const Config& config) {
    const bool worst_case = config.moe.moe_expert_rank_capacity_factor == 0;
    const std::string rows = worst_case ? "moe.moe_expert_rank_capacity_factor: 1.25, " : "";
    const bool whole_state = !config.training.use_distributed_optimizer;
    struct Line {
        const char* word;
        std::string key;
        bool applies = true;
    };
    for (const Line& line : {
             Line{"moments", "training.exp_avg_dtype, training.exp_avg_sq_dtype: bf16",
                  category.find("(BF16)") == std::string::npos},
             Line{"master weights", "training.use_distributed_optimizer: true", whole_state},
             Line{"moments", "training.use_distributed_optimizer: true", whole_state},
             Line{"gradients (FP32)", "training.main_grads_dtype: bf16"},
             Line{"delayed", "precision.moe_wgrad_micro_batches: 1"},
             Line{"side stream", "schedule.moe_shared_expert_overlap: false"},
             Line{"saved", rows + "recompute.recompute_modules, training.micro_batch_size"},
             Line{"workspace", rows + "training.micro_batch_size"},
             Line{"exchange", "training.micro_batch_size"},
             Line{"logits", "model.vocab_size"},
             Line{"tokens of steps", "training.global_batch_size"},
         })
        if (line.applies && category.find(line.word) != std::string::npos) return line.key;
    return "parallel.expert_model_parallel_size (larger), model.num_layers";
}

}  // namespace

Fit fit_of(const Config& config, int64_t gpus, const Datasheet& sheet) {
    return fit_of(config, gpus, usable_bytes(sheet));
}

Fit fit_of(const Config& config, int64_t gpus, double usable, Where where) {
    const auto items_of = [&](const Config& own) {
        std::vector<plan::MemoryItem> items = plan::memory_items(own, gpus);
        if (where == Where::host) items.push_back(plan::step_tokens(own, gpus));
        return items;
    };
    Fit fit{.usable = usable, .items = items_of(config)};
    fit.needed = plan::sum_of(fit.items);
    for (const plan::MemoryItem& item : fit.items)
        if (item.bytes > 0) fit.largest.push_back({item, key_for(item.category, config)});
    std::ranges::sort(fit.largest, [](const auto& a, const auto& b) { return a.item.bytes > b.item.bytes; });
    if (fit.largest.size() > 5) fit.largest.resize(5);
    if (fit.fits()) return fit;

    using Settings = std::vector<const Setting*>;
    const auto with = [&](const Settings& settings) {
        Config own = config;
        for (const Setting* setting : settings) setting->apply(own);
        return own;
    };
    const auto needed = [&](const Settings& settings) { return plan::sum_of(items_of(with(settings))); };
    Settings useful, chosen;
    for (const Setting& setting : kSettings)
        if (is_legal(with({&setting})) && needed({&setting}) < fit.needed) useful.push_back(&setting);
    const auto alone =
        std::ranges::find_if(useful, [&](const Setting* setting) { return needed({setting}) <= usable; });
    if (alone != useful.end()) chosen = {*alone};
    // If none alone is enough: add settings until it fits, then drop those that are not needed.
    for (const Setting* setting : useful)
        if (chosen.empty() || needed(chosen) > usable) chosen.push_back(setting);
    if (chosen.empty() || needed(chosen) > usable) return fit;
    for (size_t i = 0; i + 1 < chosen.size();) {
        Settings fewer = chosen;
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
        if (needed(fewer) <= usable)
            chosen.swap(fewer);
        else
            ++i;
    }
    for (const Setting* setting : chosen) fit.settings.emplace_back(setting->text);
    return fit;
}

std::string fit_text(const Fit& fit) {
    if (fit.fits()) return "fits";
    if (fit.settings.empty()) return "no";
    return fmt::format("with {}", fmt::join(fit.settings, ", "));
}

std::string consumers_text(const Fit& fit, const Datasheet& sheet) {
    if (fit.fits()) return "";
    std::string out =
        fmt::format("Does not fit: {:.1f} GiB needed, {:.1f} GiB of the {}'s {:.1f} GiB usable. Largest:\n",
                    fit.needed / 0x1p30, fit.usable / 0x1p30, sheet.gpu, sheet.memory_bytes / 0x1p30);
    for (const Consumer& consumer : fit.largest)
        out += fmt::format("  {:<26}{:>12.2f} GiB   {}\n", consumer.item.category,
                           consumer.item.bytes / 0x1p30, consumer.key);
    return out + (fit.settings.empty() ? std::string("No key above makes it fit on so many GPUs.\n")
                                       : fmt::format("It fits with {}.\n", fmt::join(fit.settings, ",\n  ")));
}

std::optional<JoinedMemory> joined_memory(const Config& config, int64_t ranks, int64_t micro_batches) {
    const int64_t moe_layers = plan::num_moe_layers(config);
    if (plan::micro_batches_of(config, ranks) < 2 || moe_layers == 0) return std::nullopt;
    Config single = config, joined = config;
    single.precision.moe_wgrad_micro_batches = 1;
    joined.precision.moe_wgrad_micro_batches = micro_batches;
    if (!is_legal(joined, ranks) || !is_legal(single, ranks)) return std::nullopt;
    return JoinedMemory{plan::memory_items(single, ranks), plan::memory_items(joined, ranks), moe_layers};
}

int64_t useful_joined(const Config& config, int64_t ranks) {
    const int64_t peers = config.parallel.expert_model_parallel_size,
                  micro_batches = plan::micro_batches_of(config, ranks);
    const double tokens = f64(config.training.micro_batch_size * config.model.seq_length),
                 rows = tokens * f64(config.moe.moe_router_topk * peers) /
                        f64(config.moe.num_experts * gradient_sources(config.moe, peers));
    const int64_t most =
        std::clamp<int64_t>(std::llround(std::ceil(kRowsOfJoined / rows)), 2, op::kMaxWgradSets);
    return ceil_div(micro_batches, ceil_div(micro_batches, most));
}

std::string decide_joined(Config& config, int64_t ranks, double usable) {
    constexpr const char* kKey = "precision.moe_wgrad_micro_batches";
    int64_t& joined = config.precision.moe_wgrad_micro_batches;
    if (joined != 0) return "";
    joined = 1;
    config.origin.erase(kKey);  // not set by the user
    const int64_t useful = useful_joined(config, ranks);
    const auto memory = joined_memory(config, ranks, useful);
    // Cost 0: all MoE layers are in BF16. A flow of the user may not have joined micro-batches.
    if (!memory || memory->cost() <= 0 || !config.precision.flow.empty()) return "";
    const auto costs = [](const JoinedMemory& of) {
        return fmt::format("+{} per layer, {} in all", report::format_bytes(of.cost_per_layer()),
                           report::format_bytes(of.cost()));
    };
    const int64_t micro_batches = plan::micro_batches_of(config, ranks);
    JoinedMemory least = *memory;
    for (int64_t gemms = ceil_div(micro_batches, useful), n = useful; n > 1;
         n = ceil_div(micro_batches, ++gemms)) {
        least = *joined_memory(config, ranks, n);
        if (plan::sum_of(least.joined) > usable) continue;
        joined = n;
        return fmt::format("joins the weight gradients of {} micro-batches ({}: auto): {}", n, kKey,
                           costs(least));
    }
    return fmt::format("joins no micro-batches for weight gradients ({}: auto): {} make {}, {} are usable",
                       kKey, costs(least), report::format_bytes(plan::sum_of(least.joined)),
                       report::format_bytes(usable));
}

}  // namespace fp8flow::predict
