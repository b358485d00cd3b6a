// SPDX-License-Identifier: MIT
// Bench cases of attention and the operations around it.
#include "model/bench/cases/case.h"

#include <cmath>

namespace fp8flow::bench {

namespace {

const Keys kHeads = {{"T", "4096", "32", "tokens"},
                     {"heads", "64", "4", "query heads"},
                     {"kv_heads", "8", "2", "key and value heads"},
                     {"D", "128", "64", "columns of a head"},
                     {"dtype", "bf16", "bf16", "bf16 | f32"}};
const Key kSequence = {"S", "4096", "16", "tokens of a sequence"};

struct Heads {
    int64_t tokens, heads, kv_heads, width;
    DType dtype;
    explicit Heads(const Shape& shape)
        : tokens(shape.number("T")),
          heads(shape.positive("heads")),
          kv_heads(shape.positive("kv_heads")),
          width(shape.positive("D")),
          dtype(shape.dtype("dtype", {DType::bf16, DType::f32})) {}
};

Call rotate(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), heads = shape.positive("heads"), width = shape.positive("D"),
                  sequence = shape.positive("S");
    const op::Rope args{
        .table = buffers.normal(DType::f32, {sequence, width / 2, 2}, 0.5),
        .direction = shape.choice("direction", {"forward", "backward"}) == 0 ? op::RopeDirection::forward
                                                                             : op::RopeDirection::backward,
        .x = buffers.normal(shape.dtype("dtype", {DType::bf16, DType::f32}), {tokens, heads, width})};
    return call_of(machine, &Ops::rope, args);
}

Call forward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in(shape);
    const int64_t sequence = shape.positive("S");
    const op::Attention args{.q = buffers.normal(in.dtype, {in.tokens, in.heads, in.width}),
                             .k = buffers.normal(in.dtype, {in.tokens, in.kv_heads, in.width}),
                             .v = buffers.normal(in.dtype, {in.tokens, in.kv_heads, in.width}),
                             .seq_length = sequence,
                             .scale = 1.0f / std::sqrt(static_cast<float>(in.width)),
                             .o = buffers.output(in.dtype, {in.tokens, in.heads, in.width}),
                             .lse = buffers.output(DType::f32, {in.tokens, in.heads})};
    return call_of(machine, &Ops::attention, args);
}

Call backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in(shape);
    const int64_t sequence = shape.positive("S");
    const Buffers::Dims queries = {in.tokens, in.heads, in.width}, keys = {in.tokens, in.kv_heads, in.width};
    op::AttentionBackward args{.dout = buffers.normal(in.dtype, queries),
                               .q = buffers.normal(in.dtype, queries),
                               .k = buffers.normal(in.dtype, keys),
                               .v = buffers.normal(in.dtype, keys),
                               .o = buffers.output(in.dtype, queries),
                               .lse = buffers.output(DType::f32, {in.tokens, in.heads}),
                               .seq_length = sequence,
                               .scale = 1.0f / std::sqrt(static_cast<float>(in.width)),
                               .dq = buffers.output(in.dtype, queries),
                               .dk = buffers.output(in.dtype, keys),
                               .dv = buffers.output(in.dtype, keys)};
    check(args);
    // what the forward pass saves, so that the probabilities are some
    machine.ops.attention({.q = args.q,
                           .k = args.k,
                           .v = args.v,
                           .seq_length = sequence,
                           .scale = args.scale,
                           .o = args.o,
                           .lse = args.lse});
    return call_of(machine, &Ops::attention_backward, args);
}

Call split(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in(shape);
    const Buffers::Dims keys = {in.tokens, in.kv_heads, in.width};
    const op::SplitQkv args{
        .qkv = buffers.normal(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width}),
        .q = buffers.output(in.dtype, {in.tokens, in.heads, in.width}),
        .k = buffers.output(in.dtype, keys),
        .v = buffers.output(in.dtype, keys)};
    return call_of(machine, &Ops::split_qkv, args);
}

Call merge(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in(shape);
    const Buffers::Dims keys = {in.tokens, in.kv_heads, in.width};
    const op::MergeQkv args{
        .q = buffers.normal(in.dtype, {in.tokens, in.heads, in.width}),
        .k = buffers.normal(in.dtype, keys),
        .v = buffers.normal(in.dtype, keys),
        .qkv = buffers.output(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width})};
    return call_of(machine, &Ops::merge_qkv, args);
}

// The tensors of the norm of heads; absent without it.
struct HeadNorm {
    TensorView q_gamma, k_gamma, q_raw, k_raw, q_rstd, k_rstd;
};
HeadNorm head_norm(Buffers& buffers, const Heads& in, const Shape& shape) {
    if (shape.choice("norm", {"yes", "no"}) == 1) return {};
    return {.q_gamma = buffers.normal(DType::f32, {in.width}),
            .k_gamma = buffers.normal(DType::f32, {in.width}),
            .q_raw = buffers.normal(in.dtype, {in.tokens, in.heads, in.width}),
            .k_raw = buffers.normal(in.dtype, {in.tokens, in.kv_heads, in.width}),
            .q_rstd = buffers.normal(DType::f32, {in.tokens * in.heads}),
            .k_rstd = buffers.normal(DType::f32, {in.tokens * in.kv_heads})};
}

Call heads_forward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in(shape);
    const Buffers::Dims queries = {in.tokens, in.heads, in.width}, keys = {in.tokens, in.kv_heads, in.width};
    const HeadNorm norm = head_norm(buffers, in, shape);
    const op::QkvHeads args{
        .qkv = buffers.normal(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width}),
        .table = buffers.normal(DType::f32, {shape.positive("S"), in.width / 2, 2}, 0.5),
        .q_gamma = norm.q_gamma,
        .k_gamma = norm.k_gamma,
        .q = buffers.output(in.dtype, queries),
        .k = buffers.output(in.dtype, keys),
        .v = buffers.output(in.dtype, keys),
        .q_raw = norm.q_raw,
        .k_raw = norm.k_raw,
        .q_rstd = norm.q_rstd,
        .k_rstd = norm.k_rstd};
    return call_of(machine, &Ops::qkv_heads, args);
}

Call heads_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in(shape);
    const Buffers::Dims queries = {in.tokens, in.heads, in.width}, keys = {in.tokens, in.kv_heads, in.width};
    const HeadNorm norm = head_norm(buffers, in, shape);
    op::QkvHeadsBackward args{
        .dq = buffers.normal(in.dtype, queries),
        .dk = buffers.normal(in.dtype, keys),
        .dv = buffers.normal(in.dtype, keys),
        .table = buffers.normal(DType::f32, {shape.positive("S"), in.width / 2, 2}, 0.5),
        .q_raw = norm.q_raw,
        .k_raw = norm.k_raw,
        .q_gamma = norm.q_gamma,
        .k_gamma = norm.k_gamma,
        .q_rstd = norm.q_rstd,
        .k_rstd = norm.k_rstd,
        .dqkv = buffers.output(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width})};
    if (args.q_gamma) {
        args.dq_gamma = buffers.output(DType::f32, {in.width});
        args.dk_gamma = buffers.output(DType::f32, {in.width});
    }
    return call_of(machine, &Ops::qkv_heads_backward, args);
}
const Keys kHeadKeys = kHeads + Keys{kSequence, {"norm", "yes", "yes", "yes | no: of the heads of q and k"}};

}  // namespace

std::vector<Case> attention_cases() {
    return {
        {"qkv_heads", "one matrix to queries, keys, values: split, norm of heads, rotation", kHeadKeys,
         heads_forward},
        {"qkv_heads_backward", "and back, with the gradients of gamma", kHeadKeys, heads_backward},
        {"rope",
         "rotary embedding, in place",
         {{"T", "4096", "32", "tokens"},
          {"heads", "64", "4", "heads"},
          {"D", "128", "64", "columns of a head"},
          kSequence,
          {"dtype", "bf16", "bf16", "bf16 | f32"},
          {"direction", "forward", "forward", "forward | backward"}},
         rotate},
        {"attention", "causal attention with grouped queries", kHeads + Keys{kSequence}, forward},
        {"attention_backward", "gradients of queries, keys and values", kHeads + Keys{kSequence}, backward},
        {"split_qkv", "one matrix to queries, keys, values", kHeads, split},
        {"merge_qkv", "queries, keys, values to one matrix", kHeads, merge}};
}

}  // namespace fp8flow::bench
