// SPDX-License-Identifier: MIT
// What of a run's log a terminal shows, and how. main decides it from the command line and the environment.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fp8flow::report {

struct Terminal {
    // quiet: warnings and the result; verbose: Megatron-LM's whole step line
    enum class Detail : uint8_t { quiet, normal, verbose };
    Detail detail = Detail::normal;
    bool color = false;
};

// The line with the ANSI colour of its kind: warnings yellow, a result green, or red where it is none.
std::string colored(std::string_view line);

}  // namespace fp8flow::report
