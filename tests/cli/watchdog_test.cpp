// SPDX-License-Identifier: MIT
// A rank is lost at every stage of a job: the others end soon, with one report that names it.
#include "tests/cli/command.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>

namespace fp8flow {
namespace {

constexpr double kDeadline = 3;          // of silence, seconds
constexpr double kSeconds = 10;          // that a job may take to end after the deadline
const std::string kShared = "/dev/shm";  // of this host's ranks

std::set<std::string> shared_files() {
    std::set<std::string> names;
    if (!std::filesystem::exists(kShared)) return names;
    for (const auto& entry : std::filesystem::directory_iterator(kShared))
        if (entry.path().filename().string().starts_with("fp8flow-")) names.insert(entry.path());
    return names;
}
// Perhaps of earlier jobs that were killed in their first second.
const std::set<std::string> kLeftBefore = shared_files();

// Those of other jobs that run now are removed by their jobs.
void expect_nothing_left() {
    std::set<std::string> left = shared_files();
    for (const std::string& name : kLeftBefore) left.erase(name);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!left.empty() && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        std::erase_if(left, [](const std::string& name) { return !std::filesystem::exists(name); });
    }
    EXPECT_EQ(left, std::set<std::string>{});
}

// mpirun of a short run with a preloaded fault.
Texts faulty(int ranks, const Texts& environment, const std::string& out, const Texts& more = {}) {
    const std::string deadline = std::to_string(kDeadline);
    const Texts line = test_run("train", out,
                                {"training.train_iters=2", "checkpoint.save_interval=1",
                                 "parallel.peer_deadline_seconds=" + deadline},
                                {"--start-deadline", deadline});
    return with_faults(mpirun_line(ranks, with(line, more)), environment);
}

void lose(int ranks, int victim, int signal, const std::string& call, const Texts& more = {}) {
    SCOPED_TRACE(call + ", signal " + std::to_string(signal) + ", rank " + std::to_string(victim) + " of " +
                 std::to_string(ranks));
    TemporaryFolder folder;
    const Texts environment =
        with({"FAULT_RANK=" + std::to_string(victim), "FAULT_CALL=" + call,
              "FAULT_SIGNAL=" + std::to_string(signal), "FAULT_STATUSES=" + folder.path("statuses")},
             more);
    RunningCommand run(faulty(ranks, environment, folder.path("out")), "");
    const CommandResult result = run.wait(kDeadline + kSeconds);
    EXPECT_FALSE(result.timed_out) << result.err;
    // mpirun hands on the status of the rank whose end it hears of first: the killed one's, and it kills the
    // others; or the reporter's. And it can fall itself when it ends (Open MPI 4.1, PMIx_server_finalize).
    const int peer = static_cast<int>(ExitCode::peer);
    std::set<int> handed_on = {peer, 128 + SIGSEGV};
    if (signal == SIGSTOP) {
        const Texts statuses = lines_of(read_whole(folder.path("statuses")));
        ASSERT_FALSE(statuses.empty()) << result.err;
        EXPECT_EQ(statuses[0], std::to_string(peer));
    } else {
        handed_on.insert(128 + signal);
    }
    EXPECT_TRUE(handed_on.contains(result.status)) << result.status << "\n" << result.err;
    const Texts errors = error_lines(result.err);
    ASSERT_EQ(errors.size(), 1u) << result.err;
    expect_contains(errors[0], "rank " + std::to_string(victim) + " (process");
    expect_nothing_left();
}

TEST(Watchdog, StoppedRankIsNamedAtEveryStage) {
    lose(2, 1, SIGSTOP, "MPI_Init_thread");
    lose(2, 0, SIGSTOP, "fsync");
    lose(4, 3, SIGSTOP, "MPI_Finalize");
}

TEST(Watchdog, KilledRankIsNamedAtEveryStage) {
    lose(4, 0, SIGKILL, "MPI_Init_thread");
    lose(2, 1, SIGKILL, "fsync");
    lose(2, 0, SIGKILL, "MPI_Finalize");
}

// A rank may start while another reports, before the launcher ends it.
TEST(Watchdog, RankThatStartsAfterTheReportAddsNone) {
    for (int late = 80; late <= 130; late += 10)
        lose(4, 0, SIGKILL, "MPI_Init_thread", {"FAULT_LATE=2", "FAULT_SLEEP_MS=" + std::to_string(late)});
}

TEST(Watchdog, WithoutProcNobodyIsLost) {
    TemporaryFolder folder;
    RunningCommand run(faulty(2, {"FAULT_NO_PROC=1"}, folder.path("out")), "");
    const CommandResult result = succeeded(run.wait(90));
    EXPECT_TRUE(error_lines(result.err).empty()) << result.err;
}

// One rank writes its part for longer than the deadline, and the other waits for it.
TEST(Watchdog, SlowExportIsWaitedFor) {
    TemporaryFolder folder;
    const Texts more = with_settings(
        {"--export", "f32"},
        {"parallel.expert_model_parallel_size=2", "model.qk_layernorm=true",
         "moe.moe_shared_expert_intermediate_size=0", "training.eval_iters=0", "precision.recipe=bf16"});
    const auto started = std::chrono::steady_clock::now();
    RunningCommand run(
        faulty(2, {"FAULT_RANK=0", "FAULT_SLOW=/hf/", "FAULT_SLEEP_MS=250"}, folder.path("out"), more), "");
    succeeded(run.wait(90));
    EXPECT_GT(std::chrono::steady_clock::now() - started, std::chrono::duration<double>(1.5 * kDeadline));
    EXPECT_TRUE(std::filesystem::exists(folder.path("out") + "/hf/config.json"));
    expect_nothing_left();
}

TEST(Watchdog, RankThatNeverReachesMainIsNamed) {
    TemporaryFolder folder;
    RunningCommand run(
        faulty(2, {"FAULT_RANK=1", "FAULT_CALL=load", "FAULT_SIGNAL=" + std::to_string(SIGSTOP)},
               folder.path("out")),
        "");
    const std::string errors = failure(ExitCode::peer, run.wait(kDeadline + kSeconds));
    ASSERT_EQ(error_lines(errors).size(), 1u) << errors;
    expect_contains(errors, "number 1 of this host: it has not reached main");
    expect_nothing_left();
}

}  // namespace
}  // namespace fp8flow
