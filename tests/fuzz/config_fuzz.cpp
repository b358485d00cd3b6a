// SPDX-License-Identifier: MIT
// Any text as a YAML configuration: refused with an error about usage, or it survives being printed and read
// again.
#include "model/config/config.h"

#include "kernels/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace fp8flow;
    try {
        const Config config = parse_config({reinterpret_cast<const char*>(data), size}, "f");
        const std::string dump = dump_config(config);
        if (dump_config(parse_config(dump, "g")) != dump) __builtin_trap();
    } catch (const Error& error) {
        if (error.code() != ExitCode::usage) __builtin_trap();
    }
    return 0;
}
