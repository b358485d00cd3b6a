// SPDX-License-Identifier: MIT
// Training as a whole: the same bits every time, golden losses, gradient accumulation, AdamW and clipping
// against closed forms, statistics that add up. What a step refuses to do (overflow, NaN, ranks that
// disagree) is in trainer_failures_test.cpp.
#include "model/train/trainer.h"

#include "tests/support/training.h"

#include <algorithm>
#include <numeric>

namespace fp8flow {
namespace {

using namespace test;

const std::vector<std::string> kNoBalancing = {"moe.moe_router_load_balancing_type=[]",
                                               "moe.moe_aux_loss_coeff=[]"};
const std::vector<std::string> kTwoExpertRanks = {"parallel.expert_model_parallel_size=2"};

TEST(Training, SameSeedGivesTheSameBits) {
    for (Recipe recipe : kRecipesAndFp32) {
        SCOPED_TRACE(recipe_name(recipe));
        const Config config = test_config(recipe, kTwoExpertRanks);
        const TrainingRun first = train(config, 2), second = train(config, 2);
        expect_same_run(first, second);
        for (const auto& [name, values] : first.state)
            for (float value : values) ASSERT_TRUE(std::isfinite(value)) << name;
    }
}

TEST(Training, AnotherSeedGivesOtherWeights) {
    const TrainingRun a = train(test_config(Recipe::bf16), 1, {.steps = 1});
    const TrainingRun b = train(test_config(Recipe::bf16, {"training.seed=99"}), 1, {.steps = 1});
    EXPECT_NE(a.losses(), b.losses());
    EXPECT_NE(a.state, b.state);
}

double root_mean_square(const std::vector<float>& values) {
    double squares = 0;
    for (const float v : values) squares += static_cast<double>(v) * v;
    return std::sqrt(squares / static_cast<double>(values.size()));
}

// embedding_init_method_std is of the embedding alone; 0: it follows init_method_std, as the head does.
TEST(Training, WidthOfTheInitialEmbedding) {
    for (const double wanted : {0.0, 1.0}) {
        const Config config =
            test_config(Recipe::bf16, {fmt::format("model.embedding_init_method_std={}", wanted),
                                       "model.init_method_std=0.03", "training.lr=0", "training.min_lr=0"});
        const Values state = train(config, 1, {.steps = 1}).state;
        const double embedding = root_mean_square(state.at("weight embedding.word_embeddings.weight")),
                     head = root_mean_square(state.at("weight output_layer.weight"));
        const double width = wanted > 0 ? wanted : 0.03;
        EXPECT_NEAR(embedding, width, 0.03 * width);
        EXPECT_NEAR(head, 0.03, 0.03 * 0.03);
    }
}

// What `profile` takes the energy of. The gradients are those of a whole step; nothing is updated.
TEST(Training, PassesAloneLeaveTheWeights) {
    const Config config = test_config(Recipe::fp8_flow);
    const TrainingRun whole = train(config, 1, {.steps = 1});
    on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
        const Values before = collect(trainer, world, 1);
        trainer.run_passes_alone(true);
        EXPECT_EQ(trainer.run_step().lm_loss, whole.steps[0].lm_loss);
        const Values after = collect(trainer, world, 1);
        expect_same_bits(whole.state, after, "gradient ");
        for (const char* kind : {"weight ", "m ", "v "}) expect_same_bits(before, after, kind);
        trainer.run_passes_alone(false);
        trainer.run_step();
        EXPECT_NE(collect(trainer, world, 1), after);
    });
}

// Rank 0 holds the expert with twice the mean rows and runs out of them; rank 1 has to redo the step as well.
TEST(Training, PassesAloneAreRedoneByAllRanks) {
    const Config config =
        test_config(Recipe::bf16, {"parallel.expert_model_parallel_size=2", "moe.moe_router_force_biased=2",
                                   "moe.moe_row_alignment=1", "moe.moe_expert_rank_capacity_factor=1",
                                   "training.micro_batch_size=4"});
    on_trainers(config, 2, [&](ReferenceTrainer& trainer, ProcessGroup&) {
        trainer.run_passes_alone(true);
        EXPECT_EQ(trainer.run_step().redone, 1);
        EXPECT_EQ(trainer.run_step().redone, 0);
    });
}

// 64 rows per rank, expert and micro-batch, and groups that begin at multiples of the alignment. Where
// experts have 2, 4/3, 2/3 and 0 of the mean, those of one rank pad more than those of the other.
TEST(Training, PaddingShareCountsTheRowsOfTheLastMicroBatch) {
    const char* const balanced = "moe.moe_router_force_load_balancing=true";
    const struct {
        int ranks;
        Texts keys;
        double share;
    } cases[] = {
        {2, {balanced, "moe.moe_row_alignment=128"}, 0.5},
        {2, {balanced, "moe.moe_row_alignment=32"}, 0.0},
        {4, {balanced, "recompute.recompute_granularity=full", "model.moe_layer_freq=[1, 1]"}, 0.5},
        {4, {"moe.moe_router_force_biased=2", "parallel.expert_model_parallel_size=4"}, 1 - 512.0 / 768}};
    for (const auto& [ranks, keys, share] : cases) {
        const Config config =
            test_config(Recipe::bf16, with({"parallel.expert_model_parallel_size=2"}, keys));
        train(config, ranks,
              {.steps = 1, .before_step = [&, share = share](Trainer& trainer, ProcessGroup&, int64_t step) {
                   if (step == 1) {
                       EXPECT_EQ(trainer.padding_share(), share);
                   }
               }});
    }
}

// With joined weight gradients, and with two micro-batches in memory at once. Row buffers hold their
// capacity, and of that what even routing fills.
TEST(Training, MemoryByCategoryAddsUpToItsSums) {
    for (const char* key :
         {"precision.moe_wgrad_micro_batches=2", "schedule.overlap_moe_expert_parallel_comm=true"}) {
        SCOPED_TRACE(key);
        const Config config =
            test_config(Recipe::fp8_flow, {key, "moe.moe_router_force_load_balancing=true"});
        on_trainers(config, 1, [&](ReferenceTrainer& trainer, ProcessGroup&) {
            trainer.run_step();
            const int64_t peak = trainer.run_step().peak_bytes;
            double sum = 0, rows = 0;
            for (const auto& [category, bytes] : trainer.saved_bytes()) {
                sum += static_cast<double>(bytes);
                if (category.starts_with("routed rows: ")) rows += static_cast<double>(bytes);
            }
            const double filled = static_cast<double>(trainer.most_wanted().together) /
                                  static_cast<double>(trainer.row_capacity().together);
            EXPECT_LT(filled, 1.0);
            EXPECT_NEAR(trainer.saved_memory().used, sum - rows * (1 - filled), 16.0);
            EXPECT_NEAR(trainer.workspace_memory().used, static_cast<double>(peak) - sum, 16.0);
        });
    }
}

// To bless new values after a change that is meant to move them: run this test, copy the losses that it
// prints.
void expect_golden(Recipe recipe, const std::vector<double>& golden) {
    const std::vector<double> losses =
        train(test_config(recipe), 1, {.steps = static_cast<int64_t>(golden.size())}).losses();
    std::string text;
    for (double loss : losses) text += fmt::format("{:.6f}, ", loss);
    double largest = 0;
    for (size_t i = 0; i < golden.size(); ++i)
        largest = std::max(largest, std::abs(losses[i] - golden[i]) / golden[i]);
    EXPECT_LE(largest, 2e-4) << "losses now: " << text;
}
TEST(Training, GoldenLossesBf16) {
    expect_golden(Recipe::bf16, {4.238649, 3.728897, 3.489186, 3.241533, 3.279881, 2.939100, 2.987745,
                                 2.634094, 2.847698, 2.660903});
}
TEST(Training, GoldenLossesFp8Flow) {
    expect_golden(Recipe::fp8_flow, {4.238550, 3.728612, 3.489627, 3.242626, 3.284334, 2.952907, 2.977715,
                                     2.643407, 2.863388, 2.670257});
}

TEST(Training, LossFallsTowardsTheEntropyOfTheSource) {
    for (Recipe recipe : {Recipe::bf16, Recipe::fp8_flow}) {
        const Config config = test_config(recipe, {"training.train_iters=60"});
        const double floor = *open_data(config)->entropy_floor_nats();
        const TrainingRun run = train(config, 1, {.steps = 60, .eval_batches = 4});
        EXPECT_NEAR(run.steps[0].lm_loss, std::log(static_cast<double>(config.model.vocab_size)), 0.1);
        EXPECT_GT(run.held_out, floor);
        EXPECT_LT(run.held_out, run.steps[0].lm_loss - 0.5) << recipe_name(recipe);
        EXPECT_LT(run.steps.back().lm_loss, run.steps[10].lm_loss);
    }
}

// One micro-batch of 8 sequences or four of 2: the same per-token losses, and sums in another order.
// Sequence-wise balancing and the z-loss are means over tokens, so they must not change either.
TEST(Training, MicroBatchesAddUpToTheGlobalBatch) {
    for (Recipe recipe : {Recipe::fp32, Recipe::bf16}) {
        SCOPED_TRACE(recipe_name(recipe));
        std::vector<std::string> keys = {"moe.moe_router_load_balancing_type=[seq_aux_loss]",
                                         "moe.moe_aux_loss_coeff=[0.01]", "moe.moe_z_loss_coeff=0.001",
                                         "training.micro_batch_size=8"};
        const TrainingRun whole = train(test_config(recipe, keys), 1, {.steps = 1});
        keys.back() = "training.micro_batch_size=2";
        const TrainingRun parts = train(test_config(recipe, keys), 1, {.steps = 1});
        EXPECT_NEAR(whole.steps[0].lm_loss, parts.steps[0].lm_loss, 1e-6);
        EXPECT_NEAR(whole.steps[0].balancing_loss, parts.steps[0].balancing_loss, 1e-7);
        EXPECT_NEAR(whole.steps[0].z_loss, parts.steps[0].z_loss, 1e-7);
        EXPECT_GT(whole.steps[0].balancing_loss, 0);
        EXPECT_GT(whole.steps[0].z_loss, 0);
        expect_close(parts.state, whole.state, "gradient ", 1e-5);
    }
}

TEST(Training, LearningRateFollowsWarmUpAndCosine) {
    TrainingSpec constant;
    for (const bool from_zero : {true, false}) {
        const Config config = test_config(
            Recipe::bf16,
            {"training.lr=0.02", "training.min_lr=0.002", "training.lr_warmup_iters=4",
             "training.train_iters=12", "training.lr_decay_iters=10",
             std::string("training.lr_warmup_style=") + (from_zero ? "from_zero" : "from_first_step")});
        const TrainingRun run = train(config, 1, {.steps = 12});
        for (size_t i = 0; i < 12; ++i) {
            double wanted = 0.002;
            if (i < 4) {
                wanted = 0.02 * static_cast<double>(from_zero ? i : i + 1) / 4.0;
            } else if (i < 10) {
                wanted = 0.002 + 0.018 * std::pow(std::cos(static_cast<double>(i - 4) * M_PI / 12.0), 2.0);
            }
            EXPECT_NEAR(run.steps[i].learning_rate, wanted, 1e-12) << "step " << i;
        }
        constant = config.training;
    }
    constant.lr_decay_style = LrDecayStyle::constant;
    EXPECT_DOUBLE_EQ(learning_rate(constant, 1), 0.01);
    EXPECT_DOUBLE_EQ(learning_rate(constant, 4), 0.02);
    EXPECT_DOUBLE_EQ(learning_rate(constant, 1000), 0.02);
    constant.lr_warmup_style = LrWarmupStyle::from_zero;
    EXPECT_EQ(learning_rate(constant, 0), 0.0);
    EXPECT_EQ(learning_rate(constant, 4), 0.02);
    constant.lr_warmup_iters = 0;
    EXPECT_EQ(learning_rate(constant, 0), 0.02);
}

// Rates that Megatron-LM's OptimizerParamScheduler.get_lr gives for these settings.
TEST(Training, LearningRateStylesAreMegatrons) {
    struct Case {
        std::vector<std::string> style;
        std::vector<double> rates;
    };
    constexpr int64_t kUpdates[] = {0, 1, 4, 5, 12, 13, 16, 19, 20, 21};
    const std::vector<double> warm_up = {0.0001, 0.002575, 0.01};
    const Case cases[] = {
        {{"lr_decay_style=linear"}, {0.0094375, 0.0055, 0.0049375, 0.00325, 0.0015625, 0.001, 0.001}},
        {{"lr_decay_style=cosine"},
         {0.009913533762, 0.0055, 0.004622093551, 0.002318019485, 0.001086466238, 0.001, 0.001}},
        {{"lr_decay_style=WSD"}, {0.01, 0.01, 0.008506072778, 0.004727922061, 0.001814569594, 0.001, 0.001}},
        {{"lr_decay_style=WSD", "lr_wsd_decay_style=linear"},
         {0.01, 0.01, 0.008875, 0.0055, 0.002125, 0.001, 0.001}},
        {{"lr_decay_style=WSD", "lr_wsd_decay_style=cosine"},
         {0.01, 0.01, 0.009657457896, 0.0055, 0.001342542104, 0.001, 0.001}},
        {{"lr_decay_style=WSD", "lr_wsd_decay_style=minus_sqrt"},
         {0.01, 0.01, 0.006818019485, 0.003636038969, 0.00158127088, 0.001, 0.001}}};
    for (const Case& one : cases) {
        SCOPED_TRACE(one.style.back());
        std::vector<std::string> keys = {
            "lr=0.01",        "min_lr=0.001",      "lr_warmup_iters=4",    "lr_warmup_init=1e-4",
            "train_iters=30", "lr_decay_iters=20", "lr_wsd_decay_iters=8", "lr_warmup_style=from_zero"};
        keys.insert(keys.end(), one.style.begin(), one.style.end());
        const TrainingSpec training = test_config(Recipe::bf16, keys).training;
        for (size_t i = 0; i < std::size(kUpdates); ++i)
            EXPECT_NEAR(learning_rate(training, kUpdates[i]), i < 3 ? warm_up[i] : one.rates[i - 3], 1e-11)
                << "update " << kUpdates[i];
    }
    // Megatron-LM wants lr_wsd_decay_iters; here it is a fifth of lr_decay_iters where it is left out.
    TrainingSpec short_run{.train_iters = 9, .lr = 1, .min_lr = 0, .lr_decay_style = LrDecayStyle::wsd};
    EXPECT_EQ(learning_rate(short_run, 7), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate(short_run, 8), std::sqrt(2.0) - 1);
    short_run.lr_warmup_iters = 9;  // nothing is left for the decay
    EXPECT_EQ(learning_rate(short_run, 8), 8.0 / 9);
    short_run.lr_warmup_iters = 8;
    short_run.lr_warmup_style = LrWarmupStyle::from_first_step;
    EXPECT_EQ(learning_rate(short_run, 8), 1.0);
}

// Moments have it all the same: Megatron-LM's first step is one of them.
TEST(Training, TheFirstStepOfAWarmUpFromZeroChangesNoWeight) {
    const Config config = test_config(Recipe::bf16, {"training.lr_warmup_style=from_zero"});
    std::vector<Values> states(3);
    train(config, 1, {.steps = 2, .before_step = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
                          states[static_cast<size_t>(step)] = collect(trainer, world, 1);
                      }});
    expect_same_bits(states[0], states[1], "weight ");
    EXPECT_NE(states[1], states[2]);
    const std::string name = "layers.1.moe.router.weight";
    EXPECT_NE(states[0].at("m " + name), states[1].at("m " + name));
    EXPECT_NE(states[1].at("weight " + name), states[2].at("weight " + name));
}

// Megatron-LM's numbers (moe_logging.py): each kind without its coefficient, the mean over layers. A router
// whose weights are 0 gives every expert the score 1/E, so that E / (K n^2) * sum_e counts_e * n / E is 1
// whatever is chosen, and log(sum of E times exp(0)) is log E.
TEST(Training, RouterLossesAreMegatrons) {
    for (const int ranks : {1, 2}) {
        SCOPED_TRACE(ranks);
        const Config config = test_config(
            Recipe::bf16, {"model.moe_layer_freq=[1,1]", "training.micro_batch_size=2",
                           "moe.moe_router_load_balancing_type=[seq_aux_loss,global_aux_loss,aux_loss]",
                           "moe.moe_aux_loss_coeff=[0.125,0.25,0]", "moe.moe_z_loss_coeff=0.5"});
        on_trainers(config, ranks, [&](ReferenceTrainer& trainer, ProcessGroup&) {
            for (Parameter& p : trainer.transformer().parameters().all())
                if (p.spec.name == "layers.0.moe.router.weight")
                    std::fill_n(p.master.as<float>(), p.numel(), 0.0f);
            trainer.weights_replaced();
            const StepResult step = trainer.run_step();
            ASSERT_EQ(step.router_losses.size(), 3u);  // none of the coefficient 0
            const struct {
                const char* name;
                double layer, coefficient;
            } wanted[] = {
                {"seq_load_balancing_loss", 1.0, 0.125},
                {"global_load_balancing_loss", 1.0, 0.25 / ranks},  // the mean of the ranks' gradients
                {"z_loss", std::log(4.0) * std::log(4.0), 0.5}};
            double balancing = 0, z = 0;
            for (size_t i = 0; i < 3; ++i) {
                const RouterLoss& loss = step.router_losses[i];
                SCOPED_TRACE(wanted[i].name);
                EXPECT_EQ(loss.name, wanted[i].name);
                ASSERT_EQ(loss.by_layer.size(), 2u);
                EXPECT_NEAR(loss.by_layer[0], wanted[i].layer, 1e-6);
                EXPECT_GT(loss.by_layer[1], wanted[i].layer + 1e-5);  // another router
                EXPECT_DOUBLE_EQ(loss.mean(), (loss.by_layer[0] + loss.by_layer[1]) / 2);
                (i < 2 ? balancing : z) += 2 * wanted[i].coefficient * loss.mean();
            }
            EXPECT_NEAR(step.balancing_loss, balancing, 1e-6);
            EXPECT_NEAR(step.z_loss, z, 1e-6);
        });
    }
}

double global_norm(const Values& state) {
    double squares = 0;
    for (const auto& [name, values] : state)
        if (name.starts_with("gradient "))
            for (float g : values) squares += static_cast<double>(g) * static_cast<double>(g);
    return std::sqrt(squares);
}

// The gradients of the whole model, every expert once, whatever the number of ranks that hold it.
TEST(Training, GradientNormCountsEveryParameterOnce) {
    const struct { int ranks, expert_ranks; } layouts[] = {{1, 1}, {2, 1}, {2, 2}, {4, 2}};
    for (const auto& layout : layouts) {
        const TrainingRun run =
            train(test_config(Recipe::bf16,
                              {fmt::format("parallel.expert_model_parallel_size={}", layout.expert_ranks)}),
                  layout.ranks, {.steps = 2});
        EXPECT_NEAR(run.steps[1].grad_norm, global_norm(run.state), 1e-5 * run.steps[1].grad_norm)
            << layout.ranks << " ranks, " << layout.expert_ranks << " share the experts";
        EXPECT_EQ(run.state.at("gradient layers.1.moe.experts.linear_fc1.weight").size(), 4u * 256 * 128);
    }
}

// Two steps of AdamW in double from the gradients that the trainer saw, with a clip that bites and one that
// does not.
TEST(Training, UpdateIsClippedAdamW) {
    for (const double clip : {0.05, 1e6}) {
        const Config config =
            test_config(Recipe::fp8_flow, {fmt::format("training.clip_grad={}", clip),
                                           "parallel.expert_model_parallel_size=2", "training.lr=0.01"});
        std::vector<Values> states(3);
        train(config, 2,
              {.steps = 2, .before_step = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
                   const Values state = collect(trainer, world, 2);
                   if (world.rank() == 0) states[static_cast<size_t>(step)] = state;
               }});
        const TrainingSpec& t = config.training;
        std::map<std::string, std::vector<double>> m, v;
        for (size_t step = 0; step < 2; ++step) {
            const Values &before = states[step], &after = states[step + 1];
            const double norm = global_norm(after), factor = std::min(1.0, clip / (norm + 1e-6));
            EXPECT_EQ(factor < 1.0, clip < 1.0) << norm;
            const double c1 = 1 - std::pow(t.adam_beta1, static_cast<double>(step + 1)),
                         c2 = 1 - std::pow(t.adam_beta2, static_cast<double>(step + 1)),
                         lr = learning_rate(t, static_cast<int64_t>(step));
            for (const auto& [key, weights] : after) {
                if (!key.starts_with("weight ")) continue;
                const std::string name = key.substr(7);
                const std::vector<float>&g = after.at("gradient " + name), &old = before.at(key);
                const double decay = name.find("norm") == std::string::npos ? t.weight_decay : 0.0;
                std::vector<double>&m1 = m[name], &v1 = v[name], change, wanted;
                m1.resize(g.size());
                v1.resize(g.size());
                for (size_t i = 0; i < g.size(); ++i) {
                    const double scaled = static_cast<double>(g[i]) * factor, w = static_cast<double>(old[i]);
                    m1[i] = t.adam_beta1 * m1[i] + (1 - t.adam_beta1) * scaled;
                    v1[i] = t.adam_beta2 * v1[i] + (1 - t.adam_beta2) * scaled * scaled;
                    wanted.push_back(-lr * (m1[i] / c1 / (std::sqrt(v1[i] / c2) + t.adam_eps) + decay * w));
                    change.push_back(static_cast<double>(weights[i]) - w);
                }
                EXPECT_LE(norm_wise_error(change, wanted), 1e-4) << name << ", clip " << clip;
                EXPECT_LE(norm_wise_error(after.at("m " + name), m1), 1e-5) << name;
                EXPECT_LE(norm_wise_error(after.at("v " + name), v1), 1e-5) << name;
            }
        }
    }
}

std::vector<int64_t> counts_of(Trainer& trainer, size_t layer) {
    const TensorView counts = trainer.transformer().blocks()[layer]->router()->step_counts();
    std::vector<int64_t> values(static_cast<size_t>(counts.numel()));
    trainer.ops().device().copy_out(values.data(), counts.data, values.size() * sizeof(int64_t));
    return values;
}

// Every (token, k) of the global batch is counted once, whatever is recomputed, accumulated or evaluated in
// between.
TEST(Training, CountsOfAStepAddUp) {
    const std::vector<std::vector<std::string>> modes = {
        {},
        {"training.micro_batch_size=1"},
        {"recompute.recompute_granularity=full"},
        {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[moe]"},
        {"recompute.recompute_granularity=selective", "recompute.recompute_modules=[moe_expert, layernorm]"}};
    std::vector<std::vector<int64_t>> first;
    for (std::vector<std::string> keys : modes) {
        keys.insert(keys.end(), {"model.moe_layer_freq=[1, 1]", "parallel.expert_model_parallel_size=2"});
        const Config config = test_config(Recipe::fp8_flow, keys);
        std::vector<std::vector<int64_t>> counts;
        train(config, 2,
              {.steps = 2, .before_step = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
                   if (step == 1) trainer.evaluate(1);
                   if (world.rank() != 0 || step != 2) return;
                   for (size_t layer : {0u, 1u}) counts.push_back(counts_of(trainer, layer));
               }});
        for (const auto& layer : counts)
            EXPECT_EQ(
                std::accumulate(layer.begin(), layer.end(), int64_t{0}),
                config.training.global_batch_size * config.model.seq_length * config.moe.moe_router_topk);
        if (first.empty()) first = counts;
        if (keys[0] == "training.micro_batch_size=1") continue;
        EXPECT_EQ(counts, first) << keys[0];
    }
}

// rate * sign(mean - count), from the counts of the whole batch: over-used experts become less likely.
TEST(Training, ExpertBiasMovesAgainstTheLoad) {
    const Config config = test_config(
        Recipe::bf16, {"moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true",
                       "moe.moe_router_bias_update_rate=0.01", "parallel.expert_model_parallel_size=2"});
    std::vector<double> wanted(4, 0.0);
    const TrainingRun run = train(
        config, 2, {.steps = 3, .before_step = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
                        if (world.rank() != 0 || step == 0) return;
                        const std::vector<int64_t> counts = counts_of(trainer, 1);
                        const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
                        for (size_t e = 0; e < 4; ++e)
                            wanted[e] += counts[e] * 4 < total ? 0.01 : counts[e] * 4 > total ? -0.01 : 0;
                    }});
    const std::vector<float>& bias = run.state.at("bias 1");
    ASSERT_EQ(bias.size(), 4u);
    for (size_t e = 0; e < 4; ++e) EXPECT_NEAR(bias[e], wanted[e], 1e-7) << "expert " << e;
    EXPECT_GT(*std::max_element(wanted.begin(), wanted.end()), 0);
}

TEST(Training, LoadOfALayer) {
    const LayerLoad load = load_of(3, std::vector<int64_t>{2, 6, 0, 0});
    EXPECT_EQ(load.layer, 3);
    EXPECT_DOUBLE_EQ(load.max, 3.0);
    EXPECT_DOUBLE_EQ(load.min, 0.0);
    EXPECT_DOUBLE_EQ(load.cv, std::sqrt((0.0 + 4.0 + 1.0 + 1.0) / 4.0));
    EXPECT_EQ(load.dead_experts, 2);
    EXPECT_DOUBLE_EQ(load_of(3, std::vector<int64_t>{2, 6, 4, 4}).min, 0.5);
}

// Fewer sequences than ranks: two of four ranks have no token, in every layer, and the run equals that of the
// two others alone.
TEST(Training, RanksWithoutTokensChangeNothing) {
    for (Recipe recipe : kRecipesAndFp32) {
        if (recipe == Recipe::fp8_tensorwise)
            continue;  // one scale per tensor: depends on who holds which tokens
        SCOPED_TRACE(recipe_name(recipe));
        std::vector<std::string> keys = kNoBalancing;
        keys.insert(keys.end(), {"training.global_batch_size=2", "training.micro_batch_size=1",
                                 "moe.moe_combine_order=invariant", "parallel.expert_model_parallel_size=2"});
        const Config config = test_config(recipe, keys);
        const TrainingRun two = train(config, 2, {.steps = 3, .eval_batches = 1});
        const TrainingRun four = train(config, 4, {.steps = 3, .eval_batches = 1});
        // The gradients of step 1 and the losses of step 2; later, AdamW turns rounding of tiny gradients
        // into steps.
        EXPECT_EQ(two.steps[0].lm_loss, four.steps[0].lm_loss);
        EXPECT_NEAR(two.steps[2].lm_loss, four.steps[2].lm_loss, 1e-4 * two.steps[2].lm_loss);
        EXPECT_NEAR(two.held_out, four.held_out, 1e-4 * two.held_out);
        expect_close(train(config, 4, {.steps = 1}).state, train(config, 2, {.steps = 1}).state, "gradient ",
                     1e-5);
    }
}

TEST(Training, NothingIsAllocatedOnceWarm) {
    for (Recipe recipe : kRecipesAndFp32) {
        SCOPED_TRACE(recipe_name(recipe));
        const Config config = test_config(recipe, kTwoExpertRanks);
        int64_t warm[2] = {0, 0};
        train(config, 2,
              {.steps = 5, .before_step = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
                   if (step == 3) trainer.evaluate(1);
                   if (step == 1) warm[world.rank()] = trainer.allocations();
                   if (step > 1) {
                       EXPECT_EQ(trainer.allocations(), warm[world.rank()]) << step;
                   }
               }});
        EXPECT_GT(warm[0], 0);
    }
}

}  // namespace
}  // namespace fp8flow
