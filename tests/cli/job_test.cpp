// SPDX-License-Identifier: MIT
// A job of several ranks ends as one: one report, the exit status of its class, within seconds, no process
// left. And how a process starts: OpenMP's threads wait without spinning unless the user chose otherwise,
// and the program that has started itself again for that is the one that was started.
#include "tests/cli/command.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <regex>
#include <thread>

namespace fp8flow {
namespace {

constexpr double kSeconds = 30;  // "within seconds", on a machine that does much else

void expect_one_report(const CommandResult& result, ExitCode code, const std::string& part) {
    EXPECT_EQ(result.status, static_cast<int>(code)) << result.err;
    EXPECT_EQ(error_lines(result.err).size(), 1u) << result.err;
    EXPECT_LT(result.seconds, kSeconds);
    expect_contains(result.err, part);
}

TEST(Job, ErrorOfEveryRankIsReportedOnce) {
    TemporaryFolder folder;
    const std::string config = config_file("test"), out = folder.path("out");
    expect_one_report(fp8flow_on_ranks(2, {"train", config, "--bogus"}), ExitCode::usage, "--bogus");
    expect_one_report(fp8flow_on_ranks(2, {"train", folder.path("none.yaml")}), ExitCode::usage,
                      "no such file");
    expect_one_report(fp8flow_on_ranks(3, {"train", config, "--out", out, "--set",
                                           "parallel.expert_model_parallel_size=2"}),
                      ExitCode::usage, "want a divisor of the world size 3");
    expect_one_report(fp8flow_on_ranks(2, {"train", config, "--out", out, "--set", "training.lr=1e30"}),
                      ExitCode::numeric, "not finite");
}

TEST(Job, ErrorOfOneRankEndsTheOthers) {
    TemporaryFolder folder;
    const std::string file = folder.write("file", "x");  // only rank 0 opens the output folder
    for (const char* command : {"train", "validate"})
        expect_one_report(
            fp8flow_on_ranks(4, {command, config_file("test"), "--backend", "reference", "--out", file}),
            ExitCode::output, file);
}

// One process of several that another MPI's launcher started; and shells that have such variables and are
// none.
TEST(Job, ALauncherThatMpiDoesNotSeeIsAnError) {
    struct Case {
        Texts environment;
        const char* report;  // null: it trains
    };
    const char* const four = "the launcher started 4 tasks, MPI sees 1";
    for (const auto& [environment, report] : std::vector<Case>{
             {{"PMI_SIZE=4", "PMI_RANK=2", "MPI_LOCALNRANKS=4", "MPI_LOCALRANKID=2"}, four},
             {{"PMI_SIZE=4", "PMI_RANK=0"}, four},
             {{"OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=0"}, four},
             {{"MV2_COMM_WORLD_SIZE=4", "MV2_COMM_WORLD_RANK=3"}, four},
             {{"SLURM_STEP_NUM_TASKS=4", "SLURM_NTASKS=8", "SLURM_PROCID=0", "SLURM_STEP_ID=0"}, four},
             {{"SLURM_NTASKS=4", "SLURM_PROCID=0", "SLURM_STEP_ID=0"}, four},
             {{"SLURM_NTASKS=4", "SLURM_PROCID=2"}, four},
             {{"WORLD_SIZE=4", "RANK=0", "LOCAL_RANK=0"}, four},
             {{"PMIX_RANK=3"}, "PMIX_RANK=3: the launcher started at least 4 tasks, MPI sees 1"},
             {{"PMI_SIZE=1", "PMI_RANK=0"}, nullptr},
             {{"SLURM_NTASKS=4", "SLURM_JOB_ID=7"}, nullptr},                    // salloc
             {{"SLURM_NTASKS=4", "SLURM_JOB_ID=7", "SLURM_PROCID=0"}, nullptr},  // a batch script
             {{"SLURM_NTASKS=4", "SLURM_STEP_NUM_TASKS=1", "SLURM_PROCID=0", "SLURM_STEP_ID=4294967290"},
              nullptr},  // salloc's shell as a step
             {{"SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=0", "SLURM_STEP_ID=0", "SLURM_PTY_PORT=1"}, nullptr},
             {{"WORLD_SIZE=4", "RANK=0"}, nullptr}}) {  // a pod
        SCOPED_TRACE(environment.back());
        TemporaryFolder folder;
        const Texts line = with(with({"env"}, environment), {FP8FLOW_EXECUTABLE});
        const CommandResult result =
            RunningCommand(with(line, test_run("train", folder.path("out"), {"training.train_iters=1"})),
                           folder.path())
                .wait(kSeconds);
        if (report != nullptr) {
            expect_one_report(result, ExitCode::usage, report);
        } else {
            EXPECT_EQ(result.status, 0) << result.err;
        }
        EXPECT_EQ(std::filesystem::exists(folder.path("out")), report == nullptr);
    }
}

class LongRun : public testing::Test {
protected:
    // Starts a run that takes hours and waits for its first steps.
    void start(int ranks, const std::string& deadline_seconds) {
        run_ = std::make_unique<RunningCommand>(
            mpirun_line(ranks, {"train", config_file("test"), "--backend", "reference", "--out",
                                folder_.path("out"), "--overwrite", "--set", "training.train_iters=1000000",
                                "--set", "parallel.peer_deadline_seconds=" + deadline_seconds}),
            "");
        wait_for([&] { return run_->out_so_far().find("iteration       2/") != std::string::npos; });
        ranks_ = ranks_below(run_->pid());
        ASSERT_EQ(ranks_.size(), static_cast<size_t>(ranks)) << run_->out_so_far();
    }

    // mpirun may end a moment before its ranks do; what is left of a process that nobody asked about ("Z")
    // does not count.
    void expect_all_gone() const {
        for (const int pid : ranks_) {
            bool there = true;
            for (int i = 0; i < 500 && there; ++i) {
                const std::string stat = read_whole("/proc/" + std::to_string(pid) + "/stat");
                there = !stat.empty() && stat.find(") Z ") == std::string::npos;
                if (there) std::this_thread::sleep_for(std::chrono::milliseconds(10));
            }
            EXPECT_FALSE(there) << "process " << pid << " is still there";
        }
    }

    TemporaryFolder folder_;
    std::unique_ptr<RunningCommand> run_;
    std::vector<int> ranks_;
};

TEST_F(LongRun, AKilledOrCrashedRankTakesTheJobDown) {
    for (const int signal : {SIGKILL, SIGSEGV}) {
        SCOPED_TRACE(signal);
        start(2, "60");
        ASSERT_EQ(::kill(ranks_.back(), signal), 0);
        const CommandResult result = run_->wait(kSeconds);
        EXPECT_FALSE(result.timed_out) << result.err;
        EXPECT_NE(result.status, 0);
        EXPECT_EQ(error_lines(result.err).size(), 1u) << result.err;
        expect_contains(result.err, "another rank was lost");
        expect_all_gone();
    }
}

TEST_F(LongRun, CancelledJobEndsWithoutAResult) {
    start(2, "60");
    ASSERT_EQ(::kill(run_->pid(), SIGINT), 0);
    const CommandResult result = run_->wait(kSeconds);
    EXPECT_FALSE(result.timed_out) << result.err;
    EXPECT_NE(result.status, 0);
    EXPECT_LE(error_lines(result.err).size(), 1u) << result.err;
    expect_all_gone();
}

TEST_F(LongRun, LateRankIsWaitedFor) {
    start(2, "60");
    ASSERT_EQ(::kill(ranks_.back(), SIGSTOP), 0);
    std::this_thread::sleep_for(std::chrono::seconds(3));
    const auto lines = [&] {
        const std::string out = run_->out_so_far();
        return std::count(out.begin(), out.end(), '\n');
    };
    const auto before = lines();
    ASSERT_EQ(::kill(ranks_.back(), SIGCONT), 0);
    wait_for([&] { return lines() >= before + 3; });  // steps after the rank came back
    ASSERT_EQ(::kill(run_->pid(), SIGINT), 0);
    EXPECT_FALSE(run_->wait(kSeconds).timed_out);
    expect_all_gone();
}

TEST_F(LongRun, StoppedRankIsNamedAtTheDeadline) {
    start(2, "2");
    ASSERT_EQ(::kill(ranks_.back(), SIGSTOP), 0);
    const CommandResult result = run_->wait(kSeconds);
    EXPECT_FALSE(result.timed_out) << result.err;
    expect_one_report(result, ExitCode::peer, "no answer from rank");
    expect_contains(result.err, "parallel.peer_deadline_seconds");
    expect_all_gone();
}

TEST(Job, OneRankWaitsForNobody) {
    TemporaryFolder folder;
    succeeded(fp8flow_alone(test_run("train", folder.path("out"),
                                     {"training.train_iters=1", "parallel.peer_deadline_seconds=1e-30"})));
}

// The program in an environment without a choice, but for these variables. What OpenMP read of it is on
// standard error, once for each start.
CommandResult started(const Texts& environment, const Texts& arguments) {
    const Texts line =
        with({"env", "-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT", "OMP_DISPLAY_ENV=true"}, environment);
    return RunningCommand(with(with(line, {FP8FLOW_EXECUTABLE}), arguments), "").wait(60);
}

Texts policies(const CommandResult& result) {
    const std::regex policy("OMP_WAIT_POLICY *= *'([A-Z]*)'");
    Texts found;
    for (std::sregex_iterator at(result.err.begin(), result.err.end(), policy), end; at != end; ++at)
        found.push_back((*at)[1]);
    return found;
}

TEST(Threads, WaitPassivelyUnlessToldOtherwise) {
    const CommandResult ours = succeeded(started({}, {"--version"}));
    expect_contains(ours.out, "fp8flow ");
    ASSERT_EQ(policies(ours).size(), 2u) << ours.err;
    EXPECT_EQ(policies(ours).back(), "PASSIVE");
    EXPECT_EQ(policies(started({"OMP_WAIT_POLICY=active"}, {"--version"})), Texts{"ACTIVE"});
    EXPECT_EQ(policies(started({"GOMP_SPINCOUNT=1000"}, {"--version"})).size(), 1u);
}

TEST(Threads, ArgumentsAndExitStatusSurviveTheSecondStart) {
    const std::string refused = failure(2, started({}, {"train", "no such file.yaml", "--set", ""}));
    ASSERT_EQ(error_lines(refused).size(), 1u);
    expect_contains(refused, "--set: got an empty value");
    expect_contains(failure(2, started({}, {"train", "no such file.yaml"})),
                    "no such file.yaml: got no such file");
}

}  // namespace
}  // namespace fp8flow
