// SPDX-License-Identifier: MIT
// Everything that a run writes goes through here, below one folder that is opened once: whole files replaced
// atomically, and files that grow line by line. Paths are resolved below the folder's descriptor without
// following links, so that nothing outside is written even if a name is swapped meanwhile. Read next:
// table.h.
#pragma once

#include "model/safetensors/input.h"

#include <nlohmann/json_fwd.hpp>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

// Permissions of every file and folder that a run makes, checkpoints and exported weights included. The umask
// removes some of them.
constexpr unsigned kNewFileMode = 0666, kNewFolderMode = 0777;

// A file that grows by whole lines; each line reaches the system in one write, so a crash of this program
// loses none.
class LineFile {
public:
    enum class Start { truncate, append };

    // Appends `line` and a line end. Throws ExitCode::output, e.g. on a full disk.
    void write_line(std::string_view line);
    void write_bytes(std::string_view bytes);       // unchanged: records that are not lines
    void write_json(const nlohmann::json& record);  // JSON Lines: NaN and Inf become null

    const std::string& path() const { return path_; }

private:
    friend class OutputFolder;
    LineFile(int file, std::string path) : file_(file), path_(std::move(path)) {}

    Descriptor file_;
    std::string path_;
};

// A file that grows under a temporary name and gets its own when it is complete: a reader sees the old file
// or the new one, also after a power cut. Without commit() nothing stays.
class AtomicFile {
public:
    AtomicFile(AtomicFile&& other) noexcept = default;
    ~AtomicFile();

    // Both throw ExitCode::output, e.g. on a full disk.
    void write(const void* data, size_t bytes);
    void commit();  // fsync, rename, fsync of the folder

private:
    friend class OutputFolder;
    AtomicFile(int folder, const std::string& folder_path, std::string_view name);

    int folder_;
    Descriptor file_;
    std::string name_, temporary_, path_;
};

class OutputFolder {
public:
    // Creates the folder (and its parents) where missing. Throws ExitCode::output if it is a link or a file.
    explicit OutputFolder(const std::string& path, const std::string& key = "--out");

    const std::string& path() const { return path_; }  // absolute
    std::string path_of(std::string_view name) const { return path_ + "/" + std::string(name); }
    int descriptor() const { return folder_.get(); }  // open as long as this object or the one it is moved to

    // In all of these, `name` is a plain file name: letters, digits, '.', '_', '-', '+', '='; not beginning
    // with '.'.

    // A whole file in parts of any size, and at once. The folder must outlive the file.
    AtomicFile create_atomic(std::string_view name) const;
    void write_atomic(std::string_view name, std::string_view text) const;
    // Text from elsewhere (a path, a host name) may hold invalid UTF-8, which is replaced. indent -1: one
    // line.
    void write_json(std::string_view name, const nlohmann::json& value, int indent = 2) const;

    // `append` keeps what whole lines the file has (a torn last line is cut off); `truncate` empties it.
    LineFile open_lines(std::string_view name, LineFile::Start start) const;

    // A folder below this one, created where missing.
    OutputFolder subfolder(std::string_view name) const;

    // Removes the files, not folders, of the names that `which` wants gone. Throws ExitCode::output.
    void remove_files(const std::function<bool(const std::string& name)>& which) const;
    // Temporary files of processes that died. No other process may write here.
    void remove_leftovers() const;

private:
    OutputFolder(int folder, std::string path) : folder_(folder), path_(std::move(path)) {}

    Descriptor folder_;
    std::string path_;
};

// The sorted names in an open folder, without "." and "..". Returns 0 or the error number.
int list_folder(int folder, std::vector<std::string>& names);

// To standard error, as a whole. What cannot be written is lost, without an exception.
void print_err(std::string_view text);

}  // namespace fp8flow
