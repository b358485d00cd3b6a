// SPDX-License-Identifier: MIT
// CRC32C against published values and against the polynomial division, bit by bit.
#include "model/base/crc32c.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fp8flow {
namespace {

uint32_t by_bits(const std::string& bytes) {
    uint32_t crc = 0xFFFFFFFFu;
    for (const char c : bytes) {
        crc ^= static_cast<uint8_t>(c);
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
    }
    return ~crc;
}

// RFC 3720, appendix B.4, and the usual check string.
TEST(Crc32c, PublishedValues) {
    EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
    EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
    EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
    std::string rising, falling;
    for (int i = 0; i < 32; ++i) {
        rising += static_cast<char>(i);
        falling += static_cast<char>(31 - i);
    }
    EXPECT_EQ(crc32c(rising), 0x46DD794Eu);
    EXPECT_EQ(crc32c(falling), 0x113FDB5Cu);
    EXPECT_EQ(crc32c(""), 0u);
}

TEST(Crc32c, EveryLengthAndCutEqualsTheDivision) {
    std::string bytes;
    for (int i = 0; i < 67; ++i) bytes += static_cast<char>(i * 37 + 11);
    for (size_t length = 0; length <= bytes.size(); ++length) {
        const std::string part = bytes.substr(bytes.size() - length);  // every alignment
        EXPECT_EQ(crc32c(part), by_bits(part)) << length;
        for (size_t cut = 0; cut <= length; cut += 5)
            EXPECT_EQ(crc32c(part.substr(cut), crc32c(part.substr(0, cut))), by_bits(part))
                << length << " " << cut;
    }
}

}  // namespace
}  // namespace fp8flow
