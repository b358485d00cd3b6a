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

const Key kValueWidth = {"Dv", "0", "0", "columns of a head of v; 0: D"};

struct Heads {
    Buffers& buffers;
    const Shape& shape;
    int64_t tokens = shape.number("T"), heads = shape.positive("heads");
    int64_t kv_heads = shape.positive("kv_heads"), width = shape.positive("D");
    int64_t columns = (heads + 2 * kv_heads) * width;  // of queries, keys and values in one matrix
    DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32});

    TensorView input(int64_t heads) const { return buffers.normal(dtype, {tokens, heads, width}); }
    TensorView output(int64_t heads) const { return buffers.output(dtype, {tokens, heads, width}); }
};

op::Rope rotate(Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), heads = shape.positive("heads"), width = shape.positive("D"),
                  sequence = shape.positive("S");
    return {.table = buffers.normal(DType::f32, {sequence, width / 2, 2}, 0.5),
            .direction = shape.choice("direction", {"forward", "backward"}) == 0
                             ? op::RopeDirection::forward
                             : op::RopeDirection::backward,
            .x = buffers.normal(shape.dtype("dtype", {DType::bf16, DType::f32}), {tokens, heads, width})};
}

op::Attention forward(Buffers& buffers, const Shape& shape) {
    const Heads in{buffers, shape};
    const int64_t own = shape.number("Dv"), value = own > 0 ? own : in.width;
    return {.q = in.input(in.heads),
            .k = in.input(in.kv_heads),
            .v = buffers.normal(in.dtype, {in.tokens, in.kv_heads, value}),
            .seq_length = shape.positive("S"),
            .scale = 1.0f / std::sqrt(static_cast<float>(in.width)),
            .o = buffers.output(in.dtype, {in.tokens, in.heads, value}),
            .lse = buffers.output(DType::f32, {in.tokens, in.heads})};
}

Call backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in{buffers, shape};
    const op::Attention pass = forward(buffers, shape);
    op::AttentionBackward args{.dout = buffers.normal(in.dtype, {in.tokens, in.heads, pass.v.cols()}),
                               .q = pass.q,
                               .k = pass.k,
                               .v = pass.v,
                               .o = pass.o,
                               .lse = pass.lse,
                               .seq_length = pass.seq_length,
                               .scale = pass.scale,
                               .dq = in.output(in.heads),
                               .dk = in.output(in.kv_heads),
                               .dv = buffers.output(in.dtype, {in.tokens, in.kv_heads, pass.v.cols()})};
    check(args);
    machine.ops.attention(pass);  // what it saves, so that the probabilities are some
    return call_of(machine, &Ops::attention_backward, args);
}

op::SplitQkv split(Buffers& buffers, const Shape& shape) {
    const Heads in{buffers, shape};
    return {.qkv = buffers.normal(in.dtype, {in.tokens, in.columns}),
            .q = in.output(in.heads),
            .k = in.output(in.kv_heads),
            .v = in.output(in.kv_heads)};
}

op::MergeQkv merge(Buffers& buffers, const Shape& shape) {
    const Heads in{buffers, shape};
    return {.q = in.input(in.heads),
            .k = in.input(in.kv_heads),
            .v = in.input(in.kv_heads),
            .qkv = buffers.output(in.dtype, {in.tokens, in.columns})};
}

// Adds the tensors of the norm of heads, if the shape has it.
template <class Args> void add_norm(const Heads& in, Args& args) {
    if (!in.shape.yes("norm")) return;
    args.q_gamma = in.buffers.normal(DType::f32, {in.width});
    args.k_gamma = in.buffers.normal(DType::f32, {in.width});
    args.q_raw = in.input(in.heads);
    args.k_raw = in.input(in.kv_heads);
    args.q_rstd = in.buffers.normal(DType::f32, {in.tokens * in.heads});
    args.k_rstd = in.buffers.normal(DType::f32, {in.tokens * in.kv_heads});
}

op::QkvHeads heads_forward(Buffers& buffers, const Shape& shape) {
    const Heads in{buffers, shape};
    op::QkvHeads args{.qkv = buffers.normal(in.dtype, {in.tokens, in.columns}),
                      .table = buffers.normal(DType::f32, {shape.positive("S"), in.width / 2, 2}, 0.5),
                      .q = in.output(in.heads),
                      .k = in.output(in.kv_heads),
                      .v = in.output(in.kv_heads)};
    add_norm(in, args);
    return args;
}

Call heads_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in{buffers, shape};
    op::QkvHeadsBackward args{
        .dq = in.input(in.heads),
        .dk = in.input(in.kv_heads),
        .dv = in.input(in.kv_heads),
        .table = buffers.normal(DType::f32, {shape.positive("S"), in.width / 2, 2}, 0.5),
        .dqkv = buffers.output(in.dtype, {in.tokens, in.columns})};
    add_norm(in, args);
    if (args.q_gamma) {
        args.dq_gamma = buffers.output(DType::f32, {in.width});
        args.dk_gamma = buffers.output(DType::f32, {in.width});
    }
    return call_of(machine, &Ops::qkv_heads_backward, args);
}

struct Latent {
    const Shape& shape;
    int64_t tokens = shape.number("T"), heads = shape.positive("heads"), nope = shape.number("D");
    int64_t rope = 2 * shape.positive("pairs"), value = shape.positive("Dv"), sequence = shape.positive("S");
    DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32});
};
const Keys kLatentKeys = {{"T", "4096", "32", "tokens"},
                          {"heads", "128", "4", "heads"},
                          {"D", "128", "32", "columns of a head of q and k that do not rotate"},
                          {"pairs", "32", "8", "pairs of columns that rotate"},
                          {"Dv", "128", "32", "columns of a head of v"},
                          kSequence,
                          {"dtype", "bf16", "bf16", "bf16 | f32"}};

op::LatentHeads latent_forward(Buffers& buffers, const Shape& shape) {
    const Latent in{shape};
    return {.kv = buffers.normal(in.dtype, {in.tokens, in.heads, in.nope + in.value}),
            .k_rope = buffers.normal(in.dtype, {in.tokens, in.rope}),
            .table = buffers.normal(DType::f32, {in.sequence, in.rope / 2, 2}, 0.5),
            .q = buffers.normal(in.dtype, {in.tokens, in.heads, in.nope + in.rope}),
            .k = buffers.output(in.dtype, {in.tokens, in.heads, in.nope + in.rope}),
            .v = buffers.output(in.dtype, {in.tokens, in.heads, in.value})};
}

op::LatentHeadsBackward latent_backward(Buffers& buffers, const Shape& shape) {
    const Latent in{shape};
    return {.dk = buffers.normal(in.dtype, {in.tokens, in.heads, in.nope + in.rope}),
            .dv = buffers.normal(in.dtype, {in.tokens, in.heads, in.value}),
            .table = buffers.normal(DType::f32, {in.sequence, in.rope / 2, 2}, 0.5),
            .dq = buffers.normal(in.dtype, {in.tokens, in.heads, in.nope + in.rope}),
            .dkv = buffers.output(in.dtype, {in.tokens, in.heads, in.nope + in.value}),
            .dk_rope = buffers.output(in.dtype, {in.tokens, in.rope})};
}
const Keys kHeadKeys = kHeads + Keys{kSequence, {"norm", "yes", "yes", "yes | no: of the heads of q and k"}};

}  // namespace

std::vector<Case> attention_cases() {
    return {{"qkv_heads", "one matrix to queries, keys, values: split, norm of heads, rotation", kHeadKeys,
             local<&Ops::qkv_heads, heads_forward>},
            {"qkv_heads_backward", "and back, with the gradients of gamma", kHeadKeys, heads_backward},
            {"rope",
             "rotary embedding, in place",
             {{"T", "4096", "32", "tokens"},
              {"heads", "64", "4", "heads"},
              {"D", "128", "64", "columns of a head"},
              kSequence,
              {"dtype", "bf16", "bf16", "bf16 | f32"},
              {"direction", "forward", "forward", "forward | backward"}},
             local<&Ops::rope, rotate>},
            {"attention", "causal attention with grouped queries", kHeads + Keys{kSequence, kValueWidth},
             local<&Ops::attention, forward>},
            {"attention_backward", "gradients of queries, keys and values",
             kHeads + Keys{kSequence, kValueWidth}, backward},
            {"latent_heads", "projections of the latents to queries, keys, values", kLatentKeys,
             local<&Ops::latent_heads, latent_forward>},
            {"latent_heads_backward", "and back", kLatentKeys,
             local<&Ops::latent_heads_backward, latent_backward>},
            {"split_qkv", "one matrix to queries, keys, values", kHeads, local<&Ops::split_qkv, split>},
            {"merge_qkv", "queries, keys, values to one matrix", kHeads, local<&Ops::merge_qkv, merge>}};
}

}  // namespace fp8flow::bench
