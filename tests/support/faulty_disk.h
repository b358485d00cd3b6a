// SPDX-License-Identifier: MIT
// A Disk with a fault at call number n: the call fails, is cut short, or is the last thing the process does.
// Also what a power cut at that moment leaves: files without what was not synced, and folders without the
// names that were not synced.
#pragma once

#include "model/checkpoint/disk.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

namespace fp8flow::test {

enum class Fault { none, no_space, io_error, no_access, cut_short, death };
inline const char* name_of(Fault fault) {
    switch (fault) {
        case Fault::none: return "none";
        case Fault::no_space: return "ENOSPC";
        case Fault::io_error: return "EIO";
        case Fault::no_access: return "EACCES";
        case Fault::cut_short: return "short transfer";
        case Fault::death: return "death";
    }
    return "?";
}

// Not an Error: nothing of the program may catch it and go on.
struct ProcessDeath {};

class FaultyDisk : public checkpoint::Disk {
public:
    // Call `at` (from 0) fails; none: calls are counted.
    explicit FaultyDisk(Fault fault = Fault::none, int64_t at = -1) : fault_(fault), at_(at) {}

    int64_t calls() const { return calls_; }
    bool dead() const { return dead_; }

    int open_folder(const std::string& path) override {
        const int error = next();
        return error != 0 ? error : Disk::open_folder(path);
    }
    int open_folder(int folder, const std::string& name) override {
        const int error = next();
        return error != 0 ? error : Disk::open_folder(folder, name);
    }
    int create_file(int folder, const std::string& name) override {
        if (const int error = next()) return error;
        const int file = Disk::create_file(folder, name);
        if (file >= 0) remember({Change::created_file, path_of(folder), name, ""});
        return file;
    }
    int open_file(int folder, const std::string& name) override {
        const int error = next();
        return error != 0 ? error : Disk::open_file(folder, name);
    }
    int64_t size(int file) override {
        const int error = next();
        return error != 0 ? error : Disk::size(file);
    }
    // A death, and a lack of space, come in the middle of a write.
    int64_t write(int file, const void* data, size_t bytes) override {
        const bool half =
            is_next() && fault_ != Fault::io_error && fault_ != Fault::no_access && fault_ != Fault::none;
        remember({Change::wrote, path_of(file), "", ""});
        if (half) bytes = Disk::write(file, data, bytes / 2) < 0 ? 0 : bytes / 2;
        const int error = next();
        if (error != 0) return error;
        return half ? static_cast<int64_t>(bytes) : Disk::write(file, data, bytes);
    }
    int64_t read(int file, void* data, size_t bytes, int64_t offset) override {
        const bool half = is_next() && fault_ == Fault::cut_short;
        const int error = next();
        return error != 0 ? error : Disk::read(file, data, half ? (bytes + 1) / 2 : bytes, offset);
    }
    int sync(int file) override {
        if (const int error = next()) return error;
        const std::string path = path_of(file);
        const std::lock_guard lock(mutex_);
        std::erase_if(changes_, [&](const Change& change) { return change.path == path; });
        return Disk::sync(file);
    }
    int close(int file) override {  // destructors call it: it cannot throw
        const bool fails = !dead_ && calls_++ == at_;
        Disk::close(file);
        if (fails && fault_ == Fault::death) dead_ = true;
        return fails && fault_ == Fault::io_error ? -EIO : fails && fault_ == Fault::no_space ? -ENOSPC : 0;
    }
    int make_folder(int folder, const std::string& name) override {
        if (const int error = next()) return error;
        const int made = Disk::make_folder(folder, name);
        if (made == 0) remember({Change::made_folder, path_of(folder), name, ""});
        return made;
    }
    int rename(int folder, const std::string& from, const std::string& to) override {
        if (const int error = next()) return error;
        const int renamed = Disk::rename(folder, from, to);
        if (renamed == 0) remember({Change::renamed, path_of(folder), from, to});
        return renamed;
    }
    int remove_file(int folder, const std::string& name) override {
        const int error = next();
        return error != 0 ? error : Disk::remove_file(folder, name);
    }
    int remove_folder(int folder, const std::string& name) override {
        const int error = next();
        return error != 0 ? error : Disk::remove_folder(folder, name);
    }
    int list(int folder, std::vector<std::string>& names) override {
        const int error = next();
        return error != 0 ? error : Disk::list(folder, names);
    }

    // The machine loses power: what was not synced goes, the last change first. (Removals stay done: their
    // loss only brings old files back.)
    void cut_power() {
        namespace fs = std::filesystem;
        std::error_code ignored;
        for (auto change = changes_.rbegin(); change != changes_.rend(); ++change) {
            const fs::path name = fs::path(change->path) / change->name;
            switch (change->kind) {
                case Change::wrote:
                    if (fs::exists(change->path))
                        fs::resize_file(change->path, fs::file_size(change->path) / 3);
                    break;
                case Change::created_file: fs::remove(name, ignored); break;
                case Change::made_folder: fs::remove_all(name, ignored); break;
                case Change::renamed: fs::rename(fs::path(change->path) / change->to, name, ignored); break;
            }
        }
        changes_.clear();
    }

private:
    struct Change {
        enum Kind { wrote, created_file, made_folder, renamed } kind;
        std::string path;  // of the folder; of a written file its own
        std::string name, to;
    };

    bool is_next() const { return !dead_ && calls_ == at_; }
    int next() {
        if (dead_) throw ProcessDeath{};
        if (calls_++ != at_) return 0;
        switch (fault_) {
            case Fault::none:
            case Fault::cut_short: return 0;
            case Fault::no_space: return -ENOSPC;
            case Fault::io_error: return -EIO;
            case Fault::no_access: return -EACCES;
            case Fault::death: dead_ = true; throw ProcessDeath{};
        }
        return 0;
    }
    void remember(Change change) {
        const std::lock_guard lock(mutex_);
        changes_.push_back(std::move(change));
    }
    static std::string path_of(int file) {
        std::error_code ignored;
        return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string();
    }

    Fault fault_;
    int64_t at_;
    std::atomic<int64_t> calls_ = 0;
    std::atomic<bool> dead_ = false;
    std::mutex mutex_;
    std::vector<Change> changes_;  // not synced yet
};

}  // namespace fp8flow::test
