// SPDX-License-Identifier: MIT
// Counting the launches of a call in a CUDA graph. No kernels of its own.
#include "kernels/hopper/runtime/count_launches.h"
#include "kernels/hopper/runtime/cuda_check.h"

#include <cuda_runtime.h>
#include <vector>

namespace fp8flow::hopper {

namespace {

LaunchCount launches_of(cudaGraph_t graph) {
    std::size_t size = 0;
    check_cuda(cudaGraphGetNodes(graph, nullptr, &size), "counting nodes");
    std::vector<cudaGraphNode_t> nodes(size);
    if (size > 0) check_cuda(cudaGraphGetNodes(graph, nodes.data(), &size), "reading nodes");
    LaunchCount count;
    for (cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
        check_cuda(cudaGraphNodeGetType(node, &type), "reading a node's type");
        if (type == cudaGraphNodeTypeKernel) ++count.kernels;
        if (type == cudaGraphNodeTypeMemset || type == cudaGraphNodeTypeMemcpy) ++count.others;
    }
    return count;
}

}  // namespace

std::optional<LaunchCount> count_launches(const std::function<void(const Launch&)>& call) {
    // a blocking stream: work that a call gives to the default stream ends the capture
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreate(&stream), "making a stream");
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
    bool whole = true;
    try {
        call({.stream = {stream}});
    } catch (const std::exception&) {  // not capturable: the answer is none
        whole = false;
    }
    cudaGraph_t graph = nullptr;
    whole = cudaStreamEndCapture(stream, &graph) == cudaSuccess && whole && graph != nullptr;
    std::optional<LaunchCount> launches;
    cudaGraphExec_t executable = nullptr;
    if (whole && cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess) {
        launches = launches_of(graph);
        check_cuda(cudaGraphLaunch(executable, stream), "running a graph");
        check_cuda(cudaStreamSynchronize(stream), "running a graph");
        cudaGraphExecDestroy(executable);
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    cudaGetLastError();  // not an error for the next launch to find
    return launches;
}

}  // namespace fp8flow::hopper
