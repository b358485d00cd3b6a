// SPDX-License-Identifier: MIT
// The resolved configuration as YAML, the help text, and the difference of two configurations: loops over the
// field table.
#include "model/config/fields.h"

#include <fmt/format.h>

#include <algorithm>

namespace fp8flow {

std::string dump_config(const Config& config) {
    std::string yaml, section;
    for (const auto& field : config_fields()) {
        if (field.section != section) yaml += field.section + ":\n";
        section = field.section;
        yaml += fmt::format("  {}: {}\n", field.key, field.get(config));
    }
    return yaml;
}

std::string help_config() {
    const Config defaults;
    std::string help =
        "Configuration keys (YAML sections; --set section.key=value overrides them).\n"
        "A key that exists in Megatron-LM has the same name there.\n"
        "An integer may be written 5000 or 5e3, a list [a, b].\n";
    std::string section;
    for (const auto& field : config_fields()) {
        if (field.section != section) help += "\n" + field.section + ":\n";
        section = field.section;
        help += fmt::format("  {}: {}; default {}\n      {}\n", field.key, field.type, field.get(defaults),
                            field.doc);
        if (field.recipes.empty()) continue;
        std::vector<std::string_view> names;
        for (const Recipe recipe : field.recipes) names.push_back(recipe_name(recipe));
        help += fmt::format("      recipes: {}\n", fmt::join(names, ", "));
    }
    return help;
}

bool changes_the_model(std::string_view name) {
    static constexpr std::string_view kTrained[] = {"model.init_method_std",
                                                    "model.embedding_init_method_std",
                                                    "model.max_position_embeddings",
                                                    "model.hf_family",
                                                    "moe.moe_router_load_balancing_type",
                                                    "moe.moe_aux_loss_coeff",
                                                    "moe.moe_global_aux_loss_gradient",
                                                    "moe.moe_z_loss_coeff",
                                                    "moe.moe_router_bias_update_rate",
                                                    "moe.moe_expert_rank_capacity_factor",
                                                    "moe.moe_row_alignment"};
    return (name.starts_with("model.") || name.starts_with("moe.")) &&
           std::ranges::find(kTrained, name) == std::end(kTrained);
}

std::vector<std::string> diff_configs(const Config& a, const Config& b) {
    std::vector<std::string> lines;
    for (const auto& field : config_fields()) {
        const std::string of_a = field.get(a), of_b = field.get(b);
        if (of_a != of_b) lines.push_back(fmt::format("{}: {} | {}", field.name(), of_a, of_b));
    }
    return lines;
}

Config with_recipe(const Config& config, Recipe recipe) {
    Config other = config;
    const Config defaults;
    other.precision.recipe = recipe;
    other.precision.flow.clear();
    for (const auto& field : config_fields()) {
        const auto& known = field.recipes;
        if (known.empty() || std::ranges::find(known, recipe) != known.end()) continue;
        field.set(other, WrittenValue{false, {field.get(defaults)}});
    }
    return other;
}

}  // namespace fp8flow
