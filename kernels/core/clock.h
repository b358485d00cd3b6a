// SPDX-License-Identifier: MIT
// The host's clock, for durations.
#pragma once

#include <chrono>

namespace fp8flow {

// Seconds since a moment that does not change while the program runs.
inline double clock_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace fp8flow
