// SPDX-License-Identifier: MIT
// For fuzz targets: an Error of the parser's own class is a refusal; another class, another exception, a
// crash, a hang or a sanitizer's report is a find.
#pragma once

#include "kernels/core/error.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fp8flow::fuzz {

inline void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "fuzz: %s\n", what);
    std::abort();
}

// Whether `action` returned; false where it threw Error(code) with a message of at most 4 KiB without control
// characters.
template <class Action> bool accepts(ExitCode code, Action action) {
    try {
        action();
        return true;
    } catch (const Error& error) {
        expect(error.code() == code, error.what());
        const std::string text = error.what();
        expect(!text.empty() && text.size() <= 4096, "the message's length");
        for (const char c : text)
            expect(static_cast<unsigned char>(c) >= 0x20, "a control character in the message");
        return false;
    }
}

}  // namespace fp8flow::fuzz
