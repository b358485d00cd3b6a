// SPDX-License-Identifier: MIT
// Captures what a call enqueues on a stream, and on other streams, as a CUDA graph.
#pragma once

#include "kernels/core/device.h"

#include <cuda_runtime.h>

#include <functional>
#include <memory>

namespace fp8flow::hopper {

// `work` must not wait for the device. It must enqueue nothing on the legacy stream if `stream` waits for
// that one. A stream that waits for `stream` must be waited for by `stream` at the end. Otherwise, and if
// `work` throws, there is no graph and the error is passed on; the stream can be used as before.
std::unique_ptr<WorkGraph> capture_work(cudaStream_t stream, const std::function<void()>& work);

}  // namespace fp8flow::hopper
