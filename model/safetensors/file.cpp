// SPDX-License-Identifier: MIT
// Opening and mapping of a safetensors file, and the conversion of its elements to floats.
#include "model/safetensors/file.h"

#include "kernels/core/scalar_math.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

namespace fp8flow {

static_assert(std::endian::native == std::endian::little, "tensors are read as they lie");

namespace {

template <class T> T load(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// 2^(code - 127); 0xFF is NaN. The format's own meaning: our wire keeps code 0 for pads, a file does not.
float e8m0_value(uint8_t code) {
    if (code == 0) return 0x1.0p-127f;
    return e8m0_to_float(code);
}

template <class Stored, class Convert>
void convert_all(std::span<const uint8_t> bytes, std::span<float> out, Convert convert) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = convert(load<Stored>(bytes.data() + i * sizeof(Stored)));
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), file_(path, ExitCode::data) {
    std::array<uint8_t, 8> first{};
    const auto given = std::min<int64_t>(size(), first.size());
    file_.read(0, first.data(), given);
    const int64_t length =
        header_length(std::span(first).first(static_cast<size_t>(given)), size(), path, ExitCode::data);
    std::string text(static_cast<size_t>(length), '\0');
    file_.read(first.size(), text.data(), length);
    header_ = parse_header(text, size(), path, ExitCode::data);
    by_name_.reserve(header_.tensors.size());
    for (size_t i = 0; i < header_.tensors.size(); ++i) by_name_.emplace(header_.tensors[i].name, i);
    void* mapped =
        ::mmap(nullptr, static_cast<size_t>(size()), PROT_READ, MAP_PRIVATE, file_.descriptor(), 0);
    require(mapped != MAP_FAILED, class_of(errno, ExitCode::data), "{}: cannot map {} bytes: {}", path,
            size(), std::strerror(errno));
    data_ = static_cast<const uint8_t*>(mapped);
}

SafetensorsFile::~SafetensorsFile() { ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size())); }

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const uint8_t> SafetensorsFile::bytes(const TensorEntry& entry) const {
    struct stat now {};
    require(::fstat(file_.descriptor(), &now) == 0 && now.st_size >= size(), ExitCode::data,
            "{}: had {} bytes when it was opened, now {}: it was cut under us", path_, size(), now.st_size);
    return {data_ + header_.data_start + entry.begin, static_cast<size_t>(entry.bytes())};
}

void read_floats(const TensorEntry& entry, std::span<const uint8_t> bytes, int64_t first,
                 std::span<float> out) {
    const int64_t width = size_of(entry.dtype), count = static_cast<int64_t>(out.size());
    FP8FLOW_CHECK(first >= 0 && count <= entry.numel() - first, "{}: elements {} to {} of {}", entry.name,
                  first, first + count, entry.numel());
    if (out.empty()) return;  // of a rank without tokens, say: there may be no place to copy to
    const auto from = bytes.subspan(static_cast<size_t>(first * width), static_cast<size_t>(count * width));
    switch (entry.dtype) {
        case FileDType::f32: std::memcpy(out.data(), from.data(), from.size()); return;
        case FileDType::f64:
            return convert_all<double>(from, out, [](double x) { return static_cast<float>(x); });
        case FileDType::bf16: return convert_all<Bf16>(from, out, [](Bf16 x) { return to_float(x); });
        case FileDType::f16: return convert_all<Fp16>(from, out, [](Fp16 x) { return to_float(x); });
        case FileDType::e4m3: return convert_all<E4m3>(from, out, [](E4m3 x) { return to_float(x); });
        case FileDType::e5m2: return convert_all<E5m2>(from, out, [](E5m2 x) { return to_float(x); });
        case FileDType::e8m0: return convert_all<uint8_t>(from, out, [](uint8_t x) { return e8m0_value(x); });
        default:
            fail(ExitCode::data, "tensor \"{}\" is {}, want numbers of a floating-point type",
                 printable(entry.name), describe(entry));
    }
}

}  // namespace fp8flow
