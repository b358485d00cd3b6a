// SPDX-License-Identifier: MIT
// Construction of the Hopper backend: device, cuBLASLt handle, workspaces; all memory that operations need
// besides their arguments.
#include "kernels/hopper/hopper_ops.h"

#include "kernels/core/error.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/cuda_device.h"
#include "kernels/hopper/runtime/device_query.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow {

HopperOps::HopperOps(int device, const KernelChoice& kernels) : kernels_(kernels) {
    require(hopper::device_count() > device, ExitCode::usage, "GPU {} is not a usable Hopper GPU: {}", device,
            hopper::device_count() > 0 ? "there are fewer" : hopper::unavailable_reason());
    device_ = std::make_unique<CudaDevice>(device);
    workspace({});
}

HopperOps::~HopperOps() = default;

HopperOps::Workspace& HopperOps::workspace(const Launch& launch) {
    std::unique_ptr<Workspace>& own = workspaces_[static_cast<int>(launch.role)];
    if (!own) own = std::make_unique<Workspace>(*device_);
    return *own;
}

namespace hopper {

std::unique_ptr<Ops> make_ops(int device, const KernelChoice& kernels) {
    return std::make_unique<HopperOps>(device, kernels);
}

}  // namespace hopper

}  // namespace fp8flow
