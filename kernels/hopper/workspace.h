// SPDX-License-Identifier: MIT
// Memory that operations need besides their arguments, allocated once: partial sums of two-stage reductions,
// cuBLASLt's handle and workspaces, cuDNN's plans.
#pragma once

#include "kernels/core/error.h"
#include "kernels/hopper/attention/cudnn.h"
#include "kernels/hopper/gemm/cublaslt/cublaslt.h"
#include "kernels/hopper/hopper_ops.h"

namespace fp8flow {

struct HopperOps::Workspace {
    static constexpr std::size_t kPartialsBytes = std::size_t{64} << 20, kZerosBytes = std::size_t{16} << 20;

    explicit Workspace(Device& owner)
        : device(owner),
          partials(owner.allocate(kPartialsBytes)),
          zeros(owner.allocate(kZerosBytes)),
          cublaslt(owner),
          cudnn(owner) {
        owner.fill(zeros, 0, kZerosBytes);
        owner.synchronize();
    }
    ~Workspace() {
        device.free(partials);
        device.free(zeros);
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    // `bytes` of scratch for one op; ops of one stream follow each other, so they may share it.
    template <class T> T* partials_for(int64_t count) const {
        FP8FLOW_CHECK(static_cast<std::size_t>(count) * sizeof(T) <= kPartialsBytes,
                      "{} partial sums of {} bytes", count, sizeof(T));
        return static_cast<T*>(partials);
    }

    // Counters that are zero when an op starts, and zero again when it ends.
    template <class T> T* zeros_for(int64_t count) const {
        FP8FLOW_CHECK(static_cast<std::size_t>(count) * sizeof(T) <= kZerosBytes, "{} counters of {} bytes",
                      count, sizeof(T));
        return static_cast<T*>(zeros);
    }

    Device& device;
    void* partials;
    void* zeros;
    hopper::gemm::CublasLt cublaslt;
    hopper::CudnnAttention cudnn;
};

}  // namespace fp8flow
