// SPDX-License-Identifier: MIT
// A run that a signal stops: after a step, on all ranks, with a checkpoint from which it continues with the
// same bits; and a second signal, which ends it at once.
#include "tests/cli/command.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fp8flow {
namespace {

namespace fs = std::filesystem;

constexpr int kStopped = static_cast<int>(ExitCode::stopped);
constexpr double kLongestStop = 30;  // of steps of milliseconds, on a busy machine

class Stop : public testing::Test {
protected:
    // What a shell starts in its background ignores SIGINT, and so would the runs below.
    void SetUp() override { ::signal(SIGINT, SIG_DFL); }
    static Texts train(int ranks, const std::string& out, int64_t iterations, const Texts& more = {}) {
        return test_run(
            "train", out,
            {"training.eval_iters=0", "training.lr_decay_iters=100", "checkpoint.save_interval=1000000",
             "training.train_iters=" + std::to_string(iterations),
             "parallel.expert_model_parallel_size=" + std::to_string(ranks)},
            more);
    }
    // Started, and past its first step. `foreign`: libraries below MPI take the signals.
    std::unique_ptr<RunningCommand> start(int ranks, const Texts& arguments, bool foreign = false) {
        Texts line = ranks > 1 ? mpirun_line(ranks, arguments) : with({FP8FLOW_EXECUTABLE}, arguments);
        if (foreign) line = with_faults(line, {"FAULT_HANDLERS=1"});
        return start(line);
    }
    std::unique_ptr<RunningCommand> start(const Texts& line) {
        auto run = std::make_unique<RunningCommand>(line, folder_.path());
        wait_for([&] { return run->out_so_far().find("lm loss") != std::string::npos; });
        return run;
    }
    // The step of the only checkpoint.
    int64_t step_of(const std::string& out) {
        std::set<std::string> names = names_in(folder_.path(out + "/checkpoints"));
        names.erase(".lock");
        EXPECT_EQ(names.size(), 1u);
        return std::stoll(names.begin()->substr(std::string("step_").size()));
    }
    std::vector<double> losses_of(const std::string& out) { return fp8flow::losses_of(folder_.path(out)); }
    TemporaryFolder folder_;
};

TEST_F(Stop, EachSignalStopsAfterAStepWithEverything) {
    struct Case {
        int signal;
        const char* name;
        bool foreign;
    };
    for (const auto& [signal, name, foreign] : std::vector<Case>{{SIGTERM, "SIGTERM", false},
                                                                 {SIGINT, "SIGINT", false},
                                                                 {SIGUSR1, "SIGUSR1", false},
                                                                 {SIGTERM, "SIGTERM", true},
                                                                 {SIGINT, "SIGINT", true},
                                                                 {SIGUSR1, "SIGUSR1", true}}) {
        SCOPED_TRACE(fmt::format("{}, taken by a library: {}", name, foreign));
        fs::remove_all(folder_.path(name));
        const auto run = start(1, train(1, name, 1'000'000), foreign);
        ASSERT_EQ(::kill(run->pid(), signal), 0);
        const CommandResult stopped = run->wait(kLongestStop);
        EXPECT_EQ(stopped.status, kStopped) << stopped.err;
        EXPECT_EQ(stopped.err, "");
        const int64_t step = step_of(name);
        const std::string out = name;
        expect_contains(stopped.out,
                        "stopped by " + out + " after iteration " + std::to_string(step) + " of 1000000");
        expect_contains(stopped.out, "config.yaml --out " + out + " --resume auto");
        EXPECT_EQ(losses_of(name).size(), static_cast<size_t>(step));
        for (const char* file : {"/report.html", "/memory.json", "/train.log", "/config.yaml"})
            EXPECT_TRUE(fs::exists(folder_.path(name + std::string(file)))) << file;
        EXPECT_EQ(read_whole(folder_.path(name + std::string("/.lock"))), "");
        EXPECT_EQ(read_whole(folder_.path(name + std::string("/checkpoints/.lock"))), "");
    }
}

// mpirun passes SIGUSR1 on; SIGTERM to one rank alone stops all.
TEST_F(Stop, AllRanksStopAfterTheSameStepAndContinueWithTheSameBits) {
    for (const bool one_rank : {false, true}) {
        const std::string out = one_rank ? "one" : "all", straight = out + "_straight";
        const auto run = start(2, train(2, out, 1'000'000), one_rank);
        if (one_rank) {
            const std::vector<int> ranks = ranks_below(run->pid());
            ASSERT_EQ(ranks.size(), 2u);
            ASSERT_EQ(::kill(ranks.back(), SIGTERM), 0);
        } else {
            ASSERT_EQ(::kill(run->pid(), SIGUSR1), 0);
        }
        const CommandResult stopped = run->wait(kLongestStop);
        EXPECT_EQ(stopped.status, kStopped) << stopped.err;
        EXPECT_TRUE(error_lines(stopped.err).empty()) << stopped.err;
        const int64_t iterations = step_of(out) + 3;
        ASSERT_EQ(fp8flow_on_ranks(2, train(2, out, iterations, {"--resume", "auto"}), folder_.path()).status,
                  0);
        succeeded(fp8flow_on_ranks(2, train(2, straight, iterations), folder_.path()));
        EXPECT_EQ(losses_of(out), losses_of(straight));
    }
}

// SIGTERM is blocked, from the first line of main.
bool is_past_first_line(int process) {
    const std::string status = read_whole("/proc/" + std::to_string(process) + "/status");
    const size_t at = status.find("SigBlk:");
    return at != std::string::npos &&
           (std::stoull(status.substr(at + 7), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
}

// While the program starts itself again, in MPI_Init, where libraries leave handlers, and before the first
// step.
TEST_F(Stop, ASignalDuringTheStartCounts) {
    for (const int ranks : {1, 2})
        for (const int signal : {SIGTERM, SIGINT, SIGUSR1})
            for (const int after : {0, 200}) {
                const std::string out = fmt::format("{}_{}_{}", ranks, signal, after);
                SCOPED_TRACE(out);
                Texts line = mpirun_line(ranks, train(ranks, out, 1'000'000));
                if (ranks == 1)
                    line.erase(line.begin(), std::find(line.begin(), line.end(), FP8FLOW_EXECUTABLE));
                line = with_faults(line, {"-u", "OMP_WAIT_POLICY", "FAULT_HANDLERS=1"});
                RunningCommand run(line, folder_.path());
                std::vector<int> started;
                wait_for([&] {
                    started = ranks == 1 ? std::vector<int>{run.pid()} : ranks_below(run.pid());
                    std::erase_if(started, [](int process) { return !is_past_first_line(process); });
                    return !started.empty();
                });
                std::this_thread::sleep_for(std::chrono::milliseconds(after));
                ASSERT_FALSE(started.empty());
                ASSERT_EQ(::kill(started.front(), signal), 0);
                const CommandResult stopped = run.wait(kLongestStop);
                EXPECT_EQ(stopped.status, kStopped) << stopped.err;
                EXPECT_TRUE(error_lines(stopped.err).empty()) << stopped.err;
                EXPECT_GE(step_of(out), 1);
            }
}

TEST_F(Stop, WithoutCheckpointsItSaysSo) {
    const auto run = start(1, train(1, "out", 1'000'000, {"--set", "checkpoint.save_interval=0"}));
    ASSERT_EQ(::kill(run->pid(), SIGTERM), 0);
    const CommandResult stopped = run->wait(kLongestStop);
    EXPECT_EQ(stopped.status, kStopped) << stopped.err;
    expect_contains(stopped.out, "no checkpoint to continue from: begin again, with some");
}

// Both come before the end of a step, which takes a second or more.
TEST_F(Stop, ASecondSignalEndsItAtOnce) {
    const auto run =
        start(1, train(1, "out", 1'000'000,
                       {"--set", "training.global_batch_size=512", "--set", "model.seq_length=64"}));
    ASSERT_EQ(::kill(run->pid(), SIGTERM), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ASSERT_EQ(::kill(run->pid(), SIGTERM), 0);
    const CommandResult ended = run->wait(kLongestStop);
    EXPECT_EQ(ended.status, 128 + SIGTERM);
    EXPECT_EQ(error_lines(ended.err), (Texts{"fp8flow: error: ended at once by a second signal"}));
}

TEST_F(Stop, AnIgnoredSignalStaysIgnored) {
    for (const bool foreign : {false, true}) {
        Texts line = with({"bash", "-c", "trap '' INT; exec \"$@\"", "bash", FP8FLOW_EXECUTABLE},
                          train(1, "out", 40, {"--overwrite"}));
        if (foreign) line = with_faults(line, {"FAULT_HANDLERS=1"});
        const auto run = start(line);
        ::kill(run->pid(), SIGINT);
        EXPECT_EQ(run->wait(60).status, 0);
    }
}

}  // namespace
}  // namespace fp8flow
