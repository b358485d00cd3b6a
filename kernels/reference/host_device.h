// SPDX-License-Identifier: MIT
// Host memory as the reference backend's device.
#pragma once

#include "kernels/core/device.h"

namespace fp8flow {

class HostDevice final : public Device {
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

}  // namespace fp8flow
