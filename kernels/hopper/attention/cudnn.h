// SPDX-License-Identifier: MIT
// Attention on cuDNN, declared without cuDNN's headers: cudnn.cpp, or without_cudnn.cpp in builds without
// cuDNN. A plan is made at the first call of a shape; later calls neither allocate nor synchronise with the
// host.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/ops/attention.h"

#include <memory>

namespace fp8flow {
class Device;
}

namespace fp8flow::hopper {

class CudnnAttention {
public:
    explicit CudnnAttention(Device& device);
    ~CudnnAttention();
    CudnnAttention(const CudnnAttention&) = delete;
    CudnnAttention& operator=(const CudnnAttention&) = delete;

    // Whether cuDNN computes attention of this shape, forward and backward. The native kernels take the
    // others: f32, heads of other sizes than kHeads of cudnn.cpp, sequences of one token, and shapes that
    // would misalign cuDNN's workspace or need more than 4 GiB of it.
    static bool takes(const TensorView& q, const TensorView& k, const TensorView& v, int64_t seq_length);

    // The contracts of op::Attention and op::AttentionBackward except the order of summation: probabilities
    // and score gradients are rounded to bf16 before the second GEMM. The backward uses the deterministic
    // algorithm. Throws Error where cuDNN refuses the shape.
    void forward(const op::Attention& args, const Launch& launch);
    void backward(const op::AttentionBackward& args, const Launch& launch);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace fp8flow::hopper
