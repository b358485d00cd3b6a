// SPDX-License-Identifier: MIT
// HostDevice counts the calls that would synchronise the host with a GPU.
#include "kernels/reference/host_device.h"

#include "kernels/core/error.h"
#include "kernels/core/scaled_tensor.h"
#include "kernels/host_memory.h"

#include <cstdlib>
#include <cstring>
#include <fstream>

namespace fp8flow {

int64_t HostDevice::free_bytes() const { return host_memory().free_bytes; }

void* HostDevice::allocate(std::size_t bytes) {
    ++num_synchronisations_;
    constexpr std::size_t kAlignment = 256;
    const std::size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, padded == 0 ? kAlignment : padded);
    if (data == nullptr) fail(ExitCode::memory, "{}", out_of_host_memory(static_cast<int64_t>(bytes)));
    return data;
}

void HostDevice::free(void* data) {
    ++num_synchronisations_;
    std::free(data);
}

void HostDevice::copy_in(void* device, const void* host, std::size_t bytes, Stream) {
    ++num_synchronisations_;
    if (bytes > 0) std::memcpy(device, host, bytes);
}
void HostDevice::copy_out(void* host, const void* device, std::size_t bytes, Stream) {
    ++num_synchronisations_;
    if (bytes > 0) std::memcpy(host, device, bytes);
}
void HostDevice::copy(void* to, const void* from, std::size_t bytes, Stream) {
    if (bytes > 0) std::memmove(to, from, bytes);
}
void HostDevice::fill(void* device, uint8_t value, std::size_t bytes, Stream) {
    std::memset(device, value, bytes);
}

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
