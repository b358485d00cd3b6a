// SPDX-License-Identifier: MIT
// The probe of the reference backend: memory traffic of all threads of the host.
#pragma once

#include "kernels/probe.h"

namespace fp8flow {

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
