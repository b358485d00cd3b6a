// SPDX-License-Identifier: MIT
// One poisoned value in a weight, on the GPU: NaN and Inf stop the step, and the error names the tensor and
// the index; a huge number stops it or does no harm. FP8 values clip Inf to the largest value
// (docs/numerics), so Inf in an expert's weight stops the recipes without FP8 and mxfp8 only. No weight and
// no moment moves where the step is refused.
#include "model/train/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace fp8flow::test {
namespace {

struct Poisoned {
    const char* name;
    int64_t index;
};

// Masters and moments of all parameters.
std::vector<float> state_of(Trainer& trainer) {
    std::vector<float> values;
    for (const Parameter& p : trainer.transformer().parameters().all())
        for (const TensorView& view : {p.master, p.m, p.v}) {
            const size_t first = values.size(), count = static_cast<size_t>(p.numel());
            values.resize(first + count);
            trainer.ops().device().copy_out(values.data() + first, view.data, count * sizeof(float));
        }
    return values;
}

void poison(Trainer& trainer, const Poisoned& tensor, float value) {
    ParameterStore& store = trainer.transformer().parameters();
    for (Parameter& p : store.all()) {
        if (p.spec.name != tensor.name) continue;
        ASSERT_LT(tensor.index, p.numel());
        Device& device = trainer.ops().device();
        device.copy_in(p.master.as<float>() + tensor.index, &value, sizeof value);
        device.synchronize();
        store.write_copies(p);
        return;
    }
    FAIL() << "no parameter " << tensor.name;
}

// Whether an Inf in this weight becomes a finite FP8 code.
bool clips_infinity(const std::string& recipe, const std::string& weight) {
    return recipe.starts_with("fp8_") && weight.find("experts") != std::string::npos;
}

class Poison : public testing::TestWithParam<const char*> {};

TEST_P(Poison, StopsTheStepAndNamesTheTensor) {
    constexpr Poisoned kTensors[] = {{"embedding.word_embeddings.weight", 130},
                                     {"layers.0.input_layernorm.weight", 5},
                                     {"layers.0.self_attention.linear_qkv.weight", 77},
                                     {"layers.1.pre_mlp_layernorm.weight", 7},
                                     {"layers.1.moe.router.weight", 200},
                                     {"layers.1.moe.experts.linear_fc1.weight", 3 * 256 * 128 + 9},
                                     {"layers.1.moe.experts.linear_fc2.weight", 128},
                                     {"output_layer.weight", 0}};
    const Config config = load_config(FP8FLOW_SOURCE_DIR "/configs/test.yaml",
                                      {std::string("precision.recipe=") + GetParam()}, 1);
    const auto data = open_data(config);
    for (const Poisoned& tensor : kTensors)
        for (const float value :
             {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 3e38f}) {
            SCOPED_TRACE(fmt::format("{} in {}", value, tensor.name));
            const auto groups = make_thread_groups(1, 60.0);
            Trainer trainer(config, *groups[0], choose_backend(BackendKind::hopper), Arithmetic::stated,
                            data);
            trainer.run_step();
            poison(trainer, tensor, value);
            const std::vector<float> before = state_of(trainer);
            std::string error;
            try {
                trainer.run_step();
            } catch (const Error& thrown) {
                EXPECT_EQ(thrown.code(), ExitCode::numeric) << thrown.what();
                error = thrown.what();
            }
            const std::vector<float> after = state_of(trainer);
            const bool clipped = std::isinf(value) && clips_infinity(GetParam(), tensor.name);
            EXPECT_EQ(error.empty(), clipped || (value == 3e38f && error.empty())) << error;
            if (error.empty()) {
                const auto bad =
                    std::count_if(after.begin(), after.end(), [](float x) { return !std::isfinite(x); });
                EXPECT_EQ(bad, clipped ? 1 : 0) << "values that are not finite after the step";
                continue;
            }
            EXPECT_NE(error.find("the step was not applied"), std::string::npos) << error;
            EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)), 0);
            if (std::isfinite(value)) continue;
            EXPECT_NE(error.find(fmt::format("rank 0: {} has 1 values that are not finite", tensor.name)),
                      std::string::npos)
                << error;
            EXPECT_NE(error.find(fmt::format("the first at index {}", tensor.index)), std::string::npos)
                << error;
        }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Poison,
                         testing::Values("bf16", "fp8_tensorwise", "fp8_blockwise", "fp8_flow", "fp8_rowwise",
                                         "mxfp8"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace fp8flow::test
