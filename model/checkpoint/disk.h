// SPDX-License-Identifier: MIT
// Disk: the file-system calls of checkpoints in one thin class, so that a test can make each of them fail, or
// the process die in it. All names are relative to an open folder, and no call follows a link. Read next:
// folder.h.
#pragma once

#include "kernels/core/error.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fp8flow::checkpoint {

// Each call returns 0 or more, or minus the error number. Thread-safe.
class Disk {
public:
    virtual ~Disk() = default;

    virtual int open_folder(const std::string& path);
    virtual int open_folder(int folder, const std::string& name);
    virtual int create_file(int folder, const std::string& name);  // it must not exist
    virtual int open_file(int folder, const std::string& name);    // to read; refuses all but regular files
    virtual int64_t size(int file);
    virtual int64_t write(int file, const void* data, size_t bytes);
    virtual int64_t read(int file, void* data, size_t bytes, int64_t offset);
    virtual int sync(int file);  // of a folder: the names in it
    virtual int close(int file);
    virtual int make_folder(int folder, const std::string& name);
    virtual int rename(int folder, const std::string& from, const std::string& to);  // `to` must not exist
    virtual int remove_file(int folder, const std::string& name);
    virtual int remove_folder(int folder, const std::string& name);
    virtual int list(int folder, std::vector<std::string>& names);  // without "." and ".."
};

// An open file or folder that closes itself; negative: none, or the error of opening it.
class DiskHandle {
public:
    DiskHandle() = default;
    DiskHandle(Disk& disk, int file) : disk_(&disk), file_(file) {}
    DiskHandle(DiskHandle&& other) noexcept { *this = std::move(other); }
    DiskHandle& operator=(DiskHandle&& other) noexcept;
    ~DiskHandle();

    int get() const { return file_; }
    int close();  // the error number of close, which can be that of a write before it

private:
    Disk* disk_ = nullptr;
    int file_ = -1;
};

// Repeat the call until all bytes are done. 0 or minus the error number; -EIO where a file ends too early.
int write_all(Disk& disk, int file, const void* data, size_t bytes);
int read_all(Disk& disk, int file, void* data, size_t bytes, int64_t offset);
std::string reason(int64_t result);  // the text of minus an error number

// It could not be read, and may be whole: this user may not read it, or the system cannot now.
class Unreadable : public Error {
    using Error::Error;
};
// Throws for minus an error number: Error(checkpoint) where the disk holds damage, else Unreadable.
void require_read(int64_t result, const std::string& what);

}  // namespace fp8flow::checkpoint
