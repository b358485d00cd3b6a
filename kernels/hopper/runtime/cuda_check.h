// SPDX-License-Identifier: MIT
// Turns a failed CUDA runtime call into an Error that says what was being done. For .cu files of the CUDA
// backend.
#pragma once

#include "kernels/core/error.h"

#include <cuda_runtime.h>

#include <string>

namespace fp8flow::hopper {

inline void check_cuda(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    const ExitCode code = status == cudaErrorMemoryAllocation ? ExitCode::memory : ExitCode::internal;
    fail(code, "CUDA: {}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

// The same for a failure that is a reason to use a fallback: the problem as text, or nothing.
inline std::string cuda_problem(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return {};
    cudaGetLastError();  // it is reported here, not at the next launch
    return fmt::format("{}: {}", what, cudaGetErrorString(status));
}

}  // namespace fp8flow::hopper
