// SPDX-License-Identifier: MIT
// Attention on cuDNN behind a seam without cuDNN's headers: cudnn.cpp, or without_cudnn.cpp in builds that
// have no cuDNN. Plans are made at the first call of a shape; later calls allocate nothing and wait for
// nothing.
#pragma once

#include "kernels/core/stream.h"
#include "kernels/hopper/device/view.h"
#include "kernels/ops/attention.h"

#include <memory>

namespace fp8flow::hopper {

class CudnnAttention {
public:
    explicit CudnnAttention(Device& device);
    ~CudnnAttention();
    CudnnAttention(const CudnnAttention&) = delete;
    CudnnAttention& operator=(const CudnnAttention&) = delete;

    // Whether cuDNN computes attention of this shape, forward and backward; this project's kernels take the
    // others: f32, heads of other than 64 or 128 elements, sequences of one token, and shapes that would
    // misalign cuDNN's scratch or need more than 4 GiB of it.
    static bool takes(const TensorView& q, const TensorView& k, int64_t seq_length);

    // The contracts of op::Attention and op::AttentionBackward but for the order of summation: probabilities
    // and score gradients are rounded to bf16 before their products. The backward is the deterministic
    // algorithm. Throws Error where cuDNN refuses the shape.
    void forward(const op::Attention& args, const Launch& launch);
    void backward(const op::AttentionBackward& args, const Launch& launch);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace fp8flow::hopper
