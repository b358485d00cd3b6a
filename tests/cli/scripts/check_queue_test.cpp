// SPDX-License-Identifier: MIT
// The queue of scripts/gpu_check.sh on a machine without GPUs: who runs beside whom, what a row says, what a
// limit does, and what a later call goes on with.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fp8flow {
namespace {

// Runs a script after the queue's functions, with two pretended GPUs; what it prints.
std::vector<std::string> output_of(const std::string& script) {
    const TemporaryFolder folder;
    const std::string text = std::string("source ") + FP8FLOW_SOURCE_DIR + "/scripts/common.sh; source " +
                             FP8FLOW_SOURCE_DIR + "/scripts/check_queue.sh; out=" + folder.path() +
                             "; gpu_ids=(4 7); cores=12\n" + script;
    const CommandResult result = RunningCommand({"bash", "-c", text}, folder.path()).wait(60);
    EXPECT_EQ(result.status, 0) << result.err;
    return lines_of(result.out);
}

// The checks' rows, which are the last lines.
std::vector<nlohmann::json> rows_of(const std::string& checks) {
    std::vector<nlohmann::json> rows;
    for (const std::string& line :
         output_of(checks + "\nrun_checks > /dev/null\nprintf '%s\\n' \"${check_rows[@]}\""))
        rows.push_back(nlohmann::json::parse(line));
    return rows;
}

TEST(CheckQueue, RowsSayWhatHappened) {
    const auto rows = rows_of(R"sh(
add_check --detail two "two lines" printf 'one\ntwo \\ "2"\nthree\n'
add_check "fails" bash -c 'echo "a.cu:12: Failure"; echo 1 FAILED TEST; exit 1'
add_check "throws" bash -c 'echo "unknown file: Failure"; echo "C++ exception with description no room"; exit 1'
add_check "skips" bash -c 'echo skipped: no device; exit 77'
add_check "tool" bash -c 'echo Device not supported; exit 1'
add_check --limit 1 "late" sleep 20
add_check --patience 1 "slow tool" sleep 20
)sh");
    ASSERT_EQ(rows.size(), 7u);
    const std::vector<std::pair<std::string, std::string>> wanted = {
        {"passed", "two  2"},
        {"failed", "exit status 1: a.cu:12: Failure"},
        {"failed", "exit status 1: C++ exception with description no room"},
        {"not run", "skipped: no device"},
        {"not run", "Device not supported"},
        {"failed", "stopped after 1 s"},
        {"not run", "stopped after 1 s"}};
    for (size_t i = 0; i < rows.size(); ++i) {
        EXPECT_EQ(rows[i]["result"], wanted[i].first) << rows[i];
        EXPECT_EQ(rows[i]["detail"], wanted[i].second) << rows[i];
    }
}

TEST(CheckQueue, SmallChecksShareAGpuOthersDoNot) {
    const auto rows = rows_of(R"sh(
show='start=$(date +%s%N); sleep 0.3; echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS $start $(date +%s%N)"'
for i in 1 2 3 4 5 6 7; do add_check "small $i" bash -c "$show"; done
add_check --gpus 2 both bash -c "$show"
add_check --gpus 1 alone bash -c "$show"
)sh");
    ASSERT_EQ(rows.size(), 9u);
    struct Seen {
        std::string devices;
        int threads = 0;
        int64_t start = 0, end = 0;
    };
    std::vector<Seen> seen(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        std::istringstream words(rows[i]["detail"].get<std::string>());
        words >> seen[i].devices >> seen[i].threads >> seen[i].start >> seen[i].end;
        EXPECT_EQ(seen[i].threads, i < 7 ? 2 : 6) << rows[i];  // of 12 cores
    }
    for (size_t i = 0; i < 6; ++i) {  // three a GPU, in turns; the seventh waits for one of them
        EXPECT_EQ(seen[i].devices, i % 2 == 0 ? "4" : "7");
        EXPECT_GE(seen[6].start, seen[i].start);
    }
    EXPECT_EQ(seen[7].devices, "4,7");
    for (size_t i = 0; i < 7; ++i) EXPECT_GE(seen[7].start, seen[i].end);
    EXPECT_EQ(seen[8].devices, "4");
    EXPECT_GE(seen[8].start, seen[7].end);
}

TEST(CheckQueue, NothingStartsPastTheBudget) {
    const auto rows = rows_of("budget=2\nadd_check --gpus 2 a sleep 20\nadd_check b true");
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0]["result"], "not run");
    EXPECT_EQ(rows[1]["result"], "not run");
    EXPECT_EQ(rows[1]["detail"], "the budget of 2 s is used up");
}

// Calls of the queue one after the other that keep their results in one file; each check leaves its name in
// `ran`, a line a time.
class ResumedQueue : public testing::Test {
protected:
    std::vector<nlohmann::json> call(const std::string& key, const std::string& checks) {
        return rows_of(fmt::format("resume={}; source_key={}; ran={}; export ran\n{}", state(), key,
                                   folder_.path("ran"), checks));
    }
    std::string state() const { return folder_.path("state/results"); }
    // What ran since the last look, in that order.
    std::string ran() {
        std::string names;
        for (const std::string& line : lines_of(read_whole(folder_.path("ran"))))
            names += (names.empty() ? "" : " ") + line;
        folder_.write("ran", "");
        return names;
    }

    TemporaryFolder folder_;
    const std::string note_ = "note='echo $0 >> $ran; '; ";
};

TEST_F(ResumedQueue, WhatPassedIsNotRunAgain) {
    const std::string checks =
        note_ +
        "add_check --gpus 2 --figures 'echo {\\\"x\\\": 0.25}' a bash -c \"$note echo one\" a\n"
        "add_check --gpus 2 b bash -c \"$note test -f " +
        folder_.path("mended") +
        "\" b\n"
        "add_check --gpus 2 c bash -c \"$note echo no device; exit 77\" c\n";
    auto rows = call("k1", checks);
    EXPECT_EQ(ran(), "a b c");
    ASSERT_EQ(rows.size(), 3u);
    EXPECT_EQ(rows[0]["result"], "passed");
    EXPECT_EQ(rows[1]["result"], "failed");
    EXPECT_EQ(rows[2]["result"], "not run");
    EXPECT_EQ(rows[0]["figures"]["x"], 0.25);
    EXPECT_FALSE(rows[1].contains("figures"));
    folder_.write("mended", "");
    const auto again = call("k1", checks);
    EXPECT_EQ(ran(), "b c");
    ASSERT_EQ(again.size(), 3u);
    EXPECT_EQ(again[0], rows[0]);  // as it was recorded
    EXPECT_EQ(again[1]["result"], "passed");
    call("k1", checks);
    EXPECT_EQ(ran(), "c");
    call("k2", checks);  // other sources
    EXPECT_EQ(ran(), "a b c");
}

TEST_F(ResumedQueue, WhatWasNeverTriedComesFirst) {
    const std::string old = note_ +
                            "add_check --gpus 2 skips bash -c \"$note exit 77\" skips\n"
                            "add_check --gpus 2 fails bash -c \"$note exit 1\" fails\n";
    call("k", old);
    EXPECT_EQ(ran(), "skips fails");
    call("k", old + "add_check --gpus 2 fresh bash -c \"$note true\" fresh\n");
    EXPECT_EQ(ran(), "fresh fails skips");
}

// What found no time is not recorded; the next call begins with it.
TEST_F(ResumedQueue, TheBudgetLeavesTheRestToTheNextCall) {
    const std::string checks = note_ +
                               "add_check --gpus 2 --limit 3 slow bash -c \"$note sleep 2.5\" slow\n"
                               "add_check --gpus 2 last bash -c \"$note true\" last\n";
    const auto rows = call("k", "budget=2\n" + checks);
    EXPECT_EQ(ran(), "slow");
    EXPECT_EQ(rows[0]["result"], "not run");
    EXPECT_EQ(rows[1]["detail"], "the budget of 2 s is used up");
    const auto all = call("k", checks);
    EXPECT_EQ(ran(), "last slow");
    EXPECT_EQ(all[0]["result"], "passed");
    EXPECT_EQ(all[1]["result"], "passed");
}

// So a call that is killed keeps what it had.
TEST_F(ResumedQueue, ResultsAreKeptAsTheyCome) {
    const auto rows = call("k", note_ +
                                    "add_check --gpus 2 a bash -c \"$note true\" a\n"
                                    "add_check --gpus 2 b grep -c 'k|a|passed|' " +
                                    state() + "\n");
    EXPECT_EQ(rows[1]["result"], "passed");
    EXPECT_EQ(rows[1]["detail"], "1");
}

// A line that was cut, or that is no line of ours, is passed over.
TEST_F(ResumedQueue, DamagedLinesAreNoResults) {
    folder_.write("state/results", "k|a|passed|1\ngarbage\nk||passed|0||\nk|b|passed|7||as | it was\n");
    const auto rows = call("k", note_ +
                                    "add_check --gpus 2 a bash -c \"$note true\" a\n"
                                    "add_check --gpus 2 b bash -c \"$note true\" b\n");
    EXPECT_EQ(ran(), "a");
    EXPECT_EQ(rows[1]["seconds"], 7);
    EXPECT_EQ(rows[1]["detail"], "as | it was");
}

TEST(CheckQueue, FiguresAreTheErrorsOfValidate) {
    const TemporaryFolder folder;
    const nlohmann::json validated = {
        {"bar", 0.0025},
        {"arms",
         {{{"arm", "bf16"}, {"verdict", "baseline"}},
          {{"arm", "fp8_flow"}, {"grad norm ratio", 1.01}, {"max relative error", 0.00125}},
          {{"arm", "bf16 control"}, {"max relative error", 3.5e-5}, {"mean relative error", 1e-5}}}}};
    const std::string path = folder.write("validate.json", validated.dump(2) + "\n");
    const auto lines = output_of(fmt::format("errors_of_validate {}; errors_of_validate nowhere", path));
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_EQ(nlohmann::json::parse(lines[0]),
              (nlohmann::json{{"fp8_flow", 0.00125}, {"bf16 control", 3.5e-5}}));
}

TEST(CheckQueue, TheKeyFollowsTheSources) {
    const TemporaryFolder folder;
    folder.write("kernels/a.cpp", "one");
    folder.write("docs/a.md", "one");
    const std::string key = fmt::format("root={}; key_of_sources", folder.path());
    const auto first = output_of(key);
    ASSERT_EQ(first.size(), 1u);
    EXPECT_EQ(first[0].size(), 16u);
    folder.write("docs/a.md", "two");
    EXPECT_EQ(output_of(key), first);
    folder.write("kernels/a.cpp", "two");
    EXPECT_NE(output_of(key), first);
}

TEST(CheckQueue, StatusSaysWhetherACheckFailed) {
    EXPECT_EQ(output_of("add_check a true; run_checks > /dev/null; echo $?"), std::vector<std::string>{"0"});
    EXPECT_EQ(output_of("add_check a false; add_check b true; run_checks > /dev/null; echo $?"),
              std::vector<std::string>{"1"});
}

}  // namespace
}  // namespace fp8flow
