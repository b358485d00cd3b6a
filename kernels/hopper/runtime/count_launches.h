// SPDX-License-Identifier: MIT
// Counts the launches of one call on the current GPU. In builds without CUDA: a stub that returns nothing
// (without_cuda.cpp).
#pragma once

#include "kernels/core/launch_count.h"
#include "kernels/core/stream.h"

#include <functional>
#include <optional>

namespace fp8flow::hopper {

// Kernels, fills and copies that `call` issues to the stream it is given: captured as a graph, which then
// runs once, so that the call has taken effect. Empty for calls that cannot be captured because they wait for
// the device, allocate, or use another stream.
std::optional<LaunchCount> count_launches(const std::function<void(const Launch&)>& call);

}  // namespace fp8flow::hopper
