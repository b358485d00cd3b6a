// SPDX-License-Identifier: MIT
// Handles stop signals: records them, ends the process at once, or ends a rank that its launcher terminates.
#include "model/job/stop_signals.h"

#include "model/job/watchdog.h"

#include <unistd.h>

#include <array>
#include <atomic>

namespace fp8flow {

namespace {

constexpr int kSignalStatus = 128;  // a shell's exit status of what a signal ended: this plus the signal

std::atomic<OnStopSignal> decided{OnStopSignal::undecided};
std::atomic<int> first_signal{0};
std::atomic<bool> came[NSIG] = {};

// Before main: libraries that MPI_Init loads set handlers, for ignored signals too.
const std::array<bool, NSIG> ignored_at_start = [] {
    std::array<bool, NSIG> ignored{};
    for (const int signal : kStopSignals) {
        struct sigaction action {};
        ::sigaction(signal, nullptr, &action);
        ignored[static_cast<size_t>(signal)] = action.sa_handler == SIG_IGN;
    }
    return ignored;
}();

// As a signal does by default.
void end_by(int signal) {
    sigset_t one;
    ::sigemptyset(&one);
    ::sigaddset(&one, signal);
    std::signal(signal, SIG_DFL);
    ::raise(signal);
    ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
}

void end_if_decided() {
    const int signal = first_signal;
    if (signal == 0 || decided != OnStopSignal::end) return;
    if (signal == SIGTERM && is_one_of_several()) end_terminated();
    end_by(signal);
}

}  // namespace

void hold_stop_signals() {
    sigset_t held;
    ::sigemptyset(&held);
    for (const int signal : kStopSignals) ::sigaddset(&held, signal);
    ::pthread_sigmask(SIG_BLOCK, &held, nullptr);
}

void decide_on_stop_signals(OnStopSignal decision) {
    decided = decision;
    end_if_decided();
}

void take_stop_signal(int signal, int sender) {
    if (ignored_at_start[static_cast<size_t>(signal)]) return;
    // If a rank is lost, the launcher ends the others with SIGTERM. If all ranks are there, a user or
    // scheduler wants the job to end, which a run may do after its step.
    if (signal == SIGTERM && is_ended_by_launcher(sender)) end_terminated();
    int none = 0;
    first_signal.compare_exchange_strong(none, signal);
    end_if_decided();
    if (!came[signal].exchange(true)) return;
    constexpr char kText[] = "fp8flow: error: ended at once by a second signal\n";
    note_failure();
    if (claim_report()) {
        [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText, sizeof kText - 1);
    }
    ::_exit(kSignalStatus + signal);
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
