// SPDX-License-Identifier: MIT
// Heads of multi-latent attention in the reference backend: the rotated columns, and the copies between the
// projections of the latents and q, k, v.
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <cstring>

namespace fp8flow {

namespace {

using reference::for_each_row;
using reference::load_floats;
using reference::rotate_pairs;
using reference::store_floats;

// Sizes of one head; q and k have nope + rope columns, kv has nope + value.
struct LatentShape {
    int64_t tokens, heads, nope, rope, value;
    LatentShape(const TensorView& q, const TensorView& k_rope, const TensorView& v)
        : tokens(q.dim(0)),
          heads(q.dim(1)),
          nope(q.dim(2) - k_rope.dim(1)),
          rope(k_rope.dim(1)),
          value(v.dim(2)) {}
    // Of row `row` of [T * heads, .]: first element in q or k, in kv, in v.
    int64_t in_qk(int64_t row) const { return row * (nope + rope); }
    int64_t in_kv(int64_t row) const { return row * (nope + value); }
    int64_t in_v(int64_t row) const { return row * value; }
};

const float* angles_of(const TensorView& table, int64_t token) {
    return table.as<float>() + token % table.dim(0) * table.dim(1) * 2;
}

void copy(const TensorView& from, int64_t first, int64_t count, const TensorView& to, int64_t at) {
    const int64_t size = size_of(from.dtype);
    std::memcpy(to.bytes_ptr() + at * size, from.bytes_ptr() + first * size,
                static_cast<std::size_t>(count * size));
}

// Rotates the last columns of every head of token `t` in place.
void rotate_heads(const LatentShape& shape, const TensorView& q, const TensorView& table, int64_t t,
                  float sign, float* buffer) {
    for (int64_t row = t * shape.heads; row < (t + 1) * shape.heads; ++row) {
        load_floats(q, shape.in_qk(row) + shape.nope, shape.rope, buffer);
        rotate_pairs(buffer, shape.rope, angles_of(table, t), sign);
        store_floats(q, shape.in_qk(row) + shape.nope, shape.rope, buffer);
    }
}

}  // namespace

void ReferenceOps::do_latent_heads(const op::LatentHeads& args, const Launch&) {
    const LatentShape shape(args.q, args.k_rope, args.v);
    for_each_row(shape.tokens, shape.rope, [&](int64_t t, float* buffer) {
        rotate_heads(shape, args.q, args.table, t, 1.0f, buffer);
        load_floats(args.k_rope, t * shape.rope, shape.rope, buffer);
        rotate_pairs(buffer, shape.rope, angles_of(args.table, t), 1.0f);
        for (int64_t row = t * shape.heads; row < (t + 1) * shape.heads; ++row) {
            copy(args.kv, shape.in_kv(row), shape.nope, args.k, shape.in_qk(row));
            store_floats(args.k, shape.in_qk(row) + shape.nope, shape.rope, buffer);
            copy(args.kv, shape.in_kv(row) + shape.nope, shape.value, args.v, shape.in_v(row));
        }
    });
}

void ReferenceOps::do_latent_heads_backward(const op::LatentHeadsBackward& args, const Launch&) {
    const LatentShape shape(args.dq, args.dk_rope, args.dv);
    for_each_row(shape.tokens, 2 * shape.rope, [&](int64_t t, float* buffer) {
        float* const sum = buffer + shape.rope;
        rotate_heads(shape, args.dq, args.table, t, -1.0f, buffer);
        std::fill_n(sum, shape.rope, 0.0f);
        for (int64_t row = t * shape.heads; row < (t + 1) * shape.heads; ++row) {
            copy(args.dk, shape.in_qk(row), shape.nope, args.dkv, shape.in_kv(row));
            copy(args.dv, shape.in_v(row), shape.value, args.dkv, shape.in_kv(row) + shape.nope);
            load_floats(args.dk, shape.in_qk(row) + shape.nope, shape.rope, buffer);
            for (int64_t i = 0; i < shape.rope; ++i) sum[i] += buffer[i];
        }
        rotate_pairs(sum, shape.rope, angles_of(args.table, t), -1.0f);
        store_floats(args.dk_rope, t * shape.rope, shape.rope, sum);
    });
}

}  // namespace fp8flow
