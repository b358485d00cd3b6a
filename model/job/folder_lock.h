// SPDX-License-Identifier: MIT
// FolderLock: one owner for a folder. The owner holds flock(2) on the file `.lock` in it, which has the
// process, host and command of the owner. The kernel releases the lock when the owner ends in any way; over
// NFS the server does. An owner that ends normally empties the file.
//
// If the file system has no locks, a process becomes the owner only by taking over. Taking over replaces
// `.lock` by a new file, even if another process holds it; the earlier owner notices in its next check. Read
// next: run_folder.h.
#pragma once

#include "model/safetensors/input.h"

#include <atomic>
#include <chrono>
#include <string>

namespace fp8flow {

class FolderLock {
public:
    enum class Holder { keeps, is_replaced };  // what happens to an existing owner
    // For the folder with this descriptor, which must outlive the lock. Does not lock yet. `command`: shown
    // to other processes that want the folder.
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
    // Does not wait. Throws ExitCode::output if the folder cannot be written or has no locks.
    Attempt try_to_take();
    const std::string& holder() const { return holder_; }  // after held: process, host, command

    // Throws ExitCode::output if this process is no longer the owner. Reads the file.
    void check() const;
    // The same, but not more often than every few seconds. For every step.
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
    mutable std::atomic<std::chrono::steady_clock::rep> seen_{0};  // last successful check
};

}  // namespace fp8flow
