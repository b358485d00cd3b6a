// SPDX-License-Identifier: MIT
// Every script that can be run prints its usage for --help and refuses an argument that it does not know, at
// once: nothing is built, installed or written.
#include "tests/cli/command.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

namespace fs = std::filesystem;

constexpr double kSeconds = 120;  // a busy machine takes long to load torch
const std::string kRoot = FP8FLOW_SOURCE_DIR, kUnknown = "--no-such-argument";

Texts scripts() {
    Texts found = {kRoot + "/.ci/run"};
    for (const auto& entry : fs::directory_iterator(kRoot + "/scripts"))
        if (entry.is_regular_file() && ::access(entry.path().c_str(), X_OK) == 0)
            found.push_back(entry.path().string());
    return found;
}

TEST(Scripts, HelpPrintsTheUsageAndAnUnknownArgumentIsAnError) {
    const TemporaryFolder folder;
    const Texts all = scripts();
    ASSERT_GT(all.size(), 15u);
    for (const std::string& script : all) {
        SCOPED_TRACE(script);
        const std::string name = fs::path(script).filename().string();
        const bool needs_python = script.ends_with(".py");
        if (needs_python && !fs::exists("/usr/bin/python3")) continue;
        const CommandResult help =
            succeeded(RunningCommand({script, "--help"}, folder.path()).wait(kSeconds));
        EXPECT_GE(lines_of(help.out).size(), 2u) << help.out;
        EXPECT_EQ(help.err, "");
        const CommandResult unknown = RunningCommand({script, kUnknown}, folder.path()).wait(kSeconds);
        EXPECT_EQ(unknown.status, 2) << unknown.out << unknown.err;
        EXPECT_EQ(unknown.out, "");
        expect_contains(unknown.err, "error: ");
        // of some an argument is missing, too; Slurm's script wants a job first
        if (!needs_python && name != "slurm.sbatch") expect_contains(unknown.err, kUnknown);
    }
}

// What a script hands on is looked at before an hour of building.
TEST(Scripts, ArgumentsForOthersAreCheckedFirst) {
    const TemporaryFolder folder;
    for (const Texts& line : {Texts{kRoot + "/scripts/train.sh", "-n", "1", "--train_iters=3"},
                              Texts{kRoot + "/scripts/test.sh", "-R", "permute", "--verbos"},
                              Texts{kRoot + "/scripts/test.sh", "-R"}}) {
        const CommandResult result = RunningCommand(line, folder.path()).wait(kSeconds);
        EXPECT_EQ(result.status, 2) << result.out << result.err;
        EXPECT_EQ(result.out, "");
    }
}

// In a folder that has only what it reads before the build: the next thing that is missing is the build's.
TEST(Scripts, TrainTakesTheOptionsOfTheProgram) {
    const TemporaryFolder folder;
    fs::create_directory(folder.path("scripts"));
    for (const char* name : {"scripts/train.sh", "scripts/common.sh", "model", "configs"})
        fs::create_symlink(kRoot + "/" + name, folder.path(name));
    for (const char* option : {"--set", "--out=a", "--resume", "--export=bf16", "--quiet", "--plugin"}) {
        const CommandResult result =
            RunningCommand({folder.path("scripts/train.sh"), "-n", "1", option}, folder.path())
                .wait(kSeconds);
        expect_contains(result.err, "setup_deps.sh: No such file");
    }
}

}  // namespace
}  // namespace fp8flow
