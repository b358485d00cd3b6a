// SPDX-License-Identifier: MIT
// The arithmetic of encode_pairs (kernels/hopper/norm/forward.h): BF16 values multiplied by a block's power
// of two in BF16 become the codes that the product in fp32 gives, for every value of a block and every
// multiplier that quant_scale makes of BF16 maxima.
#include "kernels/core/scalar_math.h"

#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

// A product of two BF16 numbers is exact in fp32 where it is a normal number; one rounding to BF16.
uint8_t code_of_pairs(float value, float multiplier) { return to_e4m3(round_bf16(value * multiplier)).bits; }

TEST(PairFormula, EveryValueOfEveryBlock) {
    int64_t wrong = 0, values = 0;
    for (uint32_t largest = 0; largest <= 0x7F80u; largest += 1) {
        const float amax = bits_float(largest << 16);
        const float multiplier = quant_scale(amax, kE4m3Max, ScaleFormat::pow2).multiplier;
        const bool new_power =
            largest == 0 ||
            multiplier !=
                quant_scale(bits_float((largest - 1) << 16), kE4m3Max, ScaleFormat::pow2).multiplier;
        const bool last_of_power =
            largest == 0x7F80u ||
            multiplier !=
                quant_scale(bits_float((largest + 1) << 16), kE4m3Max, ScaleFormat::pow2).multiplier;
        EXPECT_EQ(round_bf16(multiplier), multiplier);
        if (!new_power && !last_of_power) continue;
        for (uint32_t bits = 0; bits <= largest; ++bits)
            for (const uint32_t sign : {0u, 0x8000u}) {
                const float value = bits_float((bits | sign) << 16);
                wrong += code_of_pairs(value, multiplier) != to_e4m3(value * multiplier).bits;
                ++values;
            }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(values, 1000000);
}

// With a factor that is no power of two the second rounding shows: the comparison above can fail.
TEST(PairFormula, AnotherFactorIsNoticed) {
    int64_t differ = 0;
    for (uint32_t bits = 0x3F80u; bits < 0x4000u; ++bits) {
        const float value = bits_float(bits << 16);
        differ += code_of_pairs(value, 1.1f) != to_e4m3(value * 1.1f).bits;
    }
    EXPECT_GT(differ, 0);
}

}  // namespace
}  // namespace fp8flow::test
