// SPDX-License-Identifier: MIT
// The host runs one step ahead of the results that it reads: nothing changes by it, a warm step stops the
// host nowhere, and a step that must be redone is redone with the one after it. What makes a step fail at
// all is in trainer_failures_test.cpp.
#include "model/train/trainer.h"

#include "tests/support/training.h"

#include <algorithm>

namespace fp8flow {
namespace {

using namespace test;

const std::vector<std::string> kManyParts = {
    "model.moe_layer_freq=[1, 1]",
    "moe.moe_router_score_function=sigmoid",
    "training.micro_batch_size=1",
    "moe.moe_router_enable_expert_bias=true",
    "moe.moe_z_loss_coeff=0.001",
    "moe.moe_router_load_balancing_type=[seq_aux_loss, global_aux_loss]",
    "moe.moe_aux_loss_coeff=[0.01, 0.01]"};

TEST(StepsInFlight, ResultsComeOneStepLate) {
    const Config config = test_config(Recipe::bf16);
    on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup&) {
        EXPECT_FALSE(trainer.drain().has_value());
        EXPECT_FALSE(trainer.step().has_value());
        EXPECT_EQ(trainer.steps_done(), 0);
        EXPECT_THROW(trainer.evaluate(1), Error);
        EXPECT_EQ(trainer.step().value().step, 0);
        EXPECT_EQ(trainer.step().value().step, 1);
        EXPECT_EQ(trainer.steps_done(), 2);
        const StepResult last = trainer.drain().value();
        EXPECT_EQ(last.step, 2);
        EXPECT_GT(last.seconds, 0);
        EXPECT_FALSE(trainer.drain().has_value());
        EXPECT_EQ(trainer.steps_done(), 3);
        EXPECT_FALSE(trainer.step().has_value());
    });
}

TEST(StepsInFlight, ChangeNoBit) {
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_tensorwise, Recipe::fp8_flow}) {
        SCOPED_TRACE(recipe_name(recipe));
        std::vector<std::string> keys = kManyParts;
        keys.push_back("parallel.expert_model_parallel_size=2");
        const Config config = test_config(recipe, keys);
        const TrainingRun flying = train(config, 2);
        const TrainingRun one_by_one =
            train(config, 2, {.before_step = [](Trainer& trainer, ProcessGroup&, int64_t step) {
                      EXPECT_EQ(trainer.steps_done(), step);
                  }});
        ASSERT_EQ(flying.steps.size(), one_by_one.steps.size());
        expect_same_run(flying, one_by_one);
        for (size_t i = 0; i < flying.steps.size(); ++i) {
            const StepResult &a = flying.steps[i], &b = one_by_one.steps[i];
            EXPECT_EQ(a.step, static_cast<int64_t>(i));
            EXPECT_EQ(a.balancing_loss, b.balancing_loss);
            EXPECT_EQ(a.z_loss, b.z_loss);
            EXPECT_EQ(a.load[1].cv, b.load[1].cv);
            EXPECT_EQ(a.wire.total(), b.wire.total());
            EXPECT_EQ(a.casts, b.casts);
            EXPECT_EQ(a.peak_bytes, b.peak_bytes);
            EXPECT_GT(a.wire.dispatch, 0);
        }
    }
}

// The host backend counts the calls at which a GPU would stop the host. One wait a step is left: for the step
// before.
TEST(StepsInFlight, AWarmStepStopsTheHostNowhere) {
    for (Recipe recipe : kRecipesAndFp32) {
        for (const char* forced : {"false", "true"}) {
            SCOPED_TRACE(fmt::format("{}, forced routing {}", recipe_name(recipe), forced));
            std::vector<std::string> keys = kManyParts;
            keys.push_back(std::string("moe.moe_router_force_load_balancing=") + forced);
            const Config config = test_config(recipe, keys);
            on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup&) {
                for (int i = 0; i < 3; ++i) trainer.step();
                const Device& device = trainer.ops().device();
                const int64_t stops = device.num_synchronisations(), waits = device.num_waits();
                for (int i = 0; i < 5; ++i) trainer.step();
                EXPECT_EQ(device.num_synchronisations(), stops);
                EXPECT_EQ(device.num_waits(), waits + 5);
            });
        }
    }
}

// Padded rows of the busiest of two ranks, by step: two of four experts each, one MoE layer, one micro-batch.
std::vector<int64_t> busiest_rows(const Config& config, int64_t steps) {
    std::vector<int64_t> rows;
    const auto read = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
        if (world.rank() != 0 || step == 0) return;
        const TensorView counts = trainer.transformer().blocks()[1]->router()->step_counts();
        int64_t of_rank[2] = {0, 0};
        for (int64_t e = 0; e < 4; ++e)
            of_rank[e / 2] += round_up(counts.as<int64_t>()[e], config.moe.moe_row_alignment);
        rows.push_back(std::max(of_rank[0], of_rank[1]));
    };
    train(config, 2, {.steps = steps, .before_step = read});
    return rows;
}

// The router moves, and one day a rank gets more rows than fit, with the next step in flight. The
// steps before it are not touched, it is redone once, and the run equals one with ample capacity.
TEST(StepsInFlight, AnOverflowOnTheWayIsRedoneWithTheStepBehindIt) {
    constexpr int64_t kSteps = 6, kTokens = 256;
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        SCOPED_TRACE(recipe_name(recipe));
        std::vector<std::string> keys = {
            "parallel.expert_model_parallel_size=2", "model.seq_length=64",
            "training.micro_batch_size=4",           "training.lr=0.01",
            "moe.moe_router_load_balancing_type=[]", "moe.moe_aux_loss_coeff=[]",
            "moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true",
            "moe.moe_expert_rank_capacity_factor=0"};
        if (recipe == Recipe::bf16) keys.push_back("moe.moe_row_alignment=1");
        const Config ample = test_config(recipe, keys);
        const std::vector<int64_t> rows = busiest_rows(ample, kSteps);
        // the first step fits, a later one does not
        Config tight = ample;
        int64_t capacity = 0;
        const auto overflows = [&](int64_t count) { return count > capacity; };
        for (double factor = 1.0; factor < 2.0; factor += 0.05) {
            tight.moe.moe_expert_rank_capacity_factor = factor;
            capacity = MoeLayer::row_capacity(tight.moe, kTokens, 2);
            if (!overflows(rows[0]) && std::any_of(rows.begin(), rows.end(), overflows)) break;
        }
        const TrainingRun wanted = train(ample, 2, {.steps = kSteps, .eval_batches = 1});
        const TrainingRun run = train(tight, 2, {.steps = kSteps, .eval_batches = 1});
        int64_t redone = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            const bool again = overflows(rows[i]);
            // once grown, the capacity is enough for the next step as well
            if (redone == 0 || !again) {
                EXPECT_EQ(run.steps[i].redone, again ? 1 : 0)
                    << "step " << i << ": " << rows[i] << " rows, capacity " << capacity;
            }
            EXPECT_EQ(run.steps[i].step, static_cast<int64_t>(i));
            EXPECT_EQ(run.steps[i].wire.total(), wanted.steps[i].wire.total());
            EXPECT_EQ(run.steps[i].casts, wanted.steps[i].casts);
            EXPECT_EQ(run.steps[i].balancing_loss, wanted.steps[i].balancing_loss);
            if (again) capacity = std::max(capacity, round_up((rows[i] * 11 + 9) / 10, kBlock));
            redone += again;
        }
        EXPECT_EQ(run.steps[0].redone, 0);
        EXPECT_GT(redone, 0);
        expect_same_run(run, wanted);
    }
}

// Weights are the same in every micro-batch.
TEST(StepsInFlight, WeightsAreObservedOnceInAStep) {
    const Config config =
        test_config(Recipe::fp8_flow, {"training.micro_batch_size=4", "training.global_batch_size=8"});
    TensorStats stats;
    on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup&) {
        trainer.set_tensor_stats(&stats);
        trainer.run_step();
        std::map<std::string, double> values;
        for (const TensorStatsRow& row : stats.rows())
            if (row.layer == 1) values[row.tensor] = row.counts.values;
        const auto weights = static_cast<double>((config.moe.num_experts * config.moe.moe_ffn_hidden_size +
                                                  config.moe.moe_shared_expert_intermediate_size) *
                                                 config.model.hidden_size);
        EXPECT_EQ(values.at("fc1 weight"), 2 * weights);
        EXPECT_EQ(values.at("fc2 weight"), weights);
    });
}

// A step that is run again is observed once.
TEST(StepsInFlight, ARedoneStepIsObservedOnce) {
    std::vector<TensorStatsRow> rows[2];
    std::vector<TensorStatsRow> transposed[2];
    for (const char* factor : {"0", "0.01"}) {
        const Config config =
            test_config(Recipe::fp8_flow, {"model.seq_length=64", "training.micro_batch_size=4",
                                           std::string("moe.moe_expert_rank_capacity_factor=") + factor});
        TensorStats stats;
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup&) {
            trainer.set_tensor_stats(&stats);
            trainer.step();
            EXPECT_EQ(trainer.step().value().redone > 0, factor != std::string("0"));
            trainer.drain();
            rows[factor == std::string("0") ? 0 : 1] = stats.rows();
            transposed[factor == std::string("0") ? 0 : 1] = stats.transposed();
        });
    }
    ASSERT_EQ(rows[0].size(), rows[1].size());
    EXPECT_FALSE(rows[0].empty());
    for (size_t i = 0; i < rows[0].size(); ++i) {
        EXPECT_EQ(rows[0][i].counts.values, rows[1][i].counts.values) << rows[0][i].tensor;
        EXPECT_EQ(rows[0][i].counts.zeros, rows[1][i].counts.zeros) << rows[0][i].tensor;
        EXPECT_EQ(rows[0][i].counts.error_energy, rows[1][i].counts.error_energy) << rows[0][i].tensor;
    }
    ASSERT_EQ(transposed[0].size(), transposed[1].size());
    ASSERT_FALSE(transposed[0].empty());
    EXPECT_EQ(transposed[0].front().iteration, 1);
    EXPECT_EQ(transposed[0].back().iteration, 2);
    for (size_t i = 0; i < transposed[0].size(); ++i) {
        const TensorStatsRow &once = transposed[0][i], &again = transposed[1][i];
        EXPECT_EQ(once.iteration, again.iteration) << once.tensor;
        EXPECT_EQ(once.weight, again.weight) << once.tensor;
        EXPECT_EQ(once.counts.values, again.counts.values) << once.tensor;
        EXPECT_EQ(once.counts.flushed, again.counts.flushed) << once.tensor;
        EXPECT_EQ(once.counts.energy, again.counts.energy) << once.tensor;
    }
}

// The gradients of the step after a bad one are not the ones to blame: the same message as when steps are
// run one by one.
TEST(StepsInFlight, TheRightStepAndGradientAreNamed) {
    const Config config = test_config(Recipe::bf16);
    std::vector<std::string> messages;
    for (const bool one_by_one : {true, false}) {
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            trainer.run_step();
            for (Parameter& p : trainer.transformer().parameters().all()) {
                if (p.spec.name != "layers.1.pre_mlp_layernorm.weight") continue;
                for (int64_t i = 0; i < p.numel(); ++i) p.master.as<float>()[i] *= 1e38f;
                trainer.transformer().parameters().write_copies(p);
            }
            const Values before = collect(trainer, world, 1);
            try {
                EXPECT_FALSE(trainer.step().has_value());
                one_by_one ? trainer.drain() : trainer.step();
            } catch (const Error& error) {
                messages.push_back(error.what());
            }
            for (const char* kind : {"weight ", "m ", "v "})
                expect_same_bits(before, collect(trainer, world, 1), kind);
            EXPECT_EQ(trainer.steps_done(), 1);
        });
    }
    ASSERT_EQ(messages.size(), 2u);
    EXPECT_EQ(messages[0], messages[1]);
    expect_contains(messages[0], "step 2: rank 0: the gradient of ");
}

}  // namespace
}  // namespace fp8flow
