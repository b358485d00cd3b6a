// SPDX-License-Identifier: MIT
// Colours by the words that a line begins with.
#include "model/report/terminal.h"

#include <fmt/format.h>

namespace fp8flow::report {

std::string colored(std::string_view line) {
    constexpr struct {
        std::string_view start, code;
    } kKinds[] = {{"warning:", "33"},         {"note:", "36"},   {"verdict: pass", "1;32"},
                  {"verdict:", "1;31"},       {"done:", "1;32"}, {"stopped by", "1;33"},
                  {"fp8flow: error:", "1;31"}};
    for (const auto& [start, code] : kKinds)
        if (line.starts_with(start))
            return fmt::format("\x1b[{}m{}\x1b[0m{}", code, start, line.substr(start.size()));
    return std::string(line);
}

}  // namespace fp8flow::report
