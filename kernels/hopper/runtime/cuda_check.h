// SPDX-License-Identifier: MIT
// Turns a failed CUDA runtime call into an Error that says what was being done. For files of the CUDA
// backend.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace fp8flow::hopper {

[[noreturn]] void fail_cuda(cudaError_t status, const char* what);

inline void check_cuda(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail_cuda(status, what);
}

// The same for a failure that is a reason to use a fallback: the problem as text, or nothing.
std::string cuda_problem(cudaError_t status, const char* what);

}  // namespace fp8flow::hopper
