// SPDX-License-Identifier: MIT
// What a training step refuses or repeats: rows that run out, NaN, ranks that disagree. A step is a
// transaction: it happens whole or not at all.
#include "model/train/trainer.h"

#include "tests/support/training.h"

#include <limits>

namespace fp8flow {
namespace {

using namespace test;

int64_t total_redone(const TrainingRun& run) {
    int64_t redone = 0;
    for (const StepResult& step : run.steps) redone += step.redone;
    return redone;
}

// Two MoE layers, three of four choices on rank 0's experts: an overflow leaves garbage for layer 1.
// Delayed scales, expert bias and moments must come out as if it had never happened.
TEST(TrainingTransaction, OverflowIsRedoneAndNothingIsLost) {
    for (Recipe recipe : kRecipesAndFp32) {
        for (const char* order : {"rank", "invariant"}) {
            if (order == std::string("invariant") && recipe != Recipe::fp8_flow) continue;
            SCOPED_TRACE(fmt::format("{}, {}", recipe_name(recipe), order));
            std::vector<std::string> keys = {"model.moe_layer_freq=[1, 1]",
                                             "parallel.expert_model_parallel_size=2",
                                             "moe.moe_router_score_function=sigmoid",
                                             "moe.moe_router_enable_expert_bias=true",
                                             std::string("moe.moe_combine_order=") + order,
                                             "model.seq_length=64",
                                             "training.micro_batch_size=4",
                                             "moe.moe_expert_rank_capacity_factor=0"};
            // free scales show every bit of the delayed maximum
            if (recipe == Recipe::fp8_tensorwise) keys.insert(keys.begin(), "precision.scale_format=fp32");
            const TrainingRun worst = train(test_config(recipe, keys), 2, {.steps = 2, .eval_batches = 1});
            keys.back() = "moe.moe_expert_rank_capacity_factor=0.01";
            const TrainingRun tight = train(test_config(recipe, keys), 2, {.steps = 2, .eval_batches = 1});
            EXPECT_EQ(total_redone(worst), 0);
            EXPECT_GT(total_redone(tight), 0);
            EXPECT_EQ(tight.steps[1].redone, 0);  // the capacity stays
            EXPECT_EQ(worst.steps[1].load[0].max, tight.steps[1].load[0].max);
            EXPECT_EQ(worst.steps[1].balancing_loss, tight.steps[1].balancing_loss);
            expect_same_run(tight, worst);
        }
    }
}

// Rows that were kept once or dispatched again, on skewed routing: an overflow loses nothing either, and
// losses and weights are those of sorted rows.
TEST(TrainingTransaction, OverflowWithSavedRowsIsRedone) {
    std::vector<std::string> keys = {"model.moe_layer_freq=[1, 1]",
                                     "parallel.expert_model_parallel_size=2",
                                     "moe.moe_router_force_biased=1.9",
                                     "model.seq_length=64",
                                     "training.micro_batch_size=4",
                                     "recompute.recompute_granularity=selective",
                                     "recompute.recompute_modules=[moe_expert]",
                                     "recompute.saved_rows=sorted",
                                     "moe.moe_expert_rank_capacity_factor=0"};
    const TrainingRun sorted = train(test_config(Recipe::fp8_flow, keys), 2, {.steps = 2, .eval_batches = 1});
    keys.back() = "moe.moe_expert_rank_capacity_factor=0.01";
    for (const char* rows : {"received", "none"}) {
        keys[keys.size() - 2] = std::string("recompute.saved_rows=") + rows;
        const TrainingRun tight =
            train(test_config(Recipe::fp8_flow, keys), 2, {.steps = 2, .eval_batches = 1});
        EXPECT_GT(total_redone(tight), 0) << rows;
        expect_same_run(tight, sorted);
    }
}

TEST(TrainingTransaction, OverflowInAnEvaluationIsRedoneToo) {
    std::vector<std::string> keys = {"parallel.expert_model_parallel_size=2", "model.seq_length=64",
                                     "training.micro_batch_size=4", "moe.moe_expert_rank_capacity_factor=0"};
    const TrainingRun worst = train(test_config(Recipe::bf16, keys), 2, {.steps = 0, .eval_batches = 1});
    keys.back() = "moe.moe_expert_rank_capacity_factor=0.01";
    const TrainingRun tight = train(test_config(Recipe::bf16, keys), 2, {.steps = 0, .eval_batches = 1});
    EXPECT_EQ(worst.held_out, tight.held_out);
}

// Every token of a rank is a row of its four experts: 256 rows fit into a capacity of 256, for the 257th
// there is one row too few.
TEST(TrainingTransaction, CapacityIsExact) {
    const struct { int64_t sequences, length, redone; } cases[] = {{4, 64, 0}, {1, 257, 1}};
    for (const auto& c : cases) {
        std::vector<std::string> keys = {fmt::format("model.seq_length={}", c.length),
                                         fmt::format("training.micro_batch_size={}", c.sequences),
                                         fmt::format("training.global_batch_size={}", c.sequences),
                                         "model.moe_layer_freq=[1, 1]",
                                         "moe.moe_router_topk=1",
                                         "moe.moe_router_pre_softmax=true",
                                         "moe.moe_row_alignment=1",
                                         "moe.moe_expert_rank_capacity_factor=0"};
        const TrainingRun ample = train(test_config(Recipe::bf16, keys), 1, {.steps = 3});
        keys.back() = "moe.moe_expert_rank_capacity_factor=0.9";
        const TrainingRun run = train(test_config(Recipe::bf16, keys), 1, {.steps = 3});
        EXPECT_EQ(run.steps[0].redone, c.redone) << c.sequences * c.length << " rows";
        EXPECT_EQ(total_redone(run), c.redone);
        expect_same_run(run, ample);
    }
}

// Every rank's error, from a run whose ranks all fail.
std::vector<std::string> errors_of(int ranks, ExitCode code, const std::function<void(ProcessGroup&)>& body) {
    std::vector<std::string> messages(static_cast<size_t>(ranks));
    run_thread_ranks(ranks, kTestDeadline, [&](ProcessGroup& world) {
        try {
            body(world);
        } catch (const Error& error) {
            if (error.code() == code) messages[static_cast<size_t>(world.rank())] = error.what();
        }
    });
    return messages;
}

struct Plant {
    std::string name;
    int64_t index;
    float value;
};

// All ranks name the tensor, the rank and the index in the whole model; no weight, moment or bias has moved.
TEST(TrainingTransaction, NanInAWeightStopsTheStep) {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    const Plant plants[] = {{"embedding.word_embeddings.weight", 130, nan},
                            {"layers.0.input_layernorm.weight", 5, inf},
                            {"layers.0.self_attention.linear_qkv.weight", 77, nan},
                            {"layers.1.moe.router.weight", 200, nan},
                            {"layers.1.moe.experts.linear_fc1.weight", 3 * 256 * 128 + 9, nan},
                            {"layers.1.moe.experts.linear_fc2.weight", 128, nan},
                            {"output_layer.weight", 0, nan}};
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        const Config config = test_config(recipe, {"parallel.expert_model_parallel_size=2"});
        const auto data = open_data(config);
        for (const Plant& plant : plants) {
            SCOPED_TRACE(fmt::format("{}: {}", recipe_name(recipe), plant.name));
            int planted_on = -1;
            const auto messages = errors_of(2, ExitCode::numeric, [&](ProcessGroup& world) {
                ReferenceTrainer trainer(config, world, data);
                trainer.run_step();
                for (Parameter& p : trainer.transformer().parameters().all()) {
                    if (p.spec.name != plant.name) continue;
                    const int64_t first =
                        p.spec.expert ? p.spec.first_expert * (p.numel() / p.spec.shape[0]) : 0;
                    if (plant.index < first || plant.index >= first + p.numel()) continue;
                    p.master.as<float>()[plant.index - first] = plant.value;
                    trainer.transformer().parameters().write_copies(p);
                    if (p.spec.expert || world.rank() == 0) planted_on = world.rank();
                }
                const Values before = collect(trainer, world, 2);
                try {
                    trainer.run_step();
                } catch (const Error& error) {
                    const Values after = collect(trainer, world, 2);
                    for (const char* kind : {"weight ", "m ", "v "}) expect_same_bits(before, after, kind);
                    throw;
                }
            });
            ASSERT_GE(planted_on, 0);
            EXPECT_EQ(messages[0], messages[1]);
            expect_contains(messages[0], "step 2: rank " + std::to_string(planted_on) + ": " + plant.name +
                                             " has 1 values that are not finite");
            expect_contains(messages[0],
                            fmt::format("the first at index {}; the step was not applied", plant.index));
        }
    }
}

// Finite weights with results that are not: the gradients, or only the sum of their squares. The same is
// found where ranks had the sums of their slices alone.
TEST(TrainingTransaction, WhatExplodesIsNamedAndNotApplied) {
    const struct {
        const char *weight, *message;
        float factor;
    } cases[] = {{"layers.1.pre_mlp_layernorm.weight", "the gradient of ", 1e38f},
                 {"output_layer.weight", "the loss or the norm of the gradients is not finite", 1e38f}};
    for (const auto& c : cases) {
        const auto messages_of = [&](const char* divided) {
            const Config config =
                test_config(Recipe::bf16, {fmt::format("training.use_distributed_optimizer={}", divided)});
            return errors_of(2, ExitCode::numeric, [&](ProcessGroup& world) {
                ReferenceTrainer trainer(config, world);
                for (Parameter& p : trainer.transformer().parameters().all()) {
                    if (p.spec.name != c.weight) continue;
                    for (int64_t i = 0; i < p.master.numel(); ++i) p.master.as<float>()[i] *= c.factor;
                }
                trainer.weights_replaced();
                const Values before = collect(trainer, world, 1);
                try {
                    trainer.run_step();
                } catch (const Error&) {
                    expect_same_bits(before, collect(trainer, world, 1), "weight ");
                    throw;
                }
            });
        };
        const auto messages = messages_of("false");
        expect_contains(messages[0], c.message);
        expect_contains(messages[0], "the step was not applied");
        expect_contains(messages[0], "lower training.lr");
        EXPECT_EQ(messages_of("true"), messages);
    }
}

TEST(TrainingTransaction, RanksThatDisagreeAreNamed) {
    const auto start = [](const Config& config, ProcessGroup& world) { ReferenceTrainer(config, world); };
    for (const char* key : {"training.lr=0.5", "data.synthetic_seed=7", "moe.moe_router_topk=1"}) {
        std::vector<std::string> keys = {"moe.moe_router_pre_softmax=true"};
        const Config same = test_config(Recipe::bf16, keys);
        keys.push_back(key);
        const Config other = test_config(Recipe::bf16, keys);
        const auto messages = errors_of(
            4, ExitCode::peer, [&](ProcessGroup& world) { start(world.rank() == 2 ? other : same, world); });
        for (const std::string& message : messages) expect_contains(message, "rank 2 has other data");
    }
}

// The optimizer alone, with the word set by hand, or a loss that is not finite: no weight, copy, moment or
// bias is written.
TEST(TrainingTransaction, StatusWordBlocksEveryPersistentWrite) {
    const struct {
        int32_t status;
        float loss;
        int32_t after;
    } cases[] = {{op::kStepOverflow, 4.0f, op::kStepOverflow},
                 {op::kStepOverflow, std::numeric_limits<float>::infinity(), op::kStepOverflow},
                 {op::kStepNonFinite, 4.0f, op::kStepNonFinite},
                 {0, std::numeric_limits<float>::quiet_NaN(), op::kStepNonFinite},
                 {0, 4.0f, 0}};
    for (const auto& c : cases) {
        run_thread_ranks(1, kTestDeadline, [&](ProcessGroup& world) {
            const auto ops = make_ops(choose_backend(BackendKind::reference), Arithmetic::stated);
            const RankGroups groups = make_rank_groups(world, 1);
            Config config = test_config(Recipe::fp8_tensorwise, {"moe.moe_router_score_function=sigmoid",
                                                                 "moe.moe_router_enable_expert_bias=true"});
            const auto exchange =
                make_exchange(choose_backend(BackendKind::reference), groups, *ops, config).exchange;
            Transformer model({.block = {.model = config.model,
                                         .moe = config.moe,
                                         .precision = config.precision,
                                         .recompute = config.recompute},
                               .seed = 1},
                              *ops);
            Arena words(ops->device(), "words"), saved(ops->device(), "saved"),
                scratch(ops->device(), "scratch");
            RowArena rows(ops->device(), 1024, 2);
            StageTimer timer;
            Context ctx{{.ops = *ops,
                         .exchange = *exchange,
                         .saved = saved,
                         .scratch = scratch,
                         .rows = rows,
                         .timer = timer}};
            ctx.step_status = words.tensor(DType::i32, {1}, "words");
            *ctx.step_status.as<int32_t>() = c.status;
            StepInputs inputs(ops->device(), 1);
            inputs.write(0, {.schedule = adamw_schedule(config.training, 0), .sums = {c.loss, 0.0f}});
            inputs.load(0, {});
            for (const auto& block : model.blocks())
                if (block->router() != nullptr) block->router()->step_counts().as<int64_t>()[0] = 100;
            const auto snapshot = [&] {
                std::vector<std::vector<uint8_t>> bytes;
                const auto add = [&](const TensorView& view) {
                    bytes.emplace_back(view.bytes_ptr(), view.bytes_ptr() + view.bytes());
                };
                for (const Parameter& p : model.parameters().all()) {
                    for (const TensorView& view : {p.master, p.m, p.v}) add(view);
                    if (p.plain) add(p.plain);
                    if (p.fprop) add(p.fprop.data);
                }
                for (const auto& block : model.blocks())
                    if (block->router() != nullptr) add(block->router()->expert_bias());
                return bytes;
            };
            for (Parameter& p : model.parameters().all())
                for (int64_t i = 0; i < p.numel(); ++i) p.main_grad.as<float>()[i] = 1.0f;
            Optimizer optimizer(config.training, config.moe.moe_combine_order, ops->device());
            const auto before = snapshot();
            optimizer.step(ctx, model.parameters(), inputs);
            model.end_step(ctx, inputs.update());
            const auto after = snapshot();
            size_t changed = 0;
            for (size_t i = 0; i < before.size(); ++i) changed += before[i] != after[i];
            EXPECT_EQ(changed, c.after != 0 ? 0u : before.size()) << c.status << ", loss " << c.loss;
            EXPECT_EQ(*ctx.step_status.as<int32_t>(), c.after);
        });
    }
}

}  // namespace
}  // namespace fp8flow
