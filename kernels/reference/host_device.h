// SPDX-License-Identifier: MIT
// The reference backend's device: host memory. Its probe: memory traffic of all threads of the host.
#pragma once

#include "kernels/core/device.h"
#include "kernels/probe.h"

namespace fp8flow {

class HostDevice : public Device {
public:
    void* allocate(std::size_t bytes) override;
    void free(void* data) override;
    void copy_in(void* device, const void* host, std::size_t bytes, Stream stream) override;
    void copy_out(void* host, const void* device, std::size_t bytes, Stream stream) override;
    void copy(void* to, const void* from, std::size_t bytes, Stream stream) override;
    void fill(void* device, uint8_t value, std::size_t bytes, Stream stream) override;
    void synchronize() override { ++num_synchronisations_; }
    int64_t free_bytes() const override;
};

class HostProbe final : public Probe {
public:
    std::string device_name() const override;  // the processor's
    int64_t cache_bytes() const override { return 0; }
    void stream_traffic(const Traffic& traffic, const Launch& launch) override;
    void delay(double, Stream) override {}

private:
    uint64_t sink_ = 0;  // keeps the reads from being optimised away
};

}  // namespace fp8flow
