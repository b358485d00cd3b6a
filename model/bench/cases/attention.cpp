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
    const Shape& shape;
    int64_t tokens = shape.number("T"), heads = shape.positive("heads");
    int64_t kv_heads = shape.positive("kv_heads"), width = shape.positive("D");
    DType dtype = shape.dtype("dtype", {DType::bf16, DType::f32});
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

int64_t value_width(const Shape& shape) {
    const int64_t own = shape.number("Dv");
    return own > 0 ? own : shape.positive("D");
}

op::Attention forward(Buffers& buffers, const Shape& shape) {
    const Heads in{shape};
    const int64_t sequence = shape.positive("S"), value = value_width(shape);
    return {.q = buffers.normal(in.dtype, {in.tokens, in.heads, in.width}),
            .k = buffers.normal(in.dtype, {in.tokens, in.kv_heads, in.width}),
            .v = buffers.normal(in.dtype, {in.tokens, in.kv_heads, value}),
            .seq_length = sequence,
            .scale = 1.0f / std::sqrt(static_cast<float>(in.width)),
            .o = buffers.output(in.dtype, {in.tokens, in.heads, value}),
            .lse = buffers.output(DType::f32, {in.tokens, in.heads})};
}

Call backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in{shape};
    const int64_t sequence = shape.positive("S"), value = value_width(shape);
    const Buffers::Dims queries = {in.tokens, in.heads, in.width}, keys = {in.tokens, in.kv_heads, in.width},
                        outputs = {in.tokens, in.heads, value}, values = {in.tokens, in.kv_heads, value};
    op::AttentionBackward args{.dout = buffers.normal(in.dtype, outputs),
                               .q = buffers.normal(in.dtype, queries),
                               .k = buffers.normal(in.dtype, keys),
                               .v = buffers.normal(in.dtype, values),
                               .o = buffers.output(in.dtype, outputs),
                               .lse = buffers.output(DType::f32, {in.tokens, in.heads}),
                               .seq_length = sequence,
                               .scale = 1.0f / std::sqrt(static_cast<float>(in.width)),
                               .dq = buffers.output(in.dtype, queries),
                               .dk = buffers.output(in.dtype, keys),
                               .dv = buffers.output(in.dtype, values)};
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

op::SplitQkv split(Buffers& buffers, const Shape& shape) {
    const Heads in{shape};
    const Buffers::Dims keys = {in.tokens, in.kv_heads, in.width};
    return {.qkv = buffers.normal(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width}),
            .q = buffers.output(in.dtype, {in.tokens, in.heads, in.width}),
            .k = buffers.output(in.dtype, keys),
            .v = buffers.output(in.dtype, keys)};
}

op::MergeQkv merge(Buffers& buffers, const Shape& shape) {
    const Heads in{shape};
    const Buffers::Dims keys = {in.tokens, in.kv_heads, in.width};
    return {.q = buffers.normal(in.dtype, {in.tokens, in.heads, in.width}),
            .k = buffers.normal(in.dtype, keys),
            .v = buffers.normal(in.dtype, keys),
            .qkv = buffers.output(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width})};
}

// Adds the tensors of the norm of heads, if the shape has it.
template <class Args> void add_norm(Buffers& buffers, const Heads& in, Args& args) {
    if (!in.shape.yes("norm")) return;
    args.q_gamma = buffers.normal(DType::f32, {in.width});
    args.k_gamma = buffers.normal(DType::f32, {in.width});
    args.q_raw = buffers.normal(in.dtype, {in.tokens, in.heads, in.width});
    args.k_raw = buffers.normal(in.dtype, {in.tokens, in.kv_heads, in.width});
    args.q_rstd = buffers.normal(DType::f32, {in.tokens * in.heads});
    args.k_rstd = buffers.normal(DType::f32, {in.tokens * in.kv_heads});
}

op::QkvHeads heads_forward(Buffers& buffers, const Shape& shape) {
    const Heads in{shape};
    const Buffers::Dims queries = {in.tokens, in.heads, in.width}, keys = {in.tokens, in.kv_heads, in.width};
    op::QkvHeads args{.qkv = buffers.normal(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width}),
                      .table = buffers.normal(DType::f32, {shape.positive("S"), in.width / 2, 2}, 0.5),
                      .q = buffers.output(in.dtype, queries),
                      .k = buffers.output(in.dtype, keys),
                      .v = buffers.output(in.dtype, keys)};
    add_norm(buffers, in, args);
    return args;
}

Call heads_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const Heads in{shape};
    const Buffers::Dims queries = {in.tokens, in.heads, in.width}, keys = {in.tokens, in.kv_heads, in.width};
    op::QkvHeadsBackward args{
        .dq = buffers.normal(in.dtype, queries),
        .dk = buffers.normal(in.dtype, keys),
        .dv = buffers.normal(in.dtype, keys),
        .table = buffers.normal(DType::f32, {shape.positive("S"), in.width / 2, 2}, 0.5),
        .dqkv = buffers.output(in.dtype, {in.tokens, (in.heads + 2 * in.kv_heads) * in.width})};
    add_norm(buffers, in, args);
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
