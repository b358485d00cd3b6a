// SPDX-License-Identifier: MIT
// OpenMP's threads wait without spinning unless the user chose otherwise, and the program that has started
// itself again for that is the one that was started.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <regex>

namespace fp8flow {
namespace {

using Texts = std::vector<std::string>;

// The program in an environment without a choice, but for these variables. What OpenMP read of it is on
// standard error, once for each start.
CommandResult started(const Texts& environment, const Texts& arguments) {
    Texts line = {"env", "-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT", "OMP_DISPLAY_ENV=true"};
    line.insert(line.end(), environment.begin(), environment.end());
    line.emplace_back(FP8FLOW_EXECUTABLE);
    line.insert(line.end(), arguments.begin(), arguments.end());
    return RunningCommand(line, "").wait(60);
}

Texts policies(const CommandResult& result) {
    const std::regex policy("OMP_WAIT_POLICY *= *'([A-Z]*)'");
    Texts found;
    for (std::sregex_iterator at(result.err.begin(), result.err.end(), policy), end; at != end; ++at)
        found.push_back((*at)[1]);
    return found;
}

TEST(Threads, WaitPassivelyUnlessToldOtherwise) {
    const CommandResult ours = started({}, {"--version"});
    EXPECT_EQ(ours.status, 0) << ours.err;
    expect_contains(ours.out, "fp8flow ");
    ASSERT_EQ(policies(ours).size(), 2u) << ours.err;
    EXPECT_EQ(policies(ours).back(), "PASSIVE");
    EXPECT_EQ(policies(started({"OMP_WAIT_POLICY=active"}, {"--version"})), Texts{"ACTIVE"});
    EXPECT_EQ(policies(started({"GOMP_SPINCOUNT=1000"}, {"--version"})).size(), 1u);
}

TEST(Threads, ArgumentsAndExitStatusSurviveTheSecondStart) {
    const CommandResult refused = started({}, {"train", "no such file.yaml", "--set", ""});
    EXPECT_EQ(refused.status, 2);
    ASSERT_EQ(error_lines(refused.err).size(), 1u);
    expect_contains(refused.err, "no such file.yaml: got no such file");
}

}  // namespace
}  // namespace fp8flow
