// SPDX-License-Identifier: MIT
// The MoE layer of include/fp8flow/c.h: a LoneLayer with masters and gradients of the caller.
#include "bindings/handles.h"
#include "kernels/core/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace fp8flow::bindings {

namespace {

Recipe recipe_of(const char* name) {
    require(name != nullptr, ExitCode::usage, "recipe is null");
    const auto* const found = std::ranges::find(kRecipeNames, std::string_view(name));
    require(found != kRecipeNames.end(), ExitCode::usage, "recipe is \"{}\", want one of {}", name,
            fmt::join(kRecipeNames, ", "));
    return static_cast<Recipe>(found - kRecipeNames.begin());
}

LoneLayerSpec spec_of(const fp8flow_layer_spec& from) {
    require(from.weight_dtype == FP8FLOW_F32 || from.weight_dtype == FP8FLOW_BF16, ExitCode::usage,
            "weight_dtype is {}, want {} (f32) or {} (bf16)", from.weight_dtype,
            static_cast<int>(FP8FLOW_F32), static_cast<int>(FP8FLOW_BF16));
    LoneLayerSpec spec{.hidden_size = from.hidden_size, .max_tokens = from.max_tokens};
    spec.masters = Masters::callers;
    spec.precision.recipe = recipe_of(from.recipe);
    spec.moe.num_experts = from.num_experts;
    spec.moe.moe_router_topk = from.topk;
    spec.moe.moe_ffn_hidden_size = from.ffn_hidden_size;
    spec.moe.moe_router_pre_softmax = from.pre_softmax != 0;
    spec.moe.moe_router_topk_scaling_factor = from.topk_scaling;
    return spec;
}

// The parameter with this tensor of the caller's in its place.
TensorView in_place_of(const Parameter& parameter, void* data, DType dtype) {
    require(data != nullptr, ExitCode::usage, "the tensor for {} is null", parameter.spec.name);
    TensorView view{.data = data, .dtype = dtype, .rank = parameter.spec.rank};
    std::copy_n(parameter.spec.shape, parameter.spec.rank, view.dims);
    return view;
}

// With the lock of the layer's context.
template <class Body> int call(fp8flow_layer* layer, void* stream, Body body) {
    return guarded([&] {
        require(layer != nullptr, ExitCode::usage, "the layer is null");
        const ContextLock lock(layer->context, stream);
        body(lock.launch());
    });
}

TensorView rows(const fp8flow_layer& layer, const void* data, int64_t tokens) {
    require(tokens >= 0, ExitCode::usage, "tokens is {}, want at least 0", tokens);
    require(data != nullptr || tokens == 0, ExitCode::usage, "a tensor of {} tokens is null", tokens);
    return make_view(const_cast<void*>(data), DType::bf16, {tokens, layer.hidden_size});
}

}  // namespace

}  // namespace fp8flow::bindings

using namespace fp8flow;
using namespace fp8flow::bindings;

fp8flow_layer::fp8flow_layer(fp8flow_context& owner, const LoneLayerSpec& spec, DType dtype)
    : context(owner),
      weight_dtype(dtype),
      hidden_size(spec.hidden_size),
      exchange(make_exchange(owner.backend, {*owner.ranks[0], *owner.ranks[0], *owner.ranks[0]},
                             {.tokens_per_rank = spec.max_tokens,
                              .topk = spec.moe.moe_router_topk,
                              .hidden = spec.hidden_size})),
      layer(owner.ops(), *exchange, spec) {}

int fp8flow_layer_create(fp8flow_context* context, const fp8flow_layer_spec* spec, fp8flow_layer** layer) {
    return guarded([&] {
        require(context != nullptr && layer != nullptr, ExitCode::usage, "context or layer is null");
        const ContextLock lock(*context, nullptr);
        *layer =
            new fp8flow_layer(*context, spec_of(given(spec, "spec")), static_cast<DType>(spec->weight_dtype));
    });
}

void fp8flow_layer_destroy(fp8flow_layer* layer) {
    if (layer == nullptr) return;
    guarded([&] {
        const ContextLock lock(layer->context, nullptr);
        layer->context.ops().device().synchronize();
        delete layer;
    });
}

int fp8flow_layer_set_weights(fp8flow_layer* layer, const fp8flow_layer_weights* weights, void* stream) {
    return call(layer, stream, [&](const Launch& launch) {
        const fp8flow_layer_weights& all = given(weights, "weights");
        ParameterStore& store = layer->layer.parameters();
        const std::array tensors = {all.router, all.w1, all.w2};
        for (size_t i = 0; i < tensors.size(); ++i) {
            Parameter& parameter = store.all().at(i);
            store.write_copies(parameter,
                               in_place_of(parameter, const_cast<void*>(tensors[i]), layer->weight_dtype),
                               launch);
        }
        layer->has_weights = true;
    });
}

int fp8flow_layer_forward(fp8flow_layer* layer, const void* x, void* y, int64_t tokens, void* stream) {
    return call(layer, stream, [&](const Launch& launch) {
        require(layer->has_weights, ExitCode::usage, "forward before set_weights");
        layer->tokens = -1;
        layer->layer.forward(rows(*layer, x, tokens), rows(*layer, y, tokens), launch);
        layer->tokens = tokens;
    });
}

int fp8flow_layer_backward(fp8flow_layer* layer, const void* dy, void* dx,
                           const fp8flow_layer_gradients* gradients, void* stream) {
    return call(layer, stream, [&](const Launch& launch) {
        const fp8flow_layer_gradients& all = given(gradients, "gradients");
        require(layer->tokens >= 0, ExitCode::usage, "backward without a forward before it");
        const TensorView dy_rows = rows(*layer, dy, layer->tokens), dx_rows = rows(*layer, dx, layer->tokens);
        auto& parameters = layer->layer.parameters().all();
        const std::array<void*, 3> tensors = {all.router, all.w1, all.w2};
        for (size_t i = 0; i < tensors.size(); ++i)
            parameters.at(i).main_grad =
                in_place_of(parameters[i], tensors[i], i == 0 ? DType::f32 : layer->weight_dtype);
        layer->tokens = -1;
        layer->layer.backward(dy_rows, dx_rows, Gradient::overwrite, launch);
    });
}
