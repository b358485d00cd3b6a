// SPDX-License-Identifier: MIT
// MPI in this process: initialise, finalise, or abort the whole job. Keeps <mpi.h> out of other headers.
#pragma once

#include <string>

namespace fp8flow {

std::string mpi_version();  // of the library: "Open MPI v4.1.4"; before MPI_Init, too

class MpiSession {
public:
    MpiSession();
    ~MpiSession();  // MPI_Finalize, unless the job is being aborted
    MpiSession(const MpiSession&) = delete;
    MpiSession& operator=(const MpiSession&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    // Ends every rank of the job with this exit code; does not return.
    [[noreturn]] void abort(int exit_code);

private:
    int rank_ = 0, size_ = 1;
};

}  // namespace fp8flow
