// SPDX-License-Identifier: MIT
// scripts/fetch_deps.sh without a network and scripts/slurm.sbatch without Slurm: what is refused, and the
// line that would run.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace fp8flow {
namespace {

const std::string kScripts = std::string(FP8FLOW_SOURCE_DIR) + "/scripts/";

CommandResult run_bash(const std::string& text, const TemporaryFolder& folder) {
    return RunningCommand({"bash", "-c", text}, folder.path()).wait(60);
}

TEST(FetchDeps, RefusesAnArchiveWithAnotherSum) {
    const TemporaryFolder folder;
    folder.write("from/fmt-9.1.0.tar.gz", "not what was released");
    const CommandResult result = run_bash(kScripts + "fetch_deps.sh --prefix prefix --from from", folder);
    EXPECT_EQ(result.status, 2);
    EXPECT_NE(result.err.find("fmt-9.1.0.tar.gz has SHA-256"), std::string::npos) << result.err;
    EXPECT_TRUE(std::filesystem::is_empty(folder.path("prefix/archives")));
}

TEST(FetchDeps, NamesAMissingArchive) {
    const TemporaryFolder folder;
    std::filesystem::create_directory(folder.path("from"));
    const CommandResult result = run_bash(kScripts + "fetch_deps.sh --prefix prefix --from from", folder);
    EXPECT_EQ(result.status, 2);
    EXPECT_NE(result.err.find("fmt: fmt-9.1.0.tar.gz is not in from"), std::string::npos) << result.err;
}

TEST(FetchDeps, BuildsFindThePrefix) {
    const TemporaryFolder folder;
    std::filesystem::create_directory(folder.path("prefix"));
    const std::string source = "source " + kScripts + "common.sh; ";
    const CommandResult there = run_bash(source + "FP8FLOW_DEPS=prefix deps_prefix", folder);
    EXPECT_EQ(there.status, 0) << there.err;
    EXPECT_EQ(lines_of(there.out).back(), std::filesystem::canonical(folder.path("prefix")).string());
    const CommandResult missing = run_bash(source + "FP8FLOW_DEPS=nowhere deps_prefix", folder);
    EXPECT_EQ(missing.status, 2);
    EXPECT_NE(missing.err.find("FP8FLOW_DEPS: nowhere is not a folder"), std::string::npos) << missing.err;
}

class Slurm : public ::testing::Test {
protected:
    void SetUp() override {
        program("build/cuda-release/fp8flow");
        program("bin/mpirun");
        program("bin/srun");
        folder_.write("configs/small_4gpu.yaml", "");
        folder_.write("configs/own.yaml", "");
    }
    void program(const std::string& name) {
        folder_.write(name, "#!/bin/sh\necho \"$0 $*\"\n");
        std::filesystem::permissions(folder_.path(name), std::filesystem::perms::owner_all);
    }
    CommandResult submit(const std::string& environment, const std::string& arguments) {
        return run_bash(
            "export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4 "
            "SLURM_JOB_NODELIST=n[1-2] PATH=$PWD/bin:$PATH " +
                environment + "; bash " + kScripts + "slurm.sbatch " + arguments,
            folder_);
    }
    TemporaryFolder folder_;
};

TEST_F(Slurm, StartsOneRankATask) {
    const CommandResult result = submit("", "--set training.train_iters=10");
    ASSERT_EQ(result.status, 0) << result.err;
    const std::string line = lines_of(result.out).back();
    EXPECT_NE(line.find("/mpirun -n 8 --map-by ppr:4:node "), std::string::npos) << line;
    EXPECT_NE(
        line.find("/fp8flow train " + folder_.path("configs/small_4gpu.yaml") + " --backend hopper --out " +
                  folder_.path("runs/slurm-7") + " --set training.train_iters=10"),
        std::string::npos)
        << line;
}

TEST_F(Slurm, TakesAConfigACommandAndALauncher) {
    const CommandResult result = submit("FP8FLOW_LAUNCHER=srun FP8FLOW_COMMAND=validate", "configs/own.yaml");
    ASSERT_EQ(result.status, 0) << result.err;
    const std::string line = lines_of(result.out).back();
    EXPECT_NE(line.find("/srun "), std::string::npos) << line;
    EXPECT_NE(line.find("/fp8flow validate configs/own.yaml "), std::string::npos) << line;
    EXPECT_EQ(submit("FP8FLOW_LAUNCHER=ssh", "").status, 2);
    EXPECT_EQ(submit("", "configs/missing.yaml").status, 2);
}

}  // namespace
}  // namespace fp8flow
