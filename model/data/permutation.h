// SPDX-License-Identifier: MIT
// Counter-based hashing and a seeded permutation of [0, n) without an array: how the data order is drawn.
// Both are pure functions of their arguments, so that every rank computes the same order alone. Read next:
// data.h.
#pragma once

#include "kernels/core/error.h"

#include <bit>
#include <cstdint>

namespace fp8flow::data {

// SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words with full avalanche.
constexpr uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

constexpr uint64_t mix64(uint64_t a, uint64_t b) { return mix64(mix64(a) ^ b); }
constexpr uint64_t mix64(uint64_t a, uint64_t b, uint64_t c) { return mix64(mix64(a, b) ^ c); }

// [0, 1), in steps of 2^-53.
constexpr double unit_interval(uint64_t hash) { return static_cast<double>(hash >> 11) * 0x1p-53; }

// A balanced Feistel network over the smallest even number of bits that holds n, walked along its cycles
// until the value falls below n (Black and Rogaway 2002): a bijection of [0, n), at most four steps on
// average.
class Permutation {
public:
    Permutation(int64_t n, uint64_t key) : n_(static_cast<uint64_t>(n)), key_(key) {
        FP8FLOW_CHECK(n > 0, "permutation of {} elements", n);
        half_bits_ = (std::bit_width(n_ - 1) + 1) / 2;
        if (half_bits_ == 0) half_bits_ = 1;
        mask_ = (uint64_t{1} << half_bits_) - 1;
    }

    int64_t operator()(int64_t index) const {
        uint64_t x = static_cast<uint64_t>(index);
        FP8FLOW_CHECK(x < n_, "permutation index {} of {}", index, n_);
        do {
            x = encrypt(x);
        } while (x >= n_);
        return static_cast<int64_t>(x);
    }

private:
    static constexpr int kRounds = 6;  // four suffice (Luby-Rackoff); tiny halves want a few more

    uint64_t encrypt(uint64_t x) const {
        uint64_t left = x >> half_bits_;
        uint64_t right = x & mask_;
        for (int round = 0; round < kRounds; ++round) {
            const uint64_t next = left ^ (mix64(key_, static_cast<uint64_t>(round), right) & mask_);
            left = right;
            right = next;
        }
        return (left << half_bits_) | right;
    }

    uint64_t n_;
    uint64_t key_;
    int half_bits_ = 1;
    uint64_t mask_ = 1;
};

}  // namespace fp8flow::data
