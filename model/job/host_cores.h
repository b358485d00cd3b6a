// SPDX-License-Identifier: MIT
// How many cores of the host this process may use, and how busy the host is.
#pragma once

#include "kernels/comm/process_group.h"
#include "kernels/host_memory.h"
#include "model/job/backend.h"

#include <chrono>
#include <optional>
#include <string>

namespace fp8flow {

// `cores` (those of the affinity mask), or fewer where the CPU quota of the cgroup, or of one around it, is
// less (cpu.max; version 1: cpu.cfs_quota_us). At least 1.
int usable_cores(int cores, const HostMemoryFiles& files = {});

// CPU time of the host since it started, in ticks.
struct CpuTime {
    double busy = 0, idle = 0;
};
std::optional<CpuTime> cpu_time(const HostMemoryFiles& files = {});  // nothing where /proc/stat says nothing

// Waits for `window`; the share of the host's CPU time, 0 to 1, that others used meanwhile.
std::optional<double> busy_share(std::chrono::milliseconds window, const HostMemoryFiles& files = {});

// What to say before a measurement on the CPU; empty below a tenth.
std::string busy_warning(double share);
// The same of this machine, while all ranks sleep: what is busy are others. Collective; empty on a GPU.
std::string busy_warning(const BackendChoice& backend, ProcessGroup& world);

}  // namespace fp8flow
