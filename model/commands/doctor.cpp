// SPDX-License-Identifier: MIT
// `fp8flow doctor`: what a run needs of this machine, what is missing, and the command that brings it.
#include "kernels/core/error.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/host_memory.h"
#include "model/commands/commands.h"
#include "model/job/host_cores.h"
#include "model/job/mpi_session.h"
#include "model/report/run_report.h"
#include "model/report/table.h"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace fp8flow {

using namespace report;

namespace {

constexpr double kLeastShared = 0x1p28;  // containers often have 64 MiB; MPI and NCCL take more
constexpr double kLeastDisk = 0x1p30;

struct Finding {
    std::string what, text;
    std::string fix = {};  // empty: nothing is missing
};

// "", or why a check of the launch refuses.
template <class Check> std::string refusal_of(Check check) {
    try {
        check();
        return {};
    } catch (const Error& error) {
        return error.what();
    }
}

Finding processor() {
    const int cores = usable_cores(omp_get_num_procs());
    const std::string problem = refusal_of(check_processor);
    if (!problem.empty()) return {"processor", problem, "another machine"};
    return {"processor", fmt::format("{}, AVX2 and FMA, {} for this process", machine_facts({}).cpu,
                                     counted(cores, "core"))};
}

Finding mpi() {
    if (std::system("command -v mpirun > /dev/null 2>&1") == 0) return {"MPI", mpi_version() + ", mpirun"};
    return {"MPI", mpi_version() + ", but no mpirun: runs have one rank", "apt-get install openmpi-bin"};
}

Finding gpus() {
    const int devices = hopper::device_count();
    if (devices == 0) {
        const std::string reason = hopper::unavailable_reason();
        if (!hopper::gpu_visible()) return {"GPU", reason + ": runs use the reference backend, on CPUs"};
        return {"GPU", reason,
                hopper::built_with_cuda()
                    ? "a Hopper GPU, its driver, and a program of cmake --preset cuda-release"
                    : "cmake --preset cuda-release && cmake --build build/cuda-release (nvcc 12.9 or later)"};
    }
    const double clock = hopper::max_clock_hertz(0);
    for (int device = 1; device < devices; ++device)
        if (hopper::device_name(device) != hopper::device_name(0) || hopper::max_clock_hertz(device) != clock)
            return {"GPU",
                    fmt::format("GPUs 0 and {} differ in kind or clock: all wait for the slower one", device),
                    fmt::format("CUDA_VISIBLE_DEVICES without {}", device)};
    return {"GPU", fmt::format("{} x {}, {}, up to {:.0f} MHz (under load: nvidia-smi -q -d CLOCK)", devices,
                               hopper::device_name(0),
                               format_bytes(static_cast<double>(hopper::memory_bytes(0))), clock * 1e-6)};
}

std::vector<Finding> libraries_of_gpus() {
    std::vector<Finding> found = {{"CUDA", fmt::format("built with {}, the driver supports {}",
                                                       hopper::runtime_version(), hopper::driver_version())}};
    const std::string peers = hopper::peer_problem(), cudnn = hopper::cudnn_problem();
    found.push_back(peers.empty()
                        ? Finding{"peer access", "every GPU reaches the memory of all others"}
                        : Finding{"peer access", peers, "parallel.moe_token_dispatcher_type: alltoall"});
    found.push_back(hopper::built_with_nccl()
                        ? Finding{"NCCL", "in this program"}
                        : Finding{"NCCL", "not in this program: no exchange between hosts",
                                  "apt-get install libnccl2 libnccl-dev, and build again"});
    found.push_back(cudnn.empty() ? Finding{"cuDNN", "attention uses it"}
                                  : Finding{"cuDNN", "attention uses this project's kernels: " + cudnn});
    return found;
}

// Of the nearest folder that exists.
Finding space_of(const std::string& what, std::filesystem::path folder, double least,
                 const std::string& fix) {
    std::error_code error;
    folder = std::filesystem::absolute(folder, error);
    while (!std::filesystem::is_directory(folder, error) && folder.has_relative_path())
        folder = folder.parent_path();
    const auto space = std::filesystem::space(folder, error);
    if (error) return {what, fmt::format("{}: {}", folder.string(), error.message()), fix};
    const bool writable = ::access(folder.c_str(), W_OK) == 0;
    const auto free = static_cast<double>(space.available);
    return {what,
            fmt::format("{}: {} free{}", folder.string(), format_bytes(free), writable ? "" : ", read only"),
            writable && free >= least ? "" : fix};
}

}  // namespace

int run_doctor(const std::string& out) {
    const HostMemory memory = host_memory();
    std::vector<Finding> found = {
        processor(),
        {"memory", fmt::format("{} free{}{}", format_bytes(static_cast<double>(memory.free_bytes)),
                               memory.limit.empty() ? "" : " within ", memory.limit)},
        mpi(),
        space_of("disk", out, kLeastDisk, "--out DIR on a disk that is writable and has space"),
        space_of("shared memory", "/dev/shm", kLeastShared,
                 "mount -o remount,size=1g /dev/shm; in a container docker run --shm-size=1g"),
        gpus()};
    const int devices = hopper::device_count();
    if (devices > 0)
        for (Finding& finding : libraries_of_gpus()) found.push_back(std::move(finding));
    int64_t missing = 0;
    for (const Finding& finding : found) missing += finding.fix.empty() ? 0 : 1;
    fmt::print("{} {}\n\n",
               missing == 0 ? "Nothing is missing: runs use"
                            : fmt::format("{} below ('fix'). Runs use", counted(missing, "problem")),
               devices > 0 ? counted(devices, "GPU") : "the CPUs of this machine");
    for (const Finding& finding : found) {
        fmt::print("{:<8} {:<14} {}\n", finding.fix.empty() ? "ok" : "missing", finding.what,
                   printable(finding.text, 96));
        if (!finding.fix.empty()) fmt::print("{:<8} {:<14} fix: {}\n", "", "", finding.fix);
    }
    return missing == 0 ? 0 : 1;
}

}  // namespace fp8flow
