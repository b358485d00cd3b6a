// Where and with how much of the machine an op runs, and the memory of the device it runs on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fp8flow {

class Timeline;  // kernels/core/timeline.h

// An opaque stream of the backend (CUDA: cudaStream_t; reference: ignored).
struct Stream {
    void* handle = nullptr;
};

struct Launch {
    Stream stream;
    // 0: all; otherwise at most so many multiprocessors, so that communication can run beside
    int sm_limit = 0;
};

// Memory of one backend. allocate never returns null: it throws Error(memory) with the numbers.
class Device {
public:
    virtual ~Device() = default;
    virtual void* allocate(std::size_t bytes) = 0;  // 256-byte aligned
    virtual void free(void* data) = 0;
    virtual void copy_in(void* device, const void* host, std::size_t bytes, Stream stream = {}) = 0;
    // Device to host; synchronises.
    virtual void copy_out(void* host, const void* device, std::size_t bytes, Stream stream = {}) = 0;
    // Within the device.
    virtual void copy(void* to, const void* from, std::size_t bytes, Stream stream = {}) = 0;
    virtual void fill(void* device, uint8_t value, std::size_t bytes, Stream stream = {}) = 0;
    virtual void synchronize() = 0;
    virtual int64_t free_bytes() const = 0;
    // A clock for the work of this device's streams; unless overridden, the host's.
    virtual std::unique_ptr<Timeline> make_timeline();
};

}  // namespace fp8flow
