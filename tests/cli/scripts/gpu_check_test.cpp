// SPDX-License-Identifier: MIT
// scripts/gpu_check.sh and scale_check.sh from end to end on a machine without GPUs: two pretended GPUs, and
// programs that only say what they are. Which checks there are, that validate runs at the stated bar and
// leaves its errors, that two calls together do all, and what is made of results of profile, bench and train.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <string>

namespace fp8flow {
namespace {

class GpuCheck : public testing::Test {
protected:
    void SetUp() override {
        for (const char* script :
             {"gpu_check.sh", "scale_check.sh", "scale_figures.py", "check_queue.sh", "common.sh"})
            program(std::string("scripts/") + script,
                    read_whole(std::string(FP8FLOW_SOURCE_DIR "/scripts/") + script));
        for (const char* test :
             {"gpu/norm/norm_parity_test.cu", "gpu_mpi/exchange_gpu_test.cu", "gpu_mpi/golden_test.cu"})
            folder_.write(std::string("tests/") + test, "");
        program("scripts/test_python.sh", "#!/bin/sh\necho 3 passed\n");
        program("bin/nvidia-smi",
                "#!/bin/sh\ncase $* in *name*) echo NVIDIA H200 ;; *) printf '0\\n1\\n' ;; esac\n");
        program("bin/cmake", "#!/bin/sh\nexit 0\n");
        program("bin/compute-sanitizer", "#!/bin/sh\necho ERROR SUMMARY: 0 errors\n");
        program(
            "bin/mpirun",
            "#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 != -n && $1 != --bind-to ]] || shift; shift; done\n"
            "exec \"$@\"\n");
        const std::string log =
            "echo \"${FP8FLOW_SHARE_GPUS:+shared }$(basename $0) $*\" >> " + folder_.path("ran") + "\n";
        for (const char* test : {"gpu_norm_parity_test", "gpu_mpi_exchange_gpu_test",
                                 "gpu_mpi_checkpoint_gpu_test", "gpu_mpi_golden_test"})
            program(std::string("build/cuda-release/tests/") + test,
                    "#!/bin/bash\n" + log + "echo '[  PASSED  ] 1 test.'\n");
        program("build/cuda-release/fp8flow", "#!/bin/bash\n" + log + R"sh(
[[ $1 == --help ]] && exit
while (($#)); do if [[ $1 == --out ]]; then out=$2; fi; shift; done
mkdir -p "$out"
printf '{"type":"step","iteration":%d,"lm_loss":2,"tokens_per_second":8e4,"tflops_per_gpu":300}\n' 1 2 3 > "$out/metrics.jsonl"
echo '{"parameters, sum": 2147483648, "saved for backward, reserved": 1, "workspace, reserved": 1}' > "$out/memory.json"
echo '{"memory_bytes": {"total": 2147483648}}' > "$out/plan.json"
cp "$RESULTS/../../tests/data/profiles/exposed_deepseek_v3_2gpu.json" "$out/profile.json"
cp "$RESULTS/bench_exchange_h200_x2.json" "$out/bench.json"
printf '{\n  "arms": [\n    {\n      "arm": "fp8_flow",\n      "max relative error": 0.00125\n    }\n  ]\n}\n' > "$out/validate.json"
echo held-out loss 2
echo verdict: pass
)sh");
    }
    void program(const std::string& name, const std::string& text) {
        folder_.write(name, text);
        std::filesystem::permissions(folder_.path(name), std::filesystem::perms::owner_all);
    }
    CommandResult check(const std::string& arguments, const std::string& script = "gpu_check.sh") {
        const std::string line = fmt::format(
            "export PATH={}:$PATH RESULTS={}/docs/results; unset CUDA_VISIBLE_DEVICES; {} {}",
            folder_.path("bin"), FP8FLOW_SOURCE_DIR, folder_.path("scripts/" + script), arguments);
        return RunningCommand({"bash", "-c", line}, folder_.path()).wait(120);
    }
    std::map<std::string, nlohmann::json> rows(const std::string& name = "gpu_check") const {
        std::map<std::string, nlohmann::json> rows;
        const auto json =
            nlohmann::json::parse(read_whole(folder_.path(fmt::format("runs/{0}/{0}.json", name))));
        for (const auto& row : json.at("checks")) rows[row.at("check")] = row;
        return rows;
    }

    TemporaryFolder folder_;
};

TEST_F(GpuCheck, TheChecksAndTheirFigures) {
    const CommandResult result = check("");
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    const auto found = rows();
    for (const char* ranks : {"1", "2"})
        for (const char* name :
             {"gpu_mpi_golden_test hashes", "gpu_mpi_golden_test alltoall is flex",
              "gpu_mpi_golden_test recompute modes", "gpu_mpi_golden_test flow switches",
              "gpu_mpi_golden_test schedules", "gpu_mpi_golden_test delays",
              "gpu_mpi_exchange_gpu_test, levels", "gpu_mpi_exchange_gpu_test, window", "train"})
            EXPECT_EQ(found.count(fmt::format("{} on {}", name, ranks)), 1u) << name << " on " << ranks;
    EXPECT_EQ(found.count("gpu_norm_parity_test"), 1u);
    EXPECT_EQ(found.count("python"), 1u);
    EXPECT_EQ(found.count("memcheck gpu_norm_parity_test"), 1u);
    EXPECT_EQ(found.count("memcheck gpu_mpi_golden_test"), 0u);
    for (const auto& [name, row] : found) EXPECT_EQ(row["result"], "passed") << row;
    EXPECT_EQ(found.at("validate on 2").at("figures"), (nlohmann::json{{"fp8_flow", 0.00125}}));
    const std::string ran = read_whole(folder_.path("ran"));
    expect_contains(ran, "--set validate.max_relative_loss_error=0.0025");
    expect_contains(ran, "gpu_mpi_golden_test --gtest_filter=Golden.AlltoallIsFlex");
    expect_contains(ran, "gpu_mpi_exchange_gpu_test --gtest_filter=*/window");
}

TEST_F(GpuCheck, TwoCallsTogetherDoAll) {
    EXPECT_EQ(check("--resume runs/state --only golden").status, 0);
    const CommandResult rest = check("--resume runs/state");
    EXPECT_EQ(rest.status, 0) << rest.out << rest.err;
    expect_contains(rest.out, "24 of ");
    expect_contains(rest.out, "0 of ");
    const std::string ran = read_whole(folder_.path("ran"));
    int golden = 0;
    for (const std::string& line : lines_of(ran)) golden += line.starts_with("gpu_mpi_golden_test") ? 1 : 0;
    EXPECT_EQ(golden, 24) << ran;  // twelve of them, on one rank and on two, once
    EXPECT_EQ(rows().count("gpu_mpi_golden_test hashes on 1"), 1u);
    EXPECT_EQ(rows().count("train on 2"), 1u);
}

TEST_F(GpuCheck, PartsAreFoundByTheirNames) {
    EXPECT_EQ(check("--only 'flow switches on 2'").status, 0);
    EXPECT_EQ(rows().size(), 1u);
    EXPECT_EQ(lines_of(read_whole(folder_.path("ran"))).back(),
              "gpu_mpi_golden_test --gtest_filter=Golden.SwitchesOfTheFlow");
}

TEST_F(GpuCheck, ScaleAndItsBars) {
    const CommandResult result = check("--skip faults", "scale_check.sh");
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    const auto found = rows("scale_check");
    for (const char* name : {"layer deepseek_v3", "layer deepseek_v3 micro-batches",
                             "layer deepseek_v3 graph", "bits: schedules", "bits: hosts", "test: checkpoint",
                             "exchange", "train qwen3_30b_a3b", "state divided", "hosts, experts across"})
        EXPECT_EQ(found.count(name), 1u) << name;
    EXPECT_EQ(found.count("layer deepseek_v3 on 4"), 0u);  // of eight GPUs
    for (const auto& [name, row] : found) EXPECT_EQ(row["result"], "passed") << row;
    EXPECT_EQ(found.at("layer deepseek_v3").at("figures").at("fp8_flow").at("exposed ms"), 0.58);
    expect_contains(result.out, "fp8_flow + shared: 11.75 ms at 1536 MHz / 11.69 ms at 1541 MHz = 1.005");
    expect_contains(result.out, "wire exposed <= 0.2 ms");
    expect_contains(result.out, "2.0 / 2.0 GiB = 1.000; 80000 tokens/s, 300.0 TFLOP/s a GPU");
    const std::string ran = read_whole(folder_.path("ran"));
    expect_contains(ran, "--set parallel.hosts=2x1");
    expect_contains(ran, "fp8flow plan --check");
}

TEST_F(GpuCheck, MoreRanksShareTheGpus) {
    const CommandResult result = check("--share 8", "scale_check.sh");
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    const auto found = rows("scale_check");
    for (const char* name : {"bits: schedules, 8 ranks", "bits: graphs, 8 ranks", "bits: saved rows, 8 ranks",
                             "test: exchange by two levels, 8 ranks"})
        EXPECT_EQ(found.count(name), 1u) << name;
    for (const auto& [name, row] : found) {
        EXPECT_TRUE(name.ends_with(", 8 ranks")) << name;
        EXPECT_EQ(row["result"], "passed") << row;
    }
    const std::string ran = read_whole(folder_.path("ran"));
    expect_contains(ran, "shared gpu_mpi_golden_test --gtest_filter=Golden.SchedulesChangeNoBit");
    expect_contains(ran, "shared gpu_mpi_checkpoint_gpu_test");
    expect_contains(check("--share 8 --rehearsal 4", "scale_check.sh").err, "--share");
}

}  // namespace
}  // namespace fp8flow
