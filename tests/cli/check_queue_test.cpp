// SPDX-License-Identifier: MIT
// The queue of scripts/gpu_check.sh on a machine without GPUs: who runs beside whom, what a row says, and
// what a limit does.
#include "tests/cli/command.h"
#include "tests/support/files.h"

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
add_check "skips" bash -c 'echo skipped: no device; exit 77'
add_check "tool" bash -c 'echo Device not supported; exit 1'
add_check --limit 1 "late" sleep 20
add_check --patience 1 "slow tool" sleep 20
)sh");
    ASSERT_EQ(rows.size(), 6u);
    const std::vector<std::pair<std::string, std::string>> wanted = {
        {"passed", "two  2"},
        {"failed", "exit status 1: a.cu:12: Failure"},
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

TEST(CheckQueue, StatusSaysWhetherACheckFailed) {
    EXPECT_EQ(output_of("add_check a true; run_checks > /dev/null; echo $?"), std::vector<std::string>{"0"});
    EXPECT_EQ(output_of("add_check a false; add_check b true; run_checks > /dev/null; echo $?"),
              std::vector<std::string>{"1"});
}

}  // namespace
}  // namespace fp8flow
