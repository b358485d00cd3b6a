// SPDX-License-Identifier: MIT
// Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011). Any element can be drawn alone, so that
// initial weights are the same for every number of ranks and every backend.
#pragma once

#include "kernels/core/scalar_math.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace fp8flow {

FP8FLOW_HD std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{kMul0} * counter[0], p1 = uint64_t{kMul1} * counter[2];
        counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
                   static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
        key[0] += kWeyl0;
        key[1] += kWeyl1;
    }
    return counter;
}

// FNV-1a, 64 bits: a fixed hash of names, paths and contents.
constexpr uint64_t fnv1a64(std::string_view text) {
    uint64_t hash = 0xCBF29CE484222325ull;
    for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
    return hash;
}

// Four 32-bit words for (seed, stream, index).
FP8FLOW_HD std::array<uint32_t, 4> random_words(uint64_t seed, uint64_t stream, uint64_t index) {
    return philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                       static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

// Uniform in [0, 1) with 53 bits.
FP8FLOW_HD double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    const auto w = random_words(seed, stream, index);
    return static_cast<double>(((uint64_t{w[0]} << 32) | w[1]) >> 11) * 0x1.0p-53;
}

// Logarithm of a positive normal double, within 2 units in the last place: only IEEE operations, so that host
// and device agree.
FP8FLOW_HD double log_of(double x) {
    constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;  // ln 2 in two parts
    const auto bits = std::bit_cast<uint64_t>(x);
    int exponent = static_cast<int>(bits >> 52) - 1023;
    double m = std::bit_cast<double>((bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull);  // [1, 2)
    if (m > 1.4142135623730951) {
        m *= 0.5;
        ++exponent;
    }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;  // log m = 2 atanh s, |s| < 0.172
    double series = 0.0;
    for (int k = 23; k >= 3; k -= 2) series = (series + 1.0 / k) * z;
    return exponent * kLn2High + (2.0 * s + (2.0 * s * series + exponent * kLn2Low));
}

// Cosine of `turns` full turns, 0 <= turns < 1: reduced to an eighth of a turn around a multiple of a
// quarter, then Taylor's series.
FP8FLOW_HD double cos_of_turns(double turns) {
    const double quarters = turns * 4.0;
    const int nearest = static_cast<int>(quarters + 0.5);
    const double angle = (quarters - nearest) * 1.5707963267948966, z = angle * angle;
    const bool odd = nearest % 2 != 0;
    // cos: 1 - z/2! + z^2/4! ...; sin: angle (1 - z/3! + z^2/5! ...)
    double series = 1.0;
    for (int k = odd ? 19 : 18; k >= 2; k -= 2) series = 1.0 - series * z / (k * (k - 1));
    const double value =
        odd ? angle * series : series;  // of cos(angle + nearest quarters): cos, -sin, -cos, sin
    return nearest % 4 == 1 || nearest % 4 == 2 ? -value : value;
}

// Standard normal (Box-Muller on the element's own words).
FP8FLOW_HD float random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const auto w = random_words(seed, stream, index);
    const double u = (static_cast<double>(((uint64_t{w[0]} << 32) | w[1]) >> 11) + 1.0) * 0x1.0p-53;
    const double v = static_cast<double>(((uint64_t{w[2]} << 32) | w[3]) >> 11) * 0x1.0p-53;
    return static_cast<float>(std::sqrt(-2.0 * log_of(u)) * cos_of_turns(v));
}

}  // namespace fp8flow
