// SPDX-License-Identifier: MIT
// Save, end, resume on GPUs: 20 steps in two parts are the 20 steps of one run, bit for bit; and a checkpoint
// written during training holds the step at which it was taken.
#include "model/train/trainer.h"

#include "tests/gpu_mpi/ranks_on_gpus.h"
#include "tests/support/checkpoints.h"
#include "tests/support/files.h"

namespace fp8flow::test {
namespace {

// All ranks share the experts; divided: half of them do, and masters and moments are divided over the ranks.
struct State {
    Recipe recipe;
    bool divided = false;
};

class GpuCheckpoint : public testing::TestWithParam<State> {
protected:
    GpuCheckpoint() : world_(make_mpi_group(kTestDeadline)) {
        std::string path = world_->rank() == 0 ? folder_.path() : "";
        auto length = static_cast<int64_t>(path.size());
        world_->broadcast(&length, sizeof length, 0);
        path.resize(static_cast<size_t>(length));
        world_->broadcast(path.data(), path.size(), 0);
        shared_ = path;
    }
    void TearDown() override { world_->barrier(); }  // the first rank removes the folder

    TrainingRun run(const Config& config, int64_t steps) {
        return train_with_checkpoints(*world_, config,
                                      {shared_, steps, BackendKind::hopper, placement_of(*world_)});
    }

    std::unique_ptr<ProcessGroup> world_;
    TemporaryFolder folder_;
    std::string shared_;
};

TEST_P(GpuCheckpoint, TwoHalvesAreTheWholeBitForBit) {
    if (!has_gpu(*world_)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const auto [recipe, divided] = GetParam();
    const int expert_ranks = divided ? (world_->size() + 1) / 2 : world_->size();
    Config config = test_config(
        recipe, {fmt::format("parallel.expert_model_parallel_size={}", expert_ranks),
                 fmt::format("training.use_distributed_optimizer={}", divided),
                 fmt::format("moe.num_experts={}", std::max(4, world_->size())),
                 fmt::format("training.global_batch_size={}", std::max(8, 2 * world_->size())),
                 "moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true",
                 "training.train_iters=20", "checkpoint.save_interval=10"});
    Config plain = config;
    plain.checkpoint.save_interval = 0;
    const TrainingRun whole = run(plain, 20);
    const TrainingRun first = run(config, 13);
    EXPECT_EQ(first.steps.back().lm_loss, whole.steps[12].lm_loss);
    world_->barrier();
    config.checkpoint.load = "auto";
    const TrainingRun rest = run(config, 20);
    ASSERT_EQ(rest.steps.size(), 10u);
    for (size_t i = 0; i < rest.steps.size(); ++i) {
        EXPECT_EQ(rest.steps[i].lm_loss, whole.steps[10 + i].lm_loss) << "step " << 10 + i;
        EXPECT_EQ(rest.steps[i].grad_norm, whole.steps[10 + i].grad_norm) << "step " << 10 + i;
    }
    expect_same_bits(rest.state, whole.state);
}

INSTANTIATE_TEST_SUITE_P(Recipes, GpuCheckpoint,
                         testing::Values(State{Recipe::bf16}, State{Recipe::fp8_tensorwise},
                                         State{Recipe::fp8_blockwise}, State{Recipe::fp8_flow},
                                         State{Recipe::fp8_flow, true}, State{Recipe::fp8_rowwise},
                                         State{Recipe::mxfp8}),
                         [](const auto& info) {
                             return std::string(recipe_name(info.param.recipe)) +
                                    (info.param.divided ? "_divided" : "");
                         });

}  // namespace
}  // namespace fp8flow::test
