// SPDX-License-Identifier: MIT
// The memory of one GPU as a Device: plain cudaMalloc, copies on the stream, events that the host sleeps on,
// captured work.
#pragma once

#include "kernels/core/device.h"

namespace fp8flow {

class CudaDevice final : public Device {
public:
    explicit CudaDevice(int device);
    void* allocate(std::size_t bytes) override;
    void free(void* data) override;
    void copy_in(void* device, const void* host, std::size_t bytes, Stream stream) override;
    void copy_out(void* host, const void* device, std::size_t bytes, Stream stream) override;
    void copy(void* to, const void* from, std::size_t bytes, Stream stream) override;
    void fill(void* device, uint8_t value, std::size_t bytes, Stream stream) override;
    void synchronize() override;
    int64_t free_bytes() const override;
    std::unique_ptr<Timeline> make_timeline() override;
    void* allocate_host(std::size_t bytes) override;
    void free_host(void* data) override;
    void copy_in_async(void* device, const void* host, std::size_t bytes, Stream stream) override;
    void copy_out_async(void* host, const void* device, std::size_t bytes, Stream stream) override;
    Event make_event() override;
    void free_event(Event event) override;
    void record(Event event, Stream stream) override;
    bool has_passed(Event event) override;
    void wait(Event event) override;
    Stream make_stream(Priority priority) override;
    void free_stream(Stream stream) override;
    void follow(Stream stream, Event event) override;
    bool can_capture() const override { return true; }
    Stream make_ordered_stream() override;
    std::unique_ptr<WorkGraph> capture(Stream stream, const std::function<void()>& work) override;
    void enter_thread() override;

private:
    int device_;
};

}  // namespace fp8flow
