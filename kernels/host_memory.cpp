// SPDX-License-Identifier: MIT
// Reads /proc, the cgroup file system (both versions) and the resource limits; what is not there does not
// limit.
#include "kernels/host_memory.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <new>
#include <optional>

namespace fp8flow {

namespace {

// The number that `path` begins with; nothing for "max" and where there is no such file.
std::optional<int64_t> number_in(const std::string& path) {
    std::ifstream file(path);
    int64_t number = 0;
    if (!(file >> number) || number < 0) return std::nullopt;
    return number;
}

// The value of `key` in a file of "key value" lines.
std::optional<int64_t> word_line(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    std::string word;
    for (int64_t value = 0; file >> word >> value;)
        if (word == key) return value;
    return std::nullopt;
}

// The value of `key` in a file of "key: value kB" lines, in bytes.
std::optional<int64_t> kib_line(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    std::string word;
    for (int64_t kib = 0; file >> word; file.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
        if (word == key + ":" && file >> kib) return kib * 1024;
    return std::nullopt;
}

void tighten(HostMemory& memory, int64_t free, std::string limit, bool of_one_process) {
    if (free < memory.free_bytes) memory = {std::max<int64_t>(0, free), std::move(limit), of_one_process};
}

void tighten_by_cgroup(HostMemory& memory, const std::string& folder, const char* limit, const char* used,
                       const char* cached) {
    const auto most = number_in(folder + "/" + limit), now = number_in(folder + "/" + used);
    // cached pages of files are given back before the limit is reached
    const int64_t cache = word_line(folder + "/memory.stat", cached).value_or(0);
    if (most && now)
        tighten(memory, *most - *now + cache, fmt::format("the cgroup's {} of {} bytes", limit, *most),
                false);
}

}  // namespace

void each_cgroup(const HostMemoryFiles& files, const std::string& controller,
                 const std::function<void(const std::string& folder, bool unified)>& visit) {
    std::ifstream groups(files.proc + "/self/cgroup");  // hierarchy:controllers:path
    for (std::string line; std::getline(groups, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const bool unified = controllers == ",,";
        if (!unified && controllers.find("," + controller + ",") == std::string::npos) continue;
        std::string path = line.substr(second + 1);
        if (path.empty() || path.front() != '/' || path.find("..") != std::string::npos || path == "/")
            path = "";
        for (;; path.resize(path.rfind('/'))) {
            visit(files.cgroup + (unified ? "" : "/" + controller) + path, unified);
            if (path.empty()) break;
        }
    }
}

HostName host_name() {
    HostName name;
    if (::gethostname(name.text, sizeof name.text - 1) != 0) return {};
    name.text[sizeof name.text - 1] = 0;  // one that was cut
    return name;
}

HostMemory host_memory(const HostMemoryFiles& files) {
    HostMemory memory;
    if (const auto free = kib_line(files.proc + "/meminfo", "MemAvailable"))
        tighten(memory, *free, "physical memory", false);
    each_cgroup(files, "memory", [&](const std::string& folder, bool unified) {
        if (unified)
            tighten_by_cgroup(memory, folder, "memory.max", "memory.current", "inactive_file");
        else
            tighten_by_cgroup(memory, folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                              "total_inactive_file");
    });
    const auto resource = [&](auto which, const char* name, const char* taken) {
        rlimit most{};
        if (::getrlimit(which, &most) != 0 || most.rlim_cur == RLIM_INFINITY) return;
        const auto bytes = static_cast<int64_t>(std::min<rlim_t>(most.rlim_cur, INT64_MAX));
        const int64_t now = kib_line(files.proc + "/self/status", taken).value_or(0);
        tighten(memory, bytes - now, fmt::format("the resource limit {} of {} bytes", name, bytes), true);
    };
    resource(RLIMIT_AS, "RLIMIT_AS (ulimit -v)", "VmSize");
    resource(RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)", "VmData");
    return memory;
}

std::string out_of_host_memory(int64_t asked) {
    HostMemory memory;
    try {
        memory = host_memory();
    } catch (const std::bad_alloc&) {  // not even for that
        memory.free_bytes = 0;
    }
    const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / 0x1p20; };
    return fmt::format(
        "out of host memory: {}{:.1f} MiB free within {}; lower training.micro_batch_size or "
        "model.seq_length, or raise the limit",
        asked > 0 ? fmt::format("asked for {:.1f} MiB, ", mib(asked)) : "", mib(memory.free_bytes),
        memory.limit.empty() ? "no limit that is known" : memory.limit);
}

}  // namespace fp8flow
