// SPDX-License-Identifier: MIT
// The memory of a host's ranks after a job that ended without removing its name. Ranks are processes. The
// rest: tests/cli/watchdog_test.cpp.
#include "model/job/watchdog.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace fp8flow {
namespace {

// What `rank` returns in a process of its own, which ends as if it were killed.
int in_process(const std::function<int()>& rank) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(rank());
    int state = 0;
    EXPECT_EQ(::waitpid(child, &state, 0), child);
    return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
}

TEST(Watchdog, ADeadJobsMemoryIsNotTheNextJobs) {
    const std::string name = "watchdog_test " + std::to_string(::getpid());
    const auto reports = [&] {
        new Watchdog({.name = name, .rank = 0, .rank_on_host = 0, .ranks_on_host = 2, .size = 2}, 60);
        return claim_report() ? 1 : 0;
    };
    EXPECT_EQ(in_process(reports), 1);
    EXPECT_EQ(in_process(reports), 1);
    EXPECT_EQ(in_process([&] {
                  const Watchdog last(
                      {.name = name, .rank = 0, .rank_on_host = 0, .ranks_on_host = 2, .size = 2}, 60);
                  return 0;  // removes the name
              }),
              0);
}

// Both ranks of a job still share one memory.
TEST(Watchdog, RanksOfAJobShareTheirReport) {
    const std::string name = "watchdog_test 2 " + std::to_string(::getpid());
    EXPECT_EQ(in_process([&] {
                  new Watchdog({.name = name, .rank = 0, .rank_on_host = 0, .ranks_on_host = 2, .size = 2},
                               60);
                  if (!claim_report()) return 1;
                  return in_process([&] {
                      const Watchdog second(
                          {.name = name, .rank = 1, .rank_on_host = 1, .ranks_on_host = 2, .size = 2}, 60);
                      return claim_report() ? 2 : 0;
                  });
              }),
              0);
}

TEST(Watchdog, StartOfAProcess) {
    EXPECT_GT(process_start(::getpid()), 0);
    EXPECT_GE(process_start(::getpid()), process_start(::getppid()));
    EXPECT_EQ(process_start(999999999), 0);
}

}  // namespace
}  // namespace fp8flow
