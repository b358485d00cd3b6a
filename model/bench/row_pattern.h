// SPDX-License-Identifier: MIT
// The regular expression of `bench --match`, bounded before the library sees it.
#pragma once

#include <regex>
#include <string>

namespace fp8flow::bench {

class RowPattern {
public:
    // Throws Error(usage) for what is no regular expression or exceeds a bound.
    explicit RowPattern(const std::string& pattern);
    bool matches(const std::string& row) const;

private:
    std::regex regex_;
};

}  // namespace fp8flow::bench
