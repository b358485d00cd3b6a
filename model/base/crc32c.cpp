// SPDX-License-Identifier: MIT
// Eight bytes an instruction: about 8 GB/s a core, more than a disk takes.
#include "model/base/crc32c.h"

#include <nmmintrin.h>

#include <cstring>

namespace fp8flow {

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
    const auto* at = static_cast<const uint8_t*>(data);
    uint64_t state = ~crc;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint64_t word = 0;
        std::memcpy(&word, at, 8);
        state = _mm_crc32_u64(state, word);
    }
    auto narrow = static_cast<uint32_t>(state);
    for (; bytes > 0; ++at, --bytes) narrow = _mm_crc32_u8(narrow, *at);
    return ~narrow;
}

}  // namespace fp8flow
