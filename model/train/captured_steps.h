// SPDX-License-Identifier: MIT
// CapturedSteps: the work of a step as a CUDA graph, one for each slot of page-locked memory that steps take
// turns with (schedule.cuda_graph_impl: full_iteration). A slot's step is captured once one in the same slot
// neither allocated nor stopped the host, and launched from then on, until memory that it uses has moved.
// Read next: trainer.cpp.
#pragma once

#include "kernels/core/device.h"

#include <functional>
#include <memory>
#include <vector>

namespace fp8flow {

class CapturedSteps {
public:
    // What the host knows of a step after it has given the device its work; the same at every launch.
    struct Known {
        int64_t casts = 0, peak_bytes = 0;
    };
    using Work = std::function<Known()>;

    CapturedSteps(Device& device, size_t num_slots) : device_(device), graphs_(num_slots) {}

    // Gives the stream the work of the step, by `work` or by a graph of it. layout: a number that changes
    // with every allocation.
    Known run(size_t slot, int64_t layout, Stream stream, const Work& work);
    // Memory has moved, or the work is another.
    void forget();

    int64_t num_captures() const { return num_captures_; }
    LaunchCount launches() const { return launches_; }  // of the graph captured last
    double capture_seconds() const { return capture_seconds_; }

private:
    struct Graph {
        std::unique_ptr<WorkGraph> work;
        Known known;
        bool warm = false;  // the work ran as it can be captured
    };

    Device& device_;
    std::vector<Graph> graphs_;
    int64_t layout_ = -1, num_captures_ = 0;
    LaunchCount launches_;
    double capture_seconds_ = 0;
};

}  // namespace fp8flow
