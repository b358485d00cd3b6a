// SPDX-License-Identifier: MIT
// Cores that a CPU quota leaves.
#include "model/job/host_cores.h"

#include "tests/support/files.h"

#include <gtest/gtest.h>

namespace fp8flow {
namespace {

TEST(HostCores, TheTightestQuotaCounts) {
    const TemporaryFolder folder;
    const HostMemoryFiles files{folder.path("proc"), folder.path("cgroup")};
    EXPECT_EQ(usable_cores(8, files), 8);  // a system that says nothing
    folder.write("proc/self/cgroup", "0::/job/step\n");
    folder.write("cgroup/job/step/cpu.max", "max 100000\n");
    EXPECT_EQ(usable_cores(8, files), 8);
    folder.write("cgroup/job/cpu.max", "250000 100000\n");
    EXPECT_EQ(usable_cores(8, files), 2);
    EXPECT_EQ(usable_cores(1, files), 1);
    folder.write("cgroup/job/cpu.max", "50000 100000\n");
    EXPECT_EQ(usable_cores(8, files), 1);  // half a core
    folder.write("proc/self/cgroup", "4:cpuset:/x\n3:cpu,cpuacct:/old\n0::/\n");
    EXPECT_EQ(usable_cores(8, files), 8);
    folder.write("cgroup/cpu/old/cpu.cfs_quota_us", "-1\n");
    folder.write("cgroup/cpu/old/cpu.cfs_period_us", "100000\n");
    EXPECT_EQ(usable_cores(8, files), 8);
    folder.write("cgroup/cpu/old/cpu.cfs_quota_us", "300000\n");
    EXPECT_EQ(usable_cores(8, files), 3);
}

}  // namespace
}  // namespace fp8flow
