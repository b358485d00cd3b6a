// SPDX-License-Identifier: MIT
// `fp8flow train` where a step diverges, or a checkpoint cannot be written: what it says, keeps and returns.
#include "model/checkpoint/manifest.h"
#include "tests/cli/command.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>

namespace fp8flow {
namespace {

// Twelve steps at a rate that sends the norm of the second gradient to 12 to 17, by batch.
Texts train(const std::string& out, const Texts& settings, const Texts& more = {}) {
    const Texts all =
        with({"training.lr=0.05", "training.lr_warmup_iters=0", "training.lr_decay_style=constant",
              "training.train_iters=12", "training.eval_iters=0"},
             settings);
    return test_run("train", out, all, more);
}

Texts numbers_of(const std::string& out) {
    Texts numbers;
    for (const nlohmann::json& record : metrics_of(out, "step"))
        numbers.push_back(record.at("iteration").dump() + " " + record.at("lm_loss").dump() + " " +
                          record.at("grad_norm").dump());
    return numbers;
}

TEST(Divergence, StopsWithTheStateBeforeTheStep) {
    TemporaryFolder folder;
    const std::string out = folder.path("out");
    for (const int ranks : {1, 2}) {
        const CommandResult run =
            fp8flow_on_ranks(ranks, train(out,
                                          {"checkpoint.save_interval=5", "training.grad_norm_limit=9",
                                           "parallel.expert_model_parallel_size=" + std::to_string(ranks)},
                                          {"--overwrite"}));
        EXPECT_EQ(run.status, static_cast<int>(ExitCode::numeric)) << run.err;
        const Texts errors = error_lines(run.err);
        ASSERT_EQ(errors.size(), 1u) << run.err;
        expect_contains(errors[0], "step 2: the norm of the gradients is 1");
        expect_contains(errors[0], "the largest gradient is that of layers.");
        EXPECT_TRUE(std::filesystem::exists(out + "/checkpoints/step_00000001/manifest.json"));
        EXPECT_EQ(numbers_of(out).size(), 1u);
    }
}

// The state before the step may be in a checkpoint already, which may still be written, or be the one resumed
// from.
TEST(Divergence, AStateThatIsSavedIsNotSavedAgain) {
    TemporaryFolder folder;
    const std::string out = folder.path("out");
    const auto expect_stop = [&](const Texts& settings, const Texts& more) {
        const CommandResult run = fp8flow_alone(train(out, settings, more));
        EXPECT_EQ(run.status, static_cast<int>(ExitCode::numeric)) << run.err;
        ASSERT_EQ(error_lines(run.err).size(), 1u) << run.err;
        expect_contains(error_lines(run.err)[0], "step 2: the norm of the gradients is 1");
        EXPECT_EQ(run.out.find("no checkpoint"), std::string::npos) << run.out;
        EXPECT_TRUE(std::filesystem::exists(out + "/checkpoints/step_00000001/manifest.json"));
    };
    expect_stop({"checkpoint.save_interval=1", "training.grad_norm_limit=9"}, {});
    succeeded(
        fp8flow_alone(train(out, {"checkpoint.save_interval=1", "training.train_iters=1"}, {"--overwrite"})));
    expect_stop({"checkpoint.save_interval=5", "training.grad_norm_limit=9"}, {"--resume", "auto"});
}

// Three batches are too much for the second step, the fourth is not. The run is the same twice, and the same
// where it is resumed from a checkpoint after that.
TEST(Divergence, GoesBackAndOnWithOtherData) {
    TemporaryFolder folder;
    const Texts keys = {"checkpoint.save_interval=1",    "training.on_divergence=rollback",
                        "training.grad_norm_limit=13.5", "output.tensorboard_dir=tb",
                        "output.tensor_stats=true",      "output.tensor_stats_interval=1"};
    const CommandResult run = succeeded(fp8flow_alone(train(folder.path("a"), keys, {"--verbose"})));
    expect_contains(run.out, "back to iteration 1 (3 of 3 times), from there on with batch 5");
    expect_contains(run.out,
                    "iteration       12/      12 | consumed samples:          120 ");  // 12 + 3 batches
    const Texts numbers = numbers_of(folder.path("a"));
    ASSERT_EQ(numbers.size(), 12u);
    for (size_t i = 0; i < numbers.size(); ++i)
        EXPECT_EQ(numbers[i].substr(0, numbers[i].find(' ')), std::to_string(i + 1));
    // Everything else that adds up has each iteration once too.
    std::vector<int64_t> all(12);
    std::iota(all.begin(), all.end(), 1);
    const auto page = expect_report_page(read_whole(folder.path("a/report.html")));
    EXPECT_EQ(page.at("loss")[0].at("series")[0].at("x"), all);
    EXPECT_EQ(events_of(folder.path("a/tb"), "lm loss"), all);
    const auto stats = read_json(folder.path("a/tensor_stats.json"));
    EXPECT_EQ(stats[0].at("first iteration"), 1);
    EXPECT_EQ(stats[0].at("last iteration"), 12);
    const int64_t values = stats[0].at("values");  // the first of a layer, each iteration has as many
    EXPECT_EQ(values % 12, 0) << values;
    const auto transposed = read_json(folder.path("a/transposed_stats.json"));
    std::vector<int64_t> observed;
    for (const auto& one : transposed.at("iterations")) observed.push_back(one.at("iteration"));
    EXPECT_EQ(observed, all);

    succeeded(fp8flow_alone(train(folder.path("b"), with(keys, {"training.train_iters=7"}))));
    succeeded(fp8flow_alone(train(folder.path("b"), keys, {"--resume", "auto"})));
    EXPECT_EQ(numbers_of(folder.path("b")), numbers);
}

TEST(Divergence, SkipsAreCountedAndEnd) {
    TemporaryFolder folder;
    const Texts keys = {"training.on_divergence=skip", "training.grad_norm_limit=9"};
    // Ten skipped steps after the first are as many as may be: only the first has losses and statistics.
    const std::string out = folder.path("eleven");
    const CommandResult ends =
        succeeded(fp8flow_alone(train(out, with(keys, {"training.train_iters=11", "output.tensor_stats=true",
                                                       "output.tensor_stats_interval=1"}))));
    const std::string loss = fmt::format("{:.4f}", metrics_of(out, "step").at(0).at("lm_loss").get<double>());
    for (const std::string& part :
         {std::string("warning: iteration 11 is skipped, "),
          "  train loss     " + loss + " -> " + loss + "\n",
          std::string("warning: 10 iterations skipped, 0 times back to a checkpoint, 0 checkpoints not"),
          std::string("done: 11 iterations, 2.82 k tokens")})
        expect_contains(ends.out, part);
    EXPECT_EQ(read_json(out + "/memory.json").at("redone").at("iterations observed"), 11);
    const Texts stats = lines_of(read_whole(out + "/tensor_stats.jsonl"));
    EXPECT_FALSE(stats.empty());
    for (const std::string& line : stats) EXPECT_EQ(nlohmann::json::parse(line).at("iteration"), 1) << line;
    EXPECT_EQ(read_json(out + "/tensor_stats.json")[0].at("last iteration"), 1);

    const CommandResult run = fp8flow_alone(train(folder.path("out"), keys));
    EXPECT_EQ(run.status, static_cast<int>(ExitCode::numeric));
    expect_contains(run.out,
                    "warning: iteration 4 is skipped, its update is not applied: the norm of the gradients");
    expect_contains(run.err, "step 12: ");
    expect_contains(run.err, "nor were 10 before it");
    const std::vector<nlohmann::json> steps = metrics_of(folder.path("out"), "step");
    ASSERT_EQ(steps.size(), 11u);
    EXPECT_FALSE(steps[0].contains("skipped"));
    expect_contains(steps[3].at("skipped"), "training.grad_norm_limit");
}

// The folder holds the checkpoint of another run, from which this one began: it is not this run's to go back
// to. A run that continues in its own folder may, be it saved by a version without identities of runs.
TEST(Divergence, GoesBackToNoCheckpointOfAnotherRun) {
    TemporaryFolder folder;
    const std::string out = folder.path("a"), saved = out + "/checkpoints/step_00000001";
    const Texts keys = {"checkpoint.save_interval=5", "training.on_divergence=rollback",
                        "training.grad_norm_limit=13.5"};
    succeeded(fp8flow_alone(train(out, with(keys, {"training.train_iters=1"}))));
    const CommandResult other = fp8flow_alone(train(
        folder.path("b"), with(keys, {"checkpoint.save=" + out + "/checkpoints"}), {"--resume", saved}));
    expect_contains(failure(ExitCode::numeric, other), "step 2: the norm of the gradients is 1");

    const std::string path = saved + "/manifest.json";
    checkpoint::CheckpointManifest manifest = checkpoint::parse_manifest(read_whole(path), path);
    manifest.run = 0;
    folder.write("a/checkpoints/step_00000001/manifest.json", manifest_text(manifest));
    const CommandResult own = succeeded(fp8flow_alone(train(out, keys, {"--resume", "auto"})));
    expect_contains(own.out, "back to iteration 1 (3 of 3 times), from there on with batch 5");

    // One that began with the weights of another goes back to its own state, here by more than one step.
    const CommandResult tuned = succeeded(fp8flow_alone(
        train(folder.path("tuned"),
              {"training.on_divergence=rollback", "training.grad_norm_limit=6.3", "training.lr=0.1",
               "training.train_iters=6", "checkpoint.save_interval=2", "checkpoint.finetune=true"},
              {"--resume", out})));
    expect_contains(tuned.out, "back to iteration 2 (1 of 3 times), from there on with batch 5");
    const Texts numbers = numbers_of(folder.path("tuned"));
    ASSERT_EQ(numbers.size(), 6u);
    for (size_t i = 0; i < numbers.size(); ++i) EXPECT_EQ(numbers[i].substr(0, 2), fmt::format("{} ", i + 1));
}

TEST(Divergence, WantsACheckpointToGoBackTo) {
    TemporaryFolder folder;
    const Texts line = train(folder.path("out"), {"training.on_divergence=rollback"});
    expect_contains(failure(ExitCode::usage, fp8flow_alone(line)), "checkpoint.save_interval");
}

// Files of more than 5 MB cannot be written: a checkpoint has 5.5.
TEST(CheckpointOnError, WarnGoesOnAndSaysSo) {
    for (const bool warn : {true, false}) {
        TemporaryFolder folder;
        const Texts shell = {"/bin/sh", "-c", "ulimit -f 10400; exec \"$0\" \"$@\"", FP8FLOW_EXECUTABLE};
        const Texts arguments =
            train(folder.path("out"), {"checkpoint.save_interval=4", "training.lr=0.001",
                                       std::string("checkpoint.on_error=") + (warn ? "warn" : "stop")});
        const CommandResult run = RunningCommand(with(shell, arguments), "").wait(60);
        EXPECT_EQ(run.status, static_cast<int>(ExitCode::checkpoint)) << run.err;
        const size_t steps = numbers_of(folder.path("out")).size();
        if (warn) {
            EXPECT_EQ(steps, 12u);
            expect_contains(run.out, "warning: no checkpoint was written (3 so far): ");
            expect_contains(run.out, "3 checkpoints not written");
        } else {
            EXPECT_LT(steps, 12u);
            expect_contains(run.err, "step_00000004");
        }
        EXPECT_EQ(names_in(folder.path("out/checkpoints")), std::set<std::string>{".lock"});
    }
}

}  // namespace
}  // namespace fp8flow
