// SPDX-License-Identifier: MIT
// training.freeze: frozen parameters keep every bit and have no part in the gradient norm, the gradients of
// the others are those of a run that trains all, and checkpoints go on with and without the moments.
#include "model/plan/plan.h"
#include "model/predict/stages.h"
#include "model/report/run_report.h"
#include "tests/support/checkpoints.h"

#include <fmt/ranges.h>

namespace fp8flow::test {
namespace {

bool is_any(const std::string& name, const Texts& parts) {
    return std::any_of(parts.begin(), parts.end(),
                       [&](const std::string& part) { return name.find(part) != std::string::npos; });
}

double squared(const std::vector<float>& values) {
    double sum = 0;
    for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
    return sum;
}

void expect_frozen(Recipe recipe, const Texts& parts, int ranks, int expert_ranks, const Texts& keys = {}) {
    SCOPED_TRACE(fmt::format("{}, {} frozen, {} of {} ranks share the experts, {}", recipe_name(recipe),
                             parts, expert_ranks, ranks, keys));
    const Texts all = with({"training.micro_batch_size=1", "training.lr_warmup_iters=0",
                            fmt::format("parallel.expert_model_parallel_size={}", expert_ranks)},
                           keys);
    std::vector<Values> states(2);
    const TrainingRun frozen =
        train(test_config(recipe, with(all, {fmt::format("training.freeze=[{}]", fmt::join(parts, ","))})),
              ranks, {.steps = 1, .before_step = [&](Trainer& trainer, ProcessGroup& world, int64_t step) {
                          Values state = collect(trainer, world, expert_ranks);
                          if (world.rank() == 0) states[static_cast<size_t>(step)] = std::move(state);
                      }});
    const TrainingRun whole = train(test_config(recipe, all), ranks, {.steps = 1});
    double squares = 0;
    int64_t kept = 0;
    for (const auto& [name, before] : states[0]) {
        const std::string parameter = name.substr(name.find(' ') + 1);
        const bool is_frozen = is_any(parameter, parts);
        if (name.starts_with("weight ")) {
            EXPECT_EQ(before == states[1].at(name), is_frozen) << name;
            kept += is_frozen;
        } else if (name.starts_with("gradient ")) {
            const std::vector<float>& gradient = frozen.state.at(name);
            EXPECT_FALSE(is_frozen) << name;
            EXPECT_EQ(gradient, whole.state.at(name)) << name;
            squares += squared(gradient);
        } else if (name.starts_with("m ")) {
            EXPECT_FALSE(is_frozen) << name;
        }
    }
    EXPECT_GT(kept, 0);
    EXPECT_NEAR(frozen.steps[0].grad_norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
}

TEST(Freeze, KeepsBitsAndLeavesOtherGradients) {
    const Texts router = {"router", "word_embeddings"}, experts = {"experts.linear"},
                attention = {"attention."}, norms = {"norm", "output_layer"};
    for (const Texts& parts : {router, experts, attention, norms}) {
        expect_frozen(Recipe::fp8_flow, parts, 2, 2);
        expect_frozen(Recipe::bf16, parts, 1, 1);
    }
    for (const Recipe recipe : {Recipe::fp8_blockwise, Recipe::mxfp8, Recipe::fp8_tensorwise})
        expect_frozen(recipe, {"linear_fc1", "layers.0."}, 1, 1);
}

TEST(Freeze, WithOtherOrdersStatesAndSchedules) {
    const Texts parts = {"linear_fc2", "router"};
    for (const Texts& keys :
         {Texts{"training.use_distributed_optimizer=true"}, Texts{"moe.moe_combine_order=invariant"},
          Texts{"training.main_grads_dtype=bf16", "training.exp_avg_dtype=bf16"},
          Texts{"training.use_distributed_optimizer=true", "schedule.overlap_param_gather=true",
                "schedule.overlap_grad_reduce=true"},
          Texts{"schedule.delay_wgrad_compute=true", "precision.moe_wgrad_micro_batches=2"}})
        expect_frozen(Recipe::fp8_flow, parts, 2, 1, keys);
    expect_frozen(Recipe::bf16, {"word_embeddings"}, 2, 1,
                  {"model.untie_embeddings_and_output_weights=false"});
}

// Moments, main gradients and what is sent, in a run and in its plan.
TEST(Freeze, PlanAndRunLeaveThemOut) {
    for (const Texts& parts : {Texts{}, Texts{"experts.linear_fc1", "embedding"}, Texts{"layers.1.", "norm"},
                               Texts{"router", "self_attention", "output_layer"}}) {
        SCOPED_TRACE(fmt::format("{}", parts));
        const Config config =
            test_config(Recipe::bf16, {"parallel.expert_model_parallel_size=1",
                                       fmt::format("training.freeze=[{}]", fmt::join(parts, ","))});
        double trained = 0;
        for (const plan::ParameterPart& part : plan::count_parameters(config))
            trained += static_cast<double>(part.trained);
        double sent = 0, held = 0, moments = 0;
        after_timed_step(config, 2, [&](Trainer& trainer, ProcessGroup& world) {
            for (const StageSpan& span : trainer.timer().spans())
                if (std::string_view(span.name) == "gradient reduction")
                    sent += static_cast<double>(span.wire_bytes);
            if (world.rank() != 0) return;
            const ParameterStore& store = trainer.transformer().parameters();
            moments = static_cast<double>(store.bytes().at("moments"));
            for (const Parameter& p : store.all()) held += p.frozen ? 0 : static_cast<double>(p.numel());
        });
        EXPECT_EQ(trained, held);
        EXPECT_EQ(moments, 8 * trained);
        EXPECT_NEAR(sent / (2 * 4 * trained), 1, 0.01);  // by both ranks; with padding
        const std::vector<plan::MemoryItem> items = plan::memory_items(config, 2);
        EXPECT_EQ(plan::bytes_of(items, "Adam moments (FP32)"), 8 * trained);
        EXPECT_EQ(plan::bytes_of(items, "main gradients (FP32)"), 4 * trained);
        double reduced = 0;
        for (const predict::Work& work : predict::update_work(config, 2))
            if (work.stage == "gradient reduction") reduced += work.wire_bytes;
        EXPECT_EQ(reduced, 4 * trained);  // a rank
    }
}

TEST(Freeze, ARouterKeepsItsExpertBias) {
    const Texts keys = {"moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true"};
    const auto bias = [&](const Texts& more) {
        return train(test_config(Recipe::bf16, with(keys, more)), 1, {.steps = 2}).state.at("bias 1");
    };
    EXPECT_GT(squared(bias({})), 0);
    EXPECT_EQ(squared(bias({"training.freeze=[router]"})), 0);
}

TEST(Freeze, CheckpointsGoOnFrozenAndThawed) {
    const Texts keys = {"training.train_iters=8", "checkpoint.save_interval=4", "training.lr_warmup_iters=0"};
    const std::string moment = "m layers.1.moe.router.weight", weight = "weight layers.1.moe.router.weight";
    const auto config_of = [&](const Texts& more) { return test_config(Recipe::bf16, with(keys, more)); };
    const Texts frozen = {"training.freeze=[router]"},
                with_moments = {"training.freeze=[router]", "training.freeze_keeps_moments=true"},
                goes_on = {"checkpoint.load=auto", "checkpoint.save_interval=0"};
    for (const Texts& sharded : {Texts{}, Texts{"training.use_distributed_optimizer=true"}}) {
        TemporaryFolder cold, warm;
        const auto run = [&](const TemporaryFolder& folder, const Texts& more, int64_t steps) {
            return train_with_checkpoints(config_of(with(sharded, more)), 2, {folder.path(), steps});
        };
        const TrainingRun first = run(cold, frozen, 4);
        EXPECT_FALSE(first.state.contains(moment));
        const TrainingRun whole = train_with_checkpoints(
            config_of(with(with(sharded, frozen), {"checkpoint.save_interval=0"})), 2, {"", 8});
        const TrainingRun rest = run(cold, with(frozen, goes_on), 8);
        expect_same_bits(rest.state, whole.state);
        EXPECT_EQ(rest.state.at(weight), first.state.at(weight));
        // trained from there on, with moments from 0
        const TrainingRun thawed = run(cold, goes_on, 5);
        EXPECT_GT(squared(thawed.state.at(moment)), 0);
        EXPECT_NE(thawed.state.at(weight), first.state.at(weight));
        // and again from 0 if it goes back there
        const Config config = config_of(with(sharded, goes_on));
        const auto ranks = static_cast<int>(config.parallel.expert_model_parallel_size);
        on_trainers(config, 2, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            for (int i = 0; i < 2; ++i) {
                checkpoint::resume(trainer, config, *open_data(config), world, cold.path());
                EXPECT_EQ(squared(collect(trainer, world, ranks).at(moment)), 0);
                trainer.run_step();
            }
        });
        // the other way round: their moments are dropped, or stay as they are
        const TrainingRun trained = run(warm, {}, 4);
        EXPECT_FALSE(run(warm, with(frozen, goes_on), 6).state.contains(moment));
        const TrainingRun kept = run(warm, with(with_moments, goes_on), 6);
        EXPECT_EQ(kept.state.at(moment), trained.state.at(moment));
        EXPECT_EQ(kept.state.at(weight), trained.state.at(weight));
    }
}

TEST(Freeze, IsSaidAndChecked) {
    const auto store_of = [](const std::string& freeze) {
        const Config config = test_config(Recipe::bf16, {"training.freeze=" + freeze});
        std::string text;
        train(config, 1, {.steps = 0, .before_step = [&](Trainer& trainer, ProcessGroup&, int64_t) {
                              text = report::frozen_text(trainer.transformer().parameters());
                          }});
        return text;
    };
    EXPECT_EQ(store_of("[]"), "");
    EXPECT_TRUE(store_of("['layers.?.moe.router.']").starts_with("frozen: ")) << store_of("[router]");
    expect_contains(store_of("[router]"), "without moments: layers.");
    const auto refused = [&](const std::string& freeze) {
        return error_or_none(ExitCode::usage, [&] { store_of(freeze); });
    };
    expect_contains(
        refused("[routers]"),
        "training.freeze: got routers, want a part of a parameter's name: embedding.word_embeddings.weight");
    expect_contains(refused("['*']"), "training.freeze: got every parameter");
}

}  // namespace
}  // namespace fp8flow::test
