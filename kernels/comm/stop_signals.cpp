// SPDX-License-Identifier: MIT
// What is static here is static because signal handlers need it.
#include "kernels/comm/stop_signals.h"

#include "kernels/comm/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace fp8flow {

namespace {

constexpr int kSignalStatus = 128;  // a shell's exit status of what a signal ended: this plus the signal

std::atomic<int> first_signal = 0;
std::atomic<bool> came[NSIG] = {};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

bool is_ignored(int signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    return action.sa_handler == SIG_IGN;
}

// Before main. Libraries that MPI_Init loads take signals, ignored ones too, with handlers that end the
// process (LLVM, below hwloc's OpenCL plugin).
const std::array<bool, std::size(StopSignals::kSignals)> ignored_at_start = [] {
    std::array<bool, std::size(StopSignals::kSignals)> ignored{};
    std::transform(std::begin(StopSignals::kSignals), std::end(StopSignals::kSignals), ignored.begin(),
                   is_ignored);
    return ignored;
}();

void on_stop_signal(int signal) {
    // A launcher ends the remaining ranks with SIGTERM where one is lost. Where all are there, somebody wants
    // the job to end, which a run may do after its step.
    if (signal == SIGTERM && is_job_lost()) end_terminated();
    int none = 0;
    first_signal.compare_exchange_strong(none, signal);
    if (!came[signal].exchange(true)) return;
    constexpr char kText[] = "fp8flow: error: ended at once by a second signal\n";
    note_failure();
    if (claim_report()) {
        [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText, sizeof kText - 1);
    }
    ::_exit(kSignalStatus + signal);
}

}  // namespace

StopSignals::StopSignals() {
    for (size_t i = 0; i < std::size(kSignals); ++i) {
        struct sigaction ours {};
        ours.sa_handler = ignored_at_start[i] ? SIG_IGN : on_stop_signal;
        ours.sa_flags = SA_RESTART;
        ::sigaction(kSignals[i], &ours, &before_[i]);
    }
}

StopSignals::~StopSignals() {
    for (size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int stop_signal() { return first_signal; }

const char* name_of_signal(int signal) {
    switch (signal) {
        case SIGTERM: return "SIGTERM";
        case SIGINT: return "SIGINT";
        case SIGUSR1: return "SIGUSR1";
        default: return "a signal on another rank";
    }
}

}  // namespace fp8flow
