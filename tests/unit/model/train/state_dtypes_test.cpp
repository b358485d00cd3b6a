// SPDX-License-Identifier: MIT
// Training with gradients and moments in BF16: it learns as with FP32, a step done again, other schedules and
// a resumed run give the same bits, and checkpoints of either kind load into the other.
#include "kernels/core/stochastic_rounding.h"
#include "model/checkpoint/resume.h"
#include "model/train/trainer.h"
#include "tests/support/checkpoints.h"

namespace fp8flow::test {
namespace {

const Texts kBf16 = {"training.main_grads_dtype=bf16", "training.exp_avg_dtype=bf16",
                     "training.exp_avg_sq_dtype=bf16"};

TEST(StateDtypes, Bf16LearnsAsFp32Does) {
    const Texts keys = {"training.train_iters=60", "training.global_batch_size=8",
                        "training.micro_batch_size=2"};
    const RunOptions options{.steps = 60};
    const TrainingRun fp32 = train(test_config(Recipe::fp8_flow, keys), 1, options);
    const TrainingRun bf16 = train(test_config(Recipe::fp8_flow, with(keys, kBf16)), 1, options);
    EXPECT_LT(fp32.mean_of_last(10), fp32.steps[0].lm_loss - 0.5);
    EXPECT_NEAR(bf16.mean_of_last(10), fp32.mean_of_last(10), 0.02);
    EXPECT_NE(fp32.losses(), bf16.losses());
}

// Each type by itself: the tensors are of it, and only expert gradients are in BF16. Their values are those
// of FP32, rounded with random bits of their own: uses 0 and 1 of a tensor are its moments, the gradient that
// micro-batch m adds is use 2 + m. The first micro-batch overwrites, and rounds to the nearest.
TEST(StateDtypes, EachKeyChangesItsTensorsAlone) {
    const Texts halves = {"training.micro_batch_size=4", "training.clip_grad=0"};
    const auto exact_state = [&](int64_t batch_size, int64_t batch) {
        const Config config = test_config(
            Recipe::bf16, with(halves, {fmt::format("training.global_batch_size={}", batch_size)}));
        const auto choose = [&](Trainer& trainer, ProcessGroup&, int64_t step) {
            if (step == 0) trainer.set_first_batch(batch);
        };
        return train(config, 1, {.steps = 1, .before_step = choose}).state;
    };
    // of both micro-batches, and of each as a step: twice its gradient
    const Values exact = exact_state(8, 0), first = exact_state(4, 0), second = exact_state(4, 1);
    const char* const kinds[] = {"gradient ", "m ", "v "};
    for (size_t key = 0; key < kBf16.size(); ++key) {
        SCOPED_TRACE(kBf16[key]);
        const Config config = test_config(Recipe::bf16, with(halves, {kBf16[key]}));
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            trainer.run_step();
            const Values state = collect(trainer, world, 1);
            int64_t narrow = 0;
            for (const Parameter& p : trainer.transformer().parameters().all()) {
                const DType wanted[] = {p.spec.expert && key == 0 ? DType::bf16 : DType::f32,
                                        key == 1 ? DType::bf16 : DType::f32,
                                        key == 2 ? DType::bf16 : DType::f32};
                EXPECT_EQ(p.main_grad.dtype, wanted[0]) << p.spec.name;
                EXPECT_EQ(p.m.dtype, wanted[1]) << p.spec.name;
                EXPECT_EQ(p.v.dtype, wanted[2]) << p.spec.name;
                EXPECT_EQ(p.master.dtype, DType::f32);
                for (const DType dtype : wanted) narrow += dtype == DType::bf16;
                if (wanted[key] != DType::bf16) continue;
                const std::string name = kinds[key] + p.spec.name;
                const int64_t row = key == 0 ? p.spec.shape[p.spec.rank - 1] : kRoundingRow;
                const auto rounded = [&](float value, int64_t use, int64_t i) {
                    const uint64_t random = rounding_key(config.training.seed, p.stream, use) ^
                                            static_cast<uint64_t>(rounding_step(config.training.seed, 0));
                    return to_float(
                        round_stochastically(value, rounding_bits(rounding_row(random, i / row), i % row)));
                };
                for (int64_t i = 0; i < p.numel(); ++i) {
                    const auto at = static_cast<size_t>(i);
                    const float want =
                        key == 0 ? rounded(round_bf16(first.at(name)[at] / 2) + second.at(name)[at] / 2, 3, i)
                                 : rounded(exact.at(name)[at], static_cast<int64_t>(key) - 1, i);
                    ASSERT_EQ(state.at(name)[at], want) << name << " " << i;
                }
            }
            EXPECT_GT(narrow, 0);
        });
    }
}

// Rows that run out: the step is done again with the bits of one with enough buffers.
TEST(StateDtypes, AStepDoneAgainRoundsAlike) {
    Texts keys = with(
        kBf16, {"model.moe_layer_freq=[1, 1]", "parallel.expert_model_parallel_size=2", "model.seq_length=64",
                "training.micro_batch_size=2", "moe.moe_expert_rank_capacity_factor=0"});
    const TrainingRun ample = train(test_config(Recipe::fp8_flow, keys), 2, {.steps = 3});
    keys.back() = "moe.moe_expert_rank_capacity_factor=0.01";
    const TrainingRun tight = train(test_config(Recipe::fp8_flow, keys), 2, {.steps = 3});
    EXPECT_GT(tight.steps[0].redone, 0);
    expect_same_run(ample, tight);
}

// Replicas of experts round with other random bits, and agree on the sum.
TEST(StateDtypes, SchedulesAndReplicasGiveTheSameBits) {
    const Texts keys = with(kBf16, {"parallel.expert_model_parallel_size=2", "training.micro_batch_size=1",
                                    "model.seq_length=32"});
    for (const Recipe recipe : {Recipe::fp8_flow, Recipe::fp8_blockwise, Recipe::bf16}) {
        SCOPED_TRACE(recipe_name(recipe));
        const TrainingRun plain = train(test_config(recipe, keys), 4, {.steps = 3});
        for (const char* schedule : {"schedule.delay_wgrad_compute=true", "schedule.overlap_grad_reduce=true",
                                     "schedule.overlap_moe_expert_parallel_comm=true"}) {
            SCOPED_TRACE(schedule);
            const TrainingRun other = train(test_config(recipe, with(keys, {schedule})), 4, {.steps = 3});
            expect_same_run(plain, other);
        }
    }
}

// The rounding itself does not depend on who holds an expert: with one rank's tokens, the experts' gradients
// of one rank and of two are equal.
TEST(StateDtypes, GradientsOfExpertsDoNotDependOnWhoHoldsThem) {
    const Texts keys = with(kBf16, {"training.micro_batch_size=1", "training.global_batch_size=1",
                                    "moe.moe_combine_order=invariant"});
    const TrainingRun one = train(test_config(Recipe::bf16, keys), 1, {.steps = 1});
    const TrainingRun two = train(
        test_config(Recipe::bf16, with(keys, {"parallel.expert_model_parallel_size=2"})), 2, {.steps = 1});
    EXPECT_EQ(one.losses(), two.losses());
    int compared = 0;
    for (const auto& [name, values] : one.state) {
        if (!name.starts_with("gradient ") || name.find(".experts.") == std::string::npos) continue;
        ++compared;
        EXPECT_EQ(values, two.state.at(name)) << name;
    }
    EXPECT_GT(compared, 0);
}

TEST(StateDtypes, ResumedRunsAndOtherTypesOfCheckpoints) {
    const auto config_of = [](const Texts& more) {
        return test_config(
            Recipe::fp8_flow,
            with({"parallel.expert_model_parallel_size=2", "training.micro_batch_size=2"}, more));
    };
    const auto saving = [](Config config) {
        config.checkpoint.save_interval = 4;
        return config;
    };
    const auto resuming = [](Config config, const std::string& load = "auto") {
        config.checkpoint.load = load;
        return config;
    };
    const Config fp32 = config_of({}), bf16 = config_of(kBf16);
    TemporaryFolder folder, wide;
    const TrainingRun whole = train_with_checkpoints(bf16, 2, {folder.path(), 8});
    const TrainingRun first = train_with_checkpoints(saving(bf16), 2, {folder.path(), 4});
    const TrainingRun rest = train_with_checkpoints(resuming(bf16), 2, {folder.path(), 8});
    ASSERT_EQ(rest.steps.size(), 4u);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(rest.steps[i].lm_loss, whole.steps[4 + i].lm_loss);
    expect_same_bits(rest.state, whole.state);

    // BF16 into FP32: the values as they are
    const TrainingRun widened = train_with_checkpoints(resuming(fp32), 2, {folder.path(), 4});
    for (const char* kind : {"weight ", "m ", "v "}) expect_same_bits(first.state, widened.state, kind);
    // FP32 into BF16: the nearest
    const TrainingRun exact = train_with_checkpoints(saving(fp32), 2, {wide.path(), 4});
    const TrainingRun narrowed = train_with_checkpoints(resuming(bf16), 2, {wide.path(), 4});
    expect_same_bits(exact.state, narrowed.state, "weight ");
    int compared = 0;
    for (const auto& [name, values] : exact.state) {
        if (!name.starts_with("m ") && !name.starts_with("v ")) continue;
        ++compared;
        const std::vector<float>& got = narrowed.state.at(name);
        for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(got[i], round_bf16(values[i])) << name;
    }
    EXPECT_GT(compared, 0);
}

}  // namespace
}  // namespace fp8flow::test
