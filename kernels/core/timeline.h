// SPDX-License-Identifier: MIT
// Timeline: points in the work of a stream and the seconds between them; what stage timers and benchmarks
// measure with. CUDA: events, so that marking costs the host a microsecond and waits for nothing. Host: a
// steady clock.
#pragma once

#include "kernels/core/stream.h"

#include <cstdint>

namespace fp8flow {

double clock_seconds();  // of the host's steady clock, from some moment in the past

class Timeline {
public:
    virtual ~Timeline() = default;
    // Records a point after the work queued on `stream` so far; returns its index, counted from 0 since the
    // last reset. Allocates only where there have never been so many marks.
    virtual int64_t mark(Stream stream) = 0;
    // From mark a to mark b; waits until both have passed.
    virtual double seconds_between(int64_t a, int64_t b) = 0;
    // Forgets all marks and keeps their storage, also of marks that the device has not reached yet.
    virtual void reset() = 0;

    // From now on marks count the device's cycles, too, which costs it some microseconds each. Not every
    // device can.
    virtual void count_cycles() {}
    // The device's mean clock in Hz from mark a to mark b; waits until both have passed. 0: not counted.
    virtual double clock_between(int64_t /*a*/, int64_t /*b*/) { return 0; }

    // Names what the calling thread launches until end_range, for profilers that listen (CUDA: an NVTX range
    // "direction/name").
    virtual void begin_range(const char* /*direction*/, const char* /*name*/) {}
    virtual void end_range() {}
    // Brackets the part of a run that a profiler should record (CUDA: cudaProfilerStart and Stop).
    virtual void begin_capture() {}
    virtual void end_capture() {}
};

}  // namespace fp8flow
