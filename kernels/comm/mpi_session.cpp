// MPI of this process: initialise, finalise, abort.
#include "kernels/comm/mpi_session.h"

#include <mpi.h>
#include <unistd.h>

namespace fp8flow {

MpiSession::MpiSession() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
}

MpiSession::~MpiSession() { MPI_Finalize(); }

void MpiSession::abort(int exit_code) {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
}

}  // namespace fp8flow
