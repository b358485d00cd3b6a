// SPDX-License-Identifier: MIT
// Memory against a GPU's, and a search over the keys that lower it.
#include "model/predict/fit.h"

#include "model/config/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace fp8flow::predict {

namespace {

double sum_of(const std::vector<plan::MemoryItem>& items) {
    return std::accumulate(items.begin(), items.end(), 0.0,
                           [](double sum, const auto& item) { return sum + item.bytes; });
}

struct Setting {
    const char* text;
    std::function<void(Config&)> apply;
};

// The cheapest in time or accuracy first. A later one of the same key replaces an earlier one.
const std::vector<Setting>& settings() {
    using enum RecomputeGranularity;
    static const std::vector<Setting> all = {
        {"moe.moe_expert_rank_capacity_factor=1.25",
         [](Config& c) { c.moe.moe_expert_rank_capacity_factor = 1.25; }},
        {"recompute.recompute_modules=[layernorm,moe_expert]",
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
    return all;
}

bool legal(const Config& config) {
    ConfigProblems problems;
    collect_config_problems(config, std::nullopt, problems);
    return problems.empty();
}

std::string key_for(const std::string& category, const Config& config) {
    const auto has = [&](const char* word) { return category.find(word) != std::string::npos; };
    if (has("moments") && !has("(BF16)")) return "training.exp_avg_dtype, training.exp_avg_sq_dtype: bf16";
    if ((has("master weights") || has("moments")) && !config.training.use_distributed_optimizer)
        return "training.use_distributed_optimizer: true";
    if (has("gradients (FP32)")) return "training.main_grads_dtype: bf16";
    if (has("delayed")) return "precision.moe_wgrad_pair_micro_batches: false";
    if (has("side lane")) return "schedule.moe_shared_expert_overlap: false";
    const bool worst_case = config.moe.moe_expert_rank_capacity_factor == 0;
    const std::string rows = worst_case ? "moe.moe_expert_rank_capacity_factor: 1.25, " : "";
    if (has("saved")) return rows + "recompute.recompute_modules, training.micro_batch_size";
    if (has("workspace")) return rows + "training.micro_batch_size";
    if (has("exchange")) return "training.micro_batch_size";
    if (has("logits")) return "model.vocab_size";
    if (has("tokens of steps")) return "training.global_batch_size";
    return "parallel.expert_model_parallel_size (larger), model.num_layers";
}

}  // namespace

Fit fit_of(const Config& config, int64_t gpus, const Datasheet& sheet) {
    return fit_of(config, gpus, (1 - kOutsideShare) * sheet.memory_bytes);
}

Fit fit_of(const Config& config, int64_t gpus, double usable, Where where) {
    const auto items_of = [&](const Config& own) {
        std::vector<plan::MemoryItem> items = plan::memory_items(own, gpus);
        if (where == Where::host) items.push_back(plan::step_tokens(own, gpus));
        return items;
    };
    const auto needed_with = [&](const Config& own) { return sum_of(items_of(own)); };
    Fit fit{.needed = 0, .usable = usable, .items = items_of(config), .largest = {}, .settings = {}};
    fit.needed = sum_of(fit.items);
    for (const plan::MemoryItem& item : fit.items)
        if (item.bytes > 0) fit.largest.push_back({item, key_for(item.category, config)});
    std::sort(fit.largest.begin(), fit.largest.end(),
              [](const auto& a, const auto& b) { return a.item.bytes > b.item.bytes; });
    if (fit.largest.size() > 5) fit.largest.resize(5);
    if (fit.fits()) return fit;

    std::vector<const Setting*> useful;
    for (const Setting& setting : settings()) {
        Config own = config;
        setting.apply(own);
        if (!legal(own) || needed_with(own) >= fit.needed) continue;
        if (needed_with(own) <= fit.usable) {
            fit.settings = {setting.text};
            return fit;
        }
        useful.push_back(&setting);
    }
    // No one is enough: as many as it takes, then without those that are not needed after all.
    const auto needed_by = [&](const std::vector<const Setting*>& chosen) {
        Config own = config;
        for (const Setting* setting : chosen) setting->apply(own);
        return needed_with(own);
    };
    std::vector<const Setting*> chosen;
    for (const Setting* setting : useful) {
        chosen.push_back(setting);
        if (needed_by(chosen) <= fit.usable) break;
    }
    if (chosen.empty() || needed_by(chosen) > fit.usable) return fit;
    for (size_t i = 0; i + 1 < chosen.size();) {
        std::vector<const Setting*> fewer = chosen;
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
        if (needed_by(fewer) <= fit.usable)
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
                                       : fmt::format("It fits with {}.\n", fmt::join(fit.settings, ", ")));
}

}  // namespace fp8flow::predict
