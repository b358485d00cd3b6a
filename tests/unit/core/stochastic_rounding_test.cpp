// SPDX-License-Identifier: MIT
// Stochastic rounding to BF16: a value becomes one of its two neighbours, with the right mean; what BF16 can
// hold stays; the bits depend on key, row and column alone, and look independent.
#include "kernels/core/stochastic_rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace fp8flow {
namespace {

TEST(StochasticRounding, GivesANeighbourAndTheRightMean) {
    constexpr int kDraws = 65536;
    for (const float x : {1.001f, -1.001f, 3.14159265f, -2.5e-7f, 1.7e20f, 6e-39f, 1.00390625f - 1e-6f}) {
        const float low = bits_float(float_bits(x) & 0xFFFF0000u),  // towards zero
            high = bits_float((float_bits(x) & 0xFFFF0000u) + 0x10000u);
        const double up = (static_cast<double>(x) - low) / (static_cast<double>(high) - low);
        int ups = 0;
        for (int i = 0; i < kDraws; ++i) {
            const float y =
                to_float(round_stochastically(x, rounding_bits(rounding_row(17, i / 64), i % 64)));
            ASSERT_TRUE(y == low || y == high) << x << " became " << y;
            ups += y == high;
        }
        const double deviation = std::sqrt(up * (1 - up) / kDraws);
        EXPECT_NEAR(ups / static_cast<double>(kDraws), up, 5 * deviation + 1.0 / 65536) << x;
    }
}

// Every one of the 2^16 words: exactly as many go up as the fraction says.
TEST(StochasticRounding, CountsTheFractionExactly) {
    for (const uint32_t fraction : {0u, 1u, 0x7FFFu, 0x8000u, 0xFFFFu}) {
        uint32_t ups = 0;
        for (uint32_t bits = 0; bits < 65536; ++bits)
            ups += round_stochastically(bits_float(0x3F800000u | fraction), bits).bits != 0x3F80u;
        EXPECT_EQ(ups, fraction);
    }
}

TEST(StochasticRounding, KeepsWhatBf16CanHold) {
    for (uint32_t code = 0; code < 65536; ++code) {
        const Bf16 exact{static_cast<uint16_t>(code)};
        for (const uint32_t bits : {0u, 1u, 0x8000u, 0xFFFFu}) {
            const Bf16 rounded = round_stochastically(to_float(exact), bits);
            if (is_nan_bits(float_bits(to_float(exact))))
                ASSERT_TRUE(is_nan_bits(float_bits(to_float(rounded)))) << code;
            else
                ASSERT_EQ(rounded.bits, exact.bits) << code;
        }
    }
    for (const uint32_t nan : {0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800001u, 0xFFC00000u})
        EXPECT_TRUE(is_nan_bits(float_bits(to_float(round_stochastically(bits_float(nan), 0xFFFFu)))));
}

TEST(StochasticRounding, BitsAreCountedByKeyRowAndColumn) {
    std::set<uint32_t> words;
    for (const uint64_t key : {rounding_key(1, 7, 0), rounding_key(1, 7, 1), rounding_key(1, 8, 0)})
        for (const int64_t row : {0ll, 1ll, 1ll << 33})
            for (uint32_t pair = 0; pair < 64; ++pair)
                words.insert(rounding_word(rounding_row(key, row), pair));
    EXPECT_GE(words.size(), 3u * 3u * 64u - 2u);  // 2^-32 a pair of them may be equal
    const uint32_t row = rounding_row(5, 9);
    EXPECT_EQ(rounding_bits(row, 6), rounding_word(row, 3) & 0xFFFFu);
    EXPECT_EQ(rounding_bits(row, 7), rounding_word(row, 3) >> 16);
    EXPECT_EQ(rounding_bits_of_element(5, 9 * kRoundingRow + 7), rounding_bits(row, 7));
    std::set<uint64_t> keys;
    for (const int64_t step : {0, 1, 1000000})
        for (const int64_t use : {0, 1, 2, 3})
            for (const uint64_t tensor : {7ull, 8ull}) {
                const int64_t word = rounding_step(1, step);
                keys.insert(
                    StochasticRounding{.key = rounding_key(1, tensor, use), .step = &word}.step_key());
            }
    EXPECT_EQ(keys.size(), 3u * 4u * 2u);
    EXPECT_EQ(StochasticRounding{.key = 9}.step_key(), 9u);
}

// Neighbours in a row, the halves of a word, and rows one above the other: no correlation that 2^20 pairs of
// draws would show.
TEST(StochasticRounding, NeighboursAreNotCorrelated) {
    const auto draw = [](int64_t row, int64_t column) {
        return rounding_bits(rounding_row(123, row), column) / 65536.0 - 0.5;
    };
    double halves = 0, columns = 0, rows = 0, mean = 0;
    int64_t count = 0;
    for (int64_t row = 0; row < 1024; ++row)
        for (int64_t column = 0; column < 1024; column += 2, ++count) {
            const double here = draw(row, column);
            mean += here;
            halves += here * draw(row, column + 1);
            columns += here * draw(row, column + 2);
            rows += here * draw(row + 1, column);
        }
    const double n = static_cast<double>(count), bound = 5 / std::sqrt(n) / 12;
    EXPECT_LT(std::abs(mean / n), 5 * std::sqrt(1 / 12.0 / n));
    EXPECT_LT(std::abs(halves / n), bound);
    EXPECT_LT(std::abs(columns / n), bound);
    EXPECT_LT(std::abs(rows / n), bound);
}

}  // namespace
}  // namespace fp8flow
