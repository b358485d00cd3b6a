// SPDX-License-Identifier: MIT
// The host of this process: its name, how much of its memory may still be taken, and which limit says so.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fp8flow {

// "?" where it is not known. No memory from the heap, which may be what is lacking.
struct HostName {
    char text[65] = "?";
};
HostName host_name();

struct HostMemory {
    int64_t free_bytes = INT64_MAX;
    std::string limit;            // e.g. "the cgroup's memory.max of 2147483648 bytes"; empty: none known
    bool of_one_process = false;  // a resource limit; else all ranks of the host share it
};

// Where the system describes itself; tests give folders of their own.
struct HostMemoryFiles {
    std::string proc = "/proc", cgroup = "/sys/fs/cgroup";
};

// Calls visit for each cgroup that limits this process by `controller`: its own, and those around it.
// unified: version 2, where files have other names.
void each_cgroup(const HostMemoryFiles& files, const std::string& controller,
                 const std::function<void(const std::string& folder, bool unified)>& visit);

// The tightest of: physical memory (MemAvailable), memory.max of the cgroup and those around it (version 1:
// memory.limit_in_bytes), RLIMIT_AS and RLIMIT_DATA.
HostMemory host_memory(const HostMemoryFiles& files = {});

// What to say of `asked` bytes (0: not known how many) that could not be had: what is free, and the limit.
std::string out_of_host_memory(int64_t asked);

}  // namespace fp8flow
