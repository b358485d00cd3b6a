// SPDX-License-Identifier: MIT
// scripts/fetch_deps.sh without a network, scripts/slurm.sbatch without Slurm, and scripts/hosts.sh without a
// network: what is refused, the line that would run, a job that is stopped before its time limit and
// requeued, and two hosts that are this machine.
#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

const std::string kScripts = FP8FLOW_SOURCE_DIR "/scripts/";

CommandResult run_bash(const std::string& text, const TemporaryFolder& folder) {
    return RunningCommand({"bash", "-c", text}, folder.path()).wait(60);
}

TEST(FetchDeps, RefusesAnArchiveWithAnotherSum) {
    const TemporaryFolder folder;
    folder.write("from/fmt-9.1.0.tar.gz", "not what was released");
    const std::string result =
        failure(2, run_bash(kScripts + "fetch_deps.sh --prefix prefix --from from", folder));
    expect_contains(result, "fmt-9.1.0.tar.gz has SHA-256");
    EXPECT_TRUE(std::filesystem::is_empty(folder.path("prefix/archives")));
}

TEST(FetchDeps, NamesAMissingArchive) {
    const TemporaryFolder folder;
    std::filesystem::create_directory(folder.path("from"));
    const std::string result =
        failure(2, run_bash(kScripts + "fetch_deps.sh --prefix prefix --from from", folder));
    expect_contains(result, "fmt: fmt-9.1.0.tar.gz is not in from");
}

TEST(FetchDeps, BuildsFindThePrefix) {
    const TemporaryFolder folder;
    std::filesystem::create_directory(folder.path("prefix"));
    const std::string source = "source " + kScripts + "common.sh; ";
    const CommandResult there = succeeded(run_bash(source + "FP8FLOW_DEPS=prefix deps_prefix", folder));
    EXPECT_EQ(lines_of(there.out).back(), std::filesystem::canonical(folder.path("prefix")).string());
    const std::string missing = failure(2, run_bash(source + "FP8FLOW_DEPS=nowhere deps_prefix", folder));
    expect_contains(missing, "FP8FLOW_DEPS: nowhere is not a folder");
}

class Slurm : public ::testing::Test {
protected:
    void SetUp() override {
        program("build/cuda-release/fp8flow");
        program("bin/mpirun");
        program("bin/srun");
        folder_.write("configs/small_4gpu.yaml", "");
        folder_.write("configs/own.yaml", "");
    }
    void program(const std::string& name) {
        folder_.write(name, "#!/bin/sh\necho \"$0 $*\"\n");
        std::filesystem::permissions(folder_.path(name), std::filesystem::perms::owner_all);
    }
    CommandResult submit(const std::string& environment, const std::string& arguments) {
        return run_bash(
            "export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4 "
            "SLURM_JOB_NODELIST=n[1-2] PATH=$PWD/bin:$PATH " +
                environment + "; bash " + kScripts + "slurm.sbatch " + arguments,
            folder_);
    }
    TemporaryFolder folder_;
};

TEST_F(Slurm, StartsOneRankATask) {
    const CommandResult result = succeeded(submit("", "--set training.train_iters=10"));
    const std::string line = lines_of(result.out).back();
    expect_contains(line, "/mpirun -n 8 --map-by ppr:4:node ");
    expect_contains(line,
                    "/fp8flow train " + folder_.path("configs/small_4gpu.yaml") + " --backend hopper --out " +
                        folder_.path("runs/slurm-7") +
                        " --resume auto --set checkpoint.save_interval=500 --set training.train_iters=10");
}

TEST_F(Slurm, TakesAConfigACommandAndALauncher) {
    const CommandResult result =
        succeeded(submit("FP8FLOW_LAUNCHER=srun FP8FLOW_COMMAND=validate", "configs/own.yaml"));
    const std::string line = lines_of(result.out).back();
    expect_contains(line, "/srun ");
    expect_contains(line, "/fp8flow validate configs/own.yaml ");
    expect_contains(line, " --overwrite");
    EXPECT_EQ(submit("FP8FLOW_LAUNCHER=ssh", "").status, 2);
    EXPECT_EQ(submit("", "configs/missing.yaml").status, 2);
}

class Hosts : public ::testing::Test {
protected:
    CommandResult launch(const std::string& shell, const std::string& arguments,
                         const std::string& program = FP8FLOW_EXECUTABLE) {
        return run_bash(
            "unset OMPI_MCA_btl; export OMPI_MCA_btl=self,vader,tcp FP8FLOW_INTERFACE=lo "
            "FP8FLOW_PROGRAM=" +
                program + " FP8FLOW_REMOTE_SHELL='" + shell + "'; " + kScripts + "hosts.sh " + arguments,
            folder_);
    }
    const std::string here_ = FP8FLOW_SOURCE_DIR "/tests/mpi/daemon_here.sh";
    TemporaryFolder folder_;
};

TEST_F(Hosts, TrainOnTwo) {
    const CommandResult result = succeeded(
        launch(here_, "nodea:1,nodeb:1 train " + config_file("test") +
                          " --backend reference --out out --set parallel.expert_model_parallel_size=2"
                          " --set training.train_iters=2 --set training.eval_iters=0"));
    expect_contains(result.out, "== nodeb: 1 ranks, ");
    expect_contains(result.out, "done: 2 iterations");
    EXPECT_TRUE(std::filesystem::exists(folder_.path("out/metrics.jsonl")));
}

// Of every host what is wrong, and nothing starts.
TEST_F(Hosts, LooksAtEachFirst) {
    const std::string train = "nodea:1,nodeb:2 train " + config_file("test") + " --out out";
    folder_.write("shell",
                  "#!/bin/sh\nif [ $1 = nodea ]; then echo no route >&2; exit 255; fi\n"
                  "echo 0123456789abcdef; echo missing; echo 1\n");
    std::filesystem::permissions(folder_.path("shell"), std::filesystem::perms::owner_all);
    const std::string result = failure(2, launch(folder_.path("shell"), train));
    for (const char* text :
         {"nodea: no answer by ", "no route", "nodeb: ", " is another build (0123456789abcdef, here ",
          " is missing; hosts need one file system", "nodeb: 2 ranks, but 1 GPUs"})
        EXPECT_NE(result.find(text), std::string::npos) << text << " in " << result;
    EXPECT_FALSE(std::filesystem::exists(folder_.path("out")));
    EXPECT_EQ(launch(here_, "nodea train " + config_file("test")).status, 2);
    EXPECT_EQ(launch(here_, "nodea:1 plan " + config_file("test")).status, 2);
    for (const char* host : {"-oProxyCommand", "-l", ".", ""}) {  // the first two are options of ssh
        const std::string refused =
            failure(2, launch(here_, std::string("nodea:1,") + host + ":1 train " + config_file("test")));
        expect_contains(refused, "want HOST:RANKS");
    }
    EXPECT_EQ(launch(here_, "nodea:1 train missing.yaml").status, 2);
    EXPECT_EQ(launch(here_, train, "/nowhere/fp8flow").status, 2);
}

// The scheduler: runs the job, sends SIGUSR1 once it trains, and runs it again, with the same number, as long
// as it asks for that. The third time it has three iterations left. The ranks are real.
constexpr const char* kScheduler = R"sh(
for attempt in 1 2 3; do
    iterations=1000000
    if ((attempt == 3)); then
        last=$(cd runs/slurm-7/checkpoints && echo step_*)
        iterations=$((10#${last##*step_} + 3))
    fi
    rm -f requeued
    bash "$@" --set training.train_iters=$iterations > log$attempt 2>&1 &
    job=$!
    if ((attempt < 3)); then
        until grep -q 'lm loss' log$attempt || ! kill -0 $job; do sleep 0.05; done
        kill -USR1 $job
    fi
    status=0
    wait $job || status=$?
    echo "status $status, requeued $(cat requeued 2> /dev/null)"
done
echo $iterations
)sh";

TEST_F(Slurm, AJobStopsBeforeItsLimitGoesBackToTheQueueAndResumes) {
    const auto script = [&](const std::string& name, const std::string& text) {
        folder_.write(name, "#!/bin/sh\n" + text + "\n");
        std::filesystem::permissions(folder_.path(name), std::filesystem::perms::owner_all);
    };
    script("bin/mpirun", "exec " FP8FLOW_MPIEXEC " --oversubscribe \"$@\"");
    script("bin/scontrol", "echo \"$2\" > requeued");
    folder_.write("scheduler", kScheduler);
    const std::string job = kScripts + "slurm.sbatch " + config_file("test") +
                            " --backend reference --set training.eval_iters=0 "
                            "--set training.lr_decay_iters=100 --set parallel.expert_model_parallel_size=2";
    const auto run = [&](const std::string& number, const std::string& line) {
        return run_bash("export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=" + number +
                            " SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_JOB_NODELIST=here "
                            "PATH=$PWD/bin:$PATH FP8FLOW_PROGRAM=" FP8FLOW_EXECUTABLE "; bash " +
                            line,
                        folder_);
    };
    const CommandResult stopped = run("7", "scheduler " + job);
    const Texts lines = lines_of(stopped.out);
    ASSERT_EQ(lines.size(), 4u) << stopped.out << stopped.err << read_whole(folder_.path("log1"));
    EXPECT_EQ(lines[0], "status 16, requeued 7") << read_whole(folder_.path("log1"));
    EXPECT_EQ(lines[1], "status 16, requeued 7") << read_whole(folder_.path("log2"));
    EXPECT_EQ(lines[2], "status 0, requeued ") << read_whole(folder_.path("log3"));
    expect_contains(read_whole(folder_.path("log2")), "resumed from ");
    EXPECT_FALSE(std::filesystem::exists(folder_.path("runs/slurm-7-2")));

    succeeded(run("8", job + " --set training.train_iters=" + lines[3]));
    const auto losses = [&](const std::string& number) {
        return losses_of(folder_.path("runs/slurm-" + number));
    };
    EXPECT_EQ(losses("7"), losses("8"));
    EXPECT_EQ(losses("7").size(), static_cast<size_t>(std::stoll(lines[3])));
}

}  // namespace
}  // namespace fp8flow
