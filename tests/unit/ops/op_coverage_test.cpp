// SPDX-License-Identifier: MIT
// Every operation of kernels/ops/list.h is declared in kernels/ops.h, and compared between the backends: a
// test of tests/gpu makes its arguments. A new operation without such a test fails here, on any machine.
#include "kernels/ops/list.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <compare>
#include <filesystem>
#include <ostream>
#include <regex>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

struct Listed {
    std::string name, arguments;
    auto operator<=>(const Listed&) const = default;
};
void PrintTo(const Listed& op, std::ostream* out) { *out << op.name << "(" << op.arguments << ")"; }
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

// Public methods of class Ops that take an operation's arguments.
std::vector<Listed> declared(const std::string& text) {
    static const std::regex pattern(
        R"(\n    void (\w+)\(const op::(\w+)& args, const Launch& launch = \{\}\);)");
    std::vector<Listed> methods;
    for (auto at = std::sregex_iterator(text.begin(), text.end(), pattern); at != std::sregex_iterator();
         ++at)
        methods.push_back({(*at)[1], (*at)[2]});
    return methods;
}

TEST(OpCoverage, OpsDeclaresWhatTheListNames) {
    std::vector<Listed> methods = declared(read_whole(FP8FLOW_SOURCE_DIR "/kernels/ops.h")),
                        listed = kOperations;
    std::sort(methods.begin(), methods.end());
    std::sort(listed.begin(), listed.end());
    EXPECT_EQ(methods, listed);
    EXPECT_EQ(declared("\n    void add(const op::Add& args, const Launch& launch = {});\n"),
              (std::vector<Listed>{{"add", "Add"}}));
    EXPECT_TRUE(declared("\n    void add(const op::Add& args);\n").empty());
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
