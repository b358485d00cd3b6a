// Which cases of a test's table run: all, or only small ones where every memory access is watched.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace fp8flow::test {

// True for a case of so many elements (products, for matrix products / 32) if FP8FLOW_SMALL_SHAPES is set, as scripts/gpu_check.sh does
// under compute-sanitizer's slow tools. Wide rows, odd sizes and empty groups stay.
inline bool too_large_here(int64_t elements) {
    static const bool small = std::getenv("FP8FLOW_SMALL_SHAPES") != nullptr;
    constexpr int64_t kSmall = int64_t{1} << 17;
    return small && elements > kSmall;
}

}  // namespace fp8flow::test
