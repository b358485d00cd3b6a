// SPDX-License-Identifier: MIT
// The probe of the reference backend: memory traffic of all threads of the host.
#include "kernels/reference/host_probe.h"

#include "kernels/core/scaled_tensor.h"

#include <fstream>

namespace fp8flow {

std::string HostProbe::device_name() const {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        const auto colon = line.find(": ");
        if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
    }
    return "processor";
}

void HostProbe::stream_traffic(const Traffic& traffic, const Launch&) {
    const auto* from = static_cast<const uint64_t*>(traffic.from);
    auto* to = static_cast<uint64_t*>(traffic.to);
    const int64_t reads = round_up(traffic.bytes_read, 16) / 8,
                  writes = round_up(traffic.bytes_written, 16) / 8;
    constexpr int64_t kPiece = 4096;  // words of one iteration
    const int64_t pieces = ceil_div(reads > writes ? reads : writes, kPiece);
    uint64_t all = 0;
#pragma omp parallel for reduction(^ : all)
    for (int64_t p = 0; p < pieces; ++p) {
        uint64_t sum = 0;
        for (int64_t i = reads * p / pieces; i < reads * (p + 1) / pieces; ++i) sum ^= from[i];
        for (int64_t i = writes * p / pieces; i < writes * (p + 1) / pieces; ++i)
            to[i] = sum + static_cast<uint64_t>(i);
        all ^= sum;
    }
    sink_ ^= all;
}

}  // namespace fp8flow
