// SPDX-License-Identifier: MIT
// One owner per run folder: which folder a run gets, what a start that fails leaves, and two jobs that want
// the same one.
#include "tests/cli/command.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <map>
#include <set>

namespace fp8flow {
namespace {

namespace fs = std::filesystem;

Texts train(const std::string& out, const Texts& more = {}) {
    return test_run("train", out, {"training.train_iters=3", "training.eval_iters=0"}, more);
}

// Every file and folder below, hidden ones too, with content.
std::map<std::string, std::string> tree_of(const std::string& folder) {
    std::map<std::string, std::string> tree;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
        tree[entry.path().lexically_relative(folder).string()] =
            entry.is_directory() ? "" : read_whole(entry.path());
    return tree;
}

class RunFolders : public testing::Test {
protected:
    std::unique_ptr<RunningCommand> start_long_run(const std::string& out, const Texts& more = {}) {
        const Texts line = train(out, with(more, {"--set", "training.train_iters=1000000"}));
        auto run = std::make_unique<RunningCommand>(with({FP8FLOW_EXECUTABLE}, line), folder_.path());
        wait_for([&] { return run->out_so_far().find("lm loss") != std::string::npos; });
        return run;
    }
    TemporaryFolder folder_;
};

TEST_F(RunFolders, AFolderThatIsTakenGivesTheNextNumber) {
    for (const int ranks : {1, 2}) {
        const std::string out = "runs/" + std::to_string(ranks);
        const Texts line =
            train(out, {"--set", "parallel.expert_model_parallel_size=" + std::to_string(ranks)});
        succeeded(fp8flow_on_ranks(ranks, line, folder_.path()));
        const auto first = tree_of(folder_.path(out));
        EXPECT_EQ(first.at(".lock"), "");
        for (const char* number : {"-2", "-3"}) {
            const CommandResult again = succeeded(fp8flow_on_ranks(ranks, line, folder_.path()));
            EXPECT_EQ(lines_of(again.out).front(),
                      "warning: " + out + " holds another run: this one goes to " + out + number +
                          " (--overwrite replaces the other, train --resume auto continues it)");
            expect_contains(again.out, folder_.path(out + number) + "/");
            expect_contains(read_whole(folder_.path(out + number + "/config.yaml")), out + number);
        }
        EXPECT_EQ(tree_of(folder_.path(out)), first);
    }
}

// The name of a folder is not YAML: "exp #2" is not exp, of which --overwrite would remove the checkpoints.
TEST_F(RunFolders, NamesAreTakenLiterally) {
    const Texts saves = {"--set", "checkpoint.save_interval=2", "--set", "training.train_iters=2"};
    succeeded(fp8flow_alone(train("exp", saves), folder_.path()));
    const auto first = tree_of(folder_.path("exp"));
    for (const std::string out : {"exp #2", " blanks ", "o'brien", "[x]", "{}"}) {
        SCOPED_TRACE(out);
        Texts line = with(train(out, saves), {"--overwrite"});
        succeeded(fp8flow_alone(line, folder_.path()));
        EXPECT_TRUE(fs::exists(folder_.path(out) + "/checkpoints/step_00000002"));
        EXPECT_EQ(tree_of(folder_.path("exp")), first);
        const CommandResult resumed = succeeded(fp8flow_alone(
            train("resumed", {"--resume", out, "--overwrite", "--set", "training.train_iters=2"}),
            folder_.path()));
        expect_contains(resumed.out, "resumed from ");
    }
}

TEST_F(RunFolders, EveryCommandFollowsTheRule) {
    const std::string mine = folder_.write("out/notes.txt", "mine");
    const std::string config = config_file("test");
    const Texts backend = {"--backend", "reference", "--out", "out"};
    for (const Texts& command :
         {Texts{"validate", config, "--set", "training.train_iters=6", "--set",
                "validate.recipes=[bf16, fp8_flow]", "--set", "validate.max_relative_loss_error=1", "--set",
                "validate.warmup_iters=0"},
          Texts{"profile", config, "--steps", "1", "--recipes", "bf16"},
          Texts{"bench", "rms_norm", "--samples", "1"}}) {
        const Texts line = with(command, backend);
        const CommandResult next = succeeded(fp8flow_alone(line, folder_.path()));
        expect_contains(next.out, "out holds another run: this one goes to out-2");
        EXPECT_GT(names_in(folder_.path("out-2")).size(), 1u);
        EXPECT_EQ(names_in(folder_.path("out")), (std::set<std::string>{"notes.txt"}));
        fs::remove_all(folder_.path("out-2"));
    }
    EXPECT_EQ(read_whole(mine), "mine");
}

TEST_F(RunFolders, OverwriteReplacesARunAndItsCheckpoints) {
    succeeded(fp8flow_alone(train("out", {"--set", "checkpoint.save_interval=1", "--tensor-stats", "--set",
                                          "output.tensorboard_dir=tensorboard"}),
                            folder_.path()));
    EXPECT_TRUE(fs::exists(folder_.path("out/tensor_stats.json")));
    folder_.write("out/notes.txt", "mine");
    folder_.write("out/.report.html.tmp.1", "of a process that died");
    succeeded(fp8flow_alone(train("out", {"--set", "checkpoint.save_interval=2", "--set",
                                          "training.train_iters=2", "--overwrite"}),
                            folder_.path()));
    EXPECT_EQ(names_in(folder_.path("out/checkpoints")), (std::set<std::string>{".lock", "step_00000002"}));
    EXPECT_EQ(losses_of(folder_.path("out")).size(), 2u);
    EXPECT_EQ(names_in(folder_.path("out")),
              (std::set<std::string>{".lock", "checkpoints", "config.yaml", "memory.json", "metrics.jsonl",
                                     "notes.txt", "report.html", "tensorboard", "train.log"}));
    EXPECT_TRUE(fs::is_empty(folder_.path("out/tensorboard")));
    EXPECT_FALSE(fs::exists(folder_.path("out-2")));
    for (const char* resumed : {"auto", "out", "out/checkpoints/step_00000002"}) {
        const Texts both = train("out", {"--overwrite", "--resume", resumed});
        expect_contains(failure(ExitCode::usage, fp8flow_alone(both, folder_.path())),
                        "--overwrite would remove what --resume " + std::string(resumed));
    }
}

// What any command wrote goes when another one overwrites it; what is somebody's stays.
TEST_F(RunFolders, OverwriteLeavesNoFileOfAnEarlierRun) {
    const std::string config = config_file("test");
    const Texts to = {"--backend", "reference", "--out", "out", "--overwrite"};
    const auto run = [&](const Texts& line) { succeeded(fp8flow_alone(with(line, to), folder_.path())); };
    const Texts commands[] = {
        {"train", config, "--set", "training.train_iters=2", "--set", "output.tensorboard_dir=tb",
         "--tensor-stats", "--set", "output.tensor_stats_interval=1"},
        {"validate", config, "--set", "training.train_iters=6", "--set", "validate.recipes=[bf16, fp8_flow]",
         "--set", "validate.max_relative_loss_error=1", "--set", "validate.warmup_iters=0"},
        {"profile", config, "--steps", "1", "--recipes", "bf16"},
        {"bench", "rms_norm", "--samples", "1"},
        {"train", config, "--dump-samples", "2"}};
    std::set<std::string> before;
    for (const Texts& command : commands) {
        run(command);
        const auto all = tree_of(folder_.path("out"));
        for (const auto& [name, bytes] : all) EXPECT_EQ(before.count(name), 0u) << command[0] << " " << name;
        before.clear();
        for (const auto& [name, bytes] : all)
            if (!fs::is_directory(folder_.path("out/" + name)) && name != "config.yaml" &&
                name != "report.html" && name != ".lock")  // of several commands
                before.insert(name);
        EXPECT_FALSE(before.empty());
    }
    for (const char* name : {"out/notes.txt", "out/tb/notes.txt", "out/evaluate.json"})
        folder_.write(name, "mine");
    run(commands[4]);
    run(commands[4]);
    EXPECT_EQ(tree_of(folder_.path("out")).count("samples.npy"), 1u);
    EXPECT_EQ(tree_of(folder_.path("out")).count("evaluate.json"), 0u);  // `evaluate out` writes it
    for (const char* name : {"out/notes.txt", "out/tb/notes.txt"})
        EXPECT_EQ(read_whole(folder_.path(name)), "mine");
}

// A run that resumes from another run's checkpoint is a new run.
TEST_F(RunFolders, ResumedFromElsewhere) {
    const Texts saves = {"--set", "checkpoint.save_interval=2", "--set", "checkpoint.most_recent_k=0"};
    succeeded(fp8flow_alone(train("from", saves), folder_.path()));
    succeeded(fp8flow_alone(train("out", saves), folder_.path()));
    const auto before = tree_of(folder_.path("out"));
    Texts line = with(train("out", saves), {"--resume", "from/checkpoints/step_00000002"});
    succeeded(fp8flow_alone(line, folder_.path()));
    EXPECT_EQ(tree_of(folder_.path("out")), before);
    EXPECT_EQ(losses_of(folder_.path("out-2")).size(), 1u);
    line.push_back("--overwrite");
    succeeded(fp8flow_alone(line, folder_.path()));
    EXPECT_EQ(losses_of(folder_.path("out")).size(), 1u);
    EXPECT_EQ(names_in(folder_.path("out/checkpoints")), (std::set<std::string>{".lock", "step_00000003"}));
}

// The folder of checkpoints of a live run, named by another.
TEST_F(RunFolders, CheckpointsHaveOneOwner) {
    const auto run = start_long_run("out", {"--set", "checkpoint.save_interval=1000000"});
    const Texts other = train("other", {"--set", "checkpoint.save_interval=1", "--set",
                                        "checkpoint.save=" + folder_.path("out/checkpoints")});
    expect_contains(failure(ExitCode::output, fp8flow_alone(other, folder_.path())),
                    "checkpoint.save " + folder_.path("out/checkpoints") + ": process ");
    EXPECT_FALSE(fs::exists(folder_.path("other")));
}

TEST_F(RunFolders, AStartThatFailsLeavesNothing) {
    succeeded(fp8flow_alone(train("out", {"--set", "checkpoint.save_interval=3"}), folder_.path()));
    const auto before = tree_of(folder_.path());
    const Texts no_data = {"--set", "data.data_kind=text",     "--set", "model.vocab_size=257",
                           "--set", "data.data_path=/nowhere", "--set", "checkpoint.save_interval=1"},
                other_model = {"--set", "model.num_layers=3", "--set", "model.moe_layer_freq=[0,1,1]"};
    for (const auto& [out, more] :
         std::vector<std::pair<std::string, Texts>>{{"out", no_data},
                                                    {"out", with({"--overwrite"}, no_data)},
                                                    {"out", with({"--resume", "auto"}, no_data)},
                                                    {"out", with({"--resume", "auto"}, other_model)},
                                                    {"out", {"--overwrite", "--weights", "nowhere"}},
                                                    {"fresh/folder", no_data},
                                                    {"fresh/folder", {"--resume", "nowhere"}},
                                                    {"fresh/folder", {"--weights", "nowhere"}},
                                                    {"fresh/folder", {"--set", "training.lr=fast"}}}) {
        const CommandResult failed = fp8flow_on_ranks(2, train(out, more), folder_.path());
        EXPECT_NE(failed.status, 0) << testing::PrintToString(more);
        EXPECT_EQ(error_lines(failed.err).size(), 1u) << failed.err;
        EXPECT_EQ(tree_of(folder_.path()), before) << testing::PrintToString(more);
    }
}

TEST_F(RunFolders, ALiveRunIsLeftAlone) {
    const auto run = start_long_run("out");
    const CommandResult other = succeeded(fp8flow_alone(train("out"), folder_.path()));
    expect_contains(other.out, "this one goes to out-2");
    for (const Texts& more : {Texts{"--overwrite"}, Texts{"--resume", "auto"}}) {
        expect_contains(failure(ExitCode::output, fp8flow_alone(train("out", more), folder_.path())),
                        "--out out: process " + std::to_string(run->pid()) + " on ");
    }
    ASSERT_EQ(::kill(run->pid(), SIGKILL), 0);
    run->wait(30);
    EXPECT_NE(read_whole(folder_.path("out/.lock")), "");
    succeeded(fp8flow_alone(train("out", {"--overwrite"}), folder_.path()));  // at once
    EXPECT_EQ(read_whole(folder_.path("out/.lock")), "");
}

// As if another machine had taken over while this run was suspended.
TEST_F(RunFolders, ARunThatLostItsFolderStops) {
    const auto run =
        start_long_run("out", {"--set", "checkpoint.save_interval=1", "--set", "checkpoint.most_recent_k=0"});
    const std::string path = folder_.path("out/.lock");
    ASSERT_EQ(::kill(run->pid(), SIGSTOP), 0);
    const std::string another =
        R"({"id":"1","machine":"another","host":"there","pid":7,"command":"fp8flow"})";
    folder_.write("another", another);
    fs::rename(folder_.path("another"), path);
    const auto published = [&] {
        Texts names;
        for (const std::string& name : names_in(folder_.path("out/checkpoints")))
            if (!name.ends_with(".tmp") && name != ".lock") names.push_back(name);
        return names;
    };
    const Texts before = published();
    ASSERT_EQ(::kill(run->pid(), SIGCONT), 0);
    expect_contains(failure(ExitCode::output, run->wait(60)),
                    "this run has lost its folder: process 7 on there (fp8flow) has taken it");
    EXPECT_EQ(read_whole(path), another);
    EXPECT_LE(published().size(), before.size() + 1);  // the one that it was renaming when it was suspended
    EXPECT_FALSE(fs::exists(folder_.path("out/memory.json")));
}

// Taken from a live run, which ends; and on a file system without locks.
TEST_F(RunFolders, TakingOver) {
    const auto run = start_long_run("out", {"--set", "checkpoint.save_interval=1"});
    expect_contains(succeeded(fp8flow_alone(train("out", {"--take-over"}), folder_.path())).out,
                    "goes to out-2 (--overwrite replaces the other, train --resume auto continues it; "
                    "--take-over needs one of them)");
    succeeded(fp8flow_alone(train("out", {"--overwrite", "--take-over"}), folder_.path()));
    expect_contains(failure(ExitCode::output, run->wait(60)), "this run has lost its folder");
    const auto without_locks = [&](const Texts& more) {
        const Texts line = with({FP8FLOW_EXECUTABLE}, train("fresh", more));
        return RunningCommand(with_faults(line, {"FAULT_NO_LOCKS=1"}), folder_.path()).wait(60);
    };
    expect_contains(failure(ExitCode::output, without_locks({})), "fresh: its file system has no locks");
    EXPECT_FALSE(fs::exists(folder_.path("fresh")));
    succeeded(without_locks({"--take-over"}));
}

// FP8FLOW_FIGHTS: how often.
TEST_F(RunFolders, TwoJobsOverOneFolder) {
    const char* asked = std::getenv("FP8FLOW_FIGHTS");
    const int fights = asked != nullptr ? std::stoi(asked) : 5;
    for (int i = 0; i < fights; ++i) {
        const std::string out = "fight" + std::to_string(i);
        const Texts line = with({FP8FLOW_EXECUTABLE}, train(out, {"--set", "checkpoint.save_interval=1"}));
        RunningCommand a(line, folder_.path()), b(line, folder_.path());
        const CommandResult first = succeeded(a.wait(60)), second = succeeded(b.wait(60));
        for (const std::string& name : {out, out + "-2"}) {
            const std::string folder = folder_.path(name);
            ASSERT_TRUE(fs::exists(folder + "/memory.json")) << name << first.out << second.out;
            EXPECT_EQ(losses_of(folder).size(), 3u);
            EXPECT_EQ(names_in(folder + "/checkpoints"),
                      (std::set<std::string>{".lock", "step_00000002", "step_00000003"}));
            EXPECT_EQ(names_in(folder),
                      (std::set<std::string>{".lock", "checkpoints", "config.yaml", "memory.json",
                                             "metrics.jsonl", "report.html", "train.log"}));
        }
        EXPECT_FALSE(fs::exists(folder_.path(out + "-3")));
    }
}

}  // namespace
}  // namespace fp8flow
