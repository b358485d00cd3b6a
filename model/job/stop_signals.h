// SPDX-License-Identifier: MIT
// Signals that ask a run to end: SIGTERM, SIGINT, SIGUSR1. They are blocked in every thread from the first
// line of main, so that handlers of libraries never run. The watchdog's thread receives them one after the
// other.
#pragma once

#include <csignal>

namespace fp8flow {

constexpr int kStopSignals[] = {SIGTERM, SIGINT, SIGUSR1};

// Call it in the first line of main, before any thread. Signals that come before the Watchdog wait for it,
// also across exec.
void hold_stop_signals();

// What the first signal of a kind does: it is recorded, and the run checks stop_signal() between two steps;
// or it ends the process, as by default. A second one of its kind always ends the process, with status 128 +
// its number. (Schedulers may send one request as several kinds.) A signal that is ignored when the program
// starts (nohup) stays ignored. Before this call signals are recorded.
enum class OnStopSignal { undecided, note, end };
void decide_on_stop_signals(OnStopSignal decision);

// For the watchdog: a signal and the process that sent it.
void take_stop_signal(int signal, int sender);

int stop_signal();  // the first that came; 0: none
const char* name_of_signal(int signal);

}  // namespace fp8flow
