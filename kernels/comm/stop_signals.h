// SPDX-License-Identifier: MIT
// Signals that ask a run to end: SIGTERM, SIGINT, SIGUSR1. The handler sets a word; the run looks at it
// between two steps. A rank that mpirun ends because another is lost ends at once.
#pragma once

#include <csignal>
#include <iterator>

namespace fp8flow {

// While one exists, the first signal of a kind sets stop_signal(), and the second of the same kind ends the
// process at once with status 128 + its number. Schedulers send one request as several kinds. A signal that
// is ignored when the program starts (nohup) stays ignored. Handlers of libraries are replaced, and put back.
class StopSignals {
public:
    static constexpr int kSignals[] = {SIGTERM, SIGINT, SIGUSR1};
    StopSignals();
    ~StopSignals();
    StopSignals(const StopSignals&) = delete;
    StopSignals& operator=(const StopSignals&) = delete;

private:
    struct sigaction before_[std::size(kSignals)];
};

int stop_signal();  // the first that came; 0: none
const char* name_of_signal(int signal);

}  // namespace fp8flow
