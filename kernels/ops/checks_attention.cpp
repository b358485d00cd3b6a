// SPDX-License-Identifier: MIT
// Argument checks and costs of attention, rotary embedding and the packed projection. FLOPs count the causal
// half only.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

// v has q's head size, or one of its own (value_depth).
void check_heads(const TensorView& q, const TensorView& k, const TensorView& v, int64_t value_depth) {
    FP8FLOW_CHECK(q.rank == 3 && k.rank == 3 && is_bf16_or_f32(q.dtype), "q is {}, k is {}", describe(q),
                  describe(k));
    FP8FLOW_CHECK(q.dim(1) >= 1 && k.dim(1) >= 1 && q.dim(2) >= 1, "q is {}, k is {}", describe(q),
                  describe(k));
    check_tensor(k, "k", q.dtype, {q.dim(0), k.dim(1), q.dim(2)});
    check_tensor(v, "v", q.dtype, {q.dim(0), k.dim(1), value_depth});
}

void check_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                     const TensorView& lse, const TensorView& documents, int64_t seq_length) {
    FP8FLOW_CHECK(v.rank == 3 && v.dim(2) >= 1, "v is {}", describe(v));
    check_heads(q, k, v, v.dim(2));
    FP8FLOW_CHECK(q.dim(1) % k.dim(1) == 0,
                  "{} query heads over {} kv heads: num_attention_heads must be a multiple of "
                  "num_query_groups",
                  q.dim(1), k.dim(1));
    FP8FLOW_CHECK(seq_length >= 1 && q.dim(0) % seq_length == 0, "{} rows are not whole sequences of {}",
                  q.dim(0), seq_length);
    check_tensor(o, "o", q.dtype, {q.dim(0), q.dim(1), v.dim(2)});
    check_tensor(lse, "lse", DType::f32, {q.dim(0), q.dim(1)});
    if (!documents) return;
    FP8FLOW_CHECK(documents.rank == 1 && documents.dim(0) >= 1, "documents is {}", describe(documents));
    check_tensor(documents, "documents", DType::i64, {documents.dim(0)});
}

// Multiply-adds of one causal GEMM over all sequences and heads, of tensors with q's rows: q or o. Documents
// leave out some of them.
double causal_gemm(const TensorView& rows, int64_t seq_length) {
    return static_cast<double>(rows.numel()) * static_cast<double>(seq_length + 1) / 2;
}

void check_packed(const TensorView& qkv, const TensorView& q, const TensorView& k, const TensorView& v) {
    check_heads(q, k, v, q.dim(2));
    check_tensor(qkv, "qkv", q.dtype, {q.dim(0), (q.dim(1) + 2 * k.dim(1)) * q.dim(2)});
}

void check_table(const TensorView& table, int64_t depth) {
    FP8FLOW_CHECK(depth % 2 == 0, "rotary embedding of odd head size {} (kv_channels)", depth);
    FP8FLOW_CHECK(table.rank == 3 && table.dim(0) >= 1, "table is {}", describe(table));
    check_tensor(table, "table", DType::f32, {table.dim(0), depth / 2, 2});
}

// What the norm of the heads reads or writes in addition to a tensor of heads.
void check_head_norm(const TensorView& heads, const TensorView& raw, const TensorView& rstd,
                     const TensorView& gamma) {
    check_tensor(raw, "raw", heads.dtype, {heads.dim(0), heads.dim(1), heads.dim(2)});
    check_tensor(rstd, "rstd", DType::f32, {heads.dim(0) * heads.dim(1)});
    check_tensor(gamma, "gamma", DType::f32, {heads.dim(2)});
}

}  // namespace

void check(const op::Rope& args) {
    FP8FLOW_CHECK(args.x.rank == 3 && is_bf16_or_f32(args.x.dtype), "x is {}", describe(args.x));
    check_table(args.table, args.x.dim(2));
}
OpCost cost(const op::Rope& args) {
    return with_writes(
        {2 * bytes_of({args.x}) + bytes_of({args.table}), 3.0 * static_cast<double>(args.x.numel())},
        bytes_of({args.x}));
}

void check(const op::Attention& args) {
    check_attention(args.q, args.k, args.v, args.o, args.lse, args.documents, args.seq_length);
}
OpCost cost(const op::Attention& args) {
    const double gemms = causal_gemm(args.q, args.seq_length) + causal_gemm(args.o, args.seq_length);
    return with_writes({bytes_of({args.q, args.k, args.v, args.o, args.lse}), 2 * gemms, Unit::bf16_mma},
                       bytes_of({args.o, args.lse}));
}

void check(const op::AttentionBackward& args) {
    check_attention(args.q, args.k, args.v, args.o, args.lse, args.documents, args.seq_length);
    const int64_t tokens = args.q.dim(0), depth = args.q.dim(2), value_depth = args.v.dim(2);
    check_tensor(args.dout, "dout", args.q.dtype, {tokens, args.q.dim(1), value_depth});
    check_tensor(args.dq, "dq", args.q.dtype, {tokens, args.q.dim(1), depth});
    check_tensor(args.dk, "dk", args.q.dtype, {tokens, args.k.dim(1), depth});
    check_tensor(args.dv, "dv", args.q.dtype, {tokens, args.k.dim(1), value_depth});
}
OpCost cost(const op::AttentionBackward& args) {
    const double gemms = 3 * causal_gemm(args.q, args.seq_length) + 2 * causal_gemm(args.o, args.seq_length);
    return with_writes(
        {bytes_of({args.dout, args.q, args.k, args.v, args.o, args.lse, args.dq, args.dk, args.dv}),
         2 * gemms, Unit::bf16_mma},
        bytes_of({args.dq, args.dk, args.dv}));
}

void check(const op::SplitQkv& args) { check_packed(args.qkv, args.q, args.k, args.v); }
OpCost cost(const op::SplitQkv& args) {
    return with_writes({2 * bytes_of({args.qkv}), 0}, bytes_of({args.qkv}));
}

void check(const op::MergeQkv& args) { check_packed(args.qkv, args.q, args.k, args.v); }
OpCost cost(const op::MergeQkv& args) {
    return with_writes({2 * bytes_of({args.qkv}), 0}, bytes_of({args.qkv}));
}

void check(const op::QkvHeads& args) {
    check_packed(args.qkv, args.q, args.k, args.v);
    check_table(args.table, args.q.dim(2));
    FP8FLOW_CHECK(static_cast<bool>(args.q_gamma) == static_cast<bool>(args.k_gamma), "one gamma of two");
    if (!args.q_gamma) return;
    check_head_norm(args.q, args.q_raw, args.q_rstd, args.q_gamma);
    check_head_norm(args.k, args.k_raw, args.k_rstd, args.k_gamma);
}
OpCost cost(const op::QkvHeads& args) {
    const double norm = bytes_of({args.q_raw, args.k_raw, args.q_rstd, args.k_rstd}),
                 elements = static_cast<double>(args.q.numel() + args.k.numel());
    return with_writes({2 * bytes_of({args.qkv}) + norm + bytes_of({args.table, args.q_gamma, args.k_gamma}),
                        (args.q_gamma ? 7.0 : 3.0) * elements},
                       bytes_of({args.qkv}) + norm);
}

void check(const op::QkvHeadsBackward& args) {
    check_packed(args.dqkv, args.dq, args.dk, args.dv);
    check_table(args.table, args.dq.dim(2));
    if (args.rows) {
        check_fp8(args.rows, "rows");
        check_written(args.rows, "rows", args.scale_format);
        FP8FLOW_CHECK(args.rows.layout == ScaleLayout::vec128, "rows have scales {}, must be vec128",
                      name_of(args.rows.layout));
        check_tensor(args.rows.data, "rows", args.rows.data.dtype, {args.dqkv.rows(), args.dqkv.cols()});
    }
    FP8FLOW_CHECK(static_cast<bool>(args.q_gamma) == static_cast<bool>(args.k_gamma), "one gamma of two");
    if (!args.q_gamma) return;
    check_head_norm(args.dq, args.q_raw, args.q_rstd, args.q_gamma);
    check_head_norm(args.dk, args.k_raw, args.k_rstd, args.k_gamma);
    check_tensor(args.dq_gamma, "dq_gamma", DType::f32, {args.dq.dim(2)});
    check_tensor(args.dk_gamma, "dk_gamma", DType::f32, {args.dk.dim(2)});
}
OpCost cost(const op::QkvHeadsBackward& args) {
    const double norm = bytes_of({args.q_raw, args.k_raw, args.q_rstd, args.k_rstd}),
                 elements = static_cast<double>(args.dq.numel() + args.dk.numel()),
                 out = args.rows ? bytes_of({args.rows.data, args.rows.scales}) : bytes_of({args.dqkv});
    return with_writes({bytes_of({args.dqkv}) + out + norm +
                            bytes_of({args.table, args.q_gamma, args.k_gamma, args.dq_gamma, args.dk_gamma}),
                        (args.q_gamma ? 13.0 : 3.0) * elements},
                       out + bytes_of({args.dq_gamma, args.dk_gamma}));
}

}  // namespace fp8flow
