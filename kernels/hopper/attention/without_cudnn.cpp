// SPDX-License-Identifier: MIT
// CudnnAttention in a build without cuDNN: takes no shape, and says why. CMake passes the reason as
// FP8FLOW_NO_CUDNN_REASON and compiles this file instead of cudnn.cpp and lse.cu.
#include "kernels/core/error.h"
#include "kernels/hopper/attention/cudnn.h"
#include "kernels/hopper/factory.h"

namespace fp8flow::hopper {

struct CudnnAttention::State {};

std::string cudnn_problem() { return FP8FLOW_NO_CUDNN_REASON; }
std::string cudnn_problem(int64_t, int64_t) { return cudnn_problem(); }

CudnnAttention::CudnnAttention(Device&) {}
CudnnAttention::~CudnnAttention() = default;

bool CudnnAttention::takes(const TensorView&, const TensorView&, const TensorView&, int64_t) { return false; }

void CudnnAttention::forward(const op::Attention&, const Launch&) {
    fail(ExitCode::usage, "attention on cuDNN is not in this program: {}", cudnn_problem());
}
void CudnnAttention::backward(const op::AttentionBackward&, const Launch&) {
    fail(ExitCode::usage, "attention on cuDNN is not in this program: {}", cudnn_problem());
}

}  // namespace fp8flow::hopper
