// SPDX-License-Identifier: MIT
// A recipe of one's own: forward and data gradients with 1x128 scales, weight gradients from columns with one
// scale a group. It is registered by name, selected by that name, and compared with the BF16 layer.
#include <fp8flow/fp8flow.h>
#include <fp8flow/layers/flows/cast_flow.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

using namespace fp8flow;

namespace {

class RowsOf128 final : public CastFlow {
public:
    using CastFlow::CastFlow;
    WeightFormat weight_format() const override {
        return {.plain = false, .fp8_layout = ScaleLayout::block128, .scale_format = precision_.scale_format};
    }

protected:
    ScaleLayout row_layout() const override { return ScaleLayout::vec128; }
    ScaleLayout column_layout() const override { return ScaleLayout::group_row; }
};

std::vector<float> output_of(const PrecisionSpec& precision) {
    const Backend backend = make_backend();
    const auto ranks = make_thread_groups(1, 60);
    const auto exchange = make_exchange(backend, {*ranks[0], *ranks[0], *ranks[0]},
                                        {.tokens_per_rank = 128, .topk = 2, .hidden = 128});
    LoneLayer layer(*backend.ops, *exchange, {.hidden_size = 128, .max_tokens = 128, .precision = precision});
    Arena arena(backend.ops->device(), "rows");
    const TensorView x = arena.tensor(DType::bf16, {128, 128}, "x"),
                     y = arena.tensor(DType::bf16, {128, 128}, "y");
    std::vector<Bf16> bits(128 * 128);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = to_bf16(std::sin(static_cast<float>(i)));
    backend.ops->device().copy_in(x.data, bits.data(), bits.size() * sizeof(Bf16));
    layer.forward(x, y);
    backend.ops->device().copy_out(bits.data(), y.data, bits.size() * sizeof(Bf16));
    layer.backward(x, y);  // dx, where y was
    std::vector<float> out;
    for (const Bf16 b : bits) out.push_back(to_float(b));
    return out;
}

}  // namespace

int main() {
    register_flow<RowsOf128>("rows_of_128");
    const std::vector<float> own = output_of({.recipe = Recipe::fp8_blockwise, .flow = "rows_of_128"}),
                             bf16 = output_of({.recipe = Recipe::bf16});
    double error = 0, size = 0;
    for (size_t i = 0; i < own.size(); ++i)
        error += std::pow(own[i] - bf16[i], 2), size += std::pow(bf16[i], 2);
    std::printf("rows_of_128 against bf16: relative error %.4f\n", std::sqrt(error / size));
    return error > 0 && std::sqrt(error / size) < 0.1 ? 0 : 1;
}
