// SPDX-License-Identifier: MIT
// Whole training steps on the GPU against the reference: same data, weights and (forced) routing, every
// recipe, one rank. Loss and every main gradient of the first step, losses of the steps after it, and the
// same bits when run twice.
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/factory.h"
#include "layers/flows/fp8_flow.h"
#include "model/train/trainer.h"
#include "tests/support/tensors.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace fp8flow::test {
namespace {

constexpr int kSteps = 3;

// attention: native (with the reference's bits) | cudnn. The flow is the recipe's whatever is registered.
Config tiny_config(const std::string& recipe, const std::string& attention) {
    return load_config(FP8FLOW_SOURCE_DIR "/configs/test.yaml",
                       {"precision.recipe=" + recipe, "moe.moe_router_force_load_balancing=true",
                        "training.global_batch_size=2", "model.qk_layernorm=true",
                        "kernels.attention_backend=" + attention, "precision.flow=\"\""},
                       1);
}

struct TrainingRun {
    std::vector<double> losses;
    std::map<std::string, std::vector<float>> gradients;  // of the first step
};

TrainingRun run_steps(const Config& config, BackendKind kind) {
    const auto groups = make_thread_groups(1, 30.0);
    Trainer trainer(config, *groups[0], choose_backend(kind), Arithmetic::stated, open_data(config));
    TrainingRun result;
    for (int step = 0; step < kSteps; ++step) {
        result.losses.push_back(trainer.run_step().lm_loss);
        if (step > 0) continue;
        for (const Parameter& p : trainer.transformer().parameters().all()) {
            std::vector<float>& values = result.gradients[p.spec.name];
            values.resize(static_cast<size_t>(p.numel()));
            trainer.ops().device().copy_out(values.data(), p.main_grad.data, values.size() * sizeof(float));
        }
    }
    return result;
}

// One run a recipe: the reference has no choice of kernels.
const TrainingRun& reference_of(const std::string& recipe) {
    static std::map<std::string, TrainingRun> runs;
    const auto found = runs.find(recipe);
    if (found != runs.end()) return found->second;
    return runs.emplace(recipe, run_steps(tiny_config(recipe, "native"), BackendKind::reference))
        .first->second;
}

double nmse_of(const std::vector<float>& got, const std::vector<float>& want) {
    double error = 0, energy = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        error += (static_cast<double>(got[i]) - want[i]) * (static_cast<double>(got[i]) - want[i]);
        energy += static_cast<double>(want[i]) * want[i];
    }
    return energy > 0 ? error / energy : error;
}

// `bound`: of the first step's gradients; `loss_bound`: of its loss.
void expect_agreement(const TrainingRun& hopper, const TrainingRun& reference, double bound,
                      double loss_bound = 1e-4) {
    for (int step = 0; step < kSteps; ++step)
        EXPECT_NEAR(hopper.losses[step], reference.losses[step], 2e-3 * reference.losses[step])
            << "step " << step + 1;
    EXPECT_NEAR(hopper.losses[0], reference.losses[0], loss_bound * reference.losses[0]);
    for (const auto& [name, want] : reference.gradients)
        EXPECT_LE(nmse_of(hopper.gradients.at(name), want), bound) << name;
}

// recipe, attention
class StepParity : public testing::TestWithParam<std::tuple<const char*, const char*>> {
protected:
    void SetUp() override {
        if (attention() == "cudnn" && !hopper::cudnn_problem().empty())
            GTEST_SKIP() << hopper::cudnn_problem();
    }
    std::string attention() const { return std::get<1>(GetParam()); }
    Config config() const { return tiny_config(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

TEST_P(StepParity, LossAndGradientsAgree) {
    const Config config = this->config();
    const std::string recipe = std::get<0>(GetParam());
    const TrainingRun& reference = reference_of(recipe);
    const TrainingRun hopper = run_steps(config, BackendKind::hopper);
    // Different summation orders round differently to BF16, and FP8 values close to a rounding boundary then
    // differ: the bound of a whole block. cuDNN also rounds the probabilities of attention, before every
    // block.
    const double bound = attention() == "cudnn" ? 5e-3 : 1e-3;
    expect_agreement(hopper, reference, bound);
}

TEST(MergingWeights, LossAndGradientsAgree) {
    for (const char* recipe :
         {"bf16", "fp8_flow", "fp8_blockwise", "fp8_tensorwise", "fp8_rowwise", "mxfp8"}) {
        SCOPED_TRACE(recipe);
        Config config = tiny_config(recipe, "native");
        config.precision.moe_apply_probs_in = ProbsIn::combine;
        expect_agreement(run_steps(config, BackendKind::hopper), run_steps(config, BackendKind::reference),
                         1e-3);
    }
}

// Bounds where projections are FP8 too: more values round to the other side, and each changes those after it.
// The reference alone moves as far when one weight in 16 moves by a quarter of a BF16 unit: over four seeds
// the loss by up to 3.3e-4 of it, gradients by up to 5e-3.
constexpr double kManyFp8 = 5e-3, kManyFp8Loss = 5e-4;

TEST(Fp8Projections, LossAndGradientsAgree) {
    for (const char* recipe : {"fp8_flow", "fp8_blockwise", "fp8_tensorwise", "fp8_rowwise", "mxfp8"}) {
        SCOPED_TRACE(recipe);
        Config config = tiny_config(recipe, "native");
        config.precision.fp8_attention_linears = true;
        const TrainingRun hopper = run_steps(config, BackendKind::hopper);
        expect_agreement(hopper, run_steps(config, BackendKind::reference), kManyFp8, kManyFp8Loss);
        EXPECT_EQ(run_steps(config, BackendKind::hopper).losses, hopper.losses);
    }
}

TEST(AnotherGatedUnit, LossAndGradientsAgree) {
    for (const char* recipe : {"bf16", "fp8_flow"}) {
        SCOPED_TRACE(recipe);
        Config config = tiny_config(recipe, "native");
        config.model.glu = {.quick_geglu = true, .glu_linear_offset = 1, .activation_func_clamp_value = 7};
        expect_agreement(run_steps(config, BackendKind::hopper), run_steps(config, BackendKind::reference),
                         1e-3);
    }
}

// Flows of a plugin: one that changes nothing has the bits of its recipe; one that clips two tensors runs the
// kernel for it.
class SameFlow final : public Fp8Flow {
public:
    using Fp8Flow::Fp8Flow;
};
class ClippingFlow final : public Fp8Flow {
public:
    using Fp8Flow::Fp8Flow;
    Rule rule_of(Quantized tensor) const override {
        Rule rule = Fp8Flow::rule_of(tensor);
        if (tensor == Quantized::a || tensor == Quantized::dy) rule.clip = 0.5f;
        return rule;
    }
};

// Clipping adds kinks, and a scale that doubles moves them: the reference alone moves by up to 5e-3, too.
TEST(FlowOfAPlugin, LossAndGradientsAgree) {
    register_flow<SameFlow>("same_flow", Recipe::fp8_flow);
    register_flow<ClippingFlow>("clipping_flow", Recipe::fp8_flow);
    for (const bool expert_recompute : {false, true}) {
        Config config = tiny_config("fp8_flow", "native");
        config.recompute.recompute_granularity = RecomputeGranularity::selective;
        config.recompute.moe_expert = expert_recompute;
        const TrainingRun own = run_steps(config, BackendKind::hopper);
        config.precision.flow = "same_flow";
        const TrainingRun same = run_steps(config, BackendKind::hopper);
        EXPECT_EQ(same.losses, own.losses);
        EXPECT_EQ(same.gradients, own.gradients);
        config.precision.flow = "clipping_flow";
        const TrainingRun clipping = run_steps(config, BackendKind::hopper);
        expect_agreement(clipping, run_steps(config, BackendKind::reference), kManyFp8, kManyFp8Loss);
        const char* const fc2 = "layers.1.moe.experts.linear_fc2.weight";
        EXPECT_GT(nmse_of(clipping.gradients.at(fc2), own.gradients.at(fc2)), 0.02) << "clips nothing";
    }
}

// Heads of 192 and 128 columns; cuDNN takes them from 9.19 on, otherwise the native kernel runs.
TEST(LatentAttention, LossAndGradientsAgree) {
    for (const char* recipe : {"bf16", "fp8_flow", "fp8_blockwise"})
        for (const char* attention : {"native", "auto"}) {
            SCOPED_TRACE(fmt::format("{} {}", recipe, attention));
            Config config = tiny_config(recipe, attention);
            config.model.multi_latent_attention = true;
            config.model.q_lora_rank = 128;
            config.model.kv_lora_rank = 128;
            config.precision.fp8_attention_linears = config.precision.recipe != Recipe::bf16;
            const TrainingRun hopper = run_steps(config, BackendKind::hopper);
            expect_agreement(hopper, run_steps(config, BackendKind::reference), kManyFp8, kManyFp8Loss);
            EXPECT_EQ(run_steps(config, BackendKind::hopper).losses, hopper.losses);
            config.recompute.recompute_granularity = RecomputeGranularity::selective;
            config.recompute.mla_up_proj = true;
            const TrainingRun again = run_steps(config, BackendKind::hopper);
            EXPECT_EQ(again.losses, hopper.losses);
            EXPECT_EQ(again.gradients, hopper.gradients);
        }
}

TEST_P(StepParity, SameBitsTwice) {
    const Config config = this->config();
    const TrainingRun first = run_steps(config, BackendKind::hopper);
    const TrainingRun second = run_steps(config, BackendKind::hopper);
    EXPECT_EQ(first.losses, second.losses);
    for (const auto& [name, gradient] : first.gradients)
        EXPECT_EQ(gradient, second.gradients.at(name)) << name;
}

INSTANTIATE_TEST_SUITE_P(Recipes, StepParity,
                         testing::Combine(testing::Values("bf16", "fp8_flow", "fp8_blockwise",
                                                          "fp8_tensorwise", "fp8_rowwise", "mxfp8"),
                                          testing::Values("native", "cudnn")),
                         [](const auto& info) {
                             return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
                         });

}  // namespace
}  // namespace fp8flow::test
