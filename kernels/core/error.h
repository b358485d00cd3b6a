// SPDX-License-Identifier: MIT
// The one exception type of the program and its exit codes. Errors carry numbers and the key to change; they
// are thrown here and caught once, in model/commands/main.cpp. Read next: model/commands/main.cpp.
#pragma once

#include <fmt/core.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

namespace fp8flow {

// Exit codes by class of error; what to do about each: docs/operations.md.
enum class ExitCode : int {
    ok = 0,
    verdict_miss = 1,  // `validate` ran and the verdict is not "pass"
    usage = 2,         // command line or configuration
    data = 10,         // unreadable, empty or corrupt training data
    checkpoint = 11,
    memory = 12,
    numeric = 13,   // a step diverged: NaN, Inf, or past a limit
    peer = 14,      // another rank died, stalled or disagrees
    output = 15,    // the output folder is refused, or a file below it cannot be written
    stopped = 16,   // by a signal, after a step; a resumed run continues from there
    internal = 70,  // our bug
};

// The exit code of a call that failed with `error` (errno): memory for ENOMEM, `otherwise` for all others.
inline ExitCode class_of(int error, ExitCode otherwise) {
    return error == ENOMEM ? ExitCode::memory : otherwise;
}

class Error : public std::runtime_error {
public:
    Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
    ExitCode code() const { return code_; }

private:
    ExitCode code_;
};

// Throws Error with a formatted message.
template <class... Args>
[[noreturn]] void fail(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
    throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error unless `condition` holds: for what a user can get wrong.
template <class... Args>
void require(bool condition, ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
    if (!condition) fail(code, format, std::forward<Args>(args)...);
}

// Contract checks: a failure is a bug of ours, reported with the expression, the place and the numbers.
#define FP8FLOW_CHECK(condition, ...)                                                             \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            throw ::fp8flow::Error(::fp8flow::ExitCode::internal,                                 \
                                   fmt::format("{}:{}: check failed: {}: {}", __FILE__, __LINE__, \
                                               #condition, fmt::format(__VA_ARGS__)));            \
        }                                                                                         \
    } while (false)

}  // namespace fp8flow
