// SPDX-License-Identifier: MIT
// CRC32C (Castagnoli), the checksum of checkpoints and of TensorBoard's records: finds every flip of up to
// three bits in a tensor of 200 MiB and every burst of 32 bits; the processor has an instruction for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fp8flow {

// Continues the checksum `crc` (0 at the start) with these bytes.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0);
inline uint32_t crc32c(std::string_view text, uint32_t crc = 0) {
    return crc32c(text.data(), text.size(), crc);
}

}  // namespace fp8flow
