// SPDX-License-Identifier: MIT
// The manifest of checkpoints: the bytes as they are, and after a checksum that fits them, which no accident
// would have. What is accepted must be written again as it was read.
#include "tests/fuzz/fuzz.h"

#include "model/base/crc32c.h"
#include "model/checkpoint/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace fp8flow;
    using namespace fp8flow::checkpoint;
    const std::string text(reinterpret_cast<const char*>(data), size);
    const auto try_text = [](const std::string& whole) {
        CheckpointManifest manifest;
        if (fuzz::accepts(ExitCode::checkpoint, [&] { manifest = parse_manifest(whole, "manifest.json"); }))
            fuzz::expect(manifest_text(manifest) == whole,
                         "an accepted manifest is not written as it was read");
    };
    try_text(text);
    // Seeds are whole files: their first line gives way to the one that fits.
    const size_t line = text.find('\n');
    const std::string body =
        text.starts_with("{\"crc32c\"") && line != std::string::npos ? text.substr(line + 1) : text;
    try_text(fmt::format("{{\"crc32c\": \"{:08x}\",\n", crc32c(body)) + body);
    return 0;
}
