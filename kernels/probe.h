// SPDX-License-Identifier: MIT
// Probe: the limits of a machine, measured on it: streaming memory traffic of any size and mix. Also the two
// things that timing needs in addition to a clock: work that only takes time, and the size of the cache. Read
// next: model/measure/measure.h.
#pragma once

#include "kernels/core/stream.h"

#include <cstdint>
#include <string>

namespace fp8flow {

// Reads the first `bytes_read` bytes of `from` and writes the first `bytes_written` of `to`, each once, in
// parallel. Both counts are rounded up to 16, so the buffers must be; 0 is legal. What is written
// depends on what was read.
struct Traffic {
    const void* from = nullptr;
    int64_t bytes_read = 0;
    void* to = nullptr;
    int64_t bytes_written = 0;
    // 16-byte accesses that one thread has in flight: 2, 4 or 8; which is fastest depends on the size
    int depth = 4;
};

class Probe {
public:
    virtual ~Probe() = default;
    virtual std::string device_name() const = 0;  // "NVIDIA H200"
    // Bytes of the last-level cache that timed calls must not find their data in; 0: timings here say nothing
    // about caches.
    virtual int64_t cache_bytes() const = 0;
    virtual void stream_traffic(const Traffic& traffic, const Launch& launch = {}) = 0;
    // Keeps the stream busy for about so long, so that the host can queue work after it and launch times do
    // not show. Does nothing on devices that work while the caller waits.
    virtual void delay(double seconds, Stream stream = {}) = 0;
};

// Traffic between the GPUs of a job, all ranks at the same time; collective, but ranks do not wait for each
// other inside.
class PeerProbe {
public:
    virtual ~PeerProbe() = default;
    virtual int64_t bytes() const = 0;  // that one call moves between this rank and all others
    virtual void load(const Launch& launch = {}) = 0;
    virtual void store(const Launch& launch = {}) = 0;
};

}  // namespace fp8flow
