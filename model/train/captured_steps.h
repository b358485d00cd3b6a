// SPDX-License-Identifier: MIT
// CapturedSteps: the work of a step as a CUDA graph (schedule.cuda_graph_impl: full_iteration). Steps
// alternate between slots of page-locked memory, and each slot has a graph. It is captured after a step in
// the same slot has run without allocation and host wait, and launched until memory that it uses is allocated
// again. Read next: trainer.cpp.
#pragma once

#include "kernels/core/device.h"

#include <functional>
#include <memory>
#include <vector>

namespace fp8flow {

class CapturedSteps {
public:
    // Counts of the host for one step; the same at every launch.
    struct Known {
        int64_t casts = 0, peak_bytes = 0;
    };
    using Work = std::function<Known()>;

    CapturedSteps(Device& device, size_t num_slots) : device_(device), graphs_(num_slots) {}

    // Queues the work of the step on the stream: calls `work`, or launches its graph. layout: a number that
    // changes with every allocation.
    Known run(size_t slot, int64_t layout, Stream stream, const Work& work);
    // Call it if memory or the work has changed.
    void forget();

    int64_t num_captures() const { return num_captures_; }
    LaunchCount launches() const { return launches_; }  // of the graph captured last
    double capture_seconds() const { return capture_seconds_; }

private:
    struct Graph {
        std::unique_ptr<WorkGraph> work;
        Known known;
        bool warm = false;  // the work has run without allocation and host wait
    };

    Device& device_;
    std::vector<Graph> graphs_;
    int64_t layout_ = -1, num_captures_ = 0;
    LaunchCount launches_;
    double capture_seconds_ = 0;
};

}  // namespace fp8flow
