// SPDX-License-Identifier: MIT
// Command lines that users copy run as they are: those that the program prints as next steps, and those of
// the README and the pages that name nothing of the reader's own.
#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>

namespace fp8flow {
namespace {

namespace fs = std::filesystem;

constexpr double kSeconds = 120;

class PrintedCommands : public testing::Test {
protected:
    // A folder as a clone with a build has it, and the program on PATH.
    void SetUp() override {
        const fs::path sources = FP8FLOW_SOURCE_DIR;
        fs::create_directory(folder_.path("tests"));
        for (const char* name : {"configs", "docs", "scripts", "tests/data", "README.md"})
            fs::create_symlink(sources / name, folder_.path(name));
        for (const char* name : {"build/cpu", "build/cuda-release", "bin"}) {
            fs::create_directories(folder_.path(name));
            fs::create_symlink(FP8FLOW_EXECUTABLE, folder_.path(std::string(name) + "/fp8flow"));
        }
    }
    CommandResult shell(const std::string& line) {
        return RunningCommand({"bash", "-c", "PATH=" + folder_.path("bin") + ":$PATH; " + line},
                              folder_.path())
            .wait(kSeconds);
    }
    // The lines of `text` from the word that starts the program on.
    static Texts commands_in(const std::string& text) {
        const std::regex command(
            R"((mpirun -n |\S*/fp8flow )(?=.*\b(train|validate|profile|plan|bench|replay)\b))");
        Texts found;
        for (const std::string& line : lines_of(text)) {
            std::smatch at;
            if (std::regex_search(line, at, command)) found.push_back(line.substr(at.position(0)));
        }
        return found;
    }
    TemporaryFolder folder_;
};

// A verdict may be a miss after so few steps; anything else has to succeed.
void expect_done(const std::string& line, const CommandResult& result) {
    const bool verdict = line.find(" validate ") != std::string::npos && result.status == 1;
    EXPECT_TRUE(result.status == 0 || verdict) << line << "\n" << result.out << result.err;
}

TEST_F(PrintedCommands, NextStepsRunAsPrinted) {
    const std::string few = " --set training.train_iters=3 --set training.eval_iters=1";
    const std::string pair = "mpirun -n 2 --quiet fp8flow ";
    const std::string test = " configs/test.yaml --set parallel.expert_model_parallel_size=2";
    size_t printed = 0;
    const auto follow = [&](const std::string& line, size_t at_least) {
        const CommandResult run = shell(line);
        expect_done(line, run);
        const Texts next = commands_in(run.out);
        EXPECT_GE(next.size(), at_least) << line << "\n" << run.out;
        for (const std::string& command : next) {
            expect_done(command, shell(command));
            ++printed;
        }
    };
    follow(pair + "train" + test + few + " --out 'runs/with a blank'", 2);
    follow("fp8flow train configs/test.yaml --out runs/plain --quiet" + few, 2);
    follow(pair + "validate" + test + few + " --set validate.warmup_iters=1 --out runs/v", 1);
    follow("fp8flow profile configs/test.yaml --steps 1 --out runs/p", 1);
    follow("fp8flow bench swiglu --samples 1 --idle 0 --sustain 0", 1);
    EXPECT_GE(printed, 7u);
}

// With a train of this configuration that a signal stops: tests/cli/stop_test.cpp has the words.
TEST_F(PrintedCommands, AStoppedRunContinuesAsPrinted) {
    const CommandResult stopped = shell(
        "fp8flow train configs/test.yaml --set training.train_iters=100000 --set "
        "checkpoint.save_interval=1000 "
        "--out runs/s & until grep -qs 'iteration .*2/' runs/s/train.log; do sleep 0.05; done; kill -TERM "
        "$!; "
        "wait $!");
    EXPECT_EQ(stopped.status, 16) << stopped.err;
    const Texts next = commands_in(stopped.out);
    ASSERT_EQ(next.size(), 1u) << stopped.out;
    // Not 100000 steps: it is stopped again as soon as it has resumed.
    const CommandResult resumed =
        shell(next[0] +
              " & until grep -qs 'resumed from' runs/s/train.log; do sleep 0.05; done; sleep 0.2; "
              "kill -TERM $!; wait $!");
    EXPECT_EQ(resumed.status, 16) << next[0] << resumed.out << resumed.err;
    expect_contains(resumed.out, "resumed from ");
}

// Lines of code blocks that start the program, without their prompt and comment.
Texts documented() {
    const fs::path sources = FP8FLOW_SOURCE_DIR;
    Texts files = {"README.md", "docs/getting_started.md", "docs/operations.md"};
    for (const auto& entry : fs::directory_iterator(sources / "docs/usage"))
        files.push_back("docs/usage/" + entry.path().filename().string());
    for (const auto& entry : fs::directory_iterator(sources / "configs"))
        if (entry.is_regular_file()) files.push_back("configs/" + entry.path().filename().string());
    const std::regex start(
        R"(^(?:\$ |# Run:  )?((?:mpirun -n \d+ .*|build/cpu/)?fp8flow (?:train|validate|profile|plan|bench|replay) .*))");
    Texts lines;
    for (const std::string& file : files)
        for (const std::string& line : lines_of(read_whole((sources / file).string()))) {
            std::smatch at;
            if (!std::regex_search(line, at, start)) continue;
            std::string command = at[1];
            command.resize(std::min({command.find("  "), command.find(" # "), command.size()}));
            lines.push_back(command);
        }
    return lines;
}

TEST_F(PrintedCommands, DocumentedLinesRun) {
    // What stands for something of the reader's, options in brackets, and lines that go on.
    const std::regex placeholder(
        R"((^|[ =/\[|$])[A-Z][A-Z_]*($|[ ,=/\]|])|\[-|\.\.\.|\\$|/my/|config\.json|X )");
    size_t ran = 0;
    for (std::string line : documented()) {
        if (std::regex_search(line, placeholder)) continue;
        std::smatch file;
        const bool names_one = std::regex_search(line, file, std::regex(R"(configs/\S+\.yaml)"));
        EXPECT_TRUE(!names_one || fs::exists(folder_.path(file[0]))) << line;
        const bool runs =
            line.find(" plan ") != std::string::npos || line.find(" bench ") != std::string::npos ||
            line.find(" --help") != std::string::npos || line.find("/test.yaml") != std::string::npos ||
            line.find("/quickstart.yaml") != std::string::npos;
        if (!runs || line.find("trian_iters") != std::string::npos) continue;
        // As printed, but short: two iterations of few tokens.
        if (names_one && line.find(" plan ") == std::string::npos)
            line +=
                " --set training.train_iters=2 --set training.eval_iters=1 --set validate.warmup_iters=0 "
                "--set model.seq_length=16";
        expect_done(line, shell(line));
        ++ran;
    }
    EXPECT_GE(ran, 10u);
}

}  // namespace
}  // namespace fp8flow
