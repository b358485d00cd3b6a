// SPDX-License-Identifier: MIT
// Any text as an index of safetensors files: refused with an error about data, or every file that it names is
// a plain one next to it.
#include "model/safetensors/tensor_set.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace fp8flow;
    try {
        const auto files = parse_index({reinterpret_cast<const char*>(data), size}, "f");
        if (files.empty()) __builtin_trap();
        for (const auto& [tensor, file] : files)
            if (tensor.empty() || file.find('/') != std::string::npos ||
                file.find('\0') != std::string::npos || file.starts_with(".") ||
                !file.ends_with(".safetensors"))
                __builtin_trap();
    } catch (const Error& error) {
        if (error.code() != ExitCode::data) __builtin_trap();
    }
    return 0;
}
