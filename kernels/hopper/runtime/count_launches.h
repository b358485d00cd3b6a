// SPDX-License-Identifier: MIT
// How many launches one call makes on the GPU in use. In builds without CUDA: a stub that knows nothing
// (without_cuda.cpp).
#pragma once

#include "kernels/core/launch_count.h"
#include "kernels/core/stream.h"

#include <functional>
#include <optional>

namespace fp8flow::hopper {

// Kernels, fills and copies that `call` gives the stream that it gets: recorded as a graph, which then runs
// once, so that the call has happened. Nothing for calls that cannot be recorded because they wait for the
// device, allocate, or use another stream.
std::optional<LaunchCount> count_launches(const std::function<void(const Launch&)>& call);

}  // namespace fp8flow::hopper
