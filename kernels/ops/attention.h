// Causal attention with grouped queries, and rotary embedding. BF16 (or f32) operands, fp32 softmax and accumulation.
// Sources: Dao et al. 2022 (log-sum-exp saved, probabilities rebuilt in the backward), Su et al. 2021 (RoPE, half-split form).
#pragma once

#include "kernels/core/fp8_tensor.h"

namespace fp8flow::op {

enum class RopeDirection { forward, backward };  // backward: rotate by the negative angle

// In place on [T, heads, D]: pairs (i, i + D/2) rotated by cos/sin[position, i]; position of row t is t % seq_length.
struct Rope {
    TensorView table;  // [S, D/2, 2] f32: cos, sin
    RopeDirection direction = RopeDirection::forward;
    TensorView x;  // in/out [T, heads, D]
};

// T = num_sequences * seq_length rows. o = softmax(scale * q k^T + causal mask) v per head; query head h uses kv head
// h / (heads / kv_heads). lse [T, heads] = log-sum-exp of the scaled scores. Order: scores and sums over ascending key position.
struct Attention {
    TensorView q;  // [T, heads, D] bf16 | f32
    TensorView k;  // [T, kv_heads, D]
    TensorView v;  // [T, kv_heads, D]
    int64_t seq_length = 0;
    float scale = 1.0f;
    TensorView o;    // out [T, heads, D]
    TensorView lse;  // out [T, heads] f32
};
struct AttentionBackward {
    TensorView dout;  // [T, heads, D]
    TensorView q, k, v, o, lse;
    int64_t seq_length = 0;
    float scale = 1.0f;
    TensorView dq, dk, dv;  // out
};

// qkv [T, (heads + 2*kv_heads) * D] <-> q, k, v. Columns: all query heads, then all key heads, then all value heads.
struct SplitQkv {
    TensorView qkv;
    TensorView q, k, v;  // out
};
struct MergeQkv {
    TensorView q, k, v;
    TensorView qkv;  // out
};

}  // namespace fp8flow::op
