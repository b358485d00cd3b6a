// SPDX-License-Identifier: MIT
// MPI of this process: initialise, finalise, abort.
#include "model/job/mpi_session.h"

#include "model/job/watchdog.h"

#include <mpi.h>

namespace fp8flow {

std::string mpi_version() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string version(text, static_cast<size_t>(length));
    return version.substr(0, version.find_first_of(",\n"));
}

MpiSession::MpiSession() {
    note_stage(Stage::mpi_init);
    {
        const Waiting waiting;
        int provided = 0;
        // interleaved micro-batches have a thread each (layers/schedule)
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
    }
    note_stage(Stage::set_up);
    remove_watchdog_name();
    note_fatal_signals();
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
}

MpiSession::~MpiSession() {
    note_stage(Stage::mpi_finalize);
    const Waiting waiting;
    MPI_Finalize();
}

void MpiSession::abort(int exit_code) {
    note_failure();
    // A single process has no other rank to end, and MPI_Abort would print a long message.
    if (size_ > 1)
        MPI_Abort(MPI_COMM_WORLD, exit_code);
    else
        MPI_Finalize();
    _exit(exit_code);
}

}  // namespace fp8flow
