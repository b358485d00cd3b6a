// SPDX-License-Identifier: MIT
// Which limit applies: physical memory, a cgroup or one around it, a resource limit.
#include "kernels/host_memory.h"

#include "kernels/reference/host_device.h"
#include "tests/support/files.h"

#include <sys/resource.h>

namespace fp8flow {
namespace {

TEST(HostMemory, TheTightestLimitIsNamed) {
    const TemporaryFolder folder;
    const HostMemoryFiles files{folder.path("proc"), folder.path("cgroup")};
    EXPECT_EQ(host_memory(files).limit, "");  // a system that says nothing
    folder.write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:    3000 kB\n");
    EXPECT_EQ(host_memory(files).limit, "physical memory");
    EXPECT_EQ(host_memory(files).free_bytes, 3000 * 1024);
    folder.write("proc/self/cgroup", "0::/job/step\n");
    folder.write("cgroup/job/step/memory.max", "max\n");
    folder.write("cgroup/job/step/memory.current", "5\n");
    EXPECT_EQ(host_memory(files).limit, "physical memory");
    folder.write("cgroup/job/memory.max", "1000000\n");
    folder.write("cgroup/job/memory.current", "400000\n");
    EXPECT_EQ(host_memory(files).limit, "the cgroup's memory.max of 1000000 bytes");
    EXPECT_EQ(host_memory(files).free_bytes, 600000);
    folder.write("cgroup/job/memory.stat", "anon 1\ninactive_file 100000\n");
    EXPECT_EQ(host_memory(files).free_bytes, 700000);
    EXPECT_FALSE(host_memory(files).of_one_process);
    folder.write("proc/self/cgroup", "7:cpu,memory:/old\n");
    folder.write("cgroup/memory/old/memory.limit_in_bytes", "2000000\n");
    folder.write("cgroup/memory/old/memory.usage_in_bytes", "1999000\n");
    EXPECT_EQ(host_memory(files).limit, "the cgroup's memory.limit_in_bytes of 2000000 bytes");
    EXPECT_EQ(host_memory(files).free_bytes, 1000);
}

TEST(HostMemory, AResourceLimitCountsWhatIsTaken) {
    const TemporaryFolder folder;
    const HostMemoryFiles files{folder.path("proc"), folder.path("cgroup")};
    folder.write("proc/self/status", "Name: x y\nVmSize:\t  1024 kB\nVmData: 1 kB\n");
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
    const rlimit tight{rlim_t{1} << 46, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
    const HostMemory memory = host_memory(files);
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
    EXPECT_EQ(memory.free_bytes, (int64_t{1} << 46) - (1 << 20));
    EXPECT_EQ(memory.limit, "the resource limit RLIMIT_AS (ulimit -v) of 70368744177664 bytes");
    EXPECT_TRUE(memory.of_one_process);
}

// What is said where an allocation fails, by the program and by the reference backend alike.
TEST(HostMemory, WhatIsMissingIsSaidWithTheLimitThatApplies) {
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
    const rlimit tight{rlim_t{1} << 32, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
    const std::string text = out_of_host_memory(64 << 20);
    const std::string of_device =
        error_of(ExitCode::memory, [] { HostDevice().allocate(std::size_t{1} << 40); });
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
    expect_contains(text, "out of host memory: asked for 64.0 MiB, ");
    for (const std::string& said : {text, of_device}) {
        EXPECT_TRUE(said.find(" free within the resource limit RLIMIT_AS (ulimit -v) of 4294967296 bytes") !=
                        std::string::npos ||
                    said.find("physical memory") != std::string::npos ||
                    said.find("cgroup") != std::string::npos)
            << said;
    }
    EXPECT_EQ(class_of(ENOMEM, ExitCode::checkpoint), ExitCode::memory);
    EXPECT_EQ(class_of(EACCES, ExitCode::checkpoint), ExitCode::checkpoint);
}

}  // namespace
}  // namespace fp8flow
