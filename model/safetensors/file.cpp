// SPDX-License-Identifier: MIT
// Opening and mapping of a safetensors file, and the conversion of its elements to floats.
#include "model/safetensors/file.h"

#include "kernels/core/scalar_math.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

namespace fp8flow {

static_assert(std::endian::native == std::endian::little, "tensors are read as they lie");

namespace {

int64_t regular_file_size(int descriptor, const std::string& path, ExitCode code) {
    struct stat info {};
    require(::fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode), code, "{}: not a regular file", path);
    return info.st_size;
}

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

std::string read_text_file(const std::string& path, ExitCode code, std::string_view option,
                           int64_t most_bytes) {
    const std::string name = fmt::format("{}{}{}", option, option.empty() ? "" : " ", printable(path));
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    require(file >= 0, code, "{}: cannot be read: {}", name, std::strerror(errno));
    struct stat info {};
    const bool regular = ::fstat(file, &info) == 0 && S_ISREG(info.st_mode),
               fits = info.st_size <= most_bytes;
    std::string text(regular && fits ? static_cast<size_t>(info.st_size) : 0, '\0');
    size_t done = 0;
    ssize_t got = 0;
    while (done < text.size() && (got = ::read(file, text.data() + done, text.size() - done)) > 0)
        done += static_cast<size_t>(got);
    const int error = got < 0 ? errno : 0;
    ::close(file);
    require(regular, code, "{}: not a regular file", name);
    require(fits, code, "{}: has {} bytes, at most {} are read", name, info.st_size, most_bytes);
    require(error == 0, code, "{}: cannot be read: {}", name, std::strerror(error));
    text.resize(done);
    return text;
}

SafetensorsFile::SafetensorsFile(const std::string& path, const OpenTensors& options)
    : path_(path), options_(options) {
    // O_NONBLOCK: a pipe of that name must not wait for a writer.
    const int links = options.links == FileLinks::refuse ? O_NOFOLLOW : 0;
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | links);
    require(descriptor_ >= 0, class_of(errno, options.code), "{}: {}", path,
            errno == ELOOP && links != 0 ? "is a symbolic link; name the file itself" : std::strerror(errno));
    try {
        size_ = regular_file_size(descriptor_, path, options.code);
        std::array<uint8_t, 8> first{};
        const ssize_t got = ::pread(descriptor_, first.data(), first.size(), 0);
        const int64_t length =
            header_length(std::span(first).first(static_cast<size_t>(std::max<ssize_t>(got, 0))), size_, path,
                          options.code);
        void* mapped = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_PRIVATE, descriptor_, 0);
        require(mapped != MAP_FAILED, class_of(errno, options.code), "{}: cannot map {} bytes: {}", path,
                size_, std::strerror(errno));
        data_ = static_cast<const uint8_t*>(mapped);
        header_ =
            parse_header({reinterpret_cast<const char*>(data_) + first.size(), static_cast<size_t>(length)},
                         size_, path, options.code);
    } catch (...) {
        if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
        ::close(descriptor_);
        throw;
    }
    by_name_.reserve(header_.tensors.size());
    for (size_t i = 0; i < header_.tensors.size(); ++i) by_name_.emplace(header_.tensors[i].name, i);
}

SafetensorsFile::~SafetensorsFile() {
    ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
    ::close(descriptor_);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const uint8_t> SafetensorsFile::bytes(const TensorEntry& entry) const {
    const int64_t now = regular_file_size(descriptor_, path_, options_.code);
    require(now >= size_, options_.code, "{}: had {} bytes when it was opened, now {}: it was cut under us",
            path_, size_, now);
    return {data_ + header_.data_start + entry.begin, static_cast<size_t>(entry.bytes())};
}

void read_floats(const TensorEntry& entry, std::span<const uint8_t> bytes, int64_t first,
                 std::span<float> out, ExitCode code) {
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
            fail(code, "tensor \"{}\" is {}, want numbers of a floating-point type", printable(entry.name),
                 describe(entry));
    }
}

}  // namespace fp8flow
