// SPDX-License-Identifier: MIT
// One MoE layer, forward and backward, as a library: RMSNorm, router, dispatch, experts in FP8, combine,
// residual. On a GPU where there is one, otherwise on the CPU. The program's own check: the loss falls as
// plain gradient descent moves the weights.
#include <fp8flow/fp8flow.h>

#include <cstdio>
#include <vector>

using namespace fp8flow;

namespace {

constexpr int64_t kTokens = 256, kHidden = 256;

// Values as BF16 rows [T, H] in the backend's memory.
TensorView rows(Arena& arena, Device& device, const std::vector<float>& values) {
    std::vector<Bf16> narrow(values.size());
    for (size_t i = 0; i < values.size(); ++i) narrow[i] = to_bf16(values[i]);
    const TensorView view = arena.tensor(DType::bf16, {kTokens, kHidden}, "rows");
    device.copy_in(view.data, narrow.data(), narrow.size() * sizeof(Bf16));
    return view;
}

std::vector<float> floats(Device& device, const TensorView& view) {
    std::vector<Bf16> narrow(static_cast<size_t>(view.numel()));
    device.copy_out(narrow.data(), view.data, narrow.size() * sizeof(Bf16));
    std::vector<float> values;
    for (const Bf16 x : narrow) values.push_back(to_float(x));
    return values;
}

// W -= rate * gradient, on the host; then the FP8 copies that the layer computes with.
void descend(LoneLayer& layer, Device& device, float rate) {
    for (Parameter& parameter : layer.parameters().all()) {
        const auto count = static_cast<size_t>(parameter.numel());
        std::vector<float> weight(count), gradient(count);
        device.copy_out(weight.data(), parameter.master.data, count * sizeof(float));
        device.copy_out(gradient.data(), parameter.main_grad.data, count * sizeof(float));
        for (size_t i = 0; i < count; ++i) weight[i] -= rate * gradient[i];
        device.copy_in(parameter.master.data, weight.data(), count * sizeof(float));
    }
    layer.write_copies();
}

}  // namespace

int main() {
    const Backend backend = make_backend();
    Device& device = backend.ops->device();
    const auto ranks = make_thread_groups(1, 60);  // one rank, which holds all experts
    const auto exchange = make_exchange(backend, {*ranks[0], *ranks[0], *ranks[0]},
                                        {.tokens_per_rank = kTokens, .topk = 2, .hidden = kHidden});

    LoneLayerSpec spec{.hidden_size = kHidden, .max_tokens = kTokens, .norm = true, .residual = true};
    spec.moe.num_experts = 8;
    spec.moe.moe_router_topk = 2;
    spec.moe.moe_ffn_hidden_size = 256;
    spec.precision.recipe = Recipe::fp8_flow;
    LoneLayer layer(*backend.ops, *exchange, spec);

    std::vector<float> input(kTokens * kHidden), target(input.size());
    for (size_t i = 0; i < input.size(); ++i) {
        input[i] = static_cast<float>((i * 7919) % 1000) / 500 - 1;
        target[i] = static_cast<float>((i * 104729) % 1000) / 500 - 1;
    }
    Arena arena(device, "rows");
    const TensorView x = rows(arena, device, input), y = rows(arena, device, input),
                     dx = rows(arena, device, input);
    std::printf("backend: %s\n", backend.kind == BackendKind::hopper ? "hopper" : "reference");
    double first = 0, loss = 0;
    for (int step = 0; step < 8; ++step) {
        layer.forward(x, y);
        const std::vector<float> out = floats(device, y);
        std::vector<float> gradient(out.size());
        loss = 0;
        for (size_t i = 0; i < out.size(); ++i) {  // mean of squares per token
            gradient[i] = 2 * (out[i] - target[i]) / kTokens;
            loss += (out[i] - target[i]) * (out[i] - target[i]) / kTokens;
        }
        if (step == 0) first = loss;
        std::printf("step %d: loss %.4f\n", step, loss);
        const Arena::Mark mark = arena.mark();
        layer.backward(rows(arena, device, gradient), dx);
        descend(layer, device, 0.02F);
        arena.rewind(mark);
    }
    std::printf("explicit casts of activations: %lld\n", static_cast<long long>(backend.ops->num_casts()));
    return loss < first ? 0 : 1;
}
