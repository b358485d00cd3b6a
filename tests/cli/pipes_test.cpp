// SPDX-License-Identifier: MIT
// A pipe that nobody writes to, in place of each file that a user can name: an error, and no wait for a
// writer.
#include "tests/cli/command.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

TEST(Pipes, AreRefusedInPlaceOfFiles) {
    const TemporaryFolder folder;
    const std::string pipe = folder.path("pipe"), config = config_file("test");
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
    std::filesystem::create_directory(folder.path("model"));
    ASSERT_EQ(::mkfifo(folder.path("model/model.safetensors.index.json").c_str(), 0600), 0);
    const std::string profile = FP8FLOW_SOURCE_DIR "/docs/results/profile_deepseek_v3_1gpu.json";
    const auto train = [&](const Texts& more) {
        return with({"train", config, "--backend", "reference", "--out", folder.path("out")}, more);
    };
    for (const Texts& line : std::vector<Texts>{
             {"train", pipe},
             {"plan", "--hf-config", pipe},
             {"plan", config, "--plugin", pipe},
             {"bench", "rms_norm", "--plugin", pipe},
             {"plan", config, "--gpu", pipe},
             {"profile", "--compare", profile, pipe},
             {"replay", config, "--input", pipe, "--out", folder.path("out")},
             train({"--weights", pipe}),
             train({"--weights", folder.path("model")}),
             train({"--resume", pipe}),
             train({"--set", "data.data_kind=text", "--set", "model.vocab_size=257", "--set",
                    "data.data_path=[" + pipe + "]"}),
             train({"--set", "data.data_kind=megatron", "--set", "data.data_path=[" + pipe + "]"})}) {
        const CommandResult result = RunningCommand(with({FP8FLOW_EXECUTABLE}, line), folder.path()).wait(30);
        EXPECT_FALSE(result.timed_out) << testing::PrintToString(line);
        EXPECT_GT(result.status, 0) << testing::PrintToString(line);
        EXPECT_LT(result.status, static_cast<int>(ExitCode::internal)) << result.err;
        EXPECT_EQ(error_lines(result.err).size(), 1u) << testing::PrintToString(line) << result.err;
    }
}

}  // namespace
}  // namespace fp8flow
