// SPDX-License-Identifier: MIT
// Argument checks and costs of attention, rotary embedding and the packed projection. FLOPs count the causal
// half only.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

// v has q's head size, or one of its own (value_depth).
void check_heads(const TensorView& q, const TensorView& k, const TensorView& v, int64_t value_depth) {
    check_plain(q, "q", {kAny, kAny, kAny});
    check_tensor(k, "k", q.dtype, {q.dim(0), kAny, q.dim(2)});
    check_tensor(v, "v", q.dtype, {q.dim(0), k.dim(1), value_depth});
    FP8FLOW_CHECK(q.dim(1) >= 1 && k.dim(1) >= 1 && q.dim(2) >= 1, "q is {}, k is {}", describe(q),
                  describe(k));
}

// Of forward and backward.
template <class Args> void check_attention(const Args& args) {
    const TensorView &q = args.q, &k = args.k, &v = args.v;
    FP8FLOW_CHECK(v.rank == 3 && v.dim(2) >= 1, "v is {}", describe(v));
    check_heads(q, k, v, v.dim(2));
    FP8FLOW_CHECK(q.dim(1) % k.dim(1) == 0,
                  "{} query heads over {} kv heads: num_attention_heads must be a multiple of "
                  "num_query_groups",
                  q.dim(1), k.dim(1));
    FP8FLOW_CHECK(args.seq_length >= 1 && q.dim(0) % args.seq_length == 0,
                  "{} rows are not whole sequences of {}", q.dim(0), args.seq_length);
    check_tensor(args.o, "o", q.dtype, {q.dim(0), q.dim(1), v.dim(2)});
    check_tensor(args.lse, "lse", DType::f32, {q.dim(0), q.dim(1)});
    check_optional(args.documents, "documents", DType::i64, {kAny});
    FP8FLOW_CHECK(!args.documents || args.documents.dim(0) >= 1, "documents is {}", describe(args.documents));
}

// FLOPs of one causal GEMM over all sequences and heads, of tensors with q's rows: q or o. Documents leave
// out some of them.
double causal_flops(const TensorView& rows, int64_t seq_length) {
    return count_of(rows) * static_cast<double>(seq_length + 1);
}

void check_packed(const TensorView& qkv, const TensorView& q, const TensorView& k, const TensorView& v) {
    check_heads(q, k, v ? v : k, q.dim(2));
    check_tensor(qkv, "qkv", q.dtype, {q.dim(0), (q.dim(1) + (v ? 2 : 1) * k.dim(1)) * q.dim(2)});
}

void check_table(const TensorView& table, int64_t depth, const char* key = "kv_channels") {
    FP8FLOW_CHECK(depth % 2 == 0, "rotary embedding of odd head size {} ({})", depth, key);
    check_tensor(table, "table", DType::f32, {kAny, depth / 2, 2});
    FP8FLOW_CHECK(table.dim(0) >= 1, "table is {}", describe(table));
}

// The tensors of LatentHeads, or their gradients.
struct LatentTensors {
    const TensorView &q, &k, &v, &kv, &k_rope, &table;
};
void check_latent(const LatentTensors& t) {
    check_plain(t.q, "q", {kAny, kAny, kAny});
    check_plain(t.v, "v", {kAny, kAny, kAny});
    check_plain(t.k_rope, "k_rope", {kAny, kAny});
    const int64_t tokens = t.q.dim(0), heads = t.q.dim(1), depth = t.q.dim(2), rotated = t.k_rope.dim(1);
    FP8FLOW_CHECK(rotated >= 2 && rotated <= depth, "k_rope is {}, q is {}", describe(t.k_rope),
                  describe(t.q));
    check_tensor(t.k_rope, "k_rope", t.q.dtype, {tokens, rotated});
    check_tensor(t.k, "k", t.q.dtype, {tokens, heads, depth});
    check_tensor(t.v, "v", t.q.dtype, {tokens, heads, t.v.dim(2)});
    check_tensor(t.kv, "kv", t.q.dtype, {tokens, heads, depth - rotated + t.v.dim(2)});
    check_table(t.table, rotated, "qk_pos_emb_head_dim");
}
// Bytes of the rotated columns of q.
double rotated_bytes(const TensorView& k_rope, const TensorView& q) {
    return bytes_of({k_rope}) * static_cast<double>(q.dim(1));
}

void check_bias(const TensorView& bias, const char* name, const TensorView& qkv) {
    check_optional(bias, name, DType::f32, {qkv.cols()});
}

// What the norm of the heads reads or writes in addition to q and k, or to their gradients.
template <class Args> void check_head_norms(const Args& args, const TensorView& q, const TensorView& k) {
    FP8FLOW_CHECK(static_cast<bool>(args.q_gamma) == static_cast<bool>(args.k_gamma), "one gamma of two");
    if (!args.q_gamma) return;
    const bool of_heads = args.q_gamma.numel() == q.dim(2) && args.k_gamma.numel() == q.dim(2);
    const auto check_norm = [&](const TensorView& heads, const TensorView& raw, const TensorView& rstd,
                                const TensorView& gamma) {
        check_tensor(raw, "raw", heads.dtype, {heads.dim(0), heads.dim(1), heads.dim(2)});
        check_tensor(rstd, "rstd", DType::f32, {heads.dim(0) * (of_heads ? heads.dim(1) : 1)});
        check_tensor(gamma, "gamma", DType::f32, {heads.dim(2) * (of_heads ? 1 : heads.dim(1))});
    };
    check_norm(q, args.q_raw, args.q_rstd, args.q_gamma);
    check_norm(k, args.k_raw, args.k_rstd, args.k_gamma);
}

}  // namespace

void check(const op::Rope& args) {
    check_plain(args.x, "x", {kAny, kAny, kAny});
    check_table(args.table, args.x.dim(2));
}
OpCost cost(const op::Rope& args) { return moves({args.x, args.table}, {args.x}, 3 * count_of(args.x)); }

void check(const op::Attention& args) { check_attention(args); }
OpCost cost(const op::Attention& args) {
    return moves({args.q, args.k, args.v}, {args.o, args.lse},
                 causal_flops(args.q, args.seq_length) + causal_flops(args.o, args.seq_length),
                 Unit::bf16_mma);
}

void check(const op::AttentionBackward& args) {
    check_attention(args);
    const int64_t tokens = args.q.dim(0), depth = args.q.dim(2), value_depth = args.v.dim(2);
    check_tensor(args.dout, "dout", args.q.dtype, {tokens, args.q.dim(1), value_depth});
    check_tensor(args.dq, "dq", args.q.dtype, {tokens, args.q.dim(1), depth});
    check_tensor(args.dk, "dk", args.q.dtype, {tokens, args.k.dim(1), depth});
    check_tensor(args.dv, "dv", args.q.dtype, {tokens, args.k.dim(1), value_depth});
}
OpCost cost(const op::AttentionBackward& args) {
    return moves({args.dout, args.q, args.k, args.v, args.o, args.lse}, {args.dq, args.dk, args.dv},
                 3 * causal_flops(args.q, args.seq_length) + 2 * causal_flops(args.o, args.seq_length),
                 Unit::bf16_mma);
}

void check(const op::SplitQkv& args) {
    check_packed(args.qkv, args.q, args.k, args.v);
    check_bias(args.bias, "bias", args.qkv);
}
OpCost cost(const op::SplitQkv& args) {
    return moves({args.qkv, args.bias}, {args.qkv}, args.bias ? count_of(args.qkv) : 0);
}

void check(const op::MergeQkv& args) {
    check_packed(args.qkv, args.q, args.k, args.v);
    check_bias(args.dbias, "dbias", args.qkv);
}
OpCost cost(const op::MergeQkv& args) {
    return moves({args.qkv}, {args.qkv, args.dbias}, args.dbias ? count_of(args.qkv) : 0);
}

void check(const op::QkvHeads& args) {
    check_packed(args.qkv, args.q, args.k, args.v);
    check_bias(args.bias, "bias", args.qkv);
    check_table(args.table, args.q.dim(2));
    check_head_norms(args, args.q, args.k);
}
OpCost cost(const op::QkvHeads& args) {
    return moves({args.qkv, args.bias, args.table, args.q_gamma, args.k_gamma},
                 {args.qkv, args.q_raw, args.k_raw, args.q_rstd, args.k_rstd},
                 (args.q_gamma ? 7 : 3) * (count_of(args.q) + count_of(args.k)) +
                     (args.bias ? count_of(args.qkv) : 0));
}

void check(const op::QkvHeadsBackward& args) {
    check_packed(args.dqkv, args.dq, args.dk, args.dv);
    check_table(args.table, args.dq.dim(2));
    if (args.rows) {
        check_quantized(args.rows, "rows", args.scale_format, {ScaleLayout::vec128});
        check_tensor(args.rows.data, "rows", args.rows.data.dtype, {args.dqkv.rows(), args.dqkv.cols()});
    }
    check_bias(args.dbias, "dbias", args.dqkv);
    check_head_norms(args, args.dq, args.dk);
    if (!args.q_gamma) return;
    check_tensor(args.dq_gamma, "dq_gamma", DType::f32, {args.q_gamma.numel()});
    check_tensor(args.dk_gamma, "dk_gamma", DType::f32, {args.k_gamma.numel()});
}
OpCost cost(const op::QkvHeadsBackward& args) {
    const double out = args.rows ? bytes_of_scaled(args.rows) : bytes_of({args.dqkv});
    const double read = bytes_of({args.dqkv, args.table, args.q_gamma, args.k_gamma, args.q_raw, args.k_raw,
                                  args.q_rstd, args.k_rstd});
    return moves(read, out + bytes_of({args.dq_gamma, args.dk_gamma, args.dbias}),
                 (args.q_gamma ? 13 : 3) * (count_of(args.dq) + count_of(args.dk)) +
                     (args.dbias ? count_of(args.dqkv) : 0));
}

void check(const op::LatentHeads& args) {
    check_latent({args.q, args.k, args.v, args.kv, args.k_rope, args.table});
}
OpCost cost(const op::LatentHeads& args) {
    const double rotated = rotated_bytes(args.k_rope, args.q);
    return moves(bytes_of({args.kv, args.k_rope, args.table}) + rotated, bytes_of({args.k, args.v}) + rotated,
                 3 * count_of(args.k_rope) * static_cast<double>(args.q.dim(1) + 1));
}

void check(const op::LatentHeadsBackward& args) {
    check_latent({args.dq, args.dk, args.dv, args.dkv, args.dk_rope, args.table});
}
OpCost cost(const op::LatentHeadsBackward& args) {
    const double rotated = rotated_bytes(args.dk_rope, args.dq);
    return moves(bytes_of({args.dk, args.dv, args.table}) + rotated,
                 bytes_of({args.dkv, args.dk_rope}) + rotated,
                 4 * count_of(args.dk_rope) * static_cast<double>(args.dq.dim(1) + 1));
}

}  // namespace fp8flow
