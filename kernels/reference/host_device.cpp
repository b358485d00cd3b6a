// SPDX-License-Identifier: MIT
// HostDevice: the memory of the reference backend is ordinary host memory. It counts the calls that would
// synchronise the host with a GPU.
#include "kernels/reference/host_device.h"

#include "kernels/core/error.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

namespace fp8flow {

// What the kernel can give without swapping, cached files given back; without it, what nobody uses.
int64_t HostDevice::free_bytes() const {
    std::ifstream file("/proc/meminfo");
    std::string word;
    for (int64_t kib = 0; file >> word; file.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
        if (word == "MemAvailable:" && file >> kib) return kib * 1024;
    return static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
}

void* HostDevice::allocate(std::size_t bytes) {
    ++num_synchronisations_;
    constexpr std::size_t kAlignment = 256;
    const std::size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, padded == 0 ? kAlignment : padded);
    require(data != nullptr, ExitCode::memory,
            "out of host memory: asked for {:.1f} MiB, {:.1f} MiB free; lower training.micro_batch_size or "
            "model.seq_length",
            static_cast<double>(bytes) / 1048576.0, static_cast<double>(free_bytes()) / 1048576.0);
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

}  // namespace fp8flow
