// SPDX-License-Identifier: MIT
// Standard output and standard error that cannot be written: full, closed, or without a reader.
#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

constexpr int kOutput = static_cast<int>(ExitCode::output);

class Terminal : public testing::Test {
protected:
    // The program in a shell, with what follows it there. The status is the program's, not that of a pipe's
    // end.
    CommandResult run(const Texts& arguments, const std::string& rest) {
        const Texts shell = {"bash", "-c", "\"$@\" " + rest + "; exit ${PIPESTATUS[0]}", "bash",
                             FP8FLOW_EXECUTABLE};
        return RunningCommand(with(shell, arguments), folder_.path()).wait(60);
    }
    static Texts train(const Texts& settings = {}) {
        const Texts all = {"training.train_iters=3", "training.eval_iters=0", "checkpoint.save_interval=3"};
        return test_run("train", "out", with(all, settings), {"--overwrite"});
    }
    TemporaryFolder folder_;
};

TEST_F(Terminal, AReportThatCannotBeWrittenKeepsItsStatus) {
    for (const char* rest : {"2>/dev/full", "2>&-", "2> >(exec true)"})
        EXPECT_EQ(run(train({"training.lr=-1"}), rest).status, static_cast<int>(ExitCode::usage)) << rest;
}

// What a command has to say is all it does.
TEST_F(Terminal, AnAnswerThatCannotBeWrittenIsAnError) {
    for (const Texts& line : std::vector<Texts>{{"--help-config"},
                                                {"--help"},
                                                {"--version"},
                                                {"plan", config_file("test")},
                                                {"bench", "--list"},
                                                {"bench", "rms_norm", "--samples", "1"}}) {
        for (const char* rest : {">/dev/full", ">&-"}) {
            const CommandResult full = run(line, rest);
            EXPECT_EQ(full.status, kOutput) << line[0] << rest << full.err;
            EXPECT_EQ(error_lines(full.err).size(), 1u) << line[0] << rest << full.err;
            expect_contains(full.err, "standard output cannot be written: ");
        }
        const CommandResult read = succeeded(run(line, "| true"));
        EXPECT_TRUE(error_lines(read.err).empty()) << line[0] << read.err;
    }
}

// A run's results are its files.
TEST_F(Terminal, ARunOutlivesItsTerminal) {
    for (const char* rest : {">/dev/full", ">&-", "| head -n 1", "| true"}) {
        const CommandResult run = succeeded(this->run(train(), rest));
        const std::string warning = "warning: standard output cannot be written";
        EXPECT_EQ(run.err.find(warning), 0u) << rest << run.err;
        EXPECT_EQ(lines_of(run.err).size(), 1u) << rest << run.err;
        const std::string log = read_whole(folder_.path("out/train.log"));
        expect_contains(log, warning);
        expect_contains(log, "done: 3 iterations");
        expect_contains(log, "  next");
        EXPECT_TRUE(std::filesystem::exists(folder_.path("out/checkpoints/step_00000003"))) << rest;
        EXPECT_EQ(losses_of(folder_.path("out")).size(), 3u);
        std::filesystem::remove_all(folder_.path("out"));
    }
    EXPECT_EQ(run(train(), ">/dev/full 2>/dev/full").status, 0);
}

}  // namespace
}  // namespace fp8flow
