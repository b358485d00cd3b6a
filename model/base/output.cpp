// SPDX-License-Identifier: MIT
// The output folder: refusals, atomic replacement, growing files. All calls are relative to open descriptors.
#include "model/base/output.h"

#include "kernels/core/error.h"
#include "model/job/watchdog.h"

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace fp8flow {

namespace fs = std::filesystem;

namespace {

// Folders of the system, with everything below them.
constexpr std::array<std::string_view, 13> kSystemTrees = {"/bin",   "/boot",  "/dev",    "/etc",  "/lib",
                                                           "/lib32", "/lib64", "/libx32", "/proc", "/sbin",
                                                           "/snap",  "/sys",   "/usr"};
// Folders that hold other people's things; a folder below them is fine.
constexpr std::array<std::string_view, 12> kShared = {
    "/", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/var", "/var/tmp", "/dev/shm"};

std::string reason(int error) { return std::strerror(error); }

bool is_below(std::string_view path, std::string_view tree) {
    return path.size() > tree.size() && path.substr(0, tree.size()) == tree && path[tree.size()] == '/';
}

void check_name(std::string_view name, const std::string& folder) {
    const auto plain = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               std::string_view("._-+=").find(c) != std::string_view::npos;
    };
    require(
        !name.empty() && name.size() <= 200 && name[0] != '.' && std::all_of(name.begin(), name.end(), plain),
        ExitCode::output, "\"{}\" is no plain file name to write in {}", name, folder);
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

std::string home_folder() {
    passwd entry{}, *user = nullptr;
    std::vector<char> texts(1 << 16);
    ::getpwuid_r(::getuid(), &entry, texts.data(), texts.size(), &user);
    return user != nullptr && user->pw_dir != nullptr ? user->pw_dir : "";
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

void print_err(std::string_view text) { write_all(STDERR_FILENO, text); }

std::string refusal_of_output_path(const std::string& path, const std::string& home) {
    for (const std::string_view folder : kShared)
        if (path == folder) return "it holds more than one run's files; name a folder below it";
    if (!is_below(path, "/dev/shm")) {
        for (const std::string_view tree : kSystemTrees)
            if (path == tree || is_below(path, tree)) return fmt::format("{} belongs to the system", tree);
    }
    if (!home.empty() && path == home) return "it is a home folder; name a folder below it";
    return "";
}

LineFile::LineFile(LineFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

LineFile& LineFile::operator=(LineFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(path_, other.path_);
    return *this;
}

LineFile::~LineFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

void LineFile::write_line(std::string_view line) {
    std::string text(line);
    text += '\n';
    write_bytes(text);
}

void LineFile::write_bytes(std::string_view bytes) {
    const int error = write_all(descriptor_, bytes);
    require(error == 0, class_of(error, ExitCode::output), "{}: cannot write: {}", path_, reason(error));
}

void LineFile::write_json(const nlohmann::json& record) {
    // Text from elsewhere (a path, a host name) may hold invalid UTF-8: replaced, never an exception in a
    // step.
    write_line(record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

namespace {

constexpr std::string_view kTemporary = ".tmp.";  // .NAME.tmp.PROCESS

}  // namespace

AtomicFile::AtomicFile(int folder, const std::string& folder_path, std::string_view name)
    : folder_(folder),
      name_(name),
      temporary_("." + name_ + std::string(kTemporary) + std::to_string(::getpid())),
      path_(folder_path + "/" + name_) {
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    descriptor_ = ::openat(folder_, temporary_.c_str(), flags, kNewFileMode);
    if (descriptor_ < 0 && errno == EEXIST) {  // left by a process of the same id that died
        ::unlinkat(folder_, temporary_.c_str(), 0);
        descriptor_ = ::openat(folder_, temporary_.c_str(), flags, kNewFileMode);
    }
    require(descriptor_ >= 0, class_of(errno, ExitCode::output),
            "{}: cannot create: {}; choose another --out", path_, reason(errno));
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : folder_(other.folder_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      name_(std::move(other.name_)),
      temporary_(std::move(other.temporary_)),
      path_(std::move(other.path_)) {}

AtomicFile::~AtomicFile() {
    if (descriptor_ < 0) return;
    ::close(descriptor_);
    ::unlinkat(folder_, temporary_.c_str(), 0);
}

void AtomicFile::write(const void* data, size_t bytes) {
    const int error = write_all(descriptor_, {static_cast<const char*>(data), bytes});
    require(error == 0, class_of(error, ExitCode::output), "{}: cannot write {} bytes: {}", path_, bytes,
            reason(error));
    note_progress();
}

void AtomicFile::commit() {
    int error = ::fsync(descriptor_) == 0 ? 0 : errno;
    if (::close(std::exchange(descriptor_, -1)) != 0 && error == 0) error = errno;
    if (error == 0 && ::renameat(folder_, temporary_.c_str(), folder_, name_.c_str()) != 0) error = errno;
    if (error != 0) ::unlinkat(folder_, temporary_.c_str(), 0);
    if (error == 0 && ::fsync(folder_) != 0) error = errno;
    require(error == 0, class_of(error, ExitCode::output), "{}: cannot write: {}", path_, reason(error));
}

OutputFolder::OutputFolder(const std::string& path) {
    require(!path.empty(), ExitCode::output, "--out is empty; name a folder");
    std::error_code error;
    fs::path absolute = fs::absolute(path, error).lexically_normal();
    if (!absolute.has_filename()) absolute = absolute.parent_path();  // "run/" is "run"
    const std::string home = home_folder();
    const auto refuse = [&](const fs::path& place) {
        const std::string why = refusal_of_output_path(place.string(), home);
        require(why.empty(), ExitCode::output, "--out {}: {}", path, why);
    };
    refuse(absolute);
    require(!fs::is_symlink(fs::symlink_status(absolute, error)), ExitCode::output,
            "--out {}: is a symbolic link; name the folder itself", path);
    // The parents may be links (e.g. /var/run): what counts is where they lead.
    const fs::path real = fs::weakly_canonical(absolute.parent_path(), error) / absolute.filename();
    require(!error, class_of(error.value(), ExitCode::output), "--out {}: {}", path, error.message());
    refuse(real);
    fs::create_directories(real, error);
    require(!error, class_of(error.value(), ExitCode::output), "--out {}: cannot create: {}; choose another",
            path, error.message());
    path_ = real.string();
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    require(descriptor_ >= 0, class_of(errno, ExitCode::output), "--out {}: {}", path, reason(errno));
    try {
        check_writable();
    } catch (...) {
        ::close(descriptor_);
        throw;
    }
}

OutputFolder::OutputFolder(OutputFolder&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

OutputFolder& OutputFolder::operator=(OutputFolder&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(path_, other.path_);
    return *this;
}

OutputFolder::~OutputFolder() {
    if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFolder::check_writable() const {
    const std::string probe = ".writable" + std::string(kTemporary) + std::to_string(::getpid());
    const int file = ::openat(descriptor_, probe.c_str(),
                              O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kNewFileMode);
    const int error = errno;
    if (file >= 0) ::close(file);
    if (file >= 0) ::unlinkat(descriptor_, probe.c_str(), 0);
    require(file >= 0 || error == EEXIST, class_of(error, ExitCode::output),
            "{}: cannot write here: {}; choose another --out", path_, reason(error));
}

AtomicFile OutputFolder::create_atomic(std::string_view name) const {
    check_name(name, path_);
    return {descriptor_, path_, name};
}

void OutputFolder::write_atomic(std::string_view name, std::string_view text) const {
    AtomicFile file = create_atomic(name);
    file.write(text.data(), text.size());
    file.commit();
}

LineFile OutputFolder::open_lines(std::string_view name, LineFile::Start start) const {
    check_name(name, path_);
    // O_NONBLOCK: a pipe of that name must not wait for a reader. O_TRUNC only after we know that it is a
    // regular file.
    const int file =
        ::openat(descriptor_, std::string(name).c_str(),
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
    const int made = ::mkdirat(descriptor_, folder.c_str(), kNewFolderMode);
    require(made == 0 || errno == EEXIST, class_of(errno, ExitCode::output), "{}: cannot create: {}",
            path_of(name), reason(errno));
    const int opened = ::openat(descriptor_, folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    require(opened >= 0, class_of(errno, ExitCode::output), "{}: {}", path_of(name), reason(errno));
    OutputFolder result(opened, path_of(name));
    result.check_writable();
    return result;
}

void OutputFolder::remove_files(const std::function<bool(const std::string&)>& which) const {
    // A descriptor of its own: reading moves its position, and closedir closes it.
    const int copy = ::openat(descriptor_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* const entries = copy < 0 ? nullptr : ::fdopendir(copy);
    if (entries == nullptr && copy >= 0) ::close(copy);
    require(entries != nullptr, class_of(errno, ExitCode::output), "{}: cannot list: {}", path_,
            reason(errno));
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(entries))
        if (which(entry->d_name)) names.emplace_back(entry->d_name);
    ::closedir(entries);
    for (const std::string& name : names)
        require(::unlinkat(descriptor_, name.c_str(), 0) == 0 || errno == ENOENT || errno == EISDIR,
                class_of(errno, ExitCode::output), "{}: cannot remove: {}", path_of(name), reason(errno));
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
