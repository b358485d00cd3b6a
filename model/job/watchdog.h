// SPDX-License-Identifier: MIT
// Watchdog: a thread of every rank that receives its stop signals, and ends the job if a rank of this host is
// lost: gone, stopped, or without progress while others wait for it. Ranks record what they do in memory that
// the ranks of a host share, from the first line of main to the last, by a few relaxed stores. Deadlines
// count time without progress, not the duration of an operation.
#pragma once

#include "kernels/comm/progress.h"

#include <cstdint>
#include <string>

namespace fp8flow {

enum class Stage : int32_t {
    start_up,
    mpi_init,
    set_up,
    weights,
    resume,
    step,
    evaluation,
    checkpoint,
    exporting,
    summary,
    mpi_finalize
};

// Records a stage and its step (0: none); counts as progress.
void note_stage(Stage stage, int64_t step = 0);

class Watchdog {
public:
    struct Job {
        std::string name;  // the same for the ranks of one job on one host, different for other jobs
        int rank = 0, rank_on_host = 0, ranks_on_host = 1, size = 1;
    };
    // Call it before MPI_Init. Without shared memory each rank watches only itself.
    Watchdog(const Job& job, double deadline_seconds);
    ~Watchdog();  // this rank has finished
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // Sets the longest time without progress, and the name of this limit for reports; 0: no limit.
    static void set_deadline(double seconds, const char* name);
};

// For MpiSession. After MPI_Init every rank has mapped the memory, so its name is removed.
void remove_watchdog_name();
// Records fatal signals and then calls the earlier handlers. Call it after MPI_Init, which installs handlers.
void note_fatal_signals();
// True for the first caller among the ranks of this host, which then reports the error and ends the others.
bool claim_report();
// This rank ends by its own error, so the watchdog does not report it as lost.
void note_failure();

// For stop_signals.h.
bool is_one_of_several();
// Whether SIGTERM of this sender ends the rank at once: a rank of this host has reported an error or is gone
// (mpirun waits for an ended process before it terminates the others), or the launcher sends it during an MPI
// call that may not return.
bool is_ended_by_launcher(int sender);
// Reports the lost rank, or that none is known, if no rank has reported yet, and exits with ExitCode::peer.
[[noreturn]] void end_terminated();

// Start time of a process, in clock ticks since boot; 0 if it has ended or there is no /proc. The operating
// system reuses a process id, but never the pair of id and start time.
int64_t process_start(int64_t process);

}  // namespace fp8flow
