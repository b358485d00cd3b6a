// SPDX-License-Identifier: MIT
// `fp8flow train --resume`: a run that is killed again and again ends with the numbers of one that was left
// alone; and what it says when it cannot go on.
#include "tests/cli/command.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

namespace fp8flow {
namespace {

namespace fs = std::filesystem;

Texts train(const std::string& out, int ranks, const Texts& more = {}, const Texts& settings = {}) {
    const Texts all =
        with({"checkpoint.save_interval=4", "training.train_iters=48", "training.eval_interval=20",
              "parallel.expert_model_parallel_size=" + std::to_string(ranks)},
             settings);
    return test_run("train", out, all, more);
}

// What does not depend on the clock: iteration, losses, norms.
Texts numbers_of(const std::string& out) {
    Texts numbers;
    for (const nlohmann::json& record : metrics_of(out)) {
        std::string text;
        for (const char* key :
             {"iteration", "lm_loss", "load_balancing_loss", "grad_norm", "learning_rate", "held_out_loss"})
            if (record.contains(key)) text += std::string(key) + " " + record[key].dump() + ", ";
        numbers.push_back(text);
    }
    return numbers;
}

// Starts the run and kills what is to be killed, `kills` times at moments drawn by `seed`, then lets it end.
void run_with_kills(const std::string& out, int ranks, int kills, uint64_t seed) {
    std::mt19937_64 random(seed);
    int killed = 0;
    for (int attempt = 0; attempt < 10 * kills && killed < kills; ++attempt) {
        const Texts line = train(out, ranks, {"--resume", "auto"});
        RunningCommand command(ranks > 1 ? mpirun_line(ranks, line) : with({FP8FLOW_EXECUTABLE}, line), "");
        std::this_thread::sleep_for(std::chrono::milliseconds(200 + random() % 900));
        if (ranks == 1) {
            if (::kill(command.pid(), SIGKILL) == 0) ++killed;
        } else if (const std::vector<int> pids = ranks_below(command.pid()); !pids.empty()) {
            if (::kill(pids[random() % pids.size()], SIGKILL) == 0) ++killed;
        }
        command.wait(60);
        if (fs::exists(out + "/memory.json")) break;  // it was faster than we
    }
    const Texts last = train(out, ranks, {"--resume", "auto"});
    succeeded(ranks > 1 ? fp8flow_on_ranks(ranks, last) : fp8flow_alone(last));
}

TEST(Resume, KilledAgainAndAgainTheNumbersAreThoseOfAStraightRun) {
    TemporaryFolder folder;
    const std::string straight = folder.path("straight");
    succeeded(fp8flow_alone(train(straight, 1)));
    for (const uint64_t seed : {1, 2, 3}) {
        const std::string out = folder.path("killed" + std::to_string(seed));
        run_with_kills(out, 1, 5, seed);
        EXPECT_EQ(numbers_of(out), numbers_of(straight)) << seed;
    }
}

TEST(Resume, ALostRankOfTwoLosesNothing) {
    TemporaryFolder folder;
    const std::string straight = folder.path("straight"), out = folder.path("killed");
    succeeded(fp8flow_on_ranks(2, train(straight, 2)));
    run_with_kills(out, 2, 2, 7);
    EXPECT_EQ(numbers_of(out), numbers_of(straight));
}

TEST(Resume, WhatItSays) {
    TemporaryFolder folder;
    const std::string out = folder.path("run");
    const auto run = [&](const Texts& more, const Texts& settings = {}) {
        return fp8flow_alone(train(out, 1, more, settings));
    };
    CommandResult result =
        succeeded(run({"--resume", "auto"}, {"training.train_iters=6", "training.eval_interval=0"}));
    expect_contains(result.out, "warning: no checkpoint to resume from: beginning at iteration 1");
    expect_contains(result.out, "checkpoint after iteration 4: ");
    expect_contains(result.out, "checkpoint after iteration 6: ");
    EXPECT_TRUE(fs::exists(out + "/checkpoints/step_00000006/manifest.json"));
    const std::string log = read_whole(out + "/train.log");

    // Started from scratch with the checkpoints of another run: nothing of that run is touched, nothing is
    // left.
    const Texts into_it = train(folder.path("new"), 1, {}, {"checkpoint.save=" + out + "/checkpoints"});
    expect_contains(failure(ExitCode::checkpoint, fp8flow_alone(into_it)),
                    "holds 2 checkpoints of an earlier run, up to iteration 6");
    EXPECT_EQ(read_whole(out + "/train.log"), log);
    EXPECT_FALSE(fs::exists(folder.path("new")));

    // Fewer iterations than are done.
    expect_contains(failure(ExitCode::usage, run({"--resume", "auto"}, {"training.train_iters=5"})),
                    "training.train_iters: got 5, want at least 6: as many are done in " + out);
    EXPECT_EQ(read_whole(out + "/train.log"), log);

    // On, with more iterations; the key that changed the schedule is named.
    const Texts nine = {"training.train_iters=9", "training.eval_interval=0"};
    result = succeeded(run({"--resume", "auto"}, nine));
    expect_contains(result.out, "step_00000006, 6 iterations done");
    expect_contains(result.out, "note: changed since it was saved: training.train_iters: 6 | 9");
    expect_contains(result.out, "done: 3 iterations");
    const std::string page = read_whole(out + "/report.html");
    expect_contains(page, "\"time, from iteration 7 on\"");
    const double held_out = metrics_of(out, "evaluation").back().at("held_out_loss");
    const std::string text = fmt::format("held-out loss {:.4f} nats, perplexity", held_out);
    expect_contains(result.out, "\n  " + text);
    expect_contains(page, text);
    EXPECT_EQ(numbers_of(out).size(), 11u);  // 9 steps, and an evaluation after the last one of each run
    EXPECT_EQ(read_whole(out + "/train.log").substr(0, log.size()), log);

    // Nothing left to do.
    result = succeeded(run({"--resume", "auto"}, nine));
    expect_contains(result.out, "done: 0 iterations");
    EXPECT_EQ(numbers_of(out).size(), 11u);

    // The same weights in another model: a warning, though quiet; what only trains otherwise is a note.
    result = succeeded(run({"--resume", "auto", "--quiet"},
                           with(nine, {"training.lr=2e-3", "model.rotary_base=500000",
                                       "model.norm_epsilon=1e-3", "moe.moe_router_topk=3"})));
    for (const char* key :
         {"model.rotary_base: 10000 | 500000", "model.norm_epsilon: ", "moe.moe_router_topk: "})
        expect_contains(result.out, std::string("warning: changed since it was saved: ") + key);
    EXPECT_EQ(result.out.find("training.lr"), std::string::npos) << result.out;

    // Another run's weights under another recipe.
    const auto tune = [&](const Texts& more) {
        return fp8flow_alone(
            train(folder.path("tuned"), 1, with({"--resume", out + "/checkpoints"}, more),
                  {"checkpoint.finetune=true", "precision.recipe=bf16", "training.train_iters=2"}));
    };
    expect_contains(succeeded(tune({})).out, "0 iterations done");
    expect_contains(tune({"--quiet"}).out,
                    "warning: " + folder.path("tuned") + " holds another run: this one goes to");

    // The run's own folder, its checkpoints, or one of them.
    for (const char* named : {"", "/", "/checkpoints", "/checkpoints/step_00000009"}) {
        SCOPED_TRACE(named);
        result = succeeded(fp8flow_alone(train(folder.path("other"), 1, {"--resume", out + named},
                                               {"checkpoint.save_interval=0", "training.train_iters=9"})));
        expect_contains(result.out, out + "/checkpoints/step_00000009, 9 iterations done");
    }
    fs::create_directory(folder.path("empty"));
    const Texts from_empty = train(folder.path("other"), 1, {"--resume", folder.path("empty")});
    expect_contains(failure(ExitCode::checkpoint, fp8flow_alone(from_empty)),
                    "empty: no checkpoint in it, nor in a folder checkpoints below it");

    // A damaged one, named itself.
    fs::resize_file(out + "/checkpoints/step_00000009/rank_0000.safetensors", 5000);
    expect_contains(failure(ExitCode::checkpoint, run({"--resume", out + "/checkpoints/step_00000009/"})),
                    "step_00000009/rank_0000.safetensors: truncated: 5000 bytes");

    // Automatically: the one before, and the log says why.
    result = succeeded(run({"--resume", "auto"}, nine));
    expect_contains(result.out, "warning: not resumed from a newer checkpoint: ");
    expect_contains(result.out, "step_00000008, 8 iterations done");
    EXPECT_TRUE(fs::exists(out + "/checkpoints/step_00000009.refused"));
}

// Killed after its last checkpoint and resumed: each iteration is in every file once, nothing that was being
// written is left, and a damaged record is named.
TEST(Resume, WhatWasRedoneCountsOnce) {
    TemporaryFolder folder;
    const std::string out = folder.path("run");
    const Texts settings = {"training.train_iters=9", "training.eval_interval=0",
                            "output.tensorboard_dir=tb"};
    const Texts line = with(train(out, 1, {}, settings),
                            {"--set", "training.train_iters=1000000", "--set", "checkpoint.most_recent_k=0"});
    {
        RunningCommand command(with({FP8FLOW_EXECUTABLE}, line), "");
        wait_for([&] { return fs::exists(out + "/checkpoints/step_00000004"); });
        wait_for([&] { return lines_of(read_whole(out + "/metrics.jsonl")).size() >= 7; });
        ASSERT_EQ(::kill(command.pid(), SIGKILL), 0);
        command.wait(30);
    }
    for (const auto& entry : fs::directory_iterator(out + "/checkpoints"))
        if (entry.path().filename() != "step_00000004") fs::remove_all(entry.path());
    folder.write("run/.config.yaml.tmp.1", "half");
    folder.write("run/hf/.model-00001-of-00001.safetensors.tmp.1", "half");
    folder.write("run/checkpoints/step_00000008.tmp/rank_0000.safetensors", "half");
    folder.write("run/report.html", "of the part that is done again");
    const Texts others = {"config.yaml.tmp.17", ".config.yaml.tmp.", ".config.yaml.tmp.17a", ".17", "hf/17"};
    for (const std::string& name : others) folder.write("run/" + name, "somebody's");
    Texts lines = lines_of(read_whole(out + "/metrics.jsonl"));
    expect_contains(lines[2], "\"iteration\":2");
    lines[2][5] = '\0';
    std::string damaged;
    for (const std::string& one : lines) damaged += one + "\n";
    folder.write("run/metrics.jsonl", damaged);

    // A run that adds nothing to it leaves no iteration in it that is not its own, nor what dead ones left.
    CommandResult result =
        succeeded(fp8flow_alone(train(out, 1, {"--resume", "auto"},
                                      {"training.train_iters=5", "training.eval_iters=0",
                                       "output.metrics=false", "checkpoint.save_interval=0"})));
    EXPECT_EQ(metrics_of(out, "step").size(), 3u);
    EXPECT_FALSE(fs::exists(out + "/.config.yaml.tmp.1"));
    EXPECT_FALSE(fs::exists(out + "/hf/.model-00001-of-00001.safetensors.tmp.1"));
    for (const std::string& name : others) EXPECT_TRUE(fs::exists(out + "/" + name)) << name;
    EXPECT_FALSE(fs::exists(out + "/checkpoints/step_00000008.tmp"));

    result = succeeded(fp8flow_alone(train(out, 1, {"--resume", "auto"}, settings)));
    EXPECT_EQ(events_of(out + "/tb", "lm loss"), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
    std::vector<int64_t> steps;
    for (const nlohmann::json& record : metrics_of(out, "step")) steps.push_back(record.at("iteration"));
    EXPECT_EQ(steps, (std::vector<int64_t>{1, 3, 4, 5, 6, 7, 8, 9}));
    expect_contains(result.out, "warning: metrics.jsonl has no whole record of 1 iteration up to 4; ");
    EXPECT_NE(read_whole(out + "/report.html"), "of the part that is done again");

    // Again, when all is done: the files of the end are not those of no iteration.
    const auto ends = [&] { return read_whole(out + "/report.html") + read_whole(out + "/memory.json"); };
    const std::string before = ends();
    succeeded(fp8flow_alone(train(out, 1, {"--resume", "auto"}, settings)));
    EXPECT_EQ(ends(), before);
}

// An older checkpoint, into the folder that holds newer ones: the next --resume auto would take those.
TEST(Resume, OneFolderHoldsOneTrajectory) {
    TemporaryFolder folder;
    const std::string out = folder.path("run");
    const Texts short_run = {"training.train_iters=9", "training.eval_iters=0"};
    succeeded(fp8flow_alone(train(out, 1, {}, short_run)));
    for (const char* interval : {"0", "4"}) {
        const Texts settings = with(short_run, {std::string("checkpoint.save_interval=") + interval});
        const Texts line = train(out, 1, {"--resume", out + "/checkpoints/step_00000008"}, settings);
        expect_contains(failure(ExitCode::checkpoint, fp8flow_alone(line)),
                        "up to iteration 9, and this one begins at 8");
        EXPECT_EQ(metrics_of(out, "step").size(), 9u);
    }
    fs::remove_all(out + "/checkpoints/step_00000009");
    succeeded(fp8flow_alone(train(out, 1, {"--resume", out}, short_run)));
    EXPECT_EQ(metrics_of(out, "step").size(), 9u);
}

// A run that branches off another one and saves into its folder removes its own checkpoints alone; one that
// is continued, those of all its parts.
TEST(Resume, ARunIsKnownThroughItsResumes) {
    TemporaryFolder folder;
    const std::string a = folder.path("a"), b = folder.path("b");
    const auto run = [](const std::string& out, int iterations, const Texts& more,
                        const Texts& settings = {}) {
        const Texts all = with(settings, {"training.train_iters=" + std::to_string(iterations),
                                          "training.eval_iters=0", "checkpoint.most_recent_k=1"});
        succeeded(fp8flow_alone(train(out, 1, more, all)));
    };
    const auto checkpoints = [&] {
        std::set<std::string> names = names_in(a + "/checkpoints");
        names.erase(".lock");
        return names;
    };
    const auto identity = [&](const std::string& name) {
        const auto manifest = read_json(a + "/checkpoints/" + name + "/manifest.json");
        return manifest.at("run").get<std::string>();
    };
    using Names = std::set<std::string>;
    run(a, 4, {});
    const std::string of_a = identity("step_00000004");
    run(a, 8, {"--resume", "auto"});
    EXPECT_EQ(checkpoints(), Names{"step_00000008"});
    EXPECT_EQ(identity("step_00000008"), of_a);
    run(a, 12, {"--resume", a});
    EXPECT_EQ(checkpoints(), Names{"step_00000012"});
    const Texts into_a = {"checkpoint.save=" + a + "/checkpoints"};
    run(b, 20, {"--resume", a}, into_a);
    EXPECT_EQ(checkpoints(), (Names{"step_00000012", "step_00000020"}));
    EXPECT_NE(identity("step_00000020"), of_a);
    run(b, 24, {"--resume", "auto"}, into_a);
    EXPECT_EQ(checkpoints(), (Names{"step_00000012", "step_00000024"}));
}

// Its file is indexed by token: a resumed run reads, and writes, where it is in the data.
TEST(Resume, RecordedRouting) {
    TemporaryFolder folder;
    const std::string a = folder.path("a"), b = folder.path("b"), of_a = folder.path("a.routing"),
                      of_b = folder.path("b.routing");
    const Texts settings = {"training.train_iters=8", "training.eval_iters=0"};
    succeeded(fp8flow_alone(train(a, 1, {"--record-routing", of_a}, settings)));
    const CommandResult resumed = succeeded(fp8flow_on_ranks(
        2, train(b, 2,
                 {"--resume", a + "/checkpoints/step_00000004", "--routing", of_a, "--record-routing", of_b},
                 settings)));
    expect_contains(resumed.out, "equal top-k ");
    // A file that is refused removes nothing.
    expect_contains(failure(ExitCode::output,
                            fp8flow_alone(train(a, 1, {"--record-routing", of_a, "--overwrite"}, settings))),
                    of_a + ": exists");
    EXPECT_TRUE(std::filesystem::exists(a + "/checkpoints/step_00000004"));
    // A run without a checkpoint begins again, if it had not recorded all.
    const std::string of_d = folder.path("d.routing");
    const Texts again = train(folder.path("d"), 1, {"--record-routing", of_d, "--resume", "auto"},
                              with(settings, {"checkpoint.save_interval=0"}));
    succeeded(fp8flow_alone(again));
    const std::string whole = read_whole(of_d);
    expect_contains(failure(15, fp8flow_alone(again)), "exists");
    folder.write("d.routing", whole.substr(0, whole.size() - 1) + '\0');
    expect_contains(succeeded(fp8flow_alone(again)).out, "warning: " + of_d + ": replaced, because the run");
    EXPECT_EQ(read_whole(of_d), whole);
    const auto loads_of = [](const std::string& out) {
        Texts loads;
        for (const nlohmann::json& record : metrics_of(out, "step"))
            if (record["iteration"] > 4) loads.push_back(record["tokens_per_expert"].dump());
        return loads;
    };
    EXPECT_EQ(loads_of(a).size(), 4u);
    EXPECT_EQ(loads_of(a), loads_of(b));
    expect_contains(failure(10, fp8flow_alone(train(folder.path("c"), 1, {"--routing", of_b}, settings))),
                    "did not come to sample 0");
}

}  // namespace
}  // namespace fp8flow
