// SPDX-License-Identifier: MIT
// The timeline of one GPU: CUDA events, created once and recorded again after each reset.
#pragma once

#include "kernels/core/timeline.h"

#include <memory>

namespace fp8flow {

std::unique_ptr<Timeline> make_cuda_timeline();

}  // namespace fp8flow
