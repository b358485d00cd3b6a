// SPDX-License-Identifier: MIT
// How many cores of the host this process may use.
#pragma once

#include "kernels/host_memory.h"

namespace fp8flow {

// `cores` (from the affinity mask), or the CPU quota of the cgroup or one of its parents, if that is less
// (cpu.max; version 1: cpu.cfs_quota_us). At least 1.
int usable_cores(int cores, const HostMemoryFiles& files = {});

}  // namespace fp8flow
