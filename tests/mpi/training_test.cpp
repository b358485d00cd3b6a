// SPDX-License-Identifier: MIT
// Training over MPI processes against the same ranks as threads of one process: the transport must not change
// a bit; and what the ranks report together adds up to the global batch.
#include "model/train/trainer.h"

#include "tests/support/training.h"

#include <cstdlib>
#include <numeric>

namespace fp8flow {
namespace {

using test::test_config;
using test::TrainingRun;

class MpiTraining : public testing::Test {
protected:
    MpiTraining() : group_(make_mpi_group(test::kTestDeadline)) { group_->set_activity("training test"); }

    // Every rank repeats the whole job with threads: bit for bit the same losses, norms, weights, moments and
    // gradients.
    void compare(Recipe recipe, int64_t expert_ranks, const char* order) {
        SCOPED_TRACE(fmt::format("{}, {} share the experts, {}", recipe_name(recipe), expert_ranks, order));
        const Config config =
            test_config(recipe, {fmt::format("parallel.expert_model_parallel_size={}", expert_ranks),
                                 std::string("moe.moe_combine_order=") + order,
                                 "moe.moe_router_load_balancing_type=[global_aux_loss]"});
        const test::RunOptions options{.steps = 3, .eval_batches = 1};
        const TrainingRun mine = test::train_on(*group_, config, open_data(config), options);
        const TrainingRun threads = test::train(config, group_->size(), options);
        for (size_t i = 0; i < 3; ++i) {
            EXPECT_EQ(mine.steps[i].lm_loss, threads.steps[i].lm_loss);
            EXPECT_EQ(mine.steps[i].grad_norm, threads.steps[i].grad_norm);
            EXPECT_EQ(mine.steps[i].balancing_loss, threads.steps[i].balancing_loss);
            EXPECT_EQ(mine.steps[i].load[0].cv, threads.steps[i].load[0].cv);
        }
        EXPECT_EQ(mine.held_out, threads.held_out);
        test::expect_same_bits(mine.state, threads.state);
    }

    // State divided over the ranks, the wire in parallel with the layers or not, against whole state.
    void compare_divided(Recipe recipe, int64_t expert_ranks, std::vector<std::string> keys) {
        SCOPED_TRACE(fmt::format("{}, {} share the experts", recipe_name(recipe), expert_ranks));
        keys.push_back(fmt::format("parallel.expert_model_parallel_size={}", expert_ranks));
        const test::RunOptions options{.steps = 3, .eval_batches = 1};
        const auto run = [&](const std::vector<std::string>& own) {
            const Config config = test_config(recipe, own);
            return test::train_on(*group_, config, open_data(config), options);
        };
        const TrainingRun whole = run(keys);
        keys.emplace_back("training.use_distributed_optimizer=true");
        for (const bool overlaps : {false, true}) {
            if (overlaps)
                for (const char* key : {"overlap_grad_reduce", "overlap_param_gather"})
                    keys.push_back(fmt::format("schedule.{}=true", key));
            const TrainingRun divided = run(keys);
            test::expect_same_run(divided, whole);
        }
    }

    std::unique_ptr<ProcessGroup> group_;
};

TEST_F(MpiTraining, DividedStateGivesTheBitsOfTheWhole) {
    for (int64_t expert_ranks = 1; expert_ranks <= group_->size(); expert_ranks *= 2)
        compare_divided(Recipe::fp8_flow, expert_ranks, {});
    compare_divided(Recipe::bf16, 1, {"moe.moe_combine_order=invariant", "training.main_grads_dtype=bf16"});
}

TEST_F(MpiTraining, EqualsThreadRanksBitForBit) {
    for (int64_t expert_ranks = 1; expert_ranks <= group_->size(); expert_ranks *= 2) {
        compare(Recipe::bf16, expert_ranks, "rank");
        compare(Recipe::fp8_flow, expert_ranks, "invariant");
    }
    for (Recipe recipe : {Recipe::fp8_tensorwise, Recipe::fp8_blockwise, Recipe::fp8_flow, Recipe::mxfp8})
        compare(recipe, group_->size(), "rank");
}

// Two hosts: with combine order invariant two levels give the bits of one, with fewer bytes between the hosts
// where these have several ranks.
TEST_F(MpiTraining, TwoLevelsGiveTheBitsOfOne) {
    if (group_->size() < 2) GTEST_SKIP() << "one rank is on one host";
    const bool launched = std::getenv("FP8FLOW_TEST_HOSTS") != nullptr;  // on two: nothing to simulate
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        SCOPED_TRACE(recipe_name(recipe));
        const auto run = [&](const char* dispatcher) {
            const Config config = test_config(
                recipe,
                {fmt::format("parallel.expert_model_parallel_size={}", group_->size()),
                 launched ? "parallel.hosts=\"\"" : fmt::format("parallel.hosts=2x{}", group_->size() / 2),
                 std::string("parallel.moe_token_dispatcher_type=") + dispatcher,
                 "moe.moe_combine_order=invariant"});
            return test::train_on(*group_, config, open_data(config),
                                  {.steps = group_->size() == 4 && !launched ? 50 : 10, .eval_batches = 1});
        };
        const TrainingRun one = run("flex"), two = run("hierarchical");
        test::expect_same_run(two, one);
        double before = 0, now = 0;  // one level counts simulated hosts only
        for (size_t i = 0; i < one.steps.size(); ++i) {
            EXPECT_EQ(two.steps[i].grad_norm, one.steps[i].grad_norm);
            EXPECT_GT(two.steps[i].wire.between_hosts, 0);
            before += one.steps[i].wire.between_hosts;
            now += two.steps[i].wire.between_hosts;
        }
        if (launched) continue;
        EXPECT_TRUE(group_->size() == 2 ? now == before : now < before) << now << " of " << before;
    }
}

// Each (token, k) exactly once over all ranks, micro-batches and layers; also where the last rank has no
// token.
TEST_F(MpiTraining, StatisticsConserveTokens) {
    for (const int64_t batch : {int64_t{8}, std::max<int64_t>(1, group_->size() - 1)}) {
        const Config config = test_config(
            Recipe::fp8_flow, {fmt::format("parallel.expert_model_parallel_size={}", group_->size()),
                               "model.moe_layer_freq=[1, 1]", "training.micro_batch_size=1",
                               fmt::format("training.global_batch_size={}", batch)});
        test::train_on(*group_, config, open_data(config),
                       {.steps = 2, .before_step = [&](Trainer& trainer, ProcessGroup&, int64_t step) {
                            if (step == 0) return;
                            for (const auto& block : trainer.transformer().blocks()) {
                                const TensorView view = block->router()->step_counts();
                                const int64_t* counts = view.as<int64_t>();
                                EXPECT_EQ(std::accumulate(counts, counts + view.numel(), int64_t{0}),
                                          batch * config.model.seq_length * config.moe.moe_router_topk);
                            }
                        }});
    }
}

}  // namespace
}  // namespace fp8flow
