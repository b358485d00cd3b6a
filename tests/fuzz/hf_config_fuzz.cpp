// SPDX-License-Identifier: MIT
// Any text as a Hugging Face config.json: refused with an error about usage, or its settings make a
// configuration.
#include "model/config/hf_config.h"

#include "kernels/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace fp8flow;
    try {
        parse_config("output: {log_interval: 1}", "f", {}, std::nullopt,
                     parse_hf_config({reinterpret_cast<const char*>(data), size}, "config.json"));
    } catch (const Error& error) {
        if (error.code() != ExitCode::usage) __builtin_trap();
    }
    return 0;
}
