// SPDX-License-Identifier: MIT
// Commands that a run prints as next steps. Those of whole runs: tests/cli/printed_commands_test.cpp.
#include "model/commands/next_steps.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

TEST(NextSteps, CommandsAreReadyToBeTyped) {
    EXPECT_EQ(shell_word("runs/a-1_b"), "runs/a-1_b");
    EXPECT_EQ(shell_word("my runs"), "'my runs'");
    EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
    EXPECT_EQ(shell_word(""), "''");
    const std::string alone = command_line("plan", {"a b.yaml"}, 1), four = command_line("train", {"c"}, 4);
    EXPECT_TRUE(alone.ends_with(" plan 'a b.yaml'")) << alone;
    EXPECT_EQ(alone.find("mpirun"), std::string::npos);
    EXPECT_TRUE(four.starts_with("mpirun -n 4 ")) << four;
    EXPECT_EQ(next_text({{"a", "one"}, {"bcd", "two"}}), "  next  a    one\n        bcd  two");
}

TEST(NextSteps, TheConfigurationOfANextCommandHasWhatTheRunHad) {
    const auto config_of = [](const char* path, const char* hf_config, std::vector<std::string> settings) {
        Options options;
        options.config_path = path;
        options.hf_config = hf_config;
        options.overrides = std::move(settings);
        return config_of_run(options, "out");
    };
    EXPECT_EQ(config_of("a.yaml", "", {}), "a.yaml");
    EXPECT_EQ(config_of("a.yaml", "", {"output.out=out"}), "a.yaml");
    EXPECT_EQ(config_of("a.yaml", "", {"training.lr=1", "output.out=out"}), "out/config.yaml");
    EXPECT_EQ(config_of("a.yaml", "config.json", {}), "out/config.yaml");
    EXPECT_EQ(config_of("", "config.json", {}), "out/config.yaml");
}

}  // namespace
}  // namespace fp8flow
