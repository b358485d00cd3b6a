// SPDX-License-Identifier: MIT
// Texts of failed CUDA runtime calls, apart from the header, so that kernels compile without fmt.
#include "kernels/hopper/runtime/cuda_check.h"

#include "kernels/core/error.h"

#include <fmt/core.h>

namespace fp8flow::hopper {

void fail_cuda(cudaError_t status, const char* what) {
    const ExitCode code = status == cudaErrorMemoryAllocation ? ExitCode::memory : ExitCode::internal;
    fail(code, "CUDA: {}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

std::string cuda_problem(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return {};
    cudaGetLastError();  // it is reported here, not at the next launch
    return fmt::format("{}: {}", what, cudaGetErrorString(status));
}

}  // namespace fp8flow::hopper
