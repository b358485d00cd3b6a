// SPDX-License-Identifier: MIT
// Captures what a call gives to a stream, and to other streams, as a CUDA graph.
#pragma once

#include "kernels/core/device.h"

#include <cuda_runtime.h>

#include <functional>
#include <memory>

namespace fp8flow::hopper {

// `work` must not wait for the device, and must give nothing to the legacy stream if `stream` waits for that;
// a stream that follows this one must be followed again at the end. Otherwise, and where `work` throws, there
// is no graph and the error is passed on; the stream can be used as before.
std::unique_ptr<WorkGraph> capture_work(cudaStream_t stream, const std::function<void()>& work);

}  // namespace fp8flow::hopper
