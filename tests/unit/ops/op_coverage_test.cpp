// SPDX-License-Identifier: MIT
// Every operation of kernels/ops/list.h is compared between the backends: a test of tests/gpu makes its
// arguments. A new operation without such a test fails here, on any machine.
#include "kernels/ops/list.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

struct Listed {
    std::string name, arguments;
};
const std::vector<Listed> kOperations = {
#define FP8FLOW_LISTED(name, Args) {#name, #Args},
    FP8FLOW_FOR_EACH_OP(FP8FLOW_LISTED) FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_LISTED)
#undef FP8FLOW_LISTED
};

// A test makes the operation's arguments for Parity::run, or calls it on both backends itself.
bool runs(const std::string& text, const Listed& op) {
    return std::regex_search(text, std::regex("op::" + op.arguments + R"(\b)")) ||
           text.find("gpu." + op.name + "(") != std::string::npos;
}

TEST(OpCoverage, EveryOperationHasAParityTest) {
    std::string tests;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(FP8FLOW_SOURCE_DIR "/tests/gpu"))
        if (entry.path().filename().string().ends_with("_parity_test.cu"))
            tests += read_whole(entry.path().string());
    ASSERT_FALSE(tests.empty());
    for (const Listed& op : kOperations)
        EXPECT_TRUE(runs(tests, op)) << op.name << ": no tests/gpu/*_parity_test.cu runs it";
}

TEST(OpCoverage, NoticesAMissingTest) {
    const Listed norm{"rms_norm", "RmsNorm"};
    EXPECT_TRUE(runs("p.run(op::RmsNorm{.x = x});", norm));
    EXPECT_TRUE(runs("p.gpu.rms_norm({.x = x});", norm));
    EXPECT_FALSE(runs("p.run(op::RmsNormBackward{.x = x}); p.gpu.rms_norm_backward({});", norm));
}

}  // namespace
}  // namespace fp8flow
