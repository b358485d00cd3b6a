// SPDX-License-Identifier: MIT
// The device that ops run on: its memory, copies, streams and events, and work captured to be launched again.
#pragma once

#include "kernels/core/launch_count.h"
#include "kernels/core/stream.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace fp8flow {

class Timeline;  // kernels/core/timeline.h

// Work that was captured from a stream and is launched again as a whole with the same arguments: a CUDA
// graph. Values that change from launch to launch are read from device memory.
class WorkGraph {
public:
    virtual ~WorkGraph() = default;
    // The memory that the work uses must still exist.
    virtual void launch(Stream stream) = 0;
    virtual LaunchCount launches() const = 0;  // in one launch
};

// Memory of one backend. allocate never returns null: it throws Error(memory) with the numbers.
// A warm step uses only calls that never block the host: copy, fill, the asynchronous copies from and to
// page-locked host memory, and events. The default bodies are those of the host backend, where each call has
// finished when it returns.
class Device {
public:
    virtual ~Device() = default;
    virtual void* allocate(std::size_t bytes) = 0;  // 256-byte aligned
    virtual void free(void* data) = 0;
    // From ordinary host memory; may block the host. The bytes may be reused on return.
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

    // Page-locked host memory: the host end of the asynchronous copies.
    virtual void* allocate_host(std::size_t bytes) { return allocate(bytes); }
    virtual void free_host(void* data) { free(data); }
    // Return at once; `host` (from allocate_host) must stay, and must not be written or read, until an event
    // recorded after the copy has passed.
    virtual void copy_in_async(void* device, const void* host, std::size_t bytes, Stream stream = {}) {
        copy(device, host, bytes, stream);
    }
    virtual void copy_out_async(void* host, const void* device, std::size_t bytes, Stream stream = {}) {
        copy(host, device, bytes, stream);
    }
    virtual Event make_event() { return {}; }
    virtual void free_event(Event) {}
    // Records the event after the stream's queued work. An event that was never recorded has passed.
    virtual void record(Event, Stream = {}) {}
    virtual bool has_passed(Event) { return true; }
    virtual void wait(Event) { ++num_waits_; }
    // A stream that may run in parallel with all others. urgent: SMs that become free take its work first.
    enum class Priority { normal, urgent };
    virtual Stream make_stream(Priority = Priority::normal) { return {}; }
    virtual void free_stream(Stream) {}
    // Later work of the stream waits for the event. The host does not wait.
    virtual void follow(Stream, Event) {}
    // Whether work can be captured. make_ordered_stream: a stream in order with the work of Stream{}.
    // capture: runs `work` once on the host and records what it queues on that stream, and on streams that
    // wait for it and that it waits for before the end; the device does nothing yet. `work` must not block
    // the host or allocate: Error(internal).
    virtual bool can_capture() const { return false; }
    virtual Stream make_ordered_stream() { return {}; }
    virtual std::unique_ptr<WorkGraph> capture(Stream, const std::function<void()>& /*work*/) {
        return nullptr;
    }
    // The calling thread may use this device from now on. The thread that made it need not call this.
    virtual void enter_thread() {}

    // Number of calls so far that block the host until the device has caught up, or may block it: allocate,
    // free, copy_in, copy_out, synchronize, and others that the backend counts. num_waits() counts waits for
    // events. Tests of the warm step read both.
    int64_t num_synchronisations() const { return num_synchronisations_; }
    // Counts a call outside this class that blocked the host.
    void count_synchronisation() { ++num_synchronisations_; }
    int64_t num_waits() const { return num_waits_; }

protected:
    int64_t num_synchronisations_ = 0, num_waits_ = 0;
};

}  // namespace fp8flow
