// Memory that operations need beside their arguments, allocated once: partial sums of two-stage reductions, cuBLASLt's handle and workspaces,
// cuDNN's plans.
#pragma once

#include "kernels/hopper/attention_cudnn.h"
#include "kernels/hopper/gemm_lt.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/swiglu_rows.h"

namespace fp8flow {

struct HopperOps::Workspace {
    static constexpr std::size_t kPartialsBytes = std::size_t{64} << 20,
                                 kTicketBytes = sizeof(hopper::RowTicket) * hopper::RowTicket::kCount;

    explicit Workspace(Device& owner)
        : device(owner),
          partials(owner.allocate(kPartialsBytes)),
          row_tickets(static_cast<hopper::RowTicket*>(owner.allocate(kTicketBytes))),
          lt(owner),
          cudnn(owner) {
        device.fill(row_tickets, 0, kTicketBytes);
        device.synchronize();
    }
    ~Workspace() {
        device.free(row_tickets);
        device.free(partials);
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    // `bytes` of scratch for one op; ops of one stream follow each other, so they may share it.
    template <class T> T* partials_for(int64_t count) const {
        FP8FLOW_CHECK(static_cast<std::size_t>(count) * sizeof(T) <= kPartialsBytes,
                      "{} partial sums of {} bytes", count, sizeof(T));
        return static_cast<T*>(partials);
    }

    Device& device;
    void* partials;
    hopper::RowTicket* row_tickets;  // 0 between ops
    hopper::LtLibrary lt;
    hopper::CudnnAttention cudnn;
};

}  // namespace fp8flow
