// SPDX-License-Identifier: MIT
// The capacity for routed rows follows the routing: where it begins, how a step that does not fit makes it
// grow, that it is the same on every rank and never shrinks, and that a run which grows has the bits of one
// with the capacity for the worst case.
#include "model/train/trainer.h"

#include "tests/support/training.h"

#include <fmt/format.h>

#include <algorithm>

namespace fp8flow {
namespace {

using namespace test;

constexpr int64_t kTokens = 512;  // of a rank and micro-batch

// Two MoE layers; `skew`: of the experts' load, 4: everything to one of them.
std::vector<std::string> keys_of(int ranks, double skew) {
    return {fmt::format("parallel.expert_model_parallel_size={}", ranks),
            "model.moe_layer_freq=[1, 1]",
            "model.seq_length=128",
            "training.micro_batch_size=4",
            "training.global_batch_size=16",
            "moe.moe_router_topk=1",
            "moe.moe_router_pre_softmax=true",
            fmt::format("moe.moe_router_force_biased={}", skew)};
}

struct Grown {
    Trainer::Rows before, after, wanted;
    int64_t redone = 0;
};

// The rooms of every rank before and after three steps.
std::vector<Grown> grown_by(const Config& config, int ranks) {
    std::vector<Grown> all(static_cast<size_t>(ranks));
    const auto look = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
        Grown& grown = all[static_cast<size_t>(world.rank())];
        if (step == 0) grown.before = trainer.row_capacity();
        if (step != 3) return;
        grown.after = trainer.row_capacity();
        grown.wanted = trainer.most_wanted();
    };
    const TrainingRun run = train(config, ranks, {.steps = 3, .before_step = look});
    for (Grown& grown : all)
        for (const StepResult& step : run.steps) grown.redone += step.redone;
    return all;
}

TEST(RowCapacity, BeginsAtOneAndAQuarterOfTheMean) {
    EXPECT_EQ(MoeSpec{}.moe_expert_rank_capacity_factor, 1.25);
    const Config config = test_config(Recipe::fp8_flow, keys_of(4, 1));
    // one expert a rank: pads of 127 rows at most
    EXPECT_EQ(MoeLayer::row_capacity(config.moe, kTokens, 4), round_up(640 + 127, 128));
    EXPECT_EQ(MoeLayer::worst_rows(config.moe, kTokens, 4), round_up(4 * kTokens + 127, 128));
    for (const Grown& grown : grown_by(config, 4)) {
        EXPECT_EQ(grown.before.layer, round_up(640 + 127, 128));
        EXPECT_EQ(grown.before.together, 2 * grown.before.layer);
        EXPECT_EQ(grown.after.layer, grown.before.layer);
        EXPECT_EQ(grown.redone, 0);
        EXPECT_EQ(grown.wanted.layer, kTokens);
        EXPECT_EQ(grown.wanted.together, 2 * kTokens);
    }
}

// A tenth more than the busiest rank needs, on every rank; the worst case bounds it. The capacity of a layer
// and that of all layers grow apart: at 4 ranks and skew 2 a layer alone does not fit; even load in a quarter
// of the capacity fits neither, and a rank needs more in both layers together than in one.
TEST(RowCapacity, GrowsOnceToWhatTheBusiestRankAsksFor) {
    for (const int ranks : {2, 4})
        for (const auto& [skew, factor] : {std::pair{2.0, 1.25}, {4.0, 1.25}, {1.0, 0.25}}) {
            SCOPED_TRACE(fmt::format("{} ranks, skew {}, capacity {}", ranks, skew, factor));
            std::vector<std::string> keys = keys_of(ranks, skew);
            keys.push_back(fmt::format("moe.moe_expert_rank_capacity_factor={}", factor));
            const Config config = test_config(Recipe::fp8_flow, keys);
            const int64_t worst = MoeLayer::worst_rows(config.moe, kTokens, ranks);
            const std::vector<Grown> all = grown_by(config, ranks);
            int64_t wanted = 0, together = 0;
            for (const Grown& grown : all) {
                wanted = std::max(wanted, grown.wanted.layer);
                together = std::max(together, grown.wanted.together);
            }
            const bool fits = wanted <= all[0].before.layer, all_fit = together <= all[0].before.together;
            const auto capacity = [](int64_t rows, int64_t most) {
                return std::min(most, round_up((rows * 11 + 9) / 10, 128));
            };
            for (const Grown& grown : all) {
                EXPECT_EQ(grown.redone, fits && all_fit ? 0 : 1);
                EXPECT_EQ(grown.after.layer, fits ? grown.before.layer : capacity(wanted, worst));
                EXPECT_EQ(grown.after.together,
                          all_fit ? grown.before.together : capacity(together, 2 * worst));
                EXPECT_GE(grown.after.layer, grown.wanted.layer);
                EXPECT_LE(grown.after.layer, worst);
            }
            if (ranks == 4 && skew == 2.0) {
                EXPECT_FALSE(fits);
                EXPECT_TRUE(all_fit);
            }
            if (factor == 0.25) {
                EXPECT_FALSE(fits || all_fit);
                EXPECT_EQ(together, 2 * wanted);
            }
            if (skew == 4.0) {
                EXPECT_FALSE(fits);
                EXPECT_EQ(wanted, ranks * kTokens);
            }
        }
}

// Redoing changes no bit: skew 2.0 and all to one, on 1, 2 and 4 ranks, serial and with micro-batches in
// turns, rows of all layers and of one at a time.
TEST(RowCapacity, ARunThatGrowsHasTheBitsOfTheWorstCase) {
    const std::vector<std::vector<std::string>> variants = {
        {}, {"recompute.recompute_granularity=full"}, {"schedule.overlap_moe_expert_parallel_comm=true"}};
    for (const int ranks : {1, 2, 4})
        for (const double skew : {2.0, 4.0})
            for (const auto& more : variants) {
                if (ranks != 2 && !more.empty()) continue;
                Texts keys = with(keys_of(ranks, skew), more);
                SCOPED_TRACE(fmt::format("{} ranks, skew {}, {}", ranks, skew, fmt::join(more, " ")));
                const RunOptions options{.steps = 3, .eval_batches = 1};
                const TrainingRun grows = train(test_config(Recipe::fp8_flow, keys), ranks, options);
                keys.push_back("moe.moe_expert_rank_capacity_factor=0");
                const TrainingRun worst = train(test_config(Recipe::fp8_flow, keys), ranks, options);
                expect_same_run(grows, worst);
                int64_t redone = 0;
                for (const StepResult& step : grows.steps) {
                    redone += step.redone;
                    EXPECT_EQ(step.redo_seconds > 0, step.redone > 0);
                }
                // on one rank every routing has as many rows
                EXPECT_EQ(redone, ranks == 1 ? 0 : skew == 4.0 ? 1 : grows.steps[0].redone);
                for (const StepResult& step : worst.steps) EXPECT_EQ(step.redo_seconds, 0);
            }
}

// What is reserved after a growth is what the new capacity takes: nothing of the old buffers stays.
TEST(RowCapacity, OldBuffersAreGivenBack) {
    const Config config = test_config(Recipe::fp8_flow, keys_of(4, 4.0));
    on_trainers(config, 4, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
        EXPECT_EQ(trainer.run_step().redone, 1);
        const Trainer::MemorySums after = trainer.workspace_memory();
        Config direct = config;
        direct.moe.moe_expert_rank_capacity_factor =
            static_cast<double>(trainer.row_capacity().layer - 127) / kTokens;
        ReferenceTrainer other(direct, world);
        EXPECT_EQ(other.row_capacity().layer, trainer.row_capacity().layer);
        EXPECT_EQ(other.run_step().redone, 0);
        EXPECT_EQ(other.workspace_memory().reserved, after.reserved);
        EXPECT_EQ(other.workspace_memory().used, after.used);
        EXPECT_GT(trainer.allocations(), other.allocations());  // workspace was taken twice
    });
}

}  // namespace
}  // namespace fp8flow
