// SPDX-License-Identifier: MIT
// An allocation fails, whichever it is: exit status 12 with the sizes, on every number of ranks, and no hang.
#include "kernels/core/error.h"
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

using Texts = std::vector<std::string>;

constexpr double kSeconds = 30;

// Two steps with an evaluation and a checkpoint on `ranks` ranks, of which the last has no memory from its
// allocation `first` on.
CommandResult run(int ranks, int64_t first, const std::string& out) {
    Texts line = with_settings(
        {"train", config_file("test"), "--backend", "reference", "--out", out, "--overwrite"},
        {"training.train_iters=2", "checkpoint.save_interval=1", "parallel.peer_deadline_seconds=10",
         fmt::format("parallel.expert_model_parallel_size={}", ranks)});
    if (ranks > 1)
        line = mpirun_line(ranks, line);
    else
        line.insert(line.begin(), FP8FLOW_EXECUTABLE);
    line = with_faults(line, {"FAULT_RANK=" + (ranks > 1 ? std::to_string(ranks - 1) : ""),
                              fmt::format("FAULT_ALLOCATION={}", first)});
    return RunningCommand(line, "").wait(kSeconds);
}

TEST(Memory, EveryAllocationThatFailsIsAnErrorWithItsSize) {
    TemporaryFolder folder;
    for (const int ranks : {1, 2}) {
        const int64_t stride = ranks == 1 ? 1 : 6;  // mpirun takes a second to end a job
        int64_t first = 1;
        for (;; first += stride) {
            SCOPED_TRACE(fmt::format("allocation {} of rank {} of {}", first, ranks - 1, ranks));
            const CommandResult result = run(ranks, first, folder.path("out"));
            ASSERT_FALSE(result.timed_out) << result.err;
            if (result.status == 0) break;
            ASSERT_EQ(result.status, static_cast<int>(ExitCode::memory)) << result.err;
            const Texts errors = error_lines(result.err);
            ASSERT_EQ(errors.size(), 1u) << result.err;
            expect_contains(errors[0], "out of host memory: asked for ");
        }
        EXPECT_GT(first, 15) << "few allocations: is the library loaded?";
    }
}

}  // namespace
}  // namespace fp8flow
