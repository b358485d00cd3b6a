// SPDX-License-Identifier: MIT
// moe_wgrad_micro_batches: expert weight gradients of several micro-batches in one GEMM. Training with it
// equals training without it within the rounding of one sum, under every recompute mode, and costs one GEMM
// for all of them and the memory that `plan` says.
#include "layers/schedule/delayed_wgrads.h"

#include "model/plan/plan.h"
#include "tests/support/training.h"

#include <fmt/format.h>

namespace fp8flow {

using namespace plan;

namespace {

using namespace test;

constexpr Recipe kJoining[] = {Recipe::fp8_flow, Recipe::fp8_blockwise};

// Two MoE layers, micro-batches of one sequence.
Config config_of(Recipe recipe, int64_t joined, int64_t micro_batches, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"model.moe_layer_freq=[1, 1]", "training.micro_batch_size=1",
                             fmt::format("training.global_batch_size={}", micro_batches),
                             fmt::format("precision.moe_wgrad_micro_batches={}", joined)});
    return test_config(recipe, std::move(more));
}

bool is_expert_gradient(const std::string& name) {
    return name.starts_with("gradient ") && name.find(".experts.") != std::string::npos &&
           name.find("shared") == std::string::npos;
}

// Here an expert has at most 128 rows of a micro-batch and scales are powers of two, so that a product is one
// block and no sum is rounded on its way into dW: the first group, which overwrites dW, and what is alone
// give the same bits. A group that is added gives the same sum in another order.
TEST(DelayedWgrads, GradientsAreThoseOfEachMicroBatchAlone) {
    for (const Recipe recipe : kJoining)
        for (const int64_t micro_batches : {1, 2, 3, 4, 5}) {
            const TrainingRun alone = train(config_of(recipe, 1, micro_batches), 1, {.steps = 1});
            for (const int64_t n : {2, 3}) {
                SCOPED_TRACE(
                    fmt::format("{}, {} of {} micro-batches", recipe_name(recipe), n, micro_batches));
                const TrainingRun joined = train(config_of(recipe, n, micro_batches), 1, {.steps = 1});
                EXPECT_EQ(joined.losses(), alone.losses());
                int experts = 0;
                for (const auto& [name, values] : alone.state) {
                    if (!name.starts_with("gradient ")) continue;
                    const double error = norm_wise_error(joined.state.at(name), values);
                    const bool reordered = is_expert_gradient(name) && micro_batches >= n + 2;
                    EXPECT_EQ(error > 0, reordered) << name;
                    EXPECT_LE(error, 1.5e-7) << name;
                    experts += is_expert_gradient(name);
                }
                EXPECT_EQ(experts, 4);
            }
        }
}

// What the weight gradients of a step are, after its backward passes.
OpCount wgrads_of_step(const Config& config) {
    OpCount counts;
    train(config, 1, {.steps = 1, .before_step = [&](Trainer& trainer, ProcessGroup&, int64_t step) {
                          if (step == 1) counts = trainer.ops().counts().at("grouped_gemm_wgrad");
                      }});
    return counts;
}

TEST(DelayedWgrads, AStepHasOneGemmForSeveralMicroBatches) {
    constexpr int64_t kWeights = 4;  // of experts; those of shared experts do not wait
    for (const Recipe recipe : kJoining)
        for (const int64_t micro_batches : {1, 2, 3, 4}) {
            const int64_t alone = wgrads_of_step(config_of(recipe, 1, micro_batches)).calls;
            EXPECT_EQ(alone, 2 * kWeights * micro_batches);
            for (const int64_t n : {2, 3, 8})
                EXPECT_EQ(alone - wgrads_of_step(config_of(recipe, n, micro_batches)).calls,
                          kWeights * (micro_batches - ceil_div(micro_batches, n)));
        }
}

// Of the squares for the gradient norm: whatever is joined, the last micro-batch alone writes them. With the
// combine order invariant, none does.
TEST(DelayedWgrads, SquaresAreSummedOnceAStep) {
    const auto squares = [](int64_t joined, int64_t micro_batches) {
        const auto bytes = [&](const char* order) {
            return wgrads_of_step(config_of(Recipe::fp8_flow, joined, micro_batches,
                                            {fmt::format("moe.moe_combine_order={}", order)}))
                .bytes;
        };
        return bytes("rank") - bytes("invariant");
    };
    const double once = squares(1, 1);
    EXPECT_GT(once, 0);
    for (const int64_t joined : {1, 2, 3}) EXPECT_NEAR(squares(joined, 3), once, 1) << joined;
}

TEST(DelayedWgrads, RecomputationKeepsEveryBit) {
    for (const Recipe recipe : kJoining) {
        const TrainingRun plain = train(config_of(recipe, 3, 5), 1, {.steps = 2, .eval_batches = 1});
        for (const char* modules : {"moe_act", "moe_expert", "moe", "full"}) {
            SCOPED_TRACE(fmt::format("{} {}", recipe_name(recipe), modules));
            const bool full = std::string(modules) == "full";
            const TrainingRun again =
                train(config_of(recipe, 3, 5,
                                {full ? "recompute.recompute_granularity=full"
                                      : "recompute.recompute_granularity=selective",
                                 fmt::format("recompute.recompute_modules=[{}]", full ? "" : modules)}),
                      1, {.steps = 2, .eval_batches = 1});
            expect_same_run(again, plain);
        }
    }
}

// Layers in BF16 take no part; ranks share experts; the flow's ablations.
TEST(DelayedWgrads, TrainsAsWithout) {
    const std::vector<std::vector<std::string>> variants = {
        {},
        {"model.num_layers_at_end_in_bf16=1", "precision.fp8_format=hybrid"},
        {"precision.moe_scaling_aware_transpose=false", "precision.moe_quantize_before_dispatch=false",
         "precision.moe_permute_padding_for_fp8=false", "precision.moe_act_quantize_fusion=false"}};
    for (const Recipe recipe : kJoining)
        for (size_t i = 0; i < variants.size(); ++i) {
            if (i == 2 && recipe != Recipe::fp8_flow) continue;
            std::vector<std::string> keys = variants[i];
            keys.push_back("parallel.expert_model_parallel_size=2");
            SCOPED_TRACE(fmt::format("{} {}", recipe_name(recipe), fmt::join(keys, " ")));
            constexpr int64_t kThreeOfEachRank = 6;
            const TrainingRun alone = train(config_of(recipe, 1, kThreeOfEachRank, keys), 2, {.steps = 3});
            for (const int64_t n : {2, 3}) {
                const TrainingRun joined =
                    train(config_of(recipe, n, kThreeOfEachRank, keys), 2, {.steps = 3});
                expect_same_run(joined, alone);
            }
        }
}

// A step that ran out of rows half-way leaves operands that nothing takes, and the next attempt has
// more rows.
TEST(DelayedWgrads, AnOverflowIsRedone) {
    for (const Recipe recipe : kJoining) {
        const auto run = [&](const char* factor) {
            return train(config_of(recipe, 3, 3,
                                   {"model.seq_length=256",
                                    fmt::format("moe.moe_expert_rank_capacity_factor={}", factor)}),
                         1, {.steps = 2});
        };
        const TrainingRun ample = run("0"), tight = run("0.01");
        EXPECT_GT(tight.steps[0].redone, 0);
        expect_same_run(tight, ample);
    }
}

TEST(DelayedWgrads, AWarmStepAllocatesNothingAndStopsTheHostNowhere) {
    for (const Recipe recipe : kJoining) {
        const Config config = config_of(recipe, 2, 3);
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup&) {
            for (int i = 0; i < 3; ++i) trainer.step();
            const Device& device = trainer.ops().device();
            const int64_t stops = device.num_synchronisations(), waits = device.num_waits(),
                          allocations = trainer.allocations();
            for (int i = 0; i < 4; ++i) trainer.step();
            EXPECT_EQ(device.num_synchronisations(), stops);
            EXPECT_EQ(device.num_waits(), waits + 4);
            EXPECT_EQ(trainer.allocations(), allocations);
            trainer.drain();
        });
    }
}

TEST(DelayedWgrads, PlanCountsTheirMemory) {
    const auto planned = [](const Config& config) {
        for (const MemoryItem& item : make_plan(config, 1).memory)
            if (item.category == "delayed weight gradients") return item.bytes;
        return 0.0;
    };
    for (const Recipe recipe : kJoining)
        for (const char* first_in_bf16 : {"0", "1"}) {
            const auto config = [&](int64_t joined) {
                return config_of(recipe, joined, 3,
                                 {"model.seq_length=256",
                                  fmt::format("model.num_layers_at_start_in_bf16={}", first_in_bf16)});
            };
            double measured = 0, peaks[2] = {0, 0};
            for (const int64_t joined : {1, 3}) {
                const auto look = [&](Trainer& trainer, ProcessGroup&, int64_t step) {
                    if (step == 0) return;
                    const auto bytes = trainer.saved_bytes();
                    const auto found = bytes.find("delayed weight gradients");
                    EXPECT_EQ(found != bytes.end(), joined > 1);
                    if (found != bytes.end()) measured = static_cast<double>(found->second);
                };
                const TrainingRun run = train(config(joined), 1, {.steps = 1, .before_step = look});
                peaks[joined > 1] = static_cast<double>(run.steps[0].peak_bytes);
            }
            // sizes of groups and alignment of the arena are not in the plan
            EXPECT_NEAR(planned(config(3)), measured, 0.01 * measured + 8192);
            EXPECT_GT(peaks[1], peaks[0] + 0.9 * measured);
            EXPECT_NEAR(planned(config(2)), planned(config(3)) / 2, 1);
            EXPECT_EQ(planned(config(8)), planned(config(3)));  // a step has no more
            EXPECT_EQ(planned(config(1)), 0);
            EXPECT_EQ(planned(config_of(recipe, 2, 1)), 0);
        }
    // of fc2 alone: dY [H] and a [F], of both another dh [2F] and x [H]
    const Config all = config_of(Recipe::fp8_flow, 3, 3);
    const Config fc2 = config_of(Recipe::fp8_flow, 3, 3, {"training.freeze=[experts.linear_fc1]"});
    const auto hidden = static_cast<double>(all.model.hidden_size),
               width = static_cast<double>(all.moe.moe_ffn_hidden_size);
    EXPECT_GT(planned(all), 0);
    EXPECT_NEAR(planned(fc2), planned(all) * (hidden + width) / (2 * hidden + 3 * width), 1);
    EXPECT_EQ(planned(config_of(Recipe::fp8_flow, 3, 3, {"training.freeze=[experts]"})), 0);
}

TEST(DelayedWgrads, OtherRecipesAreRefusedByName) {
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_tensorwise, Recipe::fp8_rowwise, Recipe::mxfp8}) {
        SCOPED_TRACE(recipe_name(recipe));
        expect_contains(error_of(ExitCode::usage, [&] { config_of(recipe, 2, 2); }),
                        "precision.moe_wgrad_micro_batches");
    }
    EXPECT_THROW(config_of(Recipe::fp8_flow, 2, 2, {"precision.fp8_wgrad=false"}), Error);
}

TEST(DelayedWgrads, WhoWaitsForWhom) {
    BackendChoice backend = choose_backend(BackendKind::reference);
    const auto ops = make_ops(backend, Arithmetic::stated);
    const Parameter a, b;
    for (const int64_t joined : {2, 3}) {
        DelayedWgrads delayed(ops->device(), joined);
        for (const int64_t count : {1, 2, 3, 4, 5})
            for (int64_t index = 0; index < count; ++index) {
                delayed.begin_micro_batch(index, count);
                EXPECT_EQ(delayed.waits(), (index + 1) % joined != 0 && index + 1 < count)
                    << index << " of " << count;
            }
        for (int64_t index = 0; index + 1 < joined; ++index) {
            delayed.begin_micro_batch(index, joined);
            delayed.keep(a, {}, index == 0 ? Gradient::overwrite : Gradient::accumulate);
            EXPECT_THROW(delayed.keep(a, {}, Gradient::accumulate), Error);
            EXPECT_FALSE(delayed.take(a).has_value());  // not before the last micro-batch
        }
        delayed.begin_micro_batch(joined - 1, joined);
        EXPECT_THROW(delayed.keep(b, {}, Gradient::overwrite), Error);
        EXPECT_FALSE(delayed.take(b).has_value());
        const auto taken = delayed.take(a).value();
        EXPECT_EQ(taken.mode, Gradient::overwrite);
        EXPECT_EQ(taken.count, joined - 1);
        EXPECT_FALSE(delayed.take(a).has_value());
        delayed.begin_micro_batch(0, joined);
        delayed.keep(a, {}, Gradient::overwrite);
        delayed.begin_micro_batch(0, joined);  // the step begins again
        delayed.begin_micro_batch(joined - 1, joined);
        EXPECT_FALSE(delayed.take(a).has_value());
    }
}

}  // namespace
}  // namespace fp8flow
