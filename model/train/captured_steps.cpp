// SPDX-License-Identifier: MIT
// Decides when a step is captured and when its graph is dropped.
#include "model/train/captured_steps.h"

#include "kernels/core/timeline.h"

namespace fp8flow {

CapturedSteps::Known CapturedSteps::run(size_t slot, int64_t layout, Stream stream, const Work& work) {
    if (layout != layout_) {
        forget();
        layout_ = layout;
    }
    Graph& graph = graphs_[slot];
    if (!graph.work) {
        if (!graph.warm) {
            const int64_t before = device_.num_synchronisations();
            const Known known = work();
            graph.warm = device_.num_synchronisations() == before;
            return known;
        }
        const double start = clock_seconds();
        graph.work = device_.capture(stream, [&] { graph.known = work(); });
        capture_seconds_ = clock_seconds() - start;
        launches_ = graph.work->launches();
        ++num_captures_;
    }
    graph.work->launch(stream);
    return graph.known;
}

void CapturedSteps::forget() {
    for (Graph& graph : graphs_) graph = {};
}

}  // namespace fp8flow
