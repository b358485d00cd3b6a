// SPDX-License-Identifier: MIT
// The calls as the system has them, with its interruptions repeated.
#include "model/checkpoint/disk.h"

#include "model/base/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace fp8flow::checkpoint {

namespace {

constexpr size_t kLargestTransfer = size_t{1} << 30;  // Linux moves at most 2 GiB per call

template <class Result> Result or_error(Result result) { return result < 0 ? -errno : result; }

template <class Call> auto uninterrupted(Call call) {
    for (;;) {
        const auto result = call();
        if (result >= 0 || errno != EINTR) return or_error(result);
    }
}

// `call` does a part of what is left, from byte `at` on.
template <class Call> int all_of(size_t bytes, Call call) {
    for (size_t at = 0; at < bytes;) {
        const int64_t done = call(at, bytes - at);
        if (done <= 0) return done < 0 ? static_cast<int>(done) : -EIO;
        at += static_cast<size_t>(done);
    }
    return 0;
}

}  // namespace

int Disk::open_folder(const std::string& path) { return Disk::open_folder(AT_FDCWD, path); }

int Disk::open_folder(int folder, const std::string& name) {
    const int opened = uninterrupted(
        [&] { return ::openat(folder, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
    struct stat info {};
    const bool is_link = opened == -ENOTDIR &&
                         ::fstatat(folder, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
                         S_ISLNK(info.st_mode);
    return is_link ? -ELOOP : opened;  // as open_file
}

int Disk::create_file(int folder, const std::string& name) {
    return uninterrupted([&] {
        return ::openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                        kNewFileMode);
    });
}

int Disk::open_file(int folder, const std::string& name) {
    // O_NONBLOCK: a pipe of that name must not wait for a writer.
    const int file = uninterrupted(
        [&] { return ::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); });
    if (file < 0) return file;
    struct stat info {};
    int error = ::fstat(file, &info) != 0 ? errno : 0;
    if (error == 0 && S_ISREG(info.st_mode)) return file;
    if (error == 0) error = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    ::close(file);
    return -error;
}

int64_t Disk::size(int file) {
    struct stat info {};
    return ::fstat(file, &info) == 0 ? static_cast<int64_t>(info.st_size) : -errno;
}

int64_t Disk::write(int file, const void* data, size_t bytes) {
    return uninterrupted(
        [&] { return static_cast<int64_t>(::write(file, data, std::min(bytes, kLargestTransfer))); });
}

int64_t Disk::read(int file, void* data, size_t bytes, int64_t offset) {
    return uninterrupted(
        [&] { return static_cast<int64_t>(::pread(file, data, std::min(bytes, kLargestTransfer), offset)); });
}

int Disk::sync(int file) {
    return uninterrupted([&] { return ::fsync(file); });
}

int Disk::close(int file) { return or_error(::close(file)); }

int Disk::make_folder(int folder, const std::string& name) {
    return or_error(::mkdirat(folder, name.c_str(), kNewFolderMode));
}

int Disk::rename(int folder, const std::string& from, const std::string& to) {
    // Where the file system cannot promise that (NFS), a check before: only a second run in the same folder
    // could come between.
    const int renamed = or_error(static_cast<int>(
        ::syscall(SYS_renameat2, folder, from.c_str(), folder, to.c_str(), RENAME_NOREPLACE)));
    if (renamed != -EINVAL && renamed != -ENOSYS) return renamed;
    if (::faccessat(folder, to.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0) return -EEXIST;
    return or_error(::renameat(folder, from.c_str(), folder, to.c_str()));
}

int Disk::remove_file(int folder, const std::string& name) {
    return or_error(::unlinkat(folder, name.c_str(), 0));
}

int Disk::remove_folder(int folder, const std::string& name) {
    return or_error(::unlinkat(folder, name.c_str(), AT_REMOVEDIR));
}

int Disk::list(int folder, std::vector<std::string>& names) { return -list_folder(folder, names); }

DiskHandle& DiskHandle::operator=(DiskHandle&& other) noexcept {
    std::swap(disk_, other.disk_);
    std::swap(file_, other.file_);
    return *this;
}

DiskHandle::~DiskHandle() {
    if (file_ >= 0) disk_->close(file_);
}

int DiskHandle::close() { return file_ < 0 ? 0 : disk_->close(std::exchange(file_, -1)); }

void require_read(int64_t result, const std::string& what) {
    // EIO: a file ends too early; the others: it is missing, or is no file or folder.
    constexpr int kDamage[] = {ENOENT, ENOTDIR, ELOOP, EINVAL, EISDIR, ENXIO, EIO};
    if (result >= 0) return;
    const std::string text = what + ": " + reason(result);
    const ExitCode code = class_of(static_cast<int>(-result), ExitCode::checkpoint);
    if (code != ExitCode::checkpoint) throw Error(code, text);
    if (std::ranges::find(kDamage, -result) != std::end(kDamage)) throw Error(ExitCode::checkpoint, text);
    throw Unreadable(ExitCode::checkpoint, text + "; make it readable, or name another one with --resume");
}

std::string reason(int64_t result) {
    if (result == -ELOOP) return "a symbolic link, which is not followed; put what it names in its place";
    return std::strerror(static_cast<int>(-result));
}

int write_all(Disk& disk, int file, const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    return all_of(bytes, [&](size_t at, size_t left) { return disk.write(file, from + at, left); });
}

int read_all(Disk& disk, int file, void* data, size_t bytes, int64_t offset) {
    auto* to = static_cast<uint8_t*>(data);
    return all_of(bytes, [&](size_t at, size_t left) {
        return disk.read(file, to + at, left, offset + static_cast<int64_t>(at));
    });
}

}  // namespace fp8flow::checkpoint
