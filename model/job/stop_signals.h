// SPDX-License-Identifier: MIT
// Signals that ask a run to end: SIGTERM, SIGINT, SIGUSR1. From the first line of main they are blocked in
// every thread, so that handlers of libraries never run, and the watchdog's thread takes them one after the
// other.
#pragma once

#include <csignal>

namespace fp8flow {

constexpr int kStopSignals[] = {SIGTERM, SIGINT, SIGUSR1};

// The first line of main: no thread runs yet. What comes before a Watchdog waits for it, also across exec.
void hold_stop_signals();

// What the first signal of a kind does: it is noted, and the run looks at stop_signal() between two steps; or
// it ends the process, as it does by default. A second one of its kind always ends the process, with status
// 128 + its number. Schedulers send one request as several kinds. A signal that is ignored when the program
// starts (nohup) stays ignored. Until this is decided a signal is noted.
enum class OnStopSignal { undecided, note, end };
void decide_on_stop_signals(OnStopSignal decision);

// For the watchdog: a signal and the process that sent it.
void take_stop_signal(int signal, int sender);

int stop_signal();  // the first that came; 0: none
const char* name_of_signal(int signal);

}  // namespace fp8flow
