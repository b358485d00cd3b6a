// SPDX-License-Identifier: MIT
// Tables and JSON of a plan.
#include "model/report/plan_report.h"

#include "model/report/table.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace fp8flow::report {

using namespace plan;
using nlohmann::ordered_json;

namespace {

// Parameters are counted in billions.
std::string parameters_text(int64_t count) {
    std::string text = format_si(f64(count), 4);
    if (text.back() == 'G') text.back() = 'B';
    return text;
}

std::string parameter_table(const RunPlan& plan) {
    Table table({"Parameters"}, {"total", "active", "per GPU"});
    const auto add = [&](const std::string& name, int64_t total, int64_t active, int64_t per_rank) {
        table.add_row({name, parameters_text(total), parameters_text(active), parameters_text(per_rank)});
    };
    for (const auto& part : plan.parameters)
        if (part.total > 0) add(part.part, part.total, part.active, part.per_rank);
    table.add_rule();
    add("sum", plan.total_parameters(), plan.active_parameters(),
        sum_of(plan.parameters, &ParameterPart::per_rank));
    return table.text(2);
}

std::string flop_table(const RunPlan& plan) {
    Table table({"FLOPs per token"}, {"forward", "backward"});
    for (const auto& part : plan.flops)
        if (part.forward > 0) table.add_row({part.part, format_si(part.forward), format_si(part.backward)});
    table.add_rule();
    table.add_row({"sum", format_si(sum_of(plan.flops, &FlopPart::forward)),
                   format_si(sum_of(plan.flops, &FlopPart::backward))});
    return table.text(2);
}

std::string memory_table(const Config& config, const RunPlan& plan) {
    const double factor = config.moe.moe_expert_rank_capacity_factor;
    Table table({"Memory per GPU"}, {"bytes"}, {"formula"});
    for (const auto& item : plan.memory)
        if (item.bytes > 0) table.add_row({item.category, format_bytes(item.bytes), item.formula});
    table.add_rule();
    table.add_row({"sum", format_bytes(plan.total_bytes()), ""});
    table.add_row({plan.host.category, format_bytes(plan.host.bytes),
                   "page-locked, not in the sum: " + plan.host.formula});
    return table.text(2) + fmt::format(
                               "  rows: {}; even load needs {:.0f}\n"
                               "  saved activations: {} reserved, {} used with even load\n"
                               "  MoE workspace: {} reserved, {} used with even load\n",
                               factor > 0 ? fmt::format("by moe_expert_rank_capacity_factor {}", factor)
                                          : "for the worst case of routing",
                               plan.balanced_rows, format_bytes(plan.saved_reserved),
                               format_bytes(plan.saved_used), format_bytes(plan.workspace_reserved),
                               format_bytes(plan.workspace_used));
}

std::string recompute_table(const RunPlan& plan) {
    Table table({"Recompute (even load)"}, {"saved", "FLOPs/token", "wire/layer"});
    for (const auto& choice : plan.recompute) {
        const double flops = choice.extra_flops_per_token, wire = choice.extra_wire_bytes;
        table.add_row({choice.mode, format_bytes(choice.saved_bytes), flops > 0 ? "+" + format_si(flops) : "",
                       wire > 0 ? "+" + format_bytes(wire) : ""});
    }
    return table.text(2);
}

std::string wire_table(const Config& config, const RunPlan& plan) {
    Table table({"Wire per rank and MoE layer"}, {"forward", "backward"});
    for (const auto& leg : plan.wire)
        table.add_row({leg.leg, format_bytes(leg.forward), format_bytes(leg.backward)});
    std::string out =
        table.text(2) + fmt::format("  a token goes to {:.2f} of {} ranks on average; sum {}",
                                    plan.distinct_ranks, config.parallel.expert_model_parallel_size,
                                    format_bytes(plan.wire_bytes()));
    if (const double between_hosts = sum_of(plan.wire, &WireItem::between_hosts); between_hosts > 0)
        out += ", between hosts " + format_bytes(between_hosts);
    if (config.precision.recipe != Recipe::bf16)
        out += ", with recipe bf16 " +
               format_bytes(sum_of(wire_bytes(with_recipe(config, Recipe::bf16)), &WireItem::both));
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

std::string plan_text(const Config& config, const RunPlan& plan, const std::string& prediction) {
    const int64_t ep = config.parallel.expert_model_parallel_size;
    std::string out = fmt::format(
        "Plan: recipe {}, {} GPU{} (EP {} x DP {}), {} tokens per rank and micro-batch, {} per step\n"
        "Assumed: EP of parallel.expert_model_parallel_size{}, DP = GPUs / EP;\n{}\n\n",
        recipe_name(config.precision), plan.gpus, plan.gpus == 1 ? "" : "s", ep, plan.gpus / ep, plan.tokens,
        config.training.global_batch_size * config.model.seq_length,
        config.origin.contains("parallel.expert_model_parallel_size") ? "" : ", by default",
        assumptions_text(config));
    if (!prediction.empty()) out += prediction + "\n";
    out += fmt::format("{}\n{}\n{}\n{}", parameter_table(plan), flop_table(plan), memory_table(config, plan),
                       recompute_table(plan));
    if (ep > 1 && plan.wire_bytes() > 0) out += "\n" + wire_table(config, plan);
    return out;
}

ordered_json plan_json(const Config& config, const RunPlan& plan, const Provenance& provenance) {
    ordered_json json;
    json["recipe"] = std::string(recipe_name(config.precision));
    json["gpus"] = plan.gpus;
    json["expert_model_parallel_size"] = config.parallel.expert_model_parallel_size;
    json["tokens_per_rank"] = plan.tokens;
    json["parameters"] = {{"total", plan.total_parameters()}, {"active", plan.active_parameters()}};
    for (const auto& part : plan.parameters)
        json["parameters"]["parts"].push_back({{"part", part.part},
                                               {"total", part.total},
                                               {"active", part.active},
                                               {"per_rank", part.per_rank}});
    json["flops_per_token"] = {{"forward", sum_of(plan.flops, &FlopPart::forward)},
                               {"backward", sum_of(plan.flops, &FlopPart::backward)}};
    for (const auto& part : plan.flops)
        json["flops_per_token"]["parts"].push_back(
            {{"part", part.part}, {"forward", part.forward}, {"backward", part.backward}});
    json["memory_bytes"] = {
        {"total", plan.total_bytes()},           {"balanced_rows", plan.balanced_rows},
        {"row_capacity", plan.row_capacity},     {"saved_reserved", plan.saved_reserved},
        {"saved_used", plan.saved_used},         {"workspace_reserved", plan.workspace_reserved},
        {"workspace_used", plan.workspace_used}, {"host_tokens_of_steps", plan.host.bytes}};
    for (const auto& item : plan.memory)
        json["memory_bytes"]["categories"].push_back({{"category", item.category}, {"bytes", item.bytes}});
    json["recompute"] = ordered_json::array();
    for (const auto& choice : plan.recompute)
        json["recompute"].push_back({{"mode", choice.mode},
                                     {"saved_bytes", choice.saved_bytes},
                                     {"extra_flops_per_token", choice.extra_flops_per_token},
                                     {"extra_wire_bytes_per_layer", choice.extra_wire_bytes}});
    json["wire_bytes_per_layer"] = {{"total", plan.wire_bytes()}, {"distinct_ranks", plan.distinct_ranks}};
    for (const auto& leg : plan.wire)
        json["wire_bytes_per_layer"]["legs"].push_back({{"leg", leg.leg},
                                                        {"forward", leg.forward},
                                                        {"backward", leg.backward},
                                                        {"between_hosts", leg.between_hosts}});
    add_provenance(json, provenance);
    return json;
}

}  // namespace fp8flow::report
