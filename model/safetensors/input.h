// SPDX-License-Identifier: MIT
// Reading files that a user names: regular files alone, with the system's reason where one cannot be read.
#pragma once

#include "kernels/core/error.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace fp8flow {

// An open file or folder of the system; -1: none.
class Descriptor {
public:
    explicit Descriptor(int number = -1) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor() { close(); }

    int get() const { return number_; }
    int release() { return std::exchange(number_, -1); }
    explicit operator bool() const { return number_ >= 0; }
    // Returns 0 or the error number, which can be that of an earlier write.
    int close() { return number_ >= 0 && ::close(std::exchange(number_, -1)) != 0 ? errno : 0; }

private:
    int number_;
};

// `path`, which `key` names. Throws Error(code) beginning with the key where nothing is there.
const std::string& existing(const char* key, const std::string& path, ExitCode code);

// pread, not mmap: a file that shrinks meanwhile must be an error with a name, not a signal.
class InputFile {
public:
    // Throws Error(code) beginning with `name`, or the path where that is empty, unless it is a regular file,
    // or a link to one, as the Hugging Face cache stores a user's downloads.
    InputFile(const std::string& path, ExitCode code, std::string name = "");

    int descriptor() const { return file_.get(); }
    int64_t size() const { return size_; }  // when it was opened
    // All bytes, or Error(code): it cannot be read, or ends before.
    void read(int64_t offset, void* out, int64_t bytes) const;
    // The text, of a file of at most so many bytes.
    std::string text(int64_t most_bytes) const;

private:
    ExitCode code_;
    std::string name_;
    Descriptor file_;
    int64_t size_ = 0;
};

// The text of such a file. `option`: what names it, for errors.
std::string read_text_file(const std::string& path, ExitCode code, std::string_view option = "",
                           int64_t most_bytes = int64_t{64} << 20);

// Text from a user or a file made fit for a message: control characters escaped (\n, \x1b), and no more than
// `longest` bytes of it.
std::string printable(std::string_view text, size_t longest = 200);
// A checksum as text: 16 hexadecimal digits.
std::string checksum_text(uint64_t checksum);
// Whether `text`, the first bytes of a file or the first 8, are those of the pointer that Git LFS leaves in
// its place; and an Error(code) if so.
bool is_lfs_pointer(std::string_view text);
void refuse_lfs_pointer(std::string_view text, const std::string& file, ExitCode code);

}  // namespace fp8flow
