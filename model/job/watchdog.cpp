// SPDX-License-Identifier: MIT
// The shared records of the ranks of a host, and the thread that checks them.
#include "model/job/watchdog.h"

#include "kernels/core/error.h"
#include "kernels/host_memory.h"
#include "model/job/stop_signals.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <sstream>
#include <thread>
#include <vector>

namespace fp8flow {

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr timespec kBetweenLooks{.tv_sec = 0, .tv_nsec = kSecond / 10};
constexpr int64_t kLongestPause = kSecond;  // of this thread; a longer one means that this rank was stopped
constexpr int64_t kForTheReport = 15 * kSecond;  // of the rank that reports and ends the others
constexpr int64_t kForLateRanks = kSecond / 2;   // less than the second that Open MPI leaves before SIGKILL

enum class State : int32_t { not_started, running, ended };

// All bytes 0: a rank that has not started. scripts/reliability.py reads this struct.
struct alignas(64) RankRecord : ProgressRecord {
    std::atomic<State> state;
    std::atomic<int32_t> pid, rank, signal;
    std::atomic<Stage> stage;
    std::atomic<int64_t> step;
};
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<State>::is_always_lock_free);

struct alignas(64) HostRecord {
    std::atomic<int64_t> reported;  // when; 0: not yet
};

HostRecord lone_host;
RankRecord lone_rank;

// Static, because handlers of fatal signals need them. A process without a Watchdog uses private memory.
HostRecord* host = &lone_host;
RankRecord* own = &lone_rank;
std::span<RankRecord> ranks(&lone_rank, 1);
int job_size = 1;
char segment[64] = "";
std::atomic<int64_t> deadline{0};
std::atomic<const char*> deadline_name{"--start-deadline"};

int64_t now() {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * kSecond + time.tv_nsec;
}

const char* name_of(Stage stage) {
    constexpr const char* kNames[] = {"start-up", "MPI_Init", "set-up",      "reading weights",
                                      "resume",   "step",     "evaluation",  "checkpoint",
                                      "export",   "summary",  "MPI_Finalize"};
    static_assert(std::size(kNames) == static_cast<size_t>(Stage::mpi_finalize) + 1);
    return kNames[static_cast<size_t>(stage)];
}

// What /proc/PID/stat has after the name: the state, the parent, ... Empty if the process has ended or there
// is no /proc.
std::vector<std::string> stat_of(int64_t process) {
    std::ifstream file(fmt::format("/proc/{}/stat", process));
    std::string line;
    std::getline(file, line);
    std::istringstream fields(line.substr(line.rfind(')') + 1));
    return {std::istream_iterator<std::string>(fields), {}};
}

// The state letter; 0 if there is no such process.
char process_state(int32_t pid) {
    const std::vector<std::string> stat = stat_of(pid);
    if (::kill(pid, 0) != 0 && errno == ESRCH) return 0;
    return stat.empty() ? '?' : stat.front().front();
}

bool is_lost(const RankRecord& notes) {
    if (notes.state != State::running) return false;
    const char state = process_state(notes.pid);
    // It may have ended normally since the first check.
    return (state == 0 || state == 'Z' || state == 'X') && notes.state == State::running;
}

// "rank 3 (process 123, last in step 12, 4 s ago)"
std::string described(const RankRecord& notes) {
    const std::string step = notes.step == 0              ? ""
                             : notes.stage == Stage::step ? fmt::format(" {}", notes.step.load())
                                                          : fmt::format(" after step {}", notes.step.load());
    return fmt::format("rank {} (process {}, last in {}{}, {} s ago)", notes.rank.load(), notes.pid.load(),
                       name_of(notes.stage), step, (now() - notes.progress) / kSecond);
}

std::string described_as_gone(const RankRecord& notes) {
    return fmt::format("another rank was lost: {} {}", described(notes),
                       notes.signal > 0
                           ? fmt::format("ended by signal {}", notes.signal.load())
                           : std::string("is gone (killed, perhaps for lack of memory, or it crashed)"));
}

// With this rank's number and host.
void print_report(const std::string& text) {
    const std::string line =
        fmt::format("fp8flow: error: rank {} on {}: {}\n", own->rank.load(), host_name().text, text);
    [[maybe_unused]] const ssize_t done = ::write(STDERR_FILENO, line.data(), line.size());
}

constexpr int kFatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
struct sigaction before[std::size(kFatal)];

// Records the signal and calls the earlier handler.
void on_fatal_signal(int signal) {
    own->signal = signal;
    for (size_t i = 0; i < std::size(kFatal); ++i)
        if (kFatal[i] == signal) ::sigaction(signal, &before[i], nullptr);
    ::raise(signal);
}

// Whether the memory was left by an ended job of the same name: it has a rank with this rank's number, or a
// rank was lost or reported longer ago than a job lives after that.
bool is_left_over(const HostRecord& notes, std::span<const RankRecord> all, int rank_on_host) {
    const int64_t ended = now() - kForTheReport;
    return all[static_cast<size_t>(rank_on_host)].state != State::not_started ||
           (notes.reported != 0 && notes.reported < ended) ||
           std::ranges::any_of(
               all, [&](const RankRecord& rank) { return rank.progress < ended && is_lost(rank); });
}

int64_t newest_of_host() {
    int64_t newest = 0;
    for (const RankRecord& rank : ranks)
        newest = std::max(newest, rank.progress.load(std::memory_order_relaxed));
    return newest;
}

void note_start(int rank) {
    share_progress(*own, newest_of_host);
    own->pid = ::getpid();
    own->rank = rank;
    note_stage(Stage::start_up);
    own->state = State::running;
}

// Maps the memory of this descriptor. False if it belongs to an ended job or has no name any more.
bool attach_to(int file, const Watchdog::Job& job) {
    const auto count = static_cast<size_t>(job.ranks_on_host);
    const size_t bytes = sizeof(HostRecord) + sizeof(RankRecord) * count;
    struct stat info {};
    if (::flock(file, LOCK_EX) != 0) return true;  // each rank alone, as without memory
    if (::fstat(file, &info) == 0 && info.st_nlink == 0) return false;
    void* memory = MAP_FAILED;
    if (::posix_fallocate(file, 0, static_cast<off_t>(bytes)) == 0)
        memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return true;
    auto* const notes = static_cast<HostRecord*>(memory);
    const std::span all(reinterpret_cast<RankRecord*>(notes + 1), count);
    if (is_left_over(*notes, all, job.rank_on_host)) {
        ::munmap(memory, bytes);
        return ::shm_unlink(segment) != 0;
    }
    host = notes;
    ranks = all;
    own = &ranks[static_cast<size_t>(job.rank_on_host)];
    note_start(job.rank);
    return true;
}

// The memory of the job on this host, or of this process alone.
void attach(const Watchdog::Job& job) {
    if (job.ranks_on_host < 2 || job.rank_on_host >= job.ranks_on_host || job.rank_on_host < 0) return;
    struct stat space {};  // ranks of different containers cannot see each other's processes
    const auto id = std::hash<std::string>()(job.name) ^
                    (::stat("/proc/self/ns/pid", &space) == 0 ? static_cast<size_t>(space.st_ino) : 0);
    const std::string name = "/fp8flow-" + std::to_string(::getuid()) + "-" + std::to_string(id);
    std::memcpy(segment, name.c_str(), std::min(name.size() + 1, sizeof segment - 1));
    for (bool done = false; !done;) {
        const int file = ::shm_open(segment, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        done = file < 0 || attach_to(file, job);
        if (file < 0) continue;
        ::flock(file, LOCK_UN);  // the mapping would keep it
        ::close(file);
    }
}

// A rank that starts after the report finds the memory that says so; it would report into memory of its own.
void remove_name_after_report() {
    const auto starts = [](const RankRecord& notes) { return notes.state == State::not_started; };
    const int64_t end = now() + kForLateRanks;
    while (segment[0] != 0 && std::ranges::any_of(ranks, starts) && now() < end) ::poll(nullptr, 0, 10);
    remove_watchdog_name();
}

class Thread {
public:
    Thread() : stopped_since_(ranks.size()), thread_([this] { run(); }) {}
    ~Thread() {
        ends_ = true;
        ::pthread_kill(thread_.native_handle(), kStopSignals[0]);
        thread_.join();
    }

private:
    void run() {
        sigset_t all, stop;
        sigfillset(&all);
        ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // the others belong to the main thread
        sigemptyset(&stop);
        for (const int signal : kStopSignals) sigaddset(&stop, signal);
        while (!ends_) {
            siginfo_t info{};
            const int signal = ::sigtimedwait(&stop, &info, &kBetweenLooks);
            if (ends_) break;
            if (signal > 0) take_stop_signal(signal, info.si_pid);
            look();
        }
    }

    // Time without progress counts from `counts_from_`: after this rank was stopped, others get a full
    // deadline.
    int64_t silence(const RankRecord& notes) const {
        return looked_ - std::max(counts_from_, notes.progress.load(std::memory_order_relaxed));
    }

    void look() {
        const int64_t time = now(), limit = deadline;
        if (time - looked_ > kLongestPause) counts_from_ = time;
        looked_ = time;
        if (host->reported != 0) {
            if (reported_since_ == 0) reported_since_ = time;
            if (time - reported_since_ > kForTheReport) end();
            return;
        }
        look_for_gone();
        if (limit > 0) look_for_silent(limit);
    }

    void look_for_gone() {
        for (const RankRecord& notes : ranks)
            if (is_lost(notes)) report(described_as_gone(notes));
    }

    // Stopped ranks first, then a rank that never started, then one without progress while another waits.
    void look_for_silent(int64_t limit) {
        const RankRecord *stopped = nullptr, *silent = nullptr;
        bool some_wait = false;
        for (size_t r = 0; r < ranks.size(); ++r) {
            const RankRecord& notes = ranks[r];
            if (notes.state != State::running) continue;
            int64_t& since = stopped_since_[r];
            const char state = process_state(notes.pid);
            since = state != 'T' && state != 't' ? 0 : since == 0 ? looked_ : since;
            if (since > 0 && looked_ - std::max(since, counts_from_) > limit) stopped = &notes;
            if (silence(notes) <= limit || since > 0) continue;
            if (notes.waits > 0)
                some_wait = true;
            else if (silent == nullptr || notes.progress < silent->progress)
                silent = &notes;
        }
        if (stopped != nullptr)
            give_up(fmt::format("no answer from {}: it is stopped", described(*stopped)), limit);
        if (silence(*own) <= limit) return;
        const Stage stage = own->stage;
        if (stage == Stage::mpi_init) {
            for (size_t r = 0; r < ranks.size(); ++r)
                if (ranks[r].state == State::not_started)
                    give_up(fmt::format("no answer from the rank with number {} of this host: it has not "
                                        "reached main",
                                        r),
                            limit);
        }
        if (silent != nullptr && some_wait)
            give_up(fmt::format("no answer from {}: it makes no progress", described(*silent)), limit);
        // Calls of MPI that have no deadline of their own; who they wait for is on another host.
        if (stage == Stage::mpi_init || stage == Stage::mpi_finalize) {
            if (silence(*own) > limit + kSecond &&
                std::ranges::none_of(stopped_since_, [](int64_t since) { return since > 0; }))
                give_up(fmt::format("{} does not return, and every rank of this host waits in it or has left",
                                    name_of(stage)),
                        limit);
        }
    }

    [[noreturn]] static void end() {
        remove_name_after_report();
        note_failure();
        ::_exit(static_cast<int>(ExitCode::peer));
    }

    void report(const std::string& text) {
        if (!claim_report()) return;
        print_report(text);
        end();
    }
    void give_up(const std::string& text, int64_t limit) {
        report(fmt::format("{}; the limit is {} s ({})", text, limit / kSecond, deadline_name.load()));
    }

    std::vector<int64_t> stopped_since_;  // 0: not stopped
    int64_t looked_ = now(), counts_from_ = 0, reported_since_ = 0;
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

Thread* thread = nullptr;

}  // namespace

void note_stage(Stage stage, int64_t step) {
    own->stage.store(stage, std::memory_order_relaxed);
    own->step.store(step, std::memory_order_relaxed);
    note_progress();
}

Watchdog::Watchdog(const Job& job, double deadline_seconds) {
    hold_stop_signals();  // they are its thread's
    set_deadline(deadline_seconds, "--start-deadline");
    job_size = job.size;
    attach(job);
    if (own->state == State::not_started) note_start(job.rank);  // alone
    thread = new Thread;
}

Watchdog::~Watchdog() {
    remove_watchdog_name();
    own->state = State::ended;
    delete thread;
    thread = nullptr;
}

void Watchdog::set_deadline(double seconds, const char* name) {
    note_progress();
    deadline_name = name;
    deadline = static_cast<int64_t>(std::min(seconds, 1e9) * static_cast<double>(kSecond));
}

void remove_watchdog_name() {
    if (segment[0] != 0) ::shm_unlink(segment);
    segment[0] = 0;
}

void note_fatal_signals() {
    for (size_t i = 0; i < std::size(kFatal); ++i) {
        struct sigaction action {};
        action.sa_handler = on_fatal_signal;
        action.sa_flags = SA_NODEFER | SA_ONSTACK;
        ::sigaction(kFatal[i], &action, &before[i]);
    }
}

bool claim_report() {
    int64_t none = 0;
    return host->reported.compare_exchange_strong(none, now());
}

bool is_one_of_several() { return job_size > 1; }

bool is_ended_by_launcher(int sender) {
    const Stage stage = own->stage;
    if (ranks.size() > 1 && (host->reported != 0 || std::ranges::any_of(ranks, is_lost))) return true;
    return is_one_of_several() &&
           (stage == Stage::mpi_finalize || (stage <= Stage::mpi_init && sender == ::getppid()));
}

int64_t process_start(int64_t process) {
    constexpr size_t kStart = 22 - 3;
    const std::vector<std::string> stat = stat_of(process);
    return stat.size() <= kStart || stat[0] == "Z" || stat[0] == "X" ? 0 : std::atoll(stat[kStart].c_str());
}

void note_failure() { own->state = State::ended; }

void end_terminated() {
    note_failure();
    const auto gone = std::ranges::find_if(ranks, is_lost);
    // The first rank that exits with a status other than 0 ends the others; it has reported the reason.
    const bool leaving = own->stage == Stage::mpi_finalize && gone == ranks.end();
    if (!leaving && claim_report())
        print_report(gone != ranks.end()
                         ? described_as_gone(*gone)
                         : "ended by the launcher: the job was cancelled, or another rank was lost "
                           "before it started or on another host");
    remove_name_after_report();
    ::_exit(static_cast<int>(ExitCode::peer));
}

}  // namespace fp8flow
