// SPDX-License-Identifier: MIT
// Opening without waiting for the other end of a pipe, and reading in spite of interruptions.
#include "model/safetensors/input.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>

namespace fp8flow {

const std::string& existing(const char* key, const std::string& path, ExitCode code) {
    struct stat info {};
    const bool is_there = ::stat(path.c_str(), &info) == 0;  // first: the other arguments read errno
    require(is_there, class_of(errno, code), "{} {}: {}", key, path, std::strerror(errno));
    return path;
}

InputFile::InputFile(const std::string& path, ExitCode code, std::string name)
    : code_(code), name_(name.empty() ? path : name) {
    // O_NONBLOCK: a pipe of that name must not wait for a writer.
    file_ = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    require(bool(file_), class_of(errno, code), "{}: {}", name_, std::strerror(errno));
    struct stat info {};
    require(::fstat(file_.get(), &info) == 0 && S_ISREG(info.st_mode), code, "{}: not a regular file", name_);
    size_ = info.st_size;
}

void InputFile::read(int64_t offset, void* out, int64_t bytes) const {
    auto* to = static_cast<uint8_t*>(out);
    while (bytes > 0) {
        const ssize_t got = ::pread(file_.get(), to, static_cast<size_t>(bytes), offset);
        if (got < 0 && errno == EINTR) continue;
        require(got >= 0, class_of(errno, code_), "{}: cannot read at byte {}: {}", name_, offset,
                std::strerror(errno));
        require(got > 0, code_, "{}: the file ends at byte {}, expected {} bytes more", name_, offset, bytes);
        to += got;
        offset += got;
        bytes -= got;
    }
}

std::string InputFile::text(int64_t most_bytes) const {
    require(size_ <= most_bytes, code_, "{}: has {} bytes, at most {} are read", name_, size_, most_bytes);
    std::string text(static_cast<size_t>(size_), '\0');
    read(0, text.data(), size_);
    return text;
}

std::string read_text_file(const std::string& path, ExitCode code, std::string_view option,
                           int64_t most_bytes) {
    const std::string name = fmt::format("{}{}{}", option, option.empty() ? "" : " ", printable(path));
    return InputFile(path, code, name).text(most_bytes);
}

std::string printable(std::string_view text, size_t longest) {
    std::string out;
    for (const char c : text.substr(0, longest)) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '\n')
            out += "\\n";
        else if (byte < 0x20 || byte == 0x7F)
            out += fmt::format("\\x{:02x}", byte);
        else
            out += c;
    }
    if (text.size() > longest) out += "...";
    return out;
}

std::string checksum_text(uint64_t checksum) { return fmt::format("{:016x}", checksum); }

bool is_lfs_pointer(std::string_view text) {
    constexpr std::string_view kPointer = "version https://git-lfs.github.com/spec/";
    return text.starts_with(kPointer) || text == kPointer.substr(0, 8);
}

void refuse_lfs_pointer(std::string_view text, const std::string& file, ExitCode code) {
    require(!is_lfs_pointer(text), code,
            "{}: is a Git LFS pointer, not the file itself; fetch it with git lfs pull, or download it again",
            file);
}

}  // namespace fp8flow
