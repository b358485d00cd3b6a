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

// Work that was given to a stream once and is launched again as a whole, with the same arguments: a CUDA
// graph. What changes from launch to launch is read from memory.
class WorkGraph {
public:
    virtual ~WorkGraph() = default;
    // The memory that the work uses must still be what it was.
    virtual void launch(Stream stream) = 0;
    virtual LaunchCount launches() const = 0;  // in one launch
};

// Memory of one backend. allocate never returns null: it throws Error(memory) with the numbers.
// What a warm step uses never stops the host: copy, fill, and the asynchronous copies from and to page-locked
// host memory, with events. Their bodies here are those of a device that has finished each call when it
// returns (the host).
class Device {
public:
    virtual ~Device() = default;
    virtual void* allocate(std::size_t bytes) = 0;  // 256-byte aligned
    virtual void free(void* data) = 0;
    // From ordinary host memory; may stop the host. The bytes may be reused on return.
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
    // What was given to the stream so far is what a wait for the event waits for. An event never recorded has
    // passed.
    virtual void record(Event, Stream = {}) {}
    virtual bool has_passed(Event) { return true; }
    virtual void wait(Event) { ++num_waits_; }
    // A stream whose work may run beside that of all others. urgent: SMs that become free take its work
    // first.
    enum class Priority { normal, urgent };
    virtual Stream make_stream(Priority = Priority::normal) { return {}; }
    virtual void free_stream(Stream) {}
    // What the stream is given from now on follows what the event stands for. The host does not wait.
    virtual void follow(Stream, Event) {}
    // Whether work can be captured. If so: a stream for it, in order with the work of Stream{}, as that is
    // with itself; and what `work` gives to it, and to streams that follow it and that it follows again at
    // the end. `work` runs on the host once and the device does nothing yet. It must not stop the host or
    // allocate: Error(internal) then.
    virtual bool can_capture() const { return false; }
    virtual Stream make_ordered_stream() { return {}; }
    virtual std::unique_ptr<WorkGraph> capture(Stream, const std::function<void()>& /*work*/) {
        return nullptr;
    }
    // The calling thread may use this device from now on. The thread that made it may without.
    virtual void enter_thread() {}

    // Calls so far that stop the host until the device has caught up, or may (allocate, free, copy_in,
    // copy_out, synchronize, and what else the backend counts), and waits for events: what a test of a warm
    // step looks at.
    int64_t num_synchronisations() const { return num_synchronisations_; }
    // The host was stopped by another call than those above.
    void count_synchronisation() { ++num_synchronisations_; }
    int64_t num_waits() const { return num_waits_; }

protected:
    int64_t num_synchronisations_ = 0, num_waits_ = 0;
};

}  // namespace fp8flow
