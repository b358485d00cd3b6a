// SPDX-License-Identifier: MIT
// Bounds on what std::regex gets: it recurses over groups, copies states for each repetition count, and
// computes the number of a back-reference without a check for overflow.
#include "model/bench/row_pattern.h"

#include "kernels/core/error.h"
#include "model/safetensors/header.h"

#include <algorithm>

namespace fp8flow::bench {

namespace {

std::regex compiled(const std::string& pattern) {
    constexpr size_t kMaxLength = 256;
    constexpr int64_t kMaxGroups = 32;
    require(pattern.size() <= kMaxLength, ExitCode::usage,
            "--match: got a regular expression of {} bytes, want at most {}", pattern.size(), kMaxLength);
    const int64_t groups = std::count(pattern.begin(), pattern.end(), '(');
    require(groups <= kMaxGroups, ExitCode::usage, "--match: got {} opening parentheses, want at most {}",
            groups, kMaxGroups);
    bool refused = pattern.find('{') != std::string::npos;
    for (size_t i = 1; i < pattern.size(); ++i)
        refused |= pattern[i - 1] == '\\' && pattern[i] >= '1' && pattern[i] <= '9';
    require(!refused, ExitCode::usage,
            "--match: got '{}', want a regular expression without counts in braces and back-references",
            printable(pattern));
    try {
        // __polynomial: libstdc++'s matcher without backtracking
        return std::regex(pattern,
                          std::regex::ECMAScript | std::regex::nosubs | std::regex_constants::__polynomial);
    } catch (const std::regex_error& error) {
        fail(ExitCode::usage, "--match: got '{}', want a regular expression ({})", printable(pattern),
             error.what());
    }
}

}  // namespace

RowPattern::RowPattern(const std::string& pattern) : regex_(compiled(pattern)) {}

bool RowPattern::matches(const std::string& row) const { return std::regex_search(row, regex_); }

}  // namespace fp8flow::bench
