// SPDX-License-Identifier: MIT
// Bounds on length, groups and repetition: std::regex recurses over the pattern and over the states that it
// makes of it, without a limit of its own.
#include "model/bench/row_pattern.h"

#include "kernels/core/error.h"
#include "model/safetensors/header.h"

#include <algorithm>
#include <cstdint>

namespace fp8flow::bench {

namespace {

constexpr size_t kMaxLength = 256;
constexpr int64_t kMaxGroups = 32;
constexpr int64_t kMaxStates = 2048;  // length times repetition counts

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The largest number in the braces that open at `open`; counts end at `kMaxStates`.
int64_t repetitions(const std::string& pattern, size_t open) {
    int64_t largest = 1, number = 0;
    for (size_t i = open + 1; i < pattern.size() && (is_digit(pattern[i]) || pattern[i] == ','); ++i) {
        number = is_digit(pattern[i]) ? std::min(kMaxStates, number * 10 + (pattern[i] - '0')) : 0;
        largest = std::max(largest, number);
    }
    return largest;
}

void check_bounds(const std::string& pattern) {
    require(pattern.size() <= kMaxLength, ExitCode::usage,
            "--match: got a regular expression of {} bytes, want at most {}", pattern.size(), kMaxLength);
    // Escapes are not read: an escaped bracket counts, too.
    const int64_t groups = std::count(pattern.begin(), pattern.end(), '(');
    require(groups <= kMaxGroups, ExitCode::usage, "--match: got {} opening parentheses, want at most {}",
            groups, kMaxGroups);
    auto states = static_cast<int64_t>(std::max<size_t>(1, pattern.size()));
    for (size_t i = 0; i < pattern.size(); ++i) {
        if (pattern[i] == '{') states = std::min(kMaxStates + 1, states * repetitions(pattern, i));
        // libstdc++ computes the number of a back-reference without a check for overflow
        const bool reference = i > 0 && pattern[i - 1] == '\\' && is_digit(pattern[i]) && pattern[i] != '0';
        require(!reference, ExitCode::usage,
                "--match: got '{}', want a regular expression without back-references", printable(pattern));
    }
    require(states <= kMaxStates, ExitCode::usage,
            "--match: got '{}', whose length times its repetition counts exceeds {}: use * or +, or smaller "
            "counts",
            printable(pattern), kMaxStates);
}

std::regex compiled(const std::string& pattern) {
    check_bounds(pattern);
    try {
        // libstdc++'s matcher without backtracking, whose time is polynomial; it has no back-references
        return std::regex(pattern,
                          std::regex::ECMAScript | std::regex::nosubs | std::regex_constants::__polynomial);
    } catch (const std::regex_error& error) {
        fail(ExitCode::usage, "--match: got '{}', want a regular expression without back-references ({})",
             printable(pattern), error.what());
    }
}

}  // namespace

RowPattern::RowPattern(const std::string& pattern) : regex_(compiled(pattern)) {}

bool RowPattern::matches(const std::string& row) const { return std::regex_search(row, regex_); }

}  // namespace fp8flow::bench
