// SPDX-License-Identifier: MIT
// Reads the environment variables that launchers (mpirun, srun, ...) set for the ranks that they start.
#pragma once

#include "model/job/backend.h"

#include <cstdint>
#include <string>

namespace fp8flow {

struct JobStart {
    bool launched = false;  // by a launcher, as one of several ranks or of one
    int64_t rank = 0;
    Placement placement;   // of a process started alone: one rank on its host
    std::string evidence;  // the variable with the number of ranks, or with the rank: "PMI_SIZE=4"
};
JobStart read_job_start();

// Throws ExitCode::usage if the launcher has started several ranks but MPI sees only this one.
void require_same_size(const JobStart& start, int mpi_size);

}  // namespace fp8flow
