// SPDX-License-Identifier: MIT
// The two ends of the model: embedding and cross-entropy; and small element-wise ops on activations.
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

// y[t] = table[ids[t]]. An id outside [0, V) is an error (data).
struct Embedding {
    TensorView ids;    // [T] i32
    TensorView table;  // [V, H]
    TensorView y;      // out [T, H]
};
// dtable[ids[t]] += dy[t] in ascending t (fp32). overwrite zeroes the table first.
struct EmbeddingBackward {
    TensorView ids;
    TensorView dy;
    Gradient mode = Gradient::overwrite;
    TensorView dtable;  // out [V, H] f32
};

// Cross-entropy on fp32 logits of the first vocab_size columns (the padded rest gets probability and gradient
// 0). loss[t] = logsumexp(logits_t) - logits_t[label]; label < 0: ignored (loss 0, gradient 0). Order, so
// that a row can be worked on as its parts arrive: each block of 1024 columns has its largest logit m_b (no
// less than the lowest finite number), e_i = exp(logit_i - m_b), and their sum s_b: lane l of 32 holds the
// columns 128 j + 4 l + n, adds q_j = (e_j0 + e_j1) + (e_j2 + e_j3), then
// ((q_0 + q_1) + (q_2 + q_3)) + ((q_4 + q_5) + (q_6 + q_7)), and the lanes are halved (lane l += lane l + 16,
// then 8, 4, 2, 1). With m = max m_b and w_b = exp(m_b - m), lane l adds w_b s_b (fused) of the blocks l, l +
// 32, ..., and the lanes are halved: sum. loss = log(sum) + (m - logits_t[label]); dlogits_i = e_i (w_b
// (grad_scale / sum)), less grad_scale at the label. dlogits may alias nothing; absent: evaluation only.
constexpr int64_t kLossBlock = 1024, kLossLanes = 32;
struct CrossEntropy {
    TensorView logits;  // [T, V] f32
    TensorView labels;  // [T] i32
    int64_t vocab_size = 0;
    float grad_scale = 1.0f;
    TensorView loss;     // out [T] f32
    TensorView dlogits;  // out [T, V] bf16 | f32, optional
};
// sum (in/out [1] f32) += values: blocks of 64 in ascending order, then the block sums in ascending order; in
// double, rounded to f32 once per call.
constexpr int64_t kSumBlock = 64;
struct Sum {
    TensorView values;  // [N] f32
    TensorView sum;
};

struct Add {  // y = a + b (fp32, one rounding); y may be a or b
    TensorView a, b;
    TensorView y;
};
struct Cast {  // y = x in another float dtype
    TensorView x;
    TensorView y;
};
struct Zero {
    TensorView y;
};

// y[i] = fp32(standard_deviation) * random_normal(seed, stream, first + i): the same bits wherever element
// first + i is drawn.
struct FillNormal {
    uint64_t seed = 0, stream = 0;
    int64_t first = 0;  // global index of y's first element
    double standard_deviation = 1;
    TensorView y;  // out f32
};

// Counts NaN/Inf of x into count (+=) and remembers the first index. For the first-NaN locator and the step
// status.
struct CountNonFinite {
    TensorView x;      // any float dtype or FP8
    TensorView count;  // in/out [1] i64
    TensorView first;  // in/out [1] i64: lowest index seen, or -1
};

}  // namespace fp8flow::op
