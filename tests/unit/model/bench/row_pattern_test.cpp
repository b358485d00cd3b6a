// SPDX-License-Identifier: MIT
// bench --match: ordinary expressions work; those that make std::regex crash or run for minutes are refused
// or fast.
#include "model/bench/row_pattern.h"

#include "tests/support/files.h"

#include <chrono>

namespace fp8flow {

using namespace bench;

namespace {

std::string repeated(const std::string& text, int times) {
    std::string out;
    for (int i = 0; i < times; ++i) out += text;
    return out;
}

TEST(RowPattern, MatchesAnywhere) {
    const std::string row = "grouped_gemm_fprop experts=8 tokens=4096 recipe=fp8_flow";
    for (const char* pattern : {"", "gemm", "^grouped_.*fp8_flow$", "tokens=(4096|8192)", "experts=[0-9]+",
                                "\\btokens=\\d+\\b", "(?:dgrad|fprop)"})
        EXPECT_TRUE(RowPattern(pattern).matches(row)) << pattern;
    for (const char* pattern : {"dgrad", "^experts", "tokens=\\d\\d\\d\\d\\d"})
        EXPECT_FALSE(RowPattern(pattern).matches(row)) << pattern;
}

TEST(RowPattern, HostileExpressionsAreRefused) {
    const auto refusal = [](const std::string& pattern) {
        return error_of(ExitCode::usage, [&] { RowPattern{pattern}; });
    };
    expect_contains(refusal(repeated("(", 100000) + repeated(")", 100000)), "200000 bytes, want at most 256");
    expect_contains(refusal(repeated("(", 100) + "a" + repeated(")", 100)),
                    "100 opening parentheses, want at most 32");
    expect_contains(refusal("(a{1000}){1000}"), "without counts in braces");
    expect_contains(refusal("(a"), "want a regular expression");
    expect_contains(refusal("(a)\\1"), "and back-references");
    expect_contains(refusal("\\18446744073709551615"), "and back-references");
    EXPECT_EQ(refusal("(\x1b[").find('\x1b'), std::string::npos);
}

TEST(RowPattern, TakesNoExponentialTime) {
    const auto start = std::chrono::steady_clock::now();
    const std::string row = "op " + repeated("a", 120) + "!";
    EXPECT_FALSE(RowPattern("(a*)*(a*)*(a|a|aa)*(.*.*.*)*=b$").matches(row));
    EXPECT_FALSE(RowPattern(repeated("a?", 40) + repeated("a", 30) + "x").matches(row));
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 5.0);
}

}  // namespace
}  // namespace fp8flow
