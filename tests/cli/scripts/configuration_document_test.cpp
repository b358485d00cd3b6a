// SPDX-License-Identifier: MIT
// docs/configuration.md is what the program says of its keys; the check is also shown a file that differs.
#include "tests/cli/command.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <string>

namespace fp8flow {
namespace {

const std::string kRoot = FP8FLOW_SOURCE_DIR;

CommandResult check(const std::string& file) {
    RunningCommand command(
        {kRoot + "/scripts/make_configuration_doc.sh", "--check", FP8FLOW_EXECUTABLE, file}, kRoot);
    return command.wait(60);
}

std::string document() { return read_whole(kRoot + "/docs/configuration.md"); }

TEST(ConfigurationDocument, IsWhatTheProgramSays) {
    const CommandResult result = check(kRoot + "/docs/configuration.md");
    EXPECT_EQ(result.status, 0) << result.err;
}

TEST(ConfigurationDocument, AnotherMeaningIsFound) {
    TemporaryFolder folder;
    std::string text = document();
    const size_t key = text.find("| `hidden_size` |");
    ASSERT_NE(key, std::string::npos);
    text.insert(text.find("residual", key), "other ");
    const CommandResult result = check(folder.write("configuration.md", text));
    EXPECT_EQ(result.status, 1);
    expect_contains(result.err, "+| `hidden_size` |");
    expect_contains(result.err, "run scripts/make_configuration_doc.sh");
}

TEST(ConfigurationDocument, AMissingKeyIsFound) {
    TemporaryFolder folder;
    std::string text = document();
    const size_t key = text.find("| `moe_router_topk` |");
    ASSERT_NE(key, std::string::npos);
    text.erase(key, text.find('\n', key) + 1 - key);
    const CommandResult result = check(folder.write("configuration.md", text));
    EXPECT_EQ(result.status, 1);
    expect_contains(result.err, "+| `moe_router_topk` |");
}

}  // namespace
}  // namespace fp8flow
