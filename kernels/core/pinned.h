// SPDX-License-Identifier: MIT
// PinnedBuffer and HostEvent: page-locked host memory and an event of a device, owned. The device must have
// passed every copy to or from a buffer before its owner dies: a copy in flight would write into memory
// that has another owner by then.
#pragma once

#include "kernels/core/device.h"

namespace fp8flow {

class PinnedBuffer {
public:
    PinnedBuffer(Device& device, std::size_t bytes) : device_(device), data_(device.allocate_host(bytes)) {}
    ~PinnedBuffer() { device_.free_host(data_); }
    PinnedBuffer(const PinnedBuffer&) = delete;
    PinnedBuffer& operator=(const PinnedBuffer&) = delete;
    // 256-byte aligned at offset 0.
    template <class T> T* at(std::size_t byte_offset) const {
        return reinterpret_cast<T*>(static_cast<uint8_t*>(data_) + byte_offset);
    }

private:
    Device& device_;
    void* data_;
};

class HostEvent {
public:
    explicit HostEvent(Device& device) : device_(device), event_(device.make_event()) {}
    ~HostEvent() { device_.free_event(event_); }
    HostEvent(const HostEvent&) = delete;
    HostEvent& operator=(const HostEvent&) = delete;
    void record(Stream stream) { device_.record(event_, stream); }
    bool has_passed() const { return device_.has_passed(event_); }
    void wait() { device_.wait(event_); }

private:
    Device& device_;
    Event event_;
};

}  // namespace fp8flow
