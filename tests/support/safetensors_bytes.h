// SPDX-License-Identifier: MIT
// Safetensors files put together by hand, as bytes: what a test of the reader starts from and then breaks.
#pragma once

#include <cstdint>
#include <string>

namespace fp8flow {

// Length, header text, data; nothing is checked.
inline std::string safetensors_bytes(const std::string& header, const std::string& data,
                                     int64_t claimed = -1) {
    const uint64_t length = claimed >= 0 ? static_cast<uint64_t>(claimed) : header.size();
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xFF);
    return bytes + header + data;
}

}  // namespace fp8flow
