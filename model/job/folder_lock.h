// SPDX-License-Identifier: MIT
// FolderLock: one owner for a folder. The owner holds flock(2) on the file `.lock` in it, which names the
// owner: process, host, command. The kernel releases the lock when the owner ends, however it ends; over NFS
// the server does. An owner that ends by itself empties the file, which stays.
//
// Where the file system has no locks, nobody becomes the owner unless he takes over. Taking over puts a new
// `.lock` in place of the old one, whoever holds that; the earlier owner finds out in its next check. Read
// next: run_folder.h.
#pragma once

#include "model/safetensors/input.h"

#include <atomic>
#include <chrono>
#include <string>

namespace fp8flow {

class FolderLock {
public:
    enum class Holder { keeps, is_replaced };  // what becomes of an owner that is there
    // Of the folder with this descriptor, which must outlive the lock. Takes nothing yet. `command`: shown
    // to others that want the folder.
    FolderLock(int folder, std::string folder_path, const std::string& command,
               Holder holder = Holder::keeps);
    ~FolderLock();
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;

    enum class Attempt {
        taken,
        held,  // by holder()
        gone,  // the folder has been removed meanwhile
    };
    // Does not wait. Throws ExitCode::output where the folder cannot be written or has no locks.
    Attempt try_to_take();
    const std::string& holder() const { return holder_; }  // after held: process, host, command

    // Throws ExitCode::output unless the folder is still ours: reads the file.
    void check() const;
    // The same unless it was ours some seconds ago. For every step.
    void check_if_unsure() const;
    // Removes the file of an owner that removes its folder.
    void remove_file() const;

private:
    int open_locked(const std::string& name);
    bool is_in_place() const;
    bool is_ours() const;
    void replace(const std::string& candidate);
    void write_record() const;

    int folder_;
    Descriptor file_;
    std::string path_, id_, text_, holder_;
    Holder other_;
    mutable std::atomic<std::chrono::steady_clock::rep> seen_{0};  // when it was ours for sure
};

}  // namespace fp8flow
