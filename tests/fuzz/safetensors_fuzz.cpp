// SPDX-License-Identifier: MIT
// Any bytes as a safetensors file: refused with an error about data, or all its tensors lie inside it and can
// be read.
#include "model/safetensors/file.h"

#include <algorithm>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace fp8flow;
    const auto bytes = static_cast<int64_t>(size);
    try {
        const int64_t length = header_length({data, std::min<size_t>(size, 8)}, bytes, "f", ExitCode::data);
        const SafetensorsHeader header =
            parse_header({reinterpret_cast<const char*>(data) + 8, static_cast<size_t>(length)}, bytes, "f",
                         ExitCode::data);
        int64_t covered = header.data_start;
        for (const TensorEntry& entry : header.tensors) {
            if (header.data_start + entry.begin != covered || entry.bytes() < 0) __builtin_trap();
            covered += entry.bytes();
            if (covered > bytes) __builtin_trap();
            float values[64];
            const int64_t first = entry.numel() / 2, count = std::min<int64_t>(64, entry.numel() - first);
            try {
                read_floats(entry,
                            {data + header.data_start + entry.begin, static_cast<size_t>(entry.bytes())},
                            first, {values, static_cast<size_t>(count)});
            } catch (const Error& error) {  // integers
                if (error.code() != ExitCode::data) throw;
            }
        }
        if (covered != bytes) __builtin_trap();
    } catch (const Error& error) {
        if (error.code() != ExitCode::data) __builtin_trap();
    }
    return 0;
}
