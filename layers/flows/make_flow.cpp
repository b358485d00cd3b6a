// SPDX-License-Identifier: MIT
// One key selects the recipe.
#include "layers/flows/flow.h"

#include <map>

namespace fp8flow {

namespace {

// Filled when a program starts, and read afterwards.
std::map<std::string, FlowFactory>& registered_flows() {
    static std::map<std::string, FlowFactory> flows;
    return flows;
}

}  // namespace

void register_flow(const std::string& name, FlowFactory make) {
    require(!name.empty() && registered_flows().emplace(name, make).second, ExitCode::usage,
            "a flow \"{}\" is registered already, or has no name", name);
}

std::unique_ptr<Flow> make_bf16_flow(const PrecisionSpec&, const ExpertsRecompute&);
std::unique_ptr<Flow> make_fp8_flow(const PrecisionSpec&, const ExpertsRecompute&);
std::unique_ptr<Flow> make_fp8_blockwise_flow(const PrecisionSpec&, const ExpertsRecompute&);
std::unique_ptr<Flow> make_fp8_tensorwise_flow(const PrecisionSpec&, const ExpertsRecompute&);
std::unique_ptr<Flow> make_fp8_rowwise_flow(const PrecisionSpec&, const ExpertsRecompute&);
std::unique_ptr<Flow> make_mxfp8_flow(const PrecisionSpec&, const ExpertsRecompute&);

ExpertsRecompute experts_recompute(const RecomputeSpec& recompute) {
    const bool selective = recompute.recompute_granularity == RecomputeGranularity::selective;
    const bool experts = selective && recompute.moe_expert;
    return {.activation = selective && recompute.moe_act,
            .experts = experts,
            .rows = experts ? recompute.saved_rows : SavedRows::sorted};
}

ScaledTensor wire_rows(Arena& arena, DType code, int64_t tokens, int64_t width, ScaleFormat scale_format,
                       const char* category) {
    const DType scale_dtype = scale_format == ScaleFormat::fp32 ? DType::f32 : DType::e8m0;
    return {.data = arena.tensor(code, {tokens, width}, category),
            .scales = arena.tensor(scale_dtype, {tokens, ceil_div(width, kBlock)}, category),
            .layout = ScaleLayout::vec128_wire};
}

std::unique_ptr<Flow> make_flow(const PrecisionSpec& precision, const ExpertsRecompute& recompute) {
    if (!precision.flow.empty()) {
        const auto own = registered_flows().find(precision.flow);
        require(own != registered_flows().end(), ExitCode::usage,
                "precision.flow is \"{}\", which no register_flow has named", precision.flow);
        return own->second(precision, recompute);
    }
    switch (precision.recipe) {
        case Recipe::bf16:
        case Recipe::fp32: return make_bf16_flow(precision, recompute);
        case Recipe::fp8_flow: return make_fp8_flow(precision, recompute);
        case Recipe::fp8_blockwise: return make_fp8_blockwise_flow(precision, recompute);
        case Recipe::fp8_tensorwise: return make_fp8_tensorwise_flow(precision, recompute);
        case Recipe::fp8_rowwise: return make_fp8_rowwise_flow(precision, recompute);
        case Recipe::mxfp8: return make_mxfp8_flow(precision, recompute);
    }
    fail(ExitCode::internal, "unknown recipe {}", static_cast<int>(precision.recipe));
}

}  // namespace fp8flow
