// SPDX-License-Identifier: MIT
// Reads /proc and the cgroup file system (both versions). A missing file is no limit.
#include "model/job/host_cores.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

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

}  // namespace fp8flow
