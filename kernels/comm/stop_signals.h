// SPDX-License-Identifier: MIT
// Signals that ask a run to end: SIGTERM, SIGINT, SIGUSR1. The handler sets a word; the run looks at it
// between two steps. Read next: mpi_session.cpp, which decides what SIGTERM means for a rank.
#pragma once

#include <csignal>
#include <iterator>

namespace fp8flow {

// While one exists, the first signal of a kind sets stop_signal(), and the second of the same kind ends the
// process at once with status 128 + its number. Schedulers send one request as several kinds. A signal that
// is ignored (nohup) stays ignored.
class StopSignals {
public:
    StopSignals();
    ~StopSignals();
    StopSignals(const StopSignals&) = delete;
    StopSignals& operator=(const StopSignals&) = delete;

private:
    static constexpr int kSignals[] = {SIGTERM, SIGINT, SIGUSR1};
    struct sigaction before_[std::size(kSignals)];
};

int stop_signal();  // the first that came; 0: none

// For a handler of SIGTERM that decides first. False: no StopSignals exists, nothing was done.
bool take_stop_signal(int signal);

}  // namespace fp8flow
