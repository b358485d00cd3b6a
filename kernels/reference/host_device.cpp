// SPDX-License-Identifier: MIT
// HostDevice: the memory of the reference backend is ordinary host memory. It counts the calls that would
// synchronise the host with a GPU.
#include "kernels/reference/host_device.h"

#include "kernels/core/error.h"
#include "kernels/host_memory.h"

#include <cstdlib>
#include <cstring>

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

}  // namespace fp8flow
