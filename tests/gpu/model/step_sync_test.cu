// SPDX-License-Identifier: MIT
// A training step on the GPU with the host one step ahead: a warm step never synchronises the host with the
// device, gives the bits of steps run one by one, and a step that runs out of rows is redone together with
// the one after it, at the exact boundary. One rank, local exchange.
#include "model/train/trainer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace fp8flow::test {
namespace {

Config config_of(const std::string& recipe, std::vector<std::string> keys) {
    keys.push_back("precision.recipe=" + recipe);
    return load_config(FP8FLOW_SOURCE_DIR "/configs/test.yaml", keys, 1);
}

enum class Pace { ahead, one_by_one };

struct StepsRun {
    std::vector<StepResult> steps;
    std::vector<float> weights;               // of all parameters, after the last step
    int64_t synchronisations = 0, waits = 0;  // of the steps counted
    int64_t redone = 0, captures = 0;
    std::vector<double> held_out;  // after every third step
};

// The first `warm` steps are not counted.
StepsRun run_steps(const Config& config, Pace pace, int warm, int counted, bool evaluates = false) {
    const auto groups = make_thread_groups(1, 60.0);
    Trainer trainer(config, *groups[0], choose_backend(BackendKind::hopper), Arithmetic::stated,
                    open_data(config));
    Device& device = trainer.ops().device();
    StepsRun run;
    const auto keep = [&](std::optional<StepResult> result) {
        if (!result) return;
        run.redone += result->redone;
        run.steps.push_back(std::move(*result));
    };
    for (int i = 0; i < warm + counted; ++i) {
        if (i == warm) {
            run.synchronisations = device.num_synchronisations();
            run.waits = device.num_waits();
        }
        keep(trainer.step());
        if (pace == Pace::one_by_one) keep(trainer.drain());
        if (evaluates && i % 3 == 2) {
            keep(trainer.drain());
            run.held_out.push_back(trainer.evaluate(2));
        }
    }
    run.synchronisations = device.num_synchronisations() - run.synchronisations;
    run.waits = device.num_waits() - run.waits;
    keep(trainer.drain());
    if (trainer.captured() != nullptr) run.captures = trainer.captured()->num_captures();
    for (const Parameter& p : trainer.transformer().parameters().all()) {
        const size_t first = run.weights.size(), count = static_cast<size_t>(p.numel());
        run.weights.resize(first + count);
        device.copy_out(run.weights.data() + first, p.master.data, count * sizeof(float));
    }
    return run;
}

void expect_same(const StepsRun& a, const StepsRun& b) {
    ASSERT_EQ(a.steps.size(), b.steps.size());
    for (size_t i = 0; i < a.steps.size(); ++i) {
        EXPECT_EQ(a.steps[i].step, static_cast<int64_t>(i));
        EXPECT_EQ(a.steps[i].lm_loss, b.steps[i].lm_loss) << "step " << i;
        EXPECT_EQ(a.steps[i].grad_norm, b.steps[i].grad_norm) << "step " << i;
        EXPECT_EQ(a.steps[i].balancing_loss, b.steps[i].balancing_loss) << "step " << i;
        ASSERT_EQ(a.steps[i].load.size(), b.steps[i].load.size());
        for (size_t layer = 0; layer < a.steps[i].load.size(); ++layer)
            EXPECT_EQ(a.steps[i].load[layer].cv, b.steps[i].load[layer].cv) << "step " << i;
        EXPECT_EQ(a.steps[i].casts, b.steps[i].casts) << "step " << i;
    }
    EXPECT_EQ(a.held_out, b.held_out);
    ASSERT_EQ(a.weights.size(), b.weights.size());
    EXPECT_EQ(std::memcmp(a.weights.data(), b.weights.data(), a.weights.size() * sizeof(float)), 0);
}

class StepSync : public testing::TestWithParam<const char*> {};

TEST_P(StepSync, AWarmStepDoesNotSynchroniseTheHostAndChangesNoBit) {
    for (const char* forced : {"false", "true"}) {
        SCOPED_TRACE(std::string("forced routing ") + forced);
        const Config config =
            config_of(GetParam(), {"model.moe_layer_freq=[1, 1]", "training.micro_batch_size=2",
                                   "moe.moe_router_score_function=sigmoid",
                                   "moe.moe_router_enable_expert_bias=true", "moe.moe_z_loss_coeff=0.001",
                                   std::string("moe.moe_router_force_load_balancing=") + forced});
        const StepsRun ahead = run_steps(config, Pace::ahead, 3, 5);
        EXPECT_EQ(ahead.synchronisations, 0);
        EXPECT_EQ(ahead.waits, 5);  // one a step: for the result of the step before
        expect_same(ahead, run_steps(config, Pace::one_by_one, 3, 5));
        for (const StepResult& step : ahead.steps) {
            EXPECT_GT(step.lm_loss, 0);
            EXPECT_GT(step.grad_norm, 0);
            EXPECT_GT(step.seconds, 0);
        }
        EXPECT_LT(ahead.steps.back().lm_loss, ahead.steps.front().lm_loss);
    }
}

// Steps as graphs, two of them, since steps take turns with two slots of page-locked memory: no wait but for
// the result of the step before, and the bits of steps that are given to the GPU operation by operation.
TEST_P(StepSync, GraphsChangeNoBit) {
    std::vector<std::string> keys = {"model.moe_layer_freq=[1, 1]", "training.micro_batch_size=2",
                                     "moe.moe_z_loss_coeff=0.001", "schedule.cuda_graph_impl=none"};
    const StepsRun eager = run_steps(config_of(GetParam(), keys), Pace::ahead, 4, 8, true);
    const StepsRun eager_ahead = run_steps(config_of(GetParam(), keys), Pace::ahead, 5, 8);
    keys.back() = "schedule.cuda_graph_impl=full_iteration";
    const StepsRun graphs = run_steps(config_of(GetParam(), keys), Pace::ahead, 4, 8, true);
    EXPECT_GE(graphs.captures, 2);
    ASSERT_EQ(graphs.held_out.size(), 4u);
    expect_same(graphs, eager);
    const StepsRun ahead = run_steps(config_of(GetParam(), keys), Pace::ahead, 5, 8);
    EXPECT_EQ(ahead.captures, 2);
    EXPECT_EQ(ahead.synchronisations, 0);
    EXPECT_EQ(ahead.waits, 8);
    expect_same(ahead, eager_ahead);
}

INSTANTIATE_TEST_SUITE_P(Recipes, StepSync,
                         testing::Values("bf16", "fp8_flow", "fp8_blockwise", "fp8_tensorwise", "fp8_rowwise",
                                         "mxfp8"),
                         [](const auto& info) { return std::string(info.param); });

// Every token is a row of one of the four experts: 256 rows fit into a capacity of 256, 257 do not.
TEST(StepOverflow, CapacityIsExact) {
    const struct {
        const char *length, *batch;
        int64_t redone;
    } cases[] = {{"model.seq_length=64", "4", 0}, {"model.seq_length=257", "1", 1}};
    for (const auto& c : cases) {
        SCOPED_TRACE(c.length);
        std::vector<std::string> keys = {c.length,
                                         std::string("training.micro_batch_size=") + c.batch,
                                         std::string("training.global_batch_size=") + c.batch,
                                         "model.moe_layer_freq=[1, 1]",
                                         "moe.moe_router_topk=1",
                                         "moe.moe_router_pre_softmax=true",
                                         "moe.moe_row_alignment=1",
                                         "moe.moe_expert_rank_capacity_factor=0"};
        const StepsRun ample = run_steps(config_of("bf16", keys), Pace::ahead, 0, 4);
        keys.back() = "moe.moe_expert_rank_capacity_factor=0.9";
        const StepsRun tight = run_steps(config_of("bf16", keys), Pace::ahead, 0, 4);
        EXPECT_EQ(ample.redone, 0);
        EXPECT_EQ(tight.redone, c.redone);
        EXPECT_EQ(tight.steps[0].redone, c.redone);
        expect_same(tight, ample);
    }
}

// The flow's recipe with padded groups and skewed routing: half of all tokens go to one expert, so that a
// tiny capacity factor must grow more than once.
TEST(StepOverflow, SkewedRoutingGrowsTheCapacityAndLosesNothing) {
    std::vector<std::string> keys = {
        "model.seq_length=128", "training.micro_batch_size=8",     "model.moe_layer_freq=[1, 1]",
        "moe.num_experts=8",    "moe.moe_router_force_biased=2.0", "moe.moe_expert_rank_capacity_factor=0"};
    const StepsRun ample = run_steps(config_of("fp8_flow", keys), Pace::ahead, 0, 4);
    keys.back() = "moe.moe_expert_rank_capacity_factor=0.01";
    const StepsRun tight = run_steps(config_of("fp8_flow", keys), Pace::ahead, 0, 4);
    EXPECT_EQ(ample.redone, 0);
    EXPECT_GE(tight.steps[0].redone, 1);
    EXPECT_EQ(tight.redone, tight.steps[0].redone);  // the capacity is kept
    expect_same(tight, ample);
}

// Larger buffers are other memory: the graphs are captured again.
TEST(StepOverflow, GraphsAreCapturedAgain) {
    std::vector<std::string> keys = {"model.seq_length=128",
                                     "training.micro_batch_size=8",
                                     "model.moe_layer_freq=[1, 1]",
                                     "moe.num_experts=8",
                                     "moe.moe_expert_rank_capacity_factor=0.6",
                                     "schedule.cuda_graph_impl=none"};
    const StepsRun eager = run_steps(config_of("fp8_flow", keys), Pace::ahead, 0, 12);
    keys.back() = "schedule.cuda_graph_impl=full_iteration";
    const StepsRun graphs = run_steps(config_of("fp8_flow", keys), Pace::ahead, 0, 12);
    EXPECT_GE(graphs.redone, 1);
    EXPECT_GE(graphs.captures, 2);
    expect_same(graphs, eager);
}

}  // namespace
}  // namespace fp8flow::test
