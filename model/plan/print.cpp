// SPDX-License-Identifier: MIT
// The plan as a table for people and as JSON for programs.
#include "model/plan/plan.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace fp8flow::plan {
namespace {

std::string size_text(double bytes) {
    if (bytes >= 0x1p30) return fmt::format("{:.2f} GiB", bytes / 0x1p30);
    if (bytes >= 0x1p20) return fmt::format("{:.2f} MiB", bytes / 0x1p20);
    return fmt::format("{:.2f} KiB", bytes / 0x1p10);
}

// FLOPs in G, parameters in B.
std::string count_text(double count, char billions = 'G') {
    if (count >= 1e12) return fmt::format("{:.2f} T", count / 1e12);
    if (count >= 1e9) return fmt::format("{:.2f} {}", count / 1e9, billions);
    if (count >= 1e6) return fmt::format("{:.2f} M", count / 1e6);
    return fmt::format("{:.2f} k", count / 1e3);
}

std::string parameter_table(const RunPlan& plan) {
    std::string out = fmt::format("{:<28}{:>18}{:>18}{:>18}\n", "Parameters", "total", "active", "per GPU");
    const auto line = [&](const std::string& name, int64_t total, int64_t active, int64_t of_rank) {
        out += fmt::format("  {:<26}", name);
        for (const int64_t count : {total, active, of_rank})
            out += fmt::format("{:>18}", count_text(static_cast<double>(count), 'B'));
        out += "\n";
    };
    for (const auto& part : plan.parameters)
        if (part.total > 0) line(part.part, part.total, part.active, part.per_rank);
    line("sum", plan.total_parameters(), plan.active_parameters(),
         sum_of(plan.parameters, &ParameterPart::per_rank));
    return out;
}

std::string flop_table(const RunPlan& plan) {
    std::string out = fmt::format("{:<28}{:>18}{:>18}\n", "FLOPs per token", "forward", "backward");
    for (const auto& part : plan.flops) {
        if (part.forward > 0) {
            out += fmt::format("  {:<26}{:>18}{:>18}\n", part.part, count_text(part.forward),
                               count_text(part.backward));
        }
    }
    return out + fmt::format("  {:<26}{:>18}{:>18}\n", "sum",
                             count_text(sum_of(plan.flops, &FlopPart::forward)),
                             count_text(sum_of(plan.flops, &FlopPart::backward)));
}

std::string memory_table(const Config& config, const RunPlan& plan) {
    const double factor = config.moe.moe_expert_rank_capacity_factor;
    std::string out = fmt::format("Memory per GPU, rows {} (even load would need {:.0f})\n",
                                  factor > 0 ? fmt::format("by moe_expert_rank_capacity_factor {}", factor)
                                             : std::string("for the worst case of routing"),
                                  plan.balanced_rows);
    for (const auto& item : plan.memory) {
        if (item.bytes > 0)
            out += fmt::format("  {:<26}{:>12}   {}\n", item.category, size_text(item.bytes), item.formula);
    }
    out += fmt::format("  {:<26}{:>12}\n", "sum", size_text(plan.total_bytes()));
    out += fmt::format("  {:<26}{:>12}   page-locked, not in the sum: {}\n", plan.host.category,
                       size_text(plan.host.bytes), plan.host.formula);
    return out + fmt::format(
                     "  saved activations: {} reserved, {} used with even load\n"
                     "  MoE workspace: {} reserved, {} used with even load\n",
                     size_text(plan.saved_reserved), size_text(plan.saved_used),
                     size_text(plan.workspace_reserved), size_text(plan.workspace_used));
}

std::string recompute_table(const RunPlan& plan) {
    std::string out = fmt::format("{:<38}{:>16}{:>16}{:>16}\n", "Recompute (even load)", "saved",
                                  "FLOPs/token", "wire/layer");
    for (const auto& choice : plan.recompute) {
        out += fmt::format(
            "  {:<36}{:>16}{:>16}{:>16}\n", choice.mode, size_text(choice.saved_bytes),
            choice.extra_flops_per_token > 0 ? fmt::format("+{}", count_text(choice.extra_flops_per_token))
                                             : std::string(),
            choice.extra_wire_bytes > 0 ? fmt::format("+{}", size_text(choice.extra_wire_bytes))
                                        : std::string());
    }
    return out;
}

std::string wire_table(const Config& config, const RunPlan& plan) {
    std::string out =
        fmt::format("{:<28}{:>18}{:>18}\n", "Wire per rank and MoE layer", "forward", "backward");
    for (const auto& leg : plan.wire) {
        out +=
            fmt::format("  {:<26}{:>18}{:>18}\n", leg.leg, size_text(leg.forward), size_text(leg.backward));
    }
    out += fmt::format("  a token goes to {:.2f} of {} ranks on average; sum {}", plan.distinct_ranks,
                       config.parallel.expert_model_parallel_size, size_text(plan.wire_bytes()));
    if (const double between_hosts = sum_of(plan.wire, &WireItem::between_hosts); between_hosts > 0)
        out += fmt::format(", between hosts {}", size_text(between_hosts));
    if (config.precision.recipe != Recipe::bf16) {
        const double bf16 = sum_of(wire_bytes(with_recipe(config, Recipe::bf16)), &WireItem::both);
        out += fmt::format(", with recipe bf16 {}", size_text(bf16));
    }
    return out + "\n";
}

}  // namespace

std::string assumptions_text(const Config& config) {
    const ModelSpec& model = config.model;
    const bool given = config.origin.contains("model.seq_length");
    const std::string most = model.max_position_embeddings > model.seq_length
                                 ? fmt::format("; the model takes up to {}", model.max_position_embeddings)
                                 : "";
    return fmt::format("sequences of {} tokens (model.seq_length{}{}), experts evenly loaded",
                       model.seq_length, given ? "" : ", by default", most);
}

std::string plan_text(const Config& config, const RunPlan& plan, const std::string& answer) {
    const int64_t ep = config.parallel.expert_model_parallel_size;
    std::string out = fmt::format(
        "Plan: recipe {}, {} GPU{} (EP {} x DP {}), {} tokens per rank and micro-batch, {} per step\n"
        "Assumed: EP of parallel.expert_model_parallel_size{}, DP = GPUs / EP;\n{}\n\n",
        recipe_name(config.precision), plan.gpus, plan.gpus == 1 ? "" : "s", ep, plan.gpus / ep, plan.tokens,
        config.training.global_batch_size * config.model.seq_length,
        config.origin.contains("parallel.expert_model_parallel_size") ? "" : ", by default",
        assumptions_text(config));
    if (!answer.empty()) out += answer + "\n";
    out += fmt::format("{}\n{}\n{}\n{}", parameter_table(plan), flop_table(plan), memory_table(config, plan),
                       recompute_table(plan));
    if (ep > 1 && plan.wire_bytes() > 0) out += fmt::format("\n{}", wire_table(config, plan));
    return out;
}

std::string plan_json(const Config& config, const RunPlan& plan, const Provenance& provenance) {
    using nlohmann::ordered_json;
    ordered_json json;
    json["recipe"] = std::string(recipe_name(config.precision));
    json["gpus"] = plan.gpus;
    json["expert_model_parallel_size"] = config.parallel.expert_model_parallel_size;
    json["tokens_per_rank"] = plan.tokens;
    json["parameters"] = {{"total", plan.total_parameters()}, {"active", plan.active_parameters()}};
    for (const auto& part : plan.parameters) {
        json["parameters"]["parts"].push_back({{"part", part.part},
                                               {"total", part.total},
                                               {"active", part.active},
                                               {"per_rank", part.per_rank}});
    }
    json["flops_per_token"] = {{"forward", sum_of(plan.flops, &FlopPart::forward)},
                               {"backward", sum_of(plan.flops, &FlopPart::backward)}};
    for (const auto& part : plan.flops) {
        json["flops_per_token"]["parts"].push_back(
            {{"part", part.part}, {"forward", part.forward}, {"backward", part.backward}});
    }
    json["memory_bytes"] = {
        {"total", plan.total_bytes()},           {"balanced_rows", plan.balanced_rows},
        {"row_capacity", plan.row_capacity},     {"saved_reserved", plan.saved_reserved},
        {"saved_used", plan.saved_used},         {"workspace_reserved", plan.workspace_reserved},
        {"workspace_used", plan.workspace_used}, {"host_tokens_of_steps", plan.host.bytes}};
    for (const auto& item : plan.memory) {
        json["memory_bytes"]["categories"].push_back({{"category", item.category}, {"bytes", item.bytes}});
    }
    json["recompute"] = ordered_json::array();
    for (const auto& choice : plan.recompute) {
        json["recompute"].push_back({{"mode", choice.mode},
                                     {"saved_bytes", choice.saved_bytes},
                                     {"extra_flops_per_token", choice.extra_flops_per_token},
                                     {"extra_wire_bytes_per_layer", choice.extra_wire_bytes}});
    }
    json["wire_bytes_per_layer"] = {{"total", plan.wire_bytes()}, {"distinct_ranks", plan.distinct_ranks}};
    for (const auto& leg : plan.wire) {
        json["wire_bytes_per_layer"]["legs"].push_back({{"leg", leg.leg},
                                                        {"forward", leg.forward},
                                                        {"backward", leg.backward},
                                                        {"between_hosts", leg.between_hosts}});
    }
    add_provenance(json, provenance);
    return json.dump(2);
}

}  // namespace fp8flow::plan
