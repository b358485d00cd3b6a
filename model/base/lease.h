// SPDX-License-Identifier: MIT
// Lease: one owner for a folder, also over NFS. The lease is the file `.lease` in it, which says who holds
// it; it appears whole, by link(2), which fails where there is one. The owner renews the file's time. Whoever
// wants the folder compares that time with one the same file system gives now, so clocks of hosts do not
// matter.
//
// A lease goes stale:
// - at once, if its process ran on this machine and is no more;
// - on another machine, if it has not been renewed for `LeaseTimes::stale`, and not while we watched.
// Of several processes that find a stale lease, the one that links `.lease.replacing` may replace it. Read
// next: run_folder.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>

namespace fp8flow {

struct LeaseTimes {
    std::chrono::milliseconds beat{5000};    // between renewals
    std::chrono::milliseconds stale{60000};  // without a renewal
};

class Lease {
public:
    // Of the folder with this descriptor, which must outlive the lease. Takes nothing yet. `command`: told to
    // others that want the folder.
    Lease(int folder, std::string folder_path, std::string command, const LeaseTimes& times = {});
    // Gives the lease back. A lease that another process has taken over stays with it.
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    enum class Attempt {
        taken,     // ours; a thread renews it from now on
        held,      // a live process has it
        watching,  // somebody has it, of whom we do not know yet whether it lives: try again
        gone,      // the folder has been removed meanwhile
    };
    // Does not wait. Throws ExitCode::output where the folder cannot be written.
    Attempt try_to_take();
    const std::string& holder() const { return holder_; }  // after held or watching: process, host, command

    // Throws ExitCode::output unless the lease is still ours: reads the file.
    void check() const;
    // The same without touching the disk while the thread has seen it within two beats. For every step.
    void check_if_unsure() const;

private:
    struct Found {
        std::string text;
        int64_t modified = 0;  // nanoseconds
    };
    std::optional<Found> read(const std::string& name) const;
    int write_new(const std::string& name) const;
    bool make_candidate();
    int put_in_place(const char* name) const;
    bool replace(const Found& stale) const;
    void require_made(int error, const char* name) const;
    void become_owner();
    enum class State { live, unsure, stale };
    // Another's file, as we saw it first.
    struct Seen {
        std::optional<Found> found;
        std::chrono::steady_clock::time_point since;
    };
    State state_of(const Found& found, Seen& first);
    bool holds_ours(const char* name) const;
    void renew(const std::stop_token& stop);
    std::string described(const std::string& text) const;

    int folder_;
    std::string path_, id_, text_, candidate_, holder_;
    LeaseTimes times_;
    bool has_candidate_ = false, taken_ = false;
    Seen lease_seen_, replacing_seen_;
    mutable std::atomic<int64_t> seen_{0};  // when it was ours for sure, of the steady clock
    std::jthread renewal_;                  // last: ends before what it uses
};

}  // namespace fp8flow
