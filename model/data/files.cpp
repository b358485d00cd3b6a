// SPDX-License-Identifier: MIT
// Expansion of data_path entries.
#include "model/data/files.h"

#include "kernels/core/error.h"
#include "model/safetensors/input.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

namespace fp8flow::data {

namespace fs = std::filesystem;

namespace {

bool has_wildcard(const std::string& text) { return text.find_first_of("*?[{") != std::string::npos; }

// Called for each folder of a pattern that cannot be opened; a result other than 0 ends the search. A folder
// that does not exist has no match.
int refuse_unreadable(const char*, int error) { return error == ENOENT || error == ENOTDIR ? 0 : 1; }

class Lister {
public:
    explicit Lister(const std::vector<std::string>& extensions) : extensions_(extensions) {}

    void add_entry(const std::string& entry) {
        require(!entry.empty(), ExitCode::data, "data.data_path holds an empty entry");
        struct stat info {};
        if (::stat(entry.c_str(), &info) != 0) {
            require(errno == ENOENT && has_wildcard(entry), ExitCode::data, "data.data_path: {}: {}",
                    printable(entry), std::strerror(errno));
            return add_glob(entry);
        }
        const bool is_folder = S_ISDIR(info.st_mode);
        require(is_folder || S_ISREG(info.st_mode), ExitCode::data,
                "data.data_path: {}: neither a regular file nor a folder", entry);
        const fs::path path = fs::path(entry).lexically_normal();
        if (is_folder) return add_folder(path, path);
        found_.push_back({.path = path.string(), .relative = path.filename().string(), .named = true});
    }

    DataFiles take() {
        std::ranges::sort(found_, [](const DataFile& a, const DataFile& b) {
            return std::tie(a.relative, a.path) < std::tie(b.relative, b.path);
        });
        // Only now that the order is fixed: which of two names of one file stays must not depend on the
        // directory's order.
        std::set<FileId> seen;
        DataFiles result;
        std::vector<std::string> again, unread;
        for (DataFile& file : found_) {
            const struct stat info = status_of(file.path);
            file.bytes = info.st_size;
            if (seen.insert(id_of(info)).second)
                result.files.push_back(std::move(file));
            else
                again.push_back(file.path);
        }
        for (const std::string& link : links_) {
            struct stat info {};
            if (::stat(link.c_str(), &info) != 0 ||
                (S_ISDIR(info.st_mode) && !folders_.contains(id_of(info))))
                unread.push_back(link);
        }
        warn(result, again, "files that are named again, each is read once an epoch");
        warn(result, unread, "links that are not followed (name a linked folder by an entry of its own)");
        return result;
    }

private:
    using FileId = std::pair<dev_t, ino_t>;
    static FileId id_of(const struct stat& info) { return {info.st_dev, info.st_ino}; }

    static struct stat status_of(const std::string& path) {
        struct stat info {};
        const bool is_there = ::stat(path.c_str(), &info) == 0;  // first: the other arguments read errno
        require(is_there, ExitCode::data,
                "data.data_path: {}: {}; give data of yours: --set data.data_path=[/folder]", path,
                std::strerror(errno));
        return info;
    }

    static void warn(DataFiles& files, const std::vector<std::string>& paths, const char* what) {
        if (!paths.empty())
            files.warnings.push_back(fmt::format("data.data_path: {}: {}, for example {}", what, paths.size(),
                                                 printable(paths.front())));
    }

    void add_glob(const std::string& pattern) {
        // Relative paths begin where the wildcards begin: the part before them is only a place.
        fs::path base;
        for (const fs::path& part : fs::path(pattern)) {
            if (has_wildcard(part.string())) break;
            base /= part;
        }
        glob_t matches{};
        const int status = ::glob(pattern.c_str(), GLOB_BRACE, refuse_unreadable, &matches);
        std::vector<std::string> paths;
        for (size_t i = 0; status == 0 && i < matches.gl_pathc; ++i) paths.emplace_back(matches.gl_pathv[i]);
        ::globfree(&matches);
        require(status == 0 || status == GLOB_NOMATCH, ExitCode::data,
                "data.data_path: {}: cannot read a folder on the way", printable(pattern));
        require(
            !paths.empty(), ExitCode::data,
            "data.data_path: {}: no file matches; want a file, a folder or a pattern, seen from the folder "
            "that the command runs in",
            printable(pattern));
        for (const std::string& path : paths) {
            const struct stat info = status_of(path);
            if (S_ISDIR(info.st_mode)) add_folder(path, base);
            if (!S_ISREG(info.st_mode)) continue;
            const fs::path below = fs::path(path).lexically_relative(base.lexically_normal());
            found_.push_back({.path = path, .relative = base.empty() ? path : below.string()});
        }
    }

    void add_folder(const fs::path& folder, const fs::path& base) {
        std::error_code error;
        fs::directory_iterator entries(folder, error);
        require(!error, class_of(error.value(), ExitCode::data), "data.data_path: {}: {}", folder.string(),
                error.message());
        folders_.insert(id_of(status_of(folder.string())));
        for (const fs::directory_entry& entry : entries) {
            const std::string name = entry.path().filename().string();
            if (name.empty() || name[0] == '.') continue;
            // A pipe, a socket, a device: not text, not ours to open.
            const bool is_link = entry.is_symlink(error), is_folder = entry.is_directory(error);
            if (is_folder && !is_link) {
                add_folder(entry.path(), base);
            } else if (!is_folder && !wanted(entry.path())) {
                continue;
            } else if (entry.is_regular_file(error)) {
                found_.push_back(
                    {.path = entry.path().string(), .relative = relative_to(entry.path(), base)});
            } else if (is_link) {
                links_.insert(entry.path().string());
            }
        }
    }

    static std::string relative_to(const fs::path& path, const fs::path& base) {
        return base.empty() ? path.lexically_normal().string() : path.lexically_relative(base).string();
    }

    bool wanted(const fs::path& path) const {
        return extensions_.empty() || std::ranges::count(extensions_, path.extension().string()) > 0;
    }

    const std::vector<std::string>& extensions_;
    std::vector<DataFile> found_;
    std::set<FileId> folders_;     // that were read
    std::set<std::string> links_;  // to folders and to what is no file
};

}  // namespace

DataFiles list_data_files(const std::vector<std::string>& entries,
                          const std::vector<std::string>& extensions) {
    require(!entries.empty(), ExitCode::data,
            "data.data_path is empty: name at least one file, folder or glob");
    Lister lister(extensions);
    for (const std::string& entry : entries) lister.add_entry(entry);
    return lister.take();
}

std::vector<uint8_t> read_data_file(const std::string& path, int64_t limit) {
    const InputFile file(path, ExitCode::data);
    std::vector<uint8_t> bytes(static_cast<size_t>(std::min(limit, file.size())));
    file.read(0, bytes.data(), std::ssize(bytes));
    return bytes;
}

}  // namespace fp8flow::data
