// SPDX-License-Identifier: MIT
// Argument checks and costs of attention, rotary embedding and the packed projection. FLOPs count the causal
// half only.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

void check_heads(const TensorView& q, const TensorView& k, const TensorView& v) {
    FP8FLOW_CHECK(q.rank == 3 && k.rank == 3 && is_bf16_or_f32(q.dtype), "q is {}, k is {}", describe(q),
                  describe(k));
    FP8FLOW_CHECK(q.dim(1) >= 1 && k.dim(1) >= 1 && q.dim(2) >= 1, "q is {}, k is {}", describe(q),
                  describe(k));
    check_tensor(k, "k", q.dtype, {q.dim(0), k.dim(1), q.dim(2)});
    check_tensor(v, "v", q.dtype, {q.dim(0), k.dim(1), q.dim(2)});
}

void check_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                     const TensorView& lse, int64_t seq_length) {
    check_heads(q, k, v);
    FP8FLOW_CHECK(q.dim(1) % k.dim(1) == 0,
                  "{} query heads over {} kv heads: num_attention_heads must be a multiple of "
                  "num_query_groups",
                  q.dim(1), k.dim(1));
    FP8FLOW_CHECK(seq_length >= 1 && q.dim(0) % seq_length == 0, "{} rows are not whole sequences of {}",
                  q.dim(0), seq_length);
    check_tensor(o, "o", q.dtype, {q.dim(0), q.dim(1), q.dim(2)});
    check_tensor(lse, "lse", DType::f32, {q.dim(0), q.dim(1)});
}

// Multiply-adds of one causal GEMM over all sequences and heads.
double causal_gemm(const TensorView& q, int64_t seq_length) {
    return static_cast<double>(q.numel()) * static_cast<double>(seq_length + 1) / 2;
}

void check_packed(const TensorView& qkv, const TensorView& q, const TensorView& k, const TensorView& v) {
    check_heads(q, k, v);
    check_tensor(qkv, "qkv", q.dtype, {q.dim(0), (q.dim(1) + 2 * k.dim(1)) * q.dim(2)});
}

}  // namespace

void check(const op::Rope& args) {
    FP8FLOW_CHECK(args.x.rank == 3 && is_bf16_or_f32(args.x.dtype), "x is {}", describe(args.x));
    FP8FLOW_CHECK(args.x.dim(2) % 2 == 0, "rotary embedding of odd head size {} (kv_channels)",
                  args.x.dim(2));
    FP8FLOW_CHECK(args.table.rank == 3 && args.table.dim(0) >= 1, "table is {}", describe(args.table));
    check_tensor(args.table, "table", DType::f32, {args.table.dim(0), args.x.dim(2) / 2, 2});
}
OpCost cost(const op::Rope& args) {
    return with_writes(
        {2 * bytes_of({args.x}) + bytes_of({args.table}), 3.0 * static_cast<double>(args.x.numel())},
        bytes_of({args.x}));
}

void check(const op::Attention& args) {
    check_attention(args.q, args.k, args.v, args.o, args.lse, args.seq_length);
}
OpCost cost(const op::Attention& args) {
    return with_writes({bytes_of({args.q, args.k, args.v, args.o, args.lse}),
                        2 * 2 * causal_gemm(args.q, args.seq_length), Unit::bf16_mma},
                       bytes_of({args.o, args.lse}));
}

void check(const op::AttentionBackward& args) {
    check_attention(args.q, args.k, args.v, args.o, args.lse, args.seq_length);
    const int64_t tokens = args.q.dim(0), depth = args.q.dim(2);
    check_tensor(args.dout, "dout", args.q.dtype, {tokens, args.q.dim(1), depth});
    check_tensor(args.dq, "dq", args.q.dtype, {tokens, args.q.dim(1), depth});
    check_tensor(args.dk, "dk", args.q.dtype, {tokens, args.k.dim(1), depth});
    check_tensor(args.dv, "dv", args.q.dtype, {tokens, args.k.dim(1), depth});
}
OpCost cost(const op::AttentionBackward& args) {
    return with_writes(
        {bytes_of({args.dout, args.q, args.k, args.v, args.o, args.lse, args.dq, args.dk, args.dv}),
         5 * 2 * causal_gemm(args.q, args.seq_length), Unit::bf16_mma},
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

}  // namespace fp8flow
