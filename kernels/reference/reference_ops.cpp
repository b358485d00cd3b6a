// SPDX-License-Identifier: MIT
// Construction of the reference backend; each family of operations has its own file.
#include "kernels/reference/reference_ops.h"

#include "kernels/reference/host_device.h"

namespace fp8flow {

ReferenceOps::ReferenceOps(SummationOrder summation)
    : summation_(summation), device_(std::make_unique<HostDevice>()) {}

ReferenceOps::~ReferenceOps() = default;

}  // namespace fp8flow
