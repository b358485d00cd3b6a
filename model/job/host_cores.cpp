// SPDX-License-Identifier: MIT
// Reads /proc and the cgroup file system (both versions); what is not there does not limit.
#include "model/job/host_cores.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>

namespace fp8flow {

namespace {

// The first line of `path`; empty where there is none.
std::string line_of(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// "quota period" in microseconds; "max" is no limit.
void limit_by(int& cores, const std::string& text) {
    std::istringstream words(text);
    double quota = 0, period = 0;
    if (words >> quota >> period && quota > 0 && period > 0)
        cores = std::min(cores, std::max(1, static_cast<int>(quota / period)));
}

}  // namespace

int usable_cores(int cores, const HostMemoryFiles& files) {
    each_cgroup(files, "cpu", [&](const std::string& folder, bool unified) {
        limit_by(cores, unified ? line_of(folder + "/cpu.max")
                                : line_of(folder + "/cpu.cfs_quota_us") + " " +
                                      line_of(folder + "/cpu.cfs_period_us"));
    });
    return std::max(1, cores);
}

std::optional<CpuTime> cpu_time(const HostMemoryFiles& files) {
    // cpu user nice system idle iowait irq softirq steal guest guest_nice; user has guest already
    constexpr int kFields = 8, kIdle = 3, kWaiting = 4;
    std::istringstream words(line_of(files.proc + "/stat"));
    std::string name;
    words >> name;
    CpuTime time;
    for (int i = 0; i < kFields; ++i) {
        double ticks = 0;
        if (!(words >> ticks)) return std::nullopt;
        (i == kIdle || i == kWaiting ? time.idle : time.busy) += ticks;
    }
    return time;
}

std::optional<double> busy_share(std::chrono::milliseconds window, const HostMemoryFiles& files) {
    const auto before = cpu_time(files);
    std::this_thread::sleep_for(window);
    const auto after = cpu_time(files);
    if (!before || !after) return std::nullopt;
    const double busy = after->busy - before->busy, all = busy + after->idle - before->idle;
    if (!(all > 0)) return std::nullopt;
    return std::clamp(busy / all, 0.0, 1.0);
}

std::string busy_warning(double share) {
    constexpr double kQuiet = 0.1;
    if (share < kQuiet) return {};
    return fmt::format(
        "warning: other programs use {:.0f} % of this machine's CPU time, so times scatter: repeat when it "
        "is "
        "idle",
        100 * share);
}

std::string busy_warning(const BackendChoice& backend, ProcessGroup& world) {
    constexpr std::chrono::milliseconds kWindow{200};
    if (backend.kind == BackendKind::hopper) return {};
    world.barrier();
    const std::string warning = busy_warning(busy_share(kWindow).value_or(0));
    world.barrier();
    return warning;
}

}  // namespace fp8flow
