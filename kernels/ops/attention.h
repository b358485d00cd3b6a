// SPDX-License-Identifier: MIT
// Causal attention with grouped queries, and rotary embedding. BF16 (or f32) operands, fp32 softmax and
// accumulation. Sources: Dao et al. 2022 (log-sum-exp saved, probabilities rebuilt in the backward), Su et
// al. 2021 (RoPE, half-split form).
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

enum class RopeDirection { forward, backward };  // backward: rotate by the negative angle

// In place on [T, heads, D]: pairs (x, y) = (i, i + D/2) rotated by (c, s) = table[position, i]; position of
// row t is t % S. x' = fma(x, c, -(y * s)), y' = fma(y, c, x * s) in fp32, one rounding to the dtype;
// backward: s negated.
struct Rope {
    TensorView table;  // [S, D/2, 2] f32: cos, sin
    RopeDirection direction = RopeDirection::forward;
    TensorView x;  // in/out [T, heads, D]
};

// T = num_sequences * seq_length rows. o = softmax(scale * q k^T + causal mask) v per head; query head h uses
// kv head h / (heads / kv_heads). D and Dv (of v and o) may differ, both up to 256. lse [T, heads] =
// log-sum-exp of the scaled scores. T = 0 is legal.
//
// documents: first rows of the documents, ascending from 0, and T; entries that equal the next one are empty
// documents, so the number of entries may be fixed. A query sees the keys of its own sequence and document up
// to its own position. A document's rows get the bits that they get as a sequence of their own.
//
// Order, all in fp32: score = scale * (fma over ascending d); p = exp(score - max); sum = p over ascending
// keys in 8 strands, from the first key that the query sees; lse = max + log(sum); o = (fma of p * v over
// ascending keys) / sum, rounded once. Other keys are never read. The Hopper backend takes no
// documents.
struct Attention {
    TensorView q;  // [T, heads, D] bf16 | f32
    TensorView k;  // [T, kv_heads, D]
    TensorView v;  // [T, kv_heads, Dv]
    int64_t seq_length = 0;
    float scale = 1.0f;
    TensorView documents;  // [N + 1] i64, optional
    TensorView o;          // out [T, heads, Dv]
    TensorView lse;        // out [T, heads] f32
};
// p = exp(score - lse), score as above. delta = dot(dout, o) over Dv in 8 strands; dp = fma of dout * v over
// ascending d; ds = (p * (dp - delta)) * scale. dq = fma of ds * k over ascending keys; dk, dv = fma of ds *
// q, p * dout over ascending query heads of the group and, inside a head, ascending queries, in one fp32 sum.
// Each gradient is rounded once.
struct AttentionBackward {
    TensorView dout;  // [T, heads, Dv]
    TensorView q, k, v, o, lse;
    int64_t seq_length = 0;
    float scale = 1.0f;
    TensorView documents;   // as in the forward
    TensorView dq, dk, dv;  // out
};

// qkv [T, (heads + 2*kv_heads) * D] <-> q, k, v. Columns: all query heads, then all key heads, then all value
// heads. v is optional: without it the key heads are the last columns. bias: added to every row in fp32, one
// rounding to the dtype.
struct SplitQkv {
    TensorView qkv;
    TensorView bias;     // [(heads + 2*kv_heads) * D] f32, optional
    TensorView q, k, v;  // out
};
// dbias, the gradient of the bias: the sum over the rows of qkv, in kBiasChunks chunks. Chunk c has rows c, c
// + kBiasChunks, .., added in fp32, ascending; then the chunks are added, ascending.
constexpr int64_t kBiasChunks = 128;
struct MergeQkv {
    TensorView q, k, v;
    Gradient dbias_mode = Gradient::overwrite;
    TensorView qkv;    // out
    TensorView dbias;  // out [(heads + 2*kv_heads) * D] f32, optional
};

// From the projection to the operands of attention: SplitQkv with the bias; with gammas, RmsNorm of q and k;
// Rope of q and k. Each of these steps rounds once. A row of the norm is a head, or all heads of a token: W,
// the columns of the gamma, is D or the heads times D, the same choice for q and k.
struct QkvHeads {
    TensorView qkv;               // [T, (heads + 2*kv_heads) * D]
    TensorView bias;              // [(heads + 2*kv_heads) * D] f32, optional
    TensorView table;             // [S, D/2, 2] f32: cos, sin
    TensorView q_gamma, k_gamma;  // [W] f32, optional, both or none
    float eps = 1e-5f;
    TensorView q, k, v;         // out [T, heads, D], [T, kv_heads, D] twice
    TensorView q_raw, k_raw;    // out, with gammas: q and k before the norm
    TensorView q_rstd, k_rstd;  // out, with gammas: [rows of the norm] f32
};
// The backward of QkvHeads: Rope backward of dq and dk; with gammas, RmsNormBackward of their rows; MergeQkv.
// dq and dk are undefined afterwards. rows: dqkv quantised from its values (QuantizeRows); dqkv is then
// undefined, too. dbias is summed from dqkv before it is quantised.
struct QkvHeadsBackward {
    TensorView dq, dk, dv;  // dq, dk in/out
    TensorView table;
    TensorView q_raw, k_raw, q_gamma, k_gamma, q_rstd, k_rstd;  // as the forward left them
    Gradient dgamma_mode = Gradient::overwrite;                 // of dbias too
    ScaleFormat scale_format = ScaleFormat::pow2;
    TensorView dqkv;                // out
    ScaledTensor rows;              // out vec128, optional, of the shape of dqkv
    TensorView dq_gamma, dk_gamma;  // out, with gammas: [W] f32
    TensorView dbias;               // out [(heads + 2*kv_heads) * D] f32, optional
};

// Multi-latent attention: from the projections of the latents to the operands of attention. A head of q and k
// has Dn columns that do not rotate, then Dr that do, in the pairs (i, i + Dr/2) of Rope. A head of kv has Dn
// columns of k, then Dv of v. The rotated columns of k are those of k_rope, in every head. Rotated elements
// are rounded once, the others are copied.
struct LatentHeads {
    TensorView kv;      // [T, heads, Dn + Dv]
    TensorView k_rope;  // [T, Dr]
    TensorView table;   // [S, Dr/2, 2] f32: cos, sin
    TensorView q;       // in/out [T, heads, Dn + Dr]
    TensorView k;       // out [T, heads, Dn + Dr]
    TensorView v;       // out [T, heads, Dv]
};
// The backward of LatentHeads. dk_rope: the rotated columns of dk added over ascending heads in fp32, then
// rotated back, then rounded once.
struct LatentHeadsBackward {
    TensorView dk, dv;
    TensorView table;
    TensorView dq;       // in/out: rotated back
    TensorView dkv;      // out [T, heads, Dn + Dv]
    TensorView dk_rope;  // out [T, Dr]
};

}  // namespace fp8flow::op
