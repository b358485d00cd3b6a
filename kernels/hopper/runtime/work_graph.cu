// SPDX-License-Identifier: MIT
// Captured work as a CUDA graph: its end on every path, its nodes counted. No kernels of its own.
#include "kernels/hopper/runtime/work_graph.h"

#include "kernels/hopper/runtime/cuda_check.h"
#include "kernels/hopper/runtime/launch.h"

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

class CudaGraph final : public WorkGraph {
public:
    explicit CudaGraph(cudaGraph_t graph) : launches_(launches_of(graph)) {
        check_cuda(cudaGraphInstantiate(&executable_, graph, 0), "instantiating a CUDA graph");
    }
    ~CudaGraph() override { cudaGraphExecDestroy(executable_); }
    CudaGraph(const CudaGraph&) = delete;
    CudaGraph& operator=(const CudaGraph&) = delete;

    void launch(Stream stream) override {
        check_cuda(cudaGraphLaunch(executable_, stream_of(stream)), "launching a CUDA graph");
    }
    LaunchCount launches() const override { return launches_; }

private:
    LaunchCount launches_;
    cudaGraphExec_t executable_ = nullptr;
};

struct GraphDeleter {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
using OwnedGraph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, GraphDeleter>;

OwnedGraph end_capture(cudaStream_t stream, cudaError_t& status) {
    cudaGraph_t graph = nullptr;
    status = cudaStreamEndCapture(stream, &graph);
    return OwnedGraph(graph);
}

}  // namespace

// During the capture other threads may use the device, except its legacy stream.
std::unique_ptr<WorkGraph> capture_work(cudaStream_t stream, const std::function<void()>& work) {
    cudaError_t status = cudaSuccess;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
    try {
        work();
    } catch (...) {
        end_capture(stream, status);
        cudaGetLastError();  // the error on its way is the one to report
        throw;
    }
    const OwnedGraph graph = end_capture(stream, status);
    check_cuda(status, "ending a capture");
    return std::make_unique<CudaGraph>(graph.get());
}

}  // namespace fp8flow::hopper
