// SPDX-License-Identifier: MIT
// Counting the launches of a call in a CUDA graph. No kernels of its own.
#include "kernels/hopper/runtime/count_launches.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "kernels/hopper/runtime/work_graph.h"

namespace fp8flow::hopper {

std::optional<LaunchCount> count_launches(const std::function<void(const Launch&)>& call) {
    // a blocking stream: work that a call enqueues on the default stream ends the capture
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreate(&stream), "making a stream");
    std::unique_ptr<WorkGraph> graph;
    try {
        graph = capture_work(stream, [&] { call({.stream = {stream}}); });
    } catch (const std::exception&) {  // not capturable: the answer is none
        cudaGetLastError();            // not an error for the next launch to find
    }
    std::optional<LaunchCount> launches;
    if (graph) {
        graph->launch({stream});
        check_cuda(cudaStreamSynchronize(stream), "running a graph");
        launches = graph->launches();
    }
    cudaStreamDestroy(stream);
    return launches;
}

}  // namespace fp8flow::hopper
