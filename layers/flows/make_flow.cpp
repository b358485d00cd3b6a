// SPDX-License-Identifier: MIT
// Makes the flow of a recipe, registers flows of plugins, and checks rules.
#include "kernels/core/error.h"
#include "layers/flows/steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace fp8flow {

namespace {

struct OwnFlow {
    Recipe base;
    FlowFactory make;
};

// Filled when a program starts, and read afterwards.
std::map<std::string, OwnFlow>& own_flows() {
    static std::map<std::string, OwnFlow> flows;
    return flows;
}

std::unique_ptr<Flow> make_own_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    const auto own = own_flows().find(precision.flow);
    require(own != own_flows().end(), ExitCode::usage,
            "precision.flow is \"{}\", which no register_flow has named", precision.flow);
    const auto& [base, make] = own->second;
    require(precision.recipe == base, ExitCode::usage,
            "precision.flow is \"{}\": want precision.recipe {}, which it was registered with",
            precision.flow, kRecipeNames.at(static_cast<size_t>(base)));
    return make(precision, recompute);
}

}  // namespace

void register_flow(const std::string& name, Recipe base, FlowFactory make) {
    const auto recipe = std::find(kRecipeNames.begin(), kRecipeNames.end(), name);
    require(!name.empty() && recipe == kRecipeNames.end(), ExitCode::usage,
            "register_flow: \"{}\" is the name of a recipe, or empty: choose another", name);
    require(base != Recipe::fp32 && own_flows().emplace(name, OwnFlow{base, make}).second, ExitCode::usage,
            "register_flow: \"{}\" is registered already, or has base fp32", name);
}

std::vector<std::string> registered_flows() {
    std::vector<std::string> names;
    for (const auto& [name, flow] : own_flows()) names.push_back(name);
    return names;
}

std::optional<Recipe> base_of_flow(const std::string& name) {
    const auto own = own_flows().find(name);
    return own == own_flows().end() ? std::nullopt : std::optional(own->second.base);
}

void Flow::linear_forward(Context&, const Linear&, const TokenRows&, ExpertsSaved&, const TensorView&) const {
    fail(ExitCode::usage, "this flow has no linear layers: set precision.fp8_attention_linears: false");
}
void Flow::linear_backward(Context&, const Linear&, const TokenRows&, const TokenRows&, ExpertsSaved&,
                           const TensorView&) const {
    fail(ExitCode::internal, "a linear layer's backward without its forward");
}

std::unique_ptr<Flow> make_fp8_flow(const PrecisionSpec&, const ExpertsRecompute&);
std::unique_ptr<Flow> make_casting_recipe(const PrecisionSpec&, const ExpertsRecompute&);

ExpertsRecompute experts_recompute(const RecomputeSpec& recompute) {
    const bool selective = recompute.recompute_granularity == RecomputeGranularity::selective;
    const bool experts = selective && recompute.moe_expert;
    return {.activation = selective && recompute.moe_act,
            .experts = experts,
            .rows = experts ? recompute.saved_rows : SavedRows::sorted};
}

ScaledTensor wire_rows(Arena& arena, const Rule& rule, int64_t tokens, int64_t width, const char* category) {
    const DType scale_dtype = rule.scales == ScaleFormat::fp32 ? DType::f32 : DType::e8m0;
    return {.data = arena.tensor(rule.dtype, {tokens, width}, category),
            .scales = arena.tensor(scale_dtype, {tokens, ceil_div(width, kBlock)}, category),
            .layout = ScaleLayout::vec128_wire,
            .format = rule.scales};
}

void clip(Context& ctx, const Rule& rule, const ScaledTensor& rows, const RowGroups& groups) {
    if (rule.clip < 1)
        ctx.ops.clip_fp8({.groups = groups, .share = rule.clip, .rows = rows.data}, ctx.launch);
}

// ---- rules

Rule Flow::rule_of(Quantized tensor) const {
    const bool gradient = tensor == Quantized::dy || tensor == Quantized::dh;
    return {.dtype = gradient ? steps::gradient_dtype(precision_) : DType::e4m3,
            .scales = precision_.scale_format};
}

WeightFormat Flow::fp8_weights(ScaleLayout layout) const {
    const Rule rule = rule_of(Quantized::weights);
    return {.plain = false,
            .fp8_layout = layout,
            .dtype = rule.dtype,
            .scale_format = rule.scales,
            .mx_rounding = precision_.mx_rounding};
}

void refuse_rule(Quantized tensor, std::string_view got, std::string_view want) {
    fail(ExitCode::usage, "rule of {}: got {}, want {}", kQuantizedNames[static_cast<size_t>(tensor)], got,
         want);
}

void Flow::check_rules() const {
    for (size_t i = 0; i < kQuantizedNames.size(); ++i) {
        const auto tensor = static_cast<Quantized>(i);
        const Rule rule = rule_of(tensor);
        if (!is_fp8(rule.dtype))
            refuse_rule(tensor, fmt::format("dtype {}", name_of(rule.dtype)), "e4m3 or e5m2");
        if (rule.scales == ScaleFormat::undeclared) refuse_rule(tensor, "scales undeclared", "pow2 or fp32");
        if (!(rule.clip > 0 && rule.clip <= 1) || (tensor == Quantized::weights && rule.clip != 1))
            refuse_rule(
                tensor, fmt::format("clip {}", rule.clip),
                tensor == Quantized::weights ? "1: the optimizer clips no weights" : "above 0, at most 1");
    }
}

namespace {

std::unique_ptr<Flow> make_flow_of(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    if (!precision.flow.empty()) return make_own_flow(precision, recompute);
    switch (precision.recipe) {
        case Recipe::fp8_flow: return make_fp8_flow(precision, recompute);
        case Recipe::bf16:
        case Recipe::fp32:
        case Recipe::fp8_blockwise:
        case Recipe::fp8_tensorwise:
        case Recipe::fp8_rowwise:
        case Recipe::mxfp8: return make_casting_recipe(precision, recompute);
    }
    fail(ExitCode::internal, "unknown recipe {}", static_cast<int>(precision.recipe));
}

}  // namespace

std::unique_ptr<Flow> make_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    auto flow = make_flow_of(precision, recompute);
    flow->check_rules();
    return flow;
}

}  // namespace fp8flow
