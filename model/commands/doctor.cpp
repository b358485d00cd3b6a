// SPDX-License-Identifier: MIT
// `fp8flow doctor`: what a run needs of this machine, what is missing, and the command that brings it.
#include "kernels/core/error.h"
#include "kernels/host_memory.h"
#include "model/commands/commands.h"
#include "model/job/host_cores.h"
#include "model/job/mpi_session.h"
#include "model/report/run_report.h"
#include "model/report/table.h"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

namespace fp8flow {

using namespace report;

namespace {

constexpr double kLeastShared = 0x1p28;  // containers often have 64 MiB; MPI and NCCL take more
constexpr double kLeastDisk = 0x1p30;

MachineCheck processor() {
    try {
        check_processor();
    } catch (const Error& error) {
        return {"processor", error.what(), "another machine"};
    }
    const int cores = usable_cores(omp_get_num_procs());
    return {"processor", fmt::format("{}, AVX2 and FMA, {} for this process", machine_facts({}).cpu,
                                     counted(cores, "core"))};
}

MachineCheck mpi() {
    if (std::system("command -v mpirun > /dev/null 2>&1") == 0) return {"MPI", mpi_version() + ", mpirun"};
    return {"MPI", mpi_version() + ", but no mpirun: runs have one rank", "apt-get install openmpi-bin"};
}

// Of the nearest folder that exists.
MachineCheck space_of(const std::string& what, std::filesystem::path folder, double least,
                      const std::string& fix) {
    std::error_code error;
    folder = std::filesystem::absolute(folder, error);
    while (!std::filesystem::is_directory(folder, error) && folder.has_relative_path())
        folder = folder.parent_path();
    const auto space = std::filesystem::space(folder, error);
    if (error) return {what, fmt::format("{}: {}", folder.string(), error.message()), fix};
    const bool writable = ::access(folder.c_str(), W_OK) == 0;
    const auto free = f64(space.available);
    return {what,
            fmt::format("{}: {} free{}", folder.string(), format_bytes(free), writable ? "" : ", read only"),
            writable && free >= least ? "" : fix};
}

}  // namespace

int run_doctor(const std::string& out) {
    const HostMemory memory = host_memory();
    std::vector<MachineCheck> found = {
        processor(),
        {"memory", fmt::format("{} free{}{}", format_bytes(f64(memory.free_bytes)),
                               memory.limit.empty() ? "" : " within ", memory.limit)},
        mpi(),
        space_of("disk", out, kLeastDisk, "--out DIR on a disk that is writable and has space"),
        space_of("shared memory", "/dev/shm", kLeastShared,
                 "mount -o remount,size=1g /dev/shm; in a container docker run --shm-size=1g")};
    for (MachineCheck& finding : check_gpus()) found.push_back(std::move(finding));
    const auto missing =
        std::ranges::count_if(found, [](const auto& finding) { return !finding.fix.empty(); });
    fmt::print("{} {}\n\n",
               missing == 0 ? "Nothing is missing: runs use"
                            : fmt::format("{} below ('fix'). Runs use", counted(missing, "problem")),
               choose_backend(BackendKind::automatic).kind == BackendKind::hopper
                   ? "GPUs"
                   : "the CPUs of this machine");
    for (const MachineCheck& finding : found) {
        fmt::print("{:<8} {:<14} {}\n", finding.fix.empty() ? "ok" : "missing", finding.what,
                   printable(finding.text, 96));
        if (!finding.fix.empty()) fmt::print("{:<8} {:<14} fix: {}\n", "", "", finding.fix);
    }
    return missing == 0 ? 0 : 1;
}

}  // namespace fp8flow
