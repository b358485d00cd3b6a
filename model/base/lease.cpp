// SPDX-License-Identifier: MIT
// The lease file: created under a name of its own, linked into place, renewed, watched, replaced.
#include "model/base/lease.h"

#include "kernels/core/error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>

namespace fp8flow {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kLease = ".lease";
constexpr const char* kReplacing = ".lease.replacing";  // of the one process that may replace a stale lease
constexpr mode_t kLeaseMode = 0644;
constexpr size_t kLargestLease = 4096;  // what we write has some hundred bytes

std::string first_line_of(const char* path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

std::string random_id() {
    std::random_device random;
    return fmt::format("{:08x}{:08x}", random(), random());
}

// Where process ids mean the same: the boot of a kernel, and the name space of its processes. Where either is
// unknown, no other process counts as one of this machine.
std::string this_machine() {
    char space[64] = "";
    const ssize_t length = ::readlink("/proc/self/ns/pid", space, sizeof space - 1);
    const std::string boot = first_line_of("/proc/sys/kernel/random/boot_id");
    return length > 0 && !boot.empty() ? boot + " " + space : random_id();
}

std::string host_name() {
    char name[256] = "";
    return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

// Field 22 of /proc/PID/stat, when the process began, in ticks since the boot; -1 of one that has ended. A
// process id is used again, this pair is not.
int64_t start_in(const std::string& stat) {
    const size_t name_end = stat.rfind(") ");  // "pid (name) state parent ..."
    if (name_end == std::string::npos) return -1;
    const char state = stat[name_end + 2];
    if (state == 'Z' || state == 'X') return -1;
    size_t at = name_end + 2;
    for (int field = 3; field < 22 && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
    return at == std::string::npos ? -1 : std::atoll(stat.c_str() + at);
}

std::string stat_of(int64_t process) { return first_line_of(fmt::format("/proc/{}/stat", process).c_str()); }

// Of this machine. Another user's may be hidden in /proc.
bool lives(int64_t process, int64_t start) {
    if (process <= 0) return false;
    const std::string stat = stat_of(process);
    if (stat.empty()) return ::kill(static_cast<pid_t>(process), 0) != 0 && errno == EPERM;
    return start_in(stat) == start && start >= 0;
}

nlohmann::json parsed(const std::string& text) {
    nlohmann::json lease = nlohmann::json::parse(text, nullptr, false);
    return lease.is_object() ? lease : nlohmann::json::object();
}

std::string text_in(const nlohmann::json& lease, const char* key) {
    const auto found = lease.find(key);
    return found != lease.end() && found->is_string() ? found->get<std::string>() : "";
}

int64_t number_in(const nlohmann::json& lease, const char* key) {
    const auto found = lease.find(key);
    return found != lease.end() && found->is_number_integer() ? found->get<int64_t>() : -1;
}

int64_t nanoseconds(const timespec& time) {
    constexpr int64_t kPerSecond = 1'000'000'000;
    return static_cast<int64_t>(time.tv_sec) * kPerSecond + time.tv_nsec;
}

int64_t now() { return Clock::now().time_since_epoch().count(); }

}  // namespace

Lease::Lease(int folder, std::string folder_path, std::string command, const LeaseTimes& times)
    : folder_(folder),
      path_(std::move(folder_path)),
      id_(random_id()),
      candidate_(fmt::format("{}.{}", kLease, id_)),
      times_(times) {
    const nlohmann::json lease = {{"id", id_},
                                  {"machine", this_machine()},
                                  {"host", host_name()},
                                  {"pid", ::getpid()},
                                  {"process start", start_in(stat_of(::getpid()))},
                                  {"command", command.substr(0, kLargestLease / 4)}};
    text_ = lease.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

Lease::~Lease() {
    if (taken_) {
        renewal_.request_stop();
        if (renewal_.joinable()) renewal_.join();  // not where it could not be started
        try {
            if (holds_ours(kLease)) ::unlinkat(folder_, kLease, 0);
        } catch (...) {  // no memory to read it: it goes stale with this process
        }
    }
    if (has_candidate_) ::unlinkat(folder_, candidate_.c_str(), 0);
}

std::optional<Lease::Found> Lease::read(const std::string& name) const {
    // Opening it asks the server of a network file system for the file as it is now.
    const int file = ::openat(folder_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return std::nullopt;
    Found found;
    found.text.resize(kLargestLease);
    struct stat info {};
    const ssize_t length = ::pread(file, found.text.data(), found.text.size(), 0);
    const bool there = length >= 0 && ::fstat(file, &info) == 0;
    ::close(file);
    if (!there) return std::nullopt;
    found.text.resize(static_cast<size_t>(length));
    found.modified = nanoseconds(info.st_mtim);
    return found;
}

// A file with our text, where there is none. Returns 0 or the error number.
int Lease::write_new(const std::string& name) const {
    const int file =
        ::openat(folder_, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kLeaseMode);
    if (file < 0) return errno;
    errno = ENOSPC;  // where it writes less than asked
    const bool written =
        ::write(file, text_.data(), text_.size()) == static_cast<ssize_t>(text_.size()) && ::fsync(file) == 0;
    const int error = written ? 0 : errno;
    ::close(file);
    if (!written) ::unlinkat(folder_, name.c_str(), 0);
    return error;
}

// False where the folder is gone.
bool Lease::make_candidate() {
    const int error = write_new(candidate_);
    if (error == ENOENT || error == ESTALE) return false;
    require(error == 0, ExitCode::output, "{}: cannot write here: {}", path_, std::strerror(error));
    has_candidate_ = true;
    return true;
}

// Returns 0 or the error number. A network file system may say that the link failed though its first attempt
// succeeded: the text tells. Where there are no hard links the file is created in place and filled a moment
// later; until then a reader takes it for another machine's.
int Lease::put_in_place(const char* name) const {
    if (::linkat(folder_, candidate_.c_str(), folder_, name, 0) == 0) return 0;
    const int error = errno;
    if (error == EEXIST) return holds_ours(name) ? 0 : error;
    if (error != EPERM && error != EOPNOTSUPP && error != ENOSYS && error != EMLINK) return error;
    return write_new(name);
}

void Lease::become_owner() {
    ::unlinkat(folder_, candidate_.c_str(), 0);
    has_candidate_ = false;
    taken_ = true;
    seen_ = now();
    renewal_ = std::jthread([this](const std::stop_token& stop) { renew(stop); });
}

Lease::Attempt Lease::try_to_take() {
    if (!has_candidate_ && !make_candidate()) return Attempt::gone;
    for (;;) {
        const int error = put_in_place(kLease);
        if (error == 0) {
            become_owner();
            return Attempt::taken;
        }
        if (error == ENOENT || error == ESTALE) return Attempt::gone;
        require_made(error, kLease);
        const std::optional<Found> found = read(kLease);
        if (!found) continue;  // it went meanwhile
        holder_ = described(found->text);
        const State state = state_of(*found, lease_seen_);
        if (state != State::stale) return state == State::live ? Attempt::held : Attempt::watching;
        if (const int lost = put_in_place(kReplacing); lost != 0) {
            if (lost != ENOENT && lost != ESTALE) require_made(lost, kReplacing);
            const std::optional<Found> other = read(kReplacing);
            if (other && state_of(*other, replacing_seen_) == State::stale)
                ::unlinkat(folder_, kReplacing, 0);
            return Attempt::watching;
        }
        if (replace(*found)) {
            become_owner();
            return Attempt::taken;
        }
    }
}

// Two steps, reading and renaming; no other process does them meanwhile.
bool Lease::replace(const Found& stale) const {
    const std::optional<Found> now = read(kLease);
    const bool replaced =
        now && now->text == stale.text && ::renameat(folder_, candidate_.c_str(), folder_, kLease) == 0;
    const int error = errno;
    ::unlinkat(folder_, kReplacing, 0);
    require(replaced || !now || now->text != stale.text, ExitCode::output,
            "{}: cannot replace the lease of {}: {}", path_, holder_, std::strerror(error));
    return replaced;
}

void Lease::require_made(int error, const char* name) const {
    require(error == 0 || error == EEXIST, ExitCode::output,
            "{}: cannot make {}, which says whose folder it is: {}", path_, name, std::strerror(error));
}

Lease::State Lease::state_of(const Found& found, Seen& first) {
    if (!first.found || first.found->text != found.text) first = {found, Clock::now()};
    const Clock::duration watched = Clock::now() - first.since;
    const nlohmann::json lease = parsed(found.text);
    if (text_in(lease, "machine") == text_in(parsed(text_), "machine")) {
        if (!lives(number_in(lease, "pid"), number_in(lease, "process start"))) return State::stale;
        // A run that was ended a moment ago may not be quite gone.
        return watched < times_.beat ? State::unsure : State::live;
    }
    if (first.found->modified != found.modified) return State::live;
    struct stat info {};
    const bool dated = ::utimensat(folder_, candidate_.c_str(), nullptr, 0) == 0 &&
                       ::fstatat(folder_, candidate_.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
    require(dated, ExitCode::output, "{}: cannot write here: {}", path_, std::strerror(errno));
    const std::chrono::nanoseconds age(nanoseconds(info.st_mtim) - found.modified);
    return age >= times_.stale && watched >= 2 * times_.beat ? State::stale : State::unsure;
}

bool Lease::holds_ours(const char* name) const {
    const std::optional<Found> found = read(name);
    return found && found->text == text_;
}

void Lease::check() const {
    if (holds_ours(kLease)) {
        seen_ = now();
        return;
    }
    const std::optional<Found> found = read(kLease);
    fail(ExitCode::output,
         "{}: this run has lost its folder: {}; it stops and writes nothing more there. A lease that is not "
         "renewed for {} s is given away",
         path_, found ? described(found->text) + " has taken it" : "its lease was removed",
         std::chrono::duration_cast<std::chrono::seconds>(times_.stale).count());
}

void Lease::check_if_unsure() const {
    if (Clock::duration(now() - seen_) > 2 * times_.beat) check();
}

void Lease::renew(const std::stop_token& stop) {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the thread that trains
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    while (!wake.wait_for(lock, stop, times_.beat, [&] { return stop.stop_requested(); })) {
        if (!holds_ours(kLease)) continue;  // never renews another's; the run finds out in its next check
        ::utimensat(folder_, kLease, nullptr, AT_SYMLINK_NOFOLLOW);
        seen_ = now();
    }
}

std::string Lease::described(const std::string& text) const {
    const nlohmann::json lease = parsed(text);
    return fmt::format("process {} on {} ({})", number_in(lease, "pid"), text_in(lease, "host"),
                       text_in(lease, "command"));
}

}  // namespace fp8flow
