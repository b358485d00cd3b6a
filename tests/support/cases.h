// SPDX-License-Identifier: MIT
// Which cases of a test's table run: all, or only small ones where every memory access is watched, or those
// without libraries.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace fp8flow::test {

// True for a case of so many elements (products, for matrix products / 32) if FP8FLOW_SMALL_SHAPES is set, as
// cmake/GpuTests.cmake does under compute-sanitizer's slow tools. Wide rows, odd sizes and empty groups stay.
inline bool too_large_here(int64_t elements) {
    static const bool small = std::getenv("FP8FLOW_SMALL_SHAPES") != nullptr;
    constexpr int64_t kSmall = int64_t{1} << 17;
    return small && elements > kSmall;
}

// True if FP8FLOW_OWN_KERNELS is set, as cmake/GpuTests.cmake does under the tools that cannot follow the
// kernels of libraries.
inline bool own_kernels_only() {
    static const bool own = std::getenv("FP8FLOW_OWN_KERNELS") != nullptr;
    return own;
}

}  // namespace fp8flow::test
