// Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011). Any element can be drawn alone, so that initial weights are the
// same for every number of ranks and every backend.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace fp8flow {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
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

// FNV-1a, 64 bits: a fixed hash of names and paths.
constexpr uint64_t fnv1a64(std::string_view text) {
    uint64_t hash = 0xCBF29CE484222325ull;
    for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
    return hash;
}

// Four 32-bit words for (seed, stream, index).
inline std::array<uint32_t, 4> random_words(uint64_t seed, uint64_t stream, uint64_t index) {
    return philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                       static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

// Uniform in [0, 1) with 53 bits.
inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    const auto w = random_words(seed, stream, index);
    return static_cast<double>(((uint64_t{w[0]} << 32) | w[1]) >> 11) * 0x1.0p-53;
}

// Standard normal (Box-Muller on the element's own words).
inline float random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const auto w = random_words(seed, stream, index);
    const double u = (static_cast<double>(((uint64_t{w[0]} << 32) | w[1]) >> 11) + 1.0) * 0x1.0p-53;
    const double v = static_cast<double>(((uint64_t{w[2]} << 32) | w[3]) >> 11) * 0x1.0p-53;
    return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586476925 * v));
}

}  // namespace fp8flow
