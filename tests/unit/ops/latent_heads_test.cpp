// SPDX-License-Identifier: MIT
// Heads of multi-latent attention against the formulas in double, each element in its place; attention with
// values of another width than keys is in attention_test.cpp.
#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <vector>

namespace fp8flow::test {
namespace {

struct Sizes {
    int64_t tokens, heads, nope, rope, value, length;
};
const std::vector<Sizes> kSizes = {
    {0, 2, 4, 4, 4, 3}, {1, 1, 0, 2, 1, 1}, {7, 3, 5, 6, 3, 4}, {20, 2, 16, 32, 24, 16}};

struct Tensors {
    HostTensor kv, k_rope, table, q, k, v;
    Tensors(const Sizes& s, DType dtype)
        : kv(dtype, {s.tokens, s.heads, s.nope + s.value}),
          k_rope(dtype, {s.tokens, s.rope}),
          table(DType::f32, {s.length, s.rope / 2, 2}),
          q(dtype, {s.tokens, s.heads, s.nope + s.rope}),
          k(dtype, {s.tokens, s.heads, s.nope + s.rope}),
          v(dtype, {s.tokens, s.heads, s.value}) {
        fill_normal(kv, 1);
        fill_normal(k_rope, 2);
        fill_uniform(table, 3, -1.0, 1.0);
        fill_normal(q, 4);
        fill_normal(k, 5);
        fill_normal(v, 6);
    }
};

// Element i of x [rope] rotated; sign -1: back.
double rotated(const Sizes& s, const HostTensor& table, const std::vector<double>& x, int64_t token,
               int64_t i, double sign) {
    const int64_t half = s.rope / 2, pair = i % half, entry = 2 * (token % s.length * half + pair);
    const double low = x[static_cast<size_t>(pair)], high = x[static_cast<size_t>(pair + half)],
                 c = table(entry), sine = sign * table(entry + 1);
    return i < half ? low * c - high * sine : high * c + low * sine;
}
std::vector<double> part(const HostTensor& from, int64_t first, int64_t count) {
    std::vector<double> x;
    for (int64_t i = 0; i < count; ++i) x.push_back(from(first + i));
    return x;
}
double bound(DType dtype) { return dtype == DType::f32 ? 1e-6 : 0.02; }

TEST(LatentHeads, MatchesTheFormulas) {
    ReferenceOps ops;
    for (const Sizes& s : kSizes)
        for (const DType dtype : {DType::f32, DType::bf16}) {
            Tensors t(s, dtype), before(s, dtype);
            ops.latent_heads(
                {.kv = t.kv, .k_rope = t.k_rope, .table = t.table, .q = t.q, .k = t.k, .v = t.v});
            for (int64_t row = 0; row < s.tokens * s.heads; ++row) {
                const int64_t token = row / s.heads, qk = row * (s.nope + s.rope),
                              kv = row * (s.nope + s.value);
                for (int64_t d = 0; d < s.nope; ++d) {
                    ASSERT_EQ(t.q(qk + d), before.q(qk + d));
                    ASSERT_EQ(t.k(qk + d), t.kv(kv + d));
                }
                for (int64_t d = 0; d < s.value; ++d)
                    ASSERT_EQ(t.v(row * s.value + d), t.kv(kv + s.nope + d));
                const auto of_q = part(before.q, qk + s.nope, s.rope),
                           of_k = part(t.k_rope, token * s.rope, s.rope);
                for (int64_t i = 0; i < s.rope; ++i) {
                    ASSERT_NEAR(t.q(qk + s.nope + i), rotated(s, t.table, of_q, token, i, 1), bound(dtype));
                    ASSERT_NEAR(t.k(qk + s.nope + i), rotated(s, t.table, of_k, token, i, 1), bound(dtype));
                }
            }
        }
}

TEST(LatentHeads, BackwardMatchesTheFormulas) {
    ReferenceOps ops;
    for (const Sizes& s : kSizes)
        for (const DType dtype : {DType::f32, DType::bf16}) {
            Tensors t(s, dtype), before(s, dtype);
            ops.latent_heads_backward(
                {.dk = t.k, .dv = t.v, .table = t.table, .dq = t.q, .dkv = t.kv, .dk_rope = t.k_rope});
            for (int64_t token = 0; token < s.tokens; ++token) {
                std::vector<double> sum(static_cast<size_t>(s.rope));
                for (int64_t row = token * s.heads; row < (token + 1) * s.heads; ++row) {
                    const int64_t qk = row * (s.nope + s.rope), kv = row * (s.nope + s.value);
                    const auto of_q = part(before.q, qk + s.nope, s.rope);
                    for (int64_t d = 0; d < s.nope; ++d) {
                        ASSERT_EQ(t.q(qk + d), before.q(qk + d));
                        ASSERT_EQ(t.kv(kv + d), t.k(qk + d));
                    }
                    for (int64_t d = 0; d < s.value; ++d)
                        ASSERT_EQ(t.kv(kv + s.nope + d), t.v(row * s.value + d));
                    for (int64_t i = 0; i < s.rope; ++i) {
                        ASSERT_NEAR(t.q(qk + s.nope + i), rotated(s, t.table, of_q, token, i, -1),
                                    bound(dtype));
                        sum[static_cast<size_t>(i)] += t.k(qk + s.nope + i);
                    }
                }
                for (int64_t i = 0; i < s.rope; ++i)
                    ASSERT_NEAR(t.k_rope(token * s.rope + i), rotated(s, t.table, sum, token, i, -1),
                                bound(dtype));
            }
        }
}

// The latent and the columns that rotate: the key heads are the last columns.
TEST(LatentHeads, SplitAndMergeWithoutValues) {
    ReferenceOps ops;
    HostTensor both(DType::bf16, {6, 12 + 4}), latent(DType::bf16, {6, 3, 4}), rope(DType::bf16, {6, 1, 4}),
        merged(DType::bf16, {6, 12 + 4});
    fill_normal(both, 1);
    ops.split_qkv({.qkv = both, .q = latent, .k = rope});
    for (int64_t t = 0; t < 6; ++t) {
        for (int64_t d = 0; d < 12; ++d) ASSERT_EQ(latent(t * 12 + d), both(t * 16 + d));
        for (int64_t d = 0; d < 4; ++d) ASSERT_EQ(rope(t * 4 + d), both(t * 16 + 12 + d));
    }
    ops.merge_qkv({.q = latent, .k = rope, .qkv = merged});
    EXPECT_EQ(merged.bytes(), both.bytes());
}

TEST(LatentHeads, WrongShapesAreRefused) {
    ReferenceOps ops;
    const Sizes s{4, 2, 8, 4, 6, 4};
    Tensors t(s, DType::bf16), other({4, 2, 8, 6, 6, 4}, DType::bf16);
    const op::LatentHeads good{
        .kv = t.kv, .k_rope = t.k_rope, .table = t.table, .q = t.q, .k = t.k, .v = t.v};
    ops.latent_heads(good);
    for (const auto member :
         {&op::LatentHeads::k_rope, &op::LatentHeads::table, &op::LatentHeads::q, &op::LatentHeads::k}) {
        op::LatentHeads bad = good;
        bad.*member = member == &op::LatentHeads::k_rope  ? other.k_rope.view()
                      : member == &op::LatentHeads::table ? other.table.view()
                                                          : other.q.view();
        EXPECT_THROW(ops.latent_heads(bad), Error);
    }
    op::LatentHeads bad = good;
    const HostTensor narrow(DType::bf16, {4, 2, 5});
    bad.v = narrow;
    EXPECT_THROW(ops.latent_heads(bad), Error);
}

}  // namespace
}  // namespace fp8flow::test
