// SPDX-License-Identifier: MIT
// What is static here is static because signal handlers need it.
#include "kernels/comm/stop_signals.h"

#include "kernels/comm/watchdog.h"

#include <unistd.h>

#include <atomic>

namespace fp8flow {

namespace {

constexpr int kSignalStatus = 128;  // a shell's exit status of what a signal ended: this plus the signal

std::atomic<bool> caught = false;
std::atomic<int> first_signal = 0;
std::atomic<bool> came[NSIG] = {};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void on_stop_signal(int signal) { take_stop_signal(signal); }

}  // namespace

bool take_stop_signal(int signal) {
    if (!caught) return false;
    int none = 0;
    first_signal.compare_exchange_strong(none, signal);
    if (!came[signal].exchange(true)) return true;
    constexpr char kText[] = "fp8flow: error: ended at once by a second signal\n";
    note_failure();
    if (claim_report()) {
        [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText, sizeof kText - 1);
    }
    ::_exit(kSignalStatus + signal);
}

StopSignals::StopSignals() {
    caught = true;
    for (size_t i = 0; i < std::size(kSignals); ++i) {
        ::sigaction(kSignals[i], nullptr, &before_[i]);
        if (before_[i].sa_handler != SIG_DFL) continue;  // MpiSession's, which asks here; or ignored
        struct sigaction ours {};
        ours.sa_handler = on_stop_signal;
        ours.sa_flags = SA_RESTART;
        ::sigaction(kSignals[i], &ours, nullptr);
    }
}

StopSignals::~StopSignals() {
    for (size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
    caught = false;
}

int stop_signal() { return first_signal; }

}  // namespace fp8flow
