// SPDX-License-Identifier: MIT
// Opens, locks, checks and writes the lock file.
#include "model/job/folder_lock.h"

#include "kernels/core/error.h"
#include "kernels/host_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

namespace fp8flow {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kLock = ".lock";
constexpr mode_t kMode = 0666;     // and the umask
constexpr size_t kLargest = 4096;  // what we write has some hundred bytes
constexpr std::chrono::seconds kBetweenChecks{5};

// Of a file in the folder, which is opened for it: that asks the server of a network file system for the file
// as it is now. Empty where there is none.
std::string text_of(int folder, const char* name) {
    const Descriptor file(::openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    std::string text(kLargest, '\0');
    const ssize_t length = ::pread(file.get(), text.data(), text.size(), 0);
    text.resize(static_cast<size_t>(std::max<ssize_t>(length, 0)));
    return text;
}

nlohmann::json parsed(const std::string& text) {
    nlohmann::json record = nlohmann::json::parse(text, nullptr, false);
    return record.is_object() ? record : nlohmann::json::object();
}

template <class T> T value_in(const nlohmann::json& record, const char* key, T otherwise) {
    try {
        return record.value(key, otherwise);
    } catch (const nlohmann::json::exception&) {  // of another type
        return otherwise;
    }
}

std::string described(const std::string& text) {
    const nlohmann::json record = parsed(text);
    if (record.empty()) return "another run";
    return fmt::format("process {} on {} ({})", value_in<int64_t>(record, "pid", 0),
                       printable(value_in<std::string>(record, "host", "?")),
                       printable(value_in<std::string>(record, "command", "?")));
}

bool is_gone(int error) { return error == ENOENT || error == ESTALE; }

}  // namespace

FolderLock::FolderLock(int folder, std::string folder_path, const std::string& command, Holder holder)
    : folder_(folder), path_(std::move(folder_path)), other_(holder) {
    std::random_device random;
    id_ = fmt::format("{:08x}{:08x}", random(), random());
    const nlohmann::json record = {{"id", id_},
                                   {"host", host_name().text},
                                   {"pid", ::getpid()},
                                   {"command", command.substr(0, kLargest / 4)}};
    text_ = record.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

FolderLock::~FolderLock() {
    if (is_ours()) [[maybe_unused]]
        const int emptied = ::ftruncate(file_.get(), 0);
}

bool FolderLock::is_ours() const { return seen_ != 0 && text_of(folder_, kLock) == text_; }

// Returns 0 or the error number; of flock with the file open.
int FolderLock::open_locked(const std::string& name) {
    file_.close();
    file_ = Descriptor(
        ::openat(folder_, name.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, kMode));
    if (!file_) return errno;
    while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0)
        if (errno != EINTR) return errno;
    return 0;
}

// Whether the open file still has its name.
bool FolderLock::is_in_place() const {
    struct stat ours {
    }, named{};
    return ::fstat(file_.get(), &ours) == 0 && ::fstatat(folder_, kLock, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           ours.st_dev == named.st_dev && ours.st_ino == named.st_ino;
}

void FolderLock::write_record() const {
    const auto size = static_cast<ssize_t>(text_.size());
    errno = ENOSPC;  // where it writes less than asked
    const bool written = ::ftruncate(file_.get(), 0) == 0 &&
                         ::pwrite(file_.get(), text_.data(), text_.size(), 0) == size &&
                         ::fsync(file_.get()) == 0;
    require(written, ExitCode::output, "{}: cannot write .lock: {}", path_, std::strerror(errno));
}

// Replaces a file that another process holds, or that cannot be locked.
void FolderLock::replace(const std::string& candidate) {
    const int error = open_locked(candidate);
    require(bool(file_), ExitCode::output, "{}: cannot create .lock: {}", path_, std::strerror(error));
    write_record();
    const bool is_replaced = ::renameat(folder_, candidate.c_str(), folder_, kLock) == 0;
    require(is_replaced, ExitCode::output, "{}: cannot replace .lock: {}", path_, std::strerror(errno));
}

FolderLock::Attempt FolderLock::try_to_take() {
    int error = 0;
    do {
        error = open_locked(kLock);
        if (is_gone(error)) return Attempt::gone;
    } while (error == 0 && !is_in_place());  // removed or replaced between opening and locking
    const std::string lock = text_of(folder_, kLock);
    holder_ = described(lock);
    if (other_ == Holder::is_replaced && error != 0) {
        const std::string candidate = fmt::format("{}.{}", kLock, id_);
        try {
            replace(candidate);
        } catch (...) {
            ::unlinkat(folder_, candidate.c_str(), 0);
            throw;
        }
    } else if (other_ == Holder::keeps && error == EWOULDBLOCK) {
        file_.close();
        return Attempt::held;
    } else {
        require(bool(file_), ExitCode::output,
                "{}: cannot open .lock, which names the run of this folder: {}", path_, std::strerror(error));
        if (error != 0 && lock.empty()) ::unlinkat(folder_, kLock, 0);  // nobody's: we have just made it
        require(
            error == 0, ExitCode::output,
            "{}: its file system has no locks ({}), and {} may be using it; choose a folder on one that has "
            "locks, or, if no run is in this one, add --take-over",
            path_, std::strerror(error), holder_);
        write_record();
    }
    seen_ = Clock::now().time_since_epoch().count();
    return Attempt::taken;
}

void FolderLock::check() const {
    const std::string now = text_of(folder_, kLock);
    require(now == text_, ExitCode::output,
            "{}: this run has lost its folder: {}; it stops and writes nothing more there", path_,
            now.empty() ? "its .lock was emptied or removed" : described(now) + " has taken it");
    seen_ = Clock::now().time_since_epoch().count();
}

void FolderLock::check_if_unsure() const {
    if (Clock::now().time_since_epoch() - Clock::duration(seen_) > kBetweenChecks) check();
}

void FolderLock::remove_file() const {
    if (is_ours()) ::unlinkat(folder_, kLock, 0);
}

}  // namespace fp8flow
