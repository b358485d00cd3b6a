// SPDX-License-Identifier: MIT
// A long run of the test configuration on two thread ranks, twice: memory stays flat, the loss falls and
// stays above the entropy of the source, and both runs end in the same bits.
#include "model/train/trainer.h"

#include "tests/support/training.h"

#include <fstream>
#include <numeric>

namespace fp8flow {
namespace {

constexpr int64_t kSteps = 300, kWarm = 50;

// Resident memory of this process in bytes.
int64_t resident_bytes() {
    std::ifstream file("/proc/self/statm");
    int64_t total = 0, resident = 0;
    file >> total >> resident;
    return resident * 4096;
}

void soak(Recipe recipe) {
    const Config config = test::test_config(
        recipe, {"parallel.expert_model_parallel_size=2", "training.micro_batch_size=1",
                 "moe.moe_expert_rank_capacity_factor=0.25", fmt::format("training.train_iters={}", kSteps)});
    const double floor = *open_data(config)->entropy_floor_nats();
    test::TrainingRun runs[2];
    for (test::TrainingRun& run : runs) {
        int64_t warm = 0, allocations[2] = {0, 0};
        const auto watch = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
            if (step % 100 == 75) trainer.evaluate(1);
            if (step == kWarm) {
                allocations[world.rank()] = trainer.allocations();
                if (world.rank() == 0) warm = resident_bytes();
            }
            if (step > kWarm) {
                EXPECT_EQ(trainer.allocations(), allocations[world.rank()]) << "step " << step;
            }
            if (step == kSteps && world.rank() == 0) {
                EXPECT_LT(resident_bytes() - warm, int64_t{4} << 20) << "grown since step " << kWarm;
            }
        };
        run = test::train(config, 2, {.steps = kSteps, .eval_batches = 4, .before_step = watch});
        const std::vector<double> losses = run.losses();
        EXPECT_GT(run.held_out, floor);
        EXPECT_LT(run.held_out, losses[0] - 1.0);
        EXPECT_LT(std::accumulate(losses.end() - 20, losses.end(), 0.0),
                  std::accumulate(losses.begin() + 80, losses.begin() + 100, 0.0));
    }
    test::expect_same_run(runs[0], runs[1]);
}

TEST(Soak, Fp8Flow) { soak(Recipe::fp8_flow); }
TEST(Soak, Bf16) { soak(Recipe::bf16); }

}  // namespace
}  // namespace fp8flow
