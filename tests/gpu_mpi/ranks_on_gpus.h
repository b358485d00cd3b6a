// SPDX-License-Identifier: MIT
// Which GPU a rank of a test has. NCCL wants one for every rank; peer memory does not, and with
// FP8FLOW_SHARE_GPUS ranks share what there is: the driver runs one process of a GPU at a time, so that a
// call of the exchange takes milliseconds.
#pragma once

#include "kernels/hopper/runtime/device_query.h"
#include "model/job/backend.h"

#include <algorithm>
#include <cstdlib>

namespace fp8flow::test {

inline int local_rank() {
    const char* rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    return rank != nullptr ? std::atoi(rank) : 0;
}

inline bool has_own_gpu(const ProcessGroup& world) { return world.size() <= hopper::device_count(); }
inline bool has_gpu(const ProcessGroup& world) {
    return has_own_gpu(world) || (hopper::device_count() > 0 && std::getenv("FP8FLOW_SHARE_GPUS") != nullptr);
}
// Where ranks share GPUs, that of a job with one rank a GPU, which choose_backend accepts.
inline Placement placement_of(const ProcessGroup& world) {
    const int gpus = std::min(world.size(), hopper::device_count());
    return {gpus, gpus, local_rank() % gpus};
}

}  // namespace fp8flow::test
