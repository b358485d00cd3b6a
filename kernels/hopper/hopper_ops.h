// SPDX-License-Identifier: MIT
// The CUDA backend for Hopper (sm_90a): every operation on one GPU, bit-equal to the reference where the
// contract is bytes. One folder per operation family. In a file, kernels are above and the launcher (the
// do_x member) below. Read next: README.md, runtime/launch.h, then any family.
#pragma once

#include "kernels/hopper/kernel_choice.h"
#include "kernels/ops.h"

#include <memory>

namespace fp8flow {

class HopperOps final : public Ops {
public:
    // Uses CUDA device `device`; throws Error(usage) unless it is a Hopper GPU.
    explicit HopperOps(int device = 0, const KernelChoice& kernels = {});
    ~HopperOps() override;
    Device& device() override { return *device_; }

    // For tests, which run one object through every choice.
    void choose_kernels(const KernelChoice& kernels) { kernels_ = kernels; }

    int64_t cublaslt_gemms() const;  // computed by cuBLASLt so far

    struct Workspace;  // cuBLASLt handle and scratch, reduction buffers of one stream role: allocated once

protected:
#define FP8FLOW_OVERRIDE(name, Args) void do_##name(const op::Args& args, const Launch& launch) override;
    FP8FLOW_FOR_EACH_OP(FP8FLOW_OVERRIDE)
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_OVERRIDE)
#undef FP8FLOW_OVERRIDE

private:
    KernelChoice kernels_;
    // The one of a role appears at its first operation.
    Workspace& workspace(const Launch& launch);

    std::unique_ptr<Device> device_;
    std::unique_ptr<Workspace> workspaces_[kNumStreamRoles];  // by StreamRole
};

}  // namespace fp8flow
