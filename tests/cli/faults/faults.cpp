// SPDX-License-Identifier: MIT
// A library to preload into the program: rank FAULT_RANK is killed or stopped (FAULT_SIGNAL) where it calls
// FAULT_CALL: load (before main), MPI_Init_thread, MPI_Finalize or fsync. SIGUSR2 throws there instead; a
// process that is sent SIGUSR2 throws from the next allocation that the program's own code makes in the main
// thread, or from the next look at a message. FAULT_ALLOCATION: that allocation of a device's memory by that
// rank (from 1 on) and all after it fail. FAULT_HANDLERS: MPI_Init_thread leaves handlers that end the
// process, as libraries below it do. FAULT_NO_LOCKS: flock fails. FAULT_NO_PROC:
// files of processes are not there. FAULT_LATE: that rank starts FAULT_SLEEP_MS late. FAULT_SLEEP_MS delays
// each write of 64 bytes and more by that rank to a file below FAULT_SLOW. Ranks that end by _exit add a line
// with their status to the file FAULT_STATUSES.
#include <dlfcn.h>
#include <fcntl.h>
#include <mpi.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace {

std::string setting(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
}

bool is_victim() { return setting("OMPI_COMM_WORLD_RANK") == setting("FAULT_RANK"); }

[[noreturn]] void fail() {
    throw std::runtime_error("a fault thrown in rank " + setting("OMPI_COMM_WORLD_RANK"));
}

void reach(const char* call) {
    if (setting("FAULT_CALL") != call || !is_victim()) return;
    const int signal = std::atoi(setting("FAULT_SIGNAL").c_str());
    if (signal == SIGUSR2) fail();
    ::kill(::getpid(), signal);
    // Until the signal is here; and a sleep that ended while the process was stopped is followed by others,
    // so that a launcher which continues it in order to end it finds it here.
    for (int i = 0; i < 5; ++i) std::this_thread::sleep_for(std::chrono::seconds(1));
}

template <class Function> Function next(Function, const char* name) {
    return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

std::atomic<bool> throws{false};

// An address in the program itself, not in a library that it uses.
bool is_own_code(const void* address) {
    Dl_info code{}, program{};
    return ::dladdr(address, &code) != 0 &&
           ::dladdr(reinterpret_cast<const void*>(::getauxval(AT_ENTRY)), &program) != 0 &&
           code.dli_fbase == program.dli_fbase;
}

// No exception may leave a parallel region of OpenMP.
bool is_in_parallel_region() {
    using Level = int (*)();
    static const auto level = reinterpret_cast<Level>(::dlsym(RTLD_DEFAULT, "omp_get_level"));
    return level != nullptr && level() > 0;
}

// Where the process was sent SIGUSR2: for what the program's code calls in the main thread.
void throw_once(const void* caller) {
    if (throws && ::gettid() == ::getpid() && is_own_code(caller) && !is_in_parallel_region() &&
        throws.exchange(false))
        fail();
}

// Before main.
struct Loaded {
    Loaded() {
        ::signal(SIGUSR2, [](int) { throws = true; });
        const std::string late = setting("FAULT_LATE");
        if (!late.empty() && setting("OMPI_COMM_WORLD_RANK") == late)
            std::this_thread::sleep_for(
                std::chrono::milliseconds(std::atoi(setting("FAULT_SLEEP_MS").c_str())));
        reach("load");
    }
} loaded;

}  // namespace

void* operator new(size_t bytes) {
    throw_once(__builtin_return_address(0));
    using New = void* (*)(size_t);
    static const auto next_new = reinterpret_cast<New>(::dlsym(RTLD_NEXT, "_Znwm"));
    return next_new(bytes);
}

// The reference backend's Device takes its memory here, and nothing else does.
extern "C" void* aligned_alloc(size_t alignment, size_t bytes) {
    static std::atomic<int64_t> calls{0};
    const std::string first = setting("FAULT_ALLOCATION");
    if (!first.empty() && is_victim() && is_own_code(__builtin_return_address(0)) &&
        ++calls >= std::atoll(first.c_str()))
        return nullptr;
    return next(&aligned_alloc, "aligned_alloc")(alignment, bytes);
}
extern "C" int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
    reach("MPI_Init_thread");
    const int status = next(&MPI_Init_thread, "MPI_Init_thread")(argc, argv, required, provided);
    if (!setting("FAULT_HANDLERS").empty())
        for (const int taken : {SIGHUP, SIGINT, SIGTERM, SIGUSR1})
            ::signal(taken, [](int signal) { ::_exit(128 + signal); });
    return status;
}
extern "C" int MPI_Finalize() {
    reach("MPI_Finalize");
    return next(&MPI_Finalize, "MPI_Finalize")();
}
extern "C" int MPI_Testsome(int count, MPI_Request* requests, int* done, int* which, MPI_Status* statuses) {
    throw_once(__builtin_return_address(0));
    return next(&MPI_Testsome, "MPI_Testsome")(count, requests, done, which, statuses);
}
extern "C" int fsync(int file) {
    reach("fsync");
    return next(&fsync, "fsync")(file);
}
extern "C" int flock(int file, int operation) noexcept {
    if (setting("FAULT_NO_LOCKS").empty()) return next(&flock, "flock")(file, operation);
    errno = ENOLCK;
    return -1;
}
extern "C" int open(const char* path, int flags, ...) {
    if (!setting("FAULT_NO_PROC").empty() && std::string_view(path).starts_with("/proc/") &&
        std::string_view(path).ends_with("/stat")) {
        errno = ENOENT;
        return -1;
    }
    va_list more;
    va_start(more, flags);
    const auto mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : mode_t{0};
    va_end(more);
    return next(&open, "open")(path, flags, mode);
}
extern "C" void _exit(int status) {
    const std::string statuses = setting("FAULT_STATUSES");
    if (!statuses.empty() && !setting("OMPI_COMM_WORLD_RANK").empty()) {
        const int file = ::open(statuses.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file >= 0) ::dprintf(file, "%d\n", status);
    }
    next(&_exit, "_exit")(status);
    __builtin_unreachable();
}
extern "C" ssize_t write(int file, const void* data, size_t bytes) {
    const std::string slow = setting("FAULT_SLOW");
    if (!slow.empty() && is_victim() && bytes >= 64) {
        char path[4096];
        const std::string link = "/proc/self/fd/" + std::to_string(file);
        const ssize_t length = ::readlink(link.c_str(), path, sizeof path);
        if (length > 0 && std::string(path, static_cast<size_t>(length)).find(slow) != std::string::npos)
            std::this_thread::sleep_for(
                std::chrono::milliseconds(std::atoi(setting("FAULT_SLEEP_MS").c_str())));
    }
    return next(&write, "write")(file, data, bytes);
}
