// SPDX-License-Identifier: MIT
// What one call gives a GPU to do.
#pragma once

#include <cstdint>

namespace fp8flow {

struct LaunchCount {
    int64_t kernels = 0, others = 0;  // fills and copies
    int64_t all() const { return kernels + others; }
};

}  // namespace fp8flow
