// SPDX-License-Identifier: MIT
// scripts/gpu_check.sh and tests/gpu/on_gpus.sh on a machine without GPUs: two pretended GPUs, and tests of
// ctest that print which GPUs they have. The configurations of the GPU runs of this build are valid.
#include "tests/cli/command.h"

#include "model/config/config.h"
#include "tests/support/files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

using nlohmann::json;

class GpuCheck : public testing::Test {
protected:
    void SetUp() override {
        for (const char* script : {"scripts/gpu_check.sh", "scripts/common.sh", "tests/gpu/on_gpus.sh"})
            program(script, read_whole(std::string(FP8FLOW_SOURCE_DIR "/") + script));
        program("bin/nvidia-smi",
                "#!/bin/sh\ncase $* in *name*) echo NVIDIA H200, 580.1 ;; *) printf '0\\n1\\n' ;; esac\n");
        program("bin/cmake", "#!/bin/sh\ncase $1 in --build) echo $* >> built ;; esac\n");
        for (const char* file : {"CMakeLists.txt", "configs/a", "include/a", "kernels/a", "layers/a",
                                 "model/a", "cmake/a", "tests/a"})
            folder_.write(file, "");
        program("build/cuda-release/tests/gpu_show",
                "#!/bin/sh\necho \"$1: $CUDA_VISIBLE_DEVICES, $FP8FLOW_GOLDEN\" >> ran\nexit ${2:-0}\n");
        test("gpu_one", "gpu", 1, "0");
        test("gpu_bad", "gpu", 1, "3");
        test("gpu_absent", "gpu", 1, "77");
        test("gpu_pair_2", "multi-gpu", 2, "0");
        test("gpu_pair_4", "multi-gpu", 4, "0");
        test("memcheck_gpu_one", "sanitizer", 1, "0");
        test("profile_a_1", "bench", 1, "0");
        folder_.write("build/cuda-release/CTestTestfile.cmake", tests_);
    }
    void program(const std::string& name, const std::string& text) {
        folder_.write(name, text);
        std::filesystem::permissions(folder_.path(name), std::filesystem::perms::owner_all);
    }
    void test(const std::string& name, const std::string& label, int gpus, const std::string& status) {
        tests_ += fmt::format(
            "add_test({0} {1}/tests/gpu/on_gpus.sh {2} {1}/build/cuda-release/tests/gpu_show {0} {3})\n"
            "set_tests_properties({0} PROPERTIES LABELS \"{4};gpus{2}\" RESOURCE_GROUPS {2},gpus:1 "
            "PROCESSORS {2} SKIP_RETURN_CODE 77 WORKING_DIRECTORY {1})\n",
            name, folder_.path(), gpus, status, label);
    }
    // What the checks say in gpu_check.json, by name; the exit status is `status`.
    std::map<std::string, std::string> check(const std::string& arguments, int status) {
        const std::string line = fmt::format(
            "cd {0}; rm -f ran built; export PATH={0}/bin:$PATH; unset CUDA_VISIBLE_DEVICES FP8FLOW_GOLDEN; "
            "{0}/scripts/gpu_check.sh {1} out",
            folder_.path(), arguments);
        const CommandResult result = RunningCommand({"bash", "-c", line}, folder_.path()).wait(120);
        EXPECT_EQ(result.status, status) << result.out << result.err;
        std::map<std::string, std::string> results;
        if (status > 1) return results;
        const json report = read_json(folder_.path("out/gpu_check.json"));
        EXPECT_EQ(report.at("gpus"), 2);
        for (const json& row : report.at("checks")) results[row.at("check")] = row.at("result");
        return results;
    }
    Texts ran() const {
        Texts lines = lines_of(read_whole(folder_.path("ran")));
        std::sort(lines.begin(), lines.end());
        return lines;
    }

    TemporaryFolder folder_;
    std::string tests_;
};

using Results = std::map<std::string, std::string>;

TEST_F(GpuCheck, RunsWhatFitsAndSaysWhatBecameOfIt) {
    EXPECT_EQ(check("", 1), (Results{{"gpu_one", "passed"},
                                     {"gpu_bad", "failed"},
                                     {"gpu_absent", "not run"},
                                     {"gpu_pair_2", "passed"},
                                     {"memcheck_gpu_one", "passed"}}));
    EXPECT_EQ(lines_of(read_whole(folder_.path("built"))).size(), 1u);
    expect_contains(read_whole(folder_.path("built")), "--target gpu_show");
}

TEST_F(GpuCheck, SelectsByLabelAndName) {
    EXPECT_EQ(check("--label multi-gpu --only '_2$'", 0), (Results{{"gpu_pair_2", "passed"}}));
    EXPECT_EQ(ran(), Texts{"gpu_pair_2: 0,1, require"});
    EXPECT_EQ(check("--label sanitizer", 0), (Results{{"memcheck_gpu_one", "passed"}}));
    EXPECT_EQ(check("--only profile", 0), (Results{{"profile_a_1", "passed"}}));
    EXPECT_EQ(check("--label gpu --skip 'bad|absent'", 0), (Results{{"gpu_one", "passed"}}));
    check("--only nothing", 2);
    check("--share 3", 2);
}

TEST_F(GpuCheck, WhatPassedIsNotRunAgain) {
    check("--label gpu --resume state", 1);
    EXPECT_EQ(check("--label gpu --resume state", 1),
              (Results{{"gpu_bad", "failed"}, {"gpu_absent", "not run"}}));
    folder_.write("kernels/a", "other sources");
    EXPECT_EQ(check("--label gpu --resume state", 1).size(), 3u);
}

TEST_F(GpuCheck, RanksShareGpus) {
    EXPECT_EQ(check("--share 4 --only pair_4", 0), (Results{{"gpu_pair_4", "passed"}}));
    EXPECT_EQ(ran(), Texts{"gpu_pair_4: 0,1, require"});
}

// The keys and values of every run in cmake/GpuRuns.cmake, as ctest's file of this build has them.
TEST(GpuRuns, HaveValidConfigurations) {
    int runs = 0;
    for (const std::string& line : lines_of(read_whole(FP8FLOW_BINARY_DIR "/CTestTestfile.cmake"))) {
        std::string config, last;
        Texts settings;
        std::istringstream words(line.starts_with("add_test(") ? line : "");
        for (std::string word; std::getline(words, word, '"') && std::getline(words, word, '"');
             last = word) {
            if (word.starts_with(FP8FLOW_SOURCE_DIR "/configs/")) config = word;
            if (last == "--set") settings.push_back(word);
        }
        if (config.empty()) continue;
        ++runs;
        EXPECT_NO_THROW(load_config(config, settings)) << line;
    }
    EXPECT_GT(runs, 60);
}

}  // namespace
}  // namespace fp8flow
