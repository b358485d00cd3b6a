// SPDX-License-Identifier: MIT
// The FFN of rows that stay on their rank, as a flow with one group and no dispatch.
#include "layers/ffn.h"

#include <cmath>

namespace fp8flow {

ExpertWeights add_expert_weights(ParameterStore& store, const ModelSpec& model,
                                 const ExpertWeightsSpec& spec) {
    const double output_std = model.init_method_std / std::sqrt(2.0 * static_cast<double>(model.num_layers));
    auto add = [&](const char* which, int64_t rows, int64_t cols, double std) {
        return &store.add({.name = spec.name + "." + which,
                           .shape = {spec.num_experts, rows, cols},
                           .rank = 3,
                           .init_std = std,
                           .expert = spec.expert_parallel,
                           .first_expert = spec.first_expert,
                           .sources = spec.sources,
                           .format = spec.format,
                           .plain_dtype = spec.plain_dtype});
    };
    return {.w1 = add("linear_fc1.weight", 2 * spec.width, model.hidden_size, model.init_method_std),
            .w2 = add("linear_fc2.weight", model.hidden_size, spec.width, output_std)};
}

Ffn::Ffn(ParameterStore& store, const ModelSpec& model, const Flow& flow, DType plain_dtype, int64_t width,
         const std::string& name)
    : flow_(flow),
      weights_(add_expert_weights(
          store, model,
          {.name = name, .width = width, .format = flow.weight_format(), .plain_dtype = plain_dtype})) {}

void Ffn::forward(Context& ctx, const TokenRows& x, const TensorView& residual, bool recompute,
                  ExpertsSaved& saved, const TensorView& y) const {
    const Arena::Mark mark = ctx.saved.mark();
    ArenaScope scope(ctx.scratch);
    const TensorView out =
        residual ? ctx.scratch.tensor(ctx.activation, {ctx.tokens, x.plain.cols()}, "shared expert") : y;
    flow_.dense_forward(ctx, x, weights_, saved, out);
    if (residual) ctx.ops.add({.a = residual, .b = out, .y = y}, ctx.launch);
    if (!recompute) return;
    ctx.saved.rewind(mark);
    saved = {};
}

void Ffn::backward(Context& ctx, const TokenRows& x, const TokenRows& dy, bool recompute, ExpertsSaved& saved,
                   const TensorView& dx) const {
    const Arena::Mark mark = ctx.saved.mark();
    ArenaScope scope(ctx.scratch);
    if (recompute) {
        const RecomputeScope again(ctx);
        const TensorView out =
            ctx.scratch.tensor(ctx.activation, {ctx.tokens, x.plain.cols()}, "shared expert");
        flow_.dense_forward(ctx, x, weights_, saved, out);
    }
    flow_.dense_backward(ctx, x, dy, weights_, saved, dx);
    ctx.saved.rewind(mark);
}

}  // namespace fp8flow
