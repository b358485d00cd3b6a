// SPDX-License-Identifier: MIT
// A thread of every rank that takes its stop signals, and ends the job where a rank of this host is lost:
// gone, stopped, or silent while others wait for it. Ranks note what they do in memory that the ranks of a
// host share, from the first line of main to the last; a note is a few relaxed stores. Deadlines count
// silence, not duration.
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

// A stage with the step it belongs to (0: none); that is progress, too.
void note_stage(Stage stage, int64_t step = 0);

class Watchdog {
public:
    struct Job {
        std::string name;  // the same for the ranks of one job on one host, different for other jobs
        int rank = 0, rank_on_host = 0, ranks_on_host = 1, size = 1;
    };
    // Before MPI_Init. A host without shared memory for it watches each rank alone.
    Watchdog(const Job& job, double deadline_seconds);
    ~Watchdog();  // this rank has finished
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // The limit of silence from now on, and its name in reports; 0: none.
    static void set_deadline(double seconds, const char* name);
};

// For MpiSession. After MPI_Init every rank has attached, and the memory needs no name any more.
void remove_watchdog_name();
// Fatal signals are noted and then left to whoever handled them before. After MPI_Init, which has handlers.
void note_fatal_signals();
// True for the first caller among the ranks of this host, which then reports the error.
bool claim_report();
// This rank ends by an error of its own: its end is no loss to report.
void note_failure();

// For stop_signals.h.
bool is_one_of_several();
// SIGTERM of this sender ends the rank at once: one of this host has reported an error or is gone (mpirun
// reaps a process that ended before it terminates the others), or the launcher sends it in a call of MPI that
// may not return.
bool is_ended_by_launcher(int sender);
// Reports the lost rank, or that none is known, if no rank has reported yet, and exits with ExitCode::peer.
[[noreturn]] void end_terminated();

// Start time of a process, in clock ticks since boot; 0 if it has ended or there is no /proc. The operating
// system reuses a process id, but never the pair of id and start time.
int64_t process_start(int64_t process);

}  // namespace fp8flow
