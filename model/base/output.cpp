// SPDX-License-Identifier: MIT
// The output folder: refusals, atomic replacement, growing files. All calls are relative to open descriptors.
#include "model/base/output.h"

#include "kernels/comm/progress.h"
#include "kernels/core/error.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace fp8flow {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kTemporary = ".tmp.";  // .NAME.tmp.PROCESS

std::string reason(int error) { return std::strerror(error); }

void check_name(std::string_view name, const std::string& folder) {
    constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+=";
    const bool plain = name.find_first_not_of(kPlain) == std::string_view::npos;
    require(!name.empty() && name.size() <= 200 && name[0] != '.' && plain, ExitCode::output,
            "\"{}\" is no plain file name to write in {}", name, folder);
}

// Returns 0 or the error number.
int write_all(int descriptor, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t done = ::write(descriptor, bytes.data(), bytes.size());
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        bytes.remove_prefix(static_cast<size_t>(done));
    }
    return 0;
}

// The end of the last whole line.
off_t end_of_lines(int descriptor, off_t size) {
    char block[4096];
    for (off_t end = size; end > 0;) {
        const auto length = static_cast<size_t>(std::min<off_t>(end, static_cast<off_t>(sizeof block)));
        if (::pread(descriptor, block, length, end - static_cast<off_t>(length)) !=
            static_cast<ssize_t>(length))
            return size;
        for (size_t i = length; i > 0; --i)
            if (block[i - 1] == '\n') return end - static_cast<off_t>(length - i);
        end -= static_cast<off_t>(length);
    }
    return 0;
}

}  // namespace

int list_folder(int folder, std::vector<std::string>& names) {
    names.clear();
    // A descriptor of its own: reading moves its position, and closedir closes it.
    Descriptor copy(::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    DIR* const entries = copy ? ::fdopendir(copy.get()) : nullptr;
    if (entries == nullptr) return errno;
    copy.release();
    errno = 0;
    while (const dirent* entry = ::readdir(entries)) {
        const std::string_view name = entry->d_name;
        if (name != "." && name != "..") names.emplace_back(name);
    }
    const int error = errno;
    ::closedir(entries);
    std::ranges::sort(names);
    return error;
}

void print_err(std::string_view text) { write_all(STDERR_FILENO, text); }

void LineFile::write_line(std::string_view line) {
    std::string text(line);
    text += '\n';
    write_bytes(text);
}

void LineFile::write_bytes(std::string_view bytes) {
    const int error = write_all(file_.get(), bytes);
    require(error == 0, class_of(error, ExitCode::output), "{}: cannot write: {}", path_, reason(error));
}

void LineFile::write_json(const nlohmann::json& record) {
    // Text from elsewhere (a path, a host name) may hold invalid UTF-8: replaced, never an exception in a
    // step.
    write_line(record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

AtomicFile::AtomicFile(int folder, const std::string& folder_path, std::string_view name)
    : folder_(folder),
      name_(name),
      temporary_("." + name_ + std::string(kTemporary) + std::to_string(::getpid())),
      path_(folder_path + "/" + name_) {
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const auto create = [&] {
        return Descriptor(::openat(folder_, temporary_.c_str(), flags, kNewFileMode));
    };
    file_ = create();
    if (!file_ && errno == EEXIST) {  // left by a process of the same id that died
        ::unlinkat(folder_, temporary_.c_str(), 0);
        file_ = create();
    }
    require(bool(file_), class_of(errno, ExitCode::output), "{}: cannot create: {}; choose another --out",
            path_, reason(errno));
}

AtomicFile::~AtomicFile() {
    if (file_) ::unlinkat(folder_, temporary_.c_str(), 0);
}

void AtomicFile::write(const void* data, size_t bytes) {
    const int error = write_all(file_.get(), {static_cast<const char*>(data), bytes});
    require(error == 0, class_of(error, ExitCode::output), "{}: cannot write {} bytes: {}", path_, bytes,
            reason(error));
    note_progress();
}

void AtomicFile::commit() {
    int error = ::fsync(file_.get()) == 0 ? 0 : errno;
    if (const int closed = file_.close(); error == 0) error = closed;
    if (error == 0 && ::renameat(folder_, temporary_.c_str(), folder_, name_.c_str()) != 0) error = errno;
    if (error != 0) ::unlinkat(folder_, temporary_.c_str(), 0);
    if (error == 0 && ::fsync(folder_) != 0) error = errno;
    require(error == 0, class_of(error, ExitCode::output), "{}: cannot write: {}", path_, reason(error));
}

OutputFolder::OutputFolder(const std::string& path, const std::string& key) {
    require(!path.empty(), ExitCode::output, "{} is empty; name a folder", key);
    std::error_code error;
    fs::path absolute = fs::absolute(path, error).lexically_normal();
    if (!absolute.has_filename()) absolute = absolute.parent_path();  // "run/" is "run"
    require(!fs::is_symlink(fs::symlink_status(absolute, error)), ExitCode::output,
            "{} {}: is a symbolic link; name the folder itself", key, path);
    // The parents may be links (e.g. /var/run): what counts is where they lead.
    const fs::path real = fs::weakly_canonical(absolute.parent_path(), error) / absolute.filename();
    require(!error, class_of(error.value(), ExitCode::output), "{} {}: {}", key, path, error.message());
    fs::create_directories(real, error);
    require(!error, class_of(error.value(), ExitCode::output), "{} {}: cannot create: {}; choose another",
            key, path, error.message());
    path_ = real.string();
    folder_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    require(bool(folder_), class_of(errno, ExitCode::output), "{} {}: {}", key, path, reason(errno));
}

AtomicFile OutputFolder::create_atomic(std::string_view name) const {
    check_name(name, path_);
    return {descriptor(), path_, name};
}

void OutputFolder::write_atomic(std::string_view name, std::string_view text) const {
    AtomicFile file = create_atomic(name);
    file.write(text.data(), text.size());
    file.commit();
}

void OutputFolder::write_json(std::string_view name, const nlohmann::json& value, int indent) const {
    write_atomic(name, value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

LineFile OutputFolder::open_lines(std::string_view name, LineFile::Start start) const {
    check_name(name, path_);
    // O_NONBLOCK: a pipe of that name must not wait for a reader. O_TRUNC only after we know that it is a
    // regular file.
    const int file =
        ::openat(descriptor(), std::string(name).c_str(),
                 O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, kNewFileMode);
    require(file >= 0, class_of(errno, ExitCode::output), "{}: cannot open: {}", path_of(name),
            reason(errno));
    LineFile lines(file, path_of(name));
    struct stat info {};
    require(::fstat(file, &info) == 0 && S_ISREG(info.st_mode), ExitCode::output, "{}: not a regular file",
            path_of(name));
    const off_t keep = start == LineFile::Start::append ? end_of_lines(file, info.st_size) : 0;
    require(keep == info.st_size || ::ftruncate(file, keep) == 0, class_of(errno, ExitCode::output),
            "{}: cannot truncate: {}", path_of(name), reason(errno));
    return lines;
}

OutputFolder OutputFolder::subfolder(std::string_view name) const {
    check_name(name, path_);
    const std::string folder(name);
    const int made = ::mkdirat(descriptor(), folder.c_str(), kNewFolderMode);
    require(made == 0 || errno == EEXIST, class_of(errno, ExitCode::output), "{}: cannot create: {}",
            path_of(name), reason(errno));
    const int opened =
        ::openat(descriptor(), folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    require(opened >= 0, class_of(errno, ExitCode::output), "{}: {}", path_of(name), reason(errno));
    return {opened, path_of(name)};
}

void OutputFolder::remove_files(const std::function<bool(const std::string&)>& which) const {
    std::vector<std::string> names;
    const int error = list_folder(descriptor(), names);
    require(error == 0, class_of(error, ExitCode::output), "{}: cannot list: {}", path_, reason(error));
    std::erase_if(names, [&](const std::string& name) { return !which(name); });
    for (const std::string& name : names) {
        const int failed = ::unlinkat(descriptor(), name.c_str(), 0) == 0 ? 0 : errno;
        require(failed == 0 || failed == ENOENT || failed == EISDIR, class_of(failed, ExitCode::output),
                "{}: cannot remove: {}", path_of(name), reason(failed));
    }
}

void OutputFolder::remove_leftovers() const {
    remove_files([](const std::string& name) {
        const size_t at = name.rfind(kTemporary);
        const size_t process = at == std::string::npos ? name.size() : at + kTemporary.size();
        return name[0] == '.' && process < name.size() &&
               name.find_first_not_of("0123456789", process) == std::string::npos;
    });
}

}  // namespace fp8flow
