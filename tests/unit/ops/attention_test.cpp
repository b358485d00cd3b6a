// SPDX-License-Identifier: MIT
// Attention, rotary embedding and the packed projection against double-precision formulas, central
// differences, and the properties that no rounding may break: causality, independence of sequences, the same
// bits for any number of threads.
#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace fp8flow {
namespace {

using namespace test;

struct Shape {
    int64_t sequences, length, heads, kv_heads, depth;
    int64_t value_depth = 0;              // 0: depth
    std::vector<int64_t> documents = {};  // first rows and the end; empty: no documents
    int64_t tokens() const { return sequences * length; }
    int64_t values() const { return value_depth > 0 ? value_depth : depth; }
    // The first key that a query sees.
    int64_t first_key(int64_t token) const {
        int64_t first = token / length * length;
        for (int64_t document : documents)
            if (document <= token) first = std::max(first, document);
        return first;
    }
    float scale() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(depth))); }
};

// The attention of one Shape with random inputs; outputs are poisoned.
struct Problem {
    Problem(const Shape& s, DType dtype, uint64_t seed = 1)
        : shape(s),
          q(dtype, {s.tokens(), s.heads, s.depth}),
          k(dtype, {s.tokens(), s.kv_heads, s.depth}),
          v(dtype, {s.tokens(), s.kv_heads, s.values()}),
          o(dtype, {s.tokens(), s.heads, s.values()}),
          lse(DType::f32, {s.tokens(), s.heads}),
          dout(dtype, {s.tokens(), s.heads, s.values()}),
          dq(dtype, {s.tokens(), s.heads, s.depth}),
          dk(dtype, {s.tokens(), s.kv_heads, s.depth}),
          dv(dtype, {s.tokens(), s.kv_heads, s.values()}),
          documents(DType::i64, {static_cast<int64_t>(s.documents.size())}) {
        std::copy(s.documents.begin(), s.documents.end(), documents.view().as<int64_t>());
        fill_normal(q, seed);
        fill_normal(k, seed + 1);
        fill_normal(v, seed + 2);
        fill_normal(dout, seed + 3);
    }
    void forward() {
        ops.attention({.q = q,
                       .k = k,
                       .v = v,
                       .seq_length = shape.length,
                       .scale = shape.scale(),
                       .documents = document_rows(),
                       .o = o,
                       .lse = lse});
    }
    void backward() {
        ops.attention_backward({.dout = dout,
                                .q = q,
                                .k = k,
                                .v = v,
                                .o = o,
                                .lse = lse,
                                .seq_length = shape.length,
                                .scale = shape.scale(),
                                .documents = document_rows(),
                                .dq = dq,
                                .dk = dk,
                                .dv = dv});
    }
    void run() {
        forward();
        backward();
    }
    TensorView document_rows() const { return shape.documents.empty() ? TensorView{} : documents.view(); }

    Shape shape;
    HostTensor q, k, v, o, lse, dout, dq, dk, dv, documents;
    ReferenceOps ops;
};

void expect_same(const Problem& a, const Problem& b) {
    for (const auto output : {&Problem::o, &Problem::lse, &Problem::dq, &Problem::dk, &Problem::dv})
        EXPECT_TRUE(same_bytes(a.*output, b.*output));
}

struct NaiveResult {
    std::vector<double> o, lse;
};

// The definition, token by token, in double.
NaiveResult naive_attention(const Shape& s, const std::vector<double>& q, const std::vector<double>& k,
                            const std::vector<double>& v) {
    NaiveResult result;
    const auto at = [&](int64_t token, int64_t head, int64_t heads, int64_t d) {
        return static_cast<std::size_t>((token * heads + head) * s.depth + d);
    };
    for (int64_t token = 0; token < s.tokens(); ++token) {
        const int64_t start = s.first_key(token);
        for (int64_t head = 0; head < s.heads; ++head) {
            const int64_t kv_head = head / (s.heads / s.kv_heads);
            std::vector<double> weights;
            double largest = -std::numeric_limits<double>::infinity(), sum = 0;
            for (int64_t key = start; key <= token; ++key) {
                double dot = 0;
                for (int64_t d = 0; d < s.depth; ++d)
                    dot += q[at(token, head, s.heads, d)] * k[at(key, kv_head, s.kv_heads, d)];
                weights.push_back(dot * static_cast<double>(s.scale()));
                largest = std::max(largest, weights.back());
            }
            for (double& weight : weights) sum += weight = std::exp(weight - largest);
            for (int64_t d = 0; d < s.values(); ++d) {
                double out = 0;
                for (int64_t key = start; key <= token; ++key)
                    out += weights[static_cast<std::size_t>(key - start)] *
                           v[static_cast<std::size_t>((key * s.kv_heads + kv_head) * s.values() + d)];
                result.o.push_back(out / sum);
            }
            result.lse.push_back(largest + std::log(sum));
        }
    }
    return result;
}

double norm_error(const TensorView& actual, const std::vector<double>& wanted) {
    return std::sqrt(nmse(actual, wanted));
}

const Shape kShapes[] = {
    {1, 1, 1, 1, 2},                                   // one token
    {3, 1, 2, 1, 8},                                   // one token a sequence
    {2, 5, 4, 2, 8},                                   // shorter than any block
    {1, 33, 2, 2, 16},                                 // one past a query block
    {2, 64, 4, 1, 32},                                 // whole blocks, one kv head
    {3, 47, 6, 3, 20},                                 // nothing divides
    {1, 130, 2, 1, 64},                                // several query blocks
    {2, 47, 4, 2, 24, 10},                             // values narrower than queries
    {1, 70, 2, 1, 8, 256},                             // and wider
    {2, 47, 4, 2, 20, 0, {0, 1, 33, 33, 60, 94, 94}},  // documents, one across a sequence's end, two empty
    {1, 100, 2, 1, 12, 20, {0, 40, 64, 100}},
};

TEST(Attention, ForwardMatchesDoubleFormula) {
    for (const Shape& shape : kShapes) {
        for (DType dtype : {DType::f32, DType::bf16}) {
            SCOPED_TRACE(fmt::format("{} x {}, heads {}/{}, D {}, {}", shape.sequences, shape.length,
                                     shape.heads, shape.kv_heads, shape.depth, name_of(dtype)));
            Problem problem(shape, dtype);
            problem.forward();
            const NaiveResult wanted =
                naive_attention(shape, to_doubles(problem.q), to_doubles(problem.k), to_doubles(problem.v));
            EXPECT_LE(nmse(problem.o, wanted.o), dtype == DType::f32 ? 1e-12 : 4e-6);
            for (int64_t i = 0; i < problem.lse.numel(); ++i)
                EXPECT_NEAR(problem.lse(i), wanted.lse[static_cast<std::size_t>(i)], 2e-6);
        }
    }
}

// Every input element is moved in an independent forward in double; the loss is sum(dout * o).
TEST(Attention, BackwardMatchesCentralDifferences) {
    for (const Shape& shape : {Shape{1, 1, 1, 1, 2}, Shape{2, 7, 4, 2, 6}, Shape{1, 35, 3, 1, 4},
                               Shape{2, 7, 4, 2, 6, 4, {0, 3, 9, 14}}}) {
        SCOPED_TRACE(
            fmt::format("{} x {}, heads {}/{}", shape.sequences, shape.length, shape.heads, shape.kv_heads));
        Problem problem(shape, DType::f32);
        problem.run();
        std::vector<double> q = to_doubles(problem.q), k = to_doubles(problem.k), v = to_doubles(problem.v);
        const std::vector<double> dout = to_doubles(problem.dout);
        const auto loss = [&] {
            const NaiveResult result = naive_attention(shape, q, k, v);
            double sum = 0;
            for (std::size_t i = 0; i < dout.size(); ++i) sum += dout[i] * result.o[i];
            return sum;
        };
        const auto differences = [&](std::vector<double>& input) {
            std::vector<double> gradient;
            for (double& x : input) gradient.push_back(slope(x, 1e-4, loss));
            return gradient;
        };
        if (shape.length > 1) {
            EXPECT_LE(norm_error(problem.dq, differences(q)), 1e-5);
            EXPECT_LE(norm_error(problem.dk, differences(k)), 1e-5);
        } else {  // a single key has weight 1 whatever its score
            for (int64_t i = 0; i < problem.dq.numel(); ++i) EXPECT_NEAR(problem.dq(i), 0, 1e-6);
            for (int64_t i = 0; i < problem.dk.numel(); ++i) EXPECT_NEAR(problem.dk(i), 0, 1e-6);
        }
        EXPECT_LE(norm_error(problem.dv, differences(v)), 1e-5);
    }
}

// The closed-form gradient in double, for shapes that are too large for differences, and for BF16.
TEST(Attention, BackwardMatchesDoubleFormula) {
    for (const Shape& shape : kShapes) {
        if (shape.length == 1) continue;
        for (DType dtype : {DType::f32, DType::bf16}) {
            SCOPED_TRACE(fmt::format("{} x {}, heads {}/{}, D {}, {}", shape.sequences, shape.length,
                                     shape.heads, shape.kv_heads, shape.depth, name_of(dtype)));
            Problem problem(shape, dtype);
            problem.run();
            const std::vector<double> q = to_doubles(problem.q), k = to_doubles(problem.k),
                                      v = to_doubles(problem.v), dout = to_doubles(problem.dout);
            // An input of the backward: its rounding is not the backward's.
            const std::vector<double> o = to_doubles(problem.o);
            const NaiveResult forward = naive_attention(shape, q, k, v);
            std::vector<double> dq(q.size()), dk(k.size()), dv(v.size());
            for (int64_t token = 0; token < shape.tokens(); ++token) {
                for (int64_t head = 0; head < shape.heads; ++head) {
                    const int64_t kv_head = head / (shape.heads / shape.kv_heads);
                    const auto row = static_cast<std::size_t>((token * shape.heads + head) * shape.depth),
                               out_row =
                                   static_cast<std::size_t>((token * shape.heads + head) * shape.values());
                    const double lse = forward.lse[static_cast<std::size_t>(token * shape.heads + head)];
                    const auto depth = static_cast<std::size_t>(shape.depth),
                               values = static_cast<std::size_t>(shape.values());
                    double delta = 0;
                    for (std::size_t d = 0; d < values; ++d) delta += dout[out_row + d] * o[out_row + d];
                    for (int64_t key = shape.first_key(token); key <= token; ++key) {
                        const auto key_head = static_cast<std::size_t>(key * shape.kv_heads + kv_head);
                        const std::size_t key_row = key_head * depth, value_row = key_head * values;
                        double dot = 0, dp = 0;
                        for (std::size_t d = 0; d < depth; ++d) dot += q[row + d] * k[key_row + d];
                        for (std::size_t d = 0; d < values; ++d) dp += dout[out_row + d] * v[value_row + d];
                        const double scale = static_cast<double>(shape.scale());
                        const double p = std::exp(dot * scale - lse), ds = p * (dp - delta) * scale;
                        for (std::size_t d = 0; d < depth; ++d) {
                            dq[row + d] += ds * k[key_row + d];
                            dk[key_row + d] += ds * q[row + d];
                        }
                        for (std::size_t d = 0; d < values; ++d) dv[value_row + d] += p * dout[out_row + d];
                    }
                }
            }
            EXPECT_LE(nmse(problem.dq, dq), dtype == DType::f32 ? 1e-11 : 4e-6);
            EXPECT_LE(nmse(problem.dk, dk), dtype == DType::f32 ? 1e-11 : 4e-6);
            EXPECT_LE(nmse(problem.dv, dv), dtype == DType::f32 ? 1e-11 : 4e-6);
        }
    }
}

// Changing k, v (to NaN, even) and q after a token changes no bit of the outputs up to it; and no token of
// another sequence.
TEST(Attention, FutureTokensDoNotChangeThePast) {
    const Shape shape{2, 70, 4, 2, 16};
    Problem problem(shape, DType::bf16);
    problem.forward();
    const int64_t row = shape.heads * shape.depth, kv_row = shape.kv_heads * shape.depth;
    for (int64_t last : {0, 1, 2, 30, 31, 32, 68}) {
        Problem changed(shape, DType::bf16);
        for (int64_t i = (last + 1) * kv_row; i < shape.length * kv_row; ++i) {
            set(changed.k, i, std::numeric_limits<double>::quiet_NaN());
            set(changed.v, i, std::numeric_limits<double>::quiet_NaN());
        }
        for (int64_t i = (last + 1) * row; i < shape.length * row; ++i) set(changed.q, i, 7.0);
        changed.forward();
        EXPECT_TRUE(same_bytes(problem.o.view().slice(0, last + 1), changed.o.view().slice(0, last + 1)))
            << last;
        EXPECT_TRUE(same_bytes(problem.lse.view().slice(0, last + 1), changed.lse.view().slice(0, last + 1)))
            << last;
        EXPECT_FALSE(same_bytes(problem.o.view().slice(last + 1, 1), changed.o.view().slice(last + 1, 1)))
            << last;
        EXPECT_TRUE(same_bytes(problem.o.view().slice(shape.length, shape.length),
                               changed.o.view().slice(shape.length, shape.length)));
    }
}

// A document gets the bits that it gets as a sequence of its own.
TEST(Attention, DocumentsAreSequencesOfTheirOwn) {
    Problem packed({1, 120, 4, 2, 24, 16, {0, 40, 80, 120}}, DType::bf16),
        alone({3, 40, 4, 2, 24, 16}, DType::bf16);
    packed.run();
    alone.run();
    expect_same(packed, alone);
}

// With grouped queries every query head gives what it gives when its kv head is alone, and dk, dv are the
// sums over the group.
TEST(Attention, GroupedQueriesShareTheirKeyHead) {
    const Shape grouped{2, 19, 6, 2, 8}, full{2, 19, 6, 6, 8};
    Problem a(grouped, DType::f32), b(full, DType::f32);
    for (int64_t token = 0; token < grouped.tokens(); ++token)
        for (int64_t head = 0; head < 6; ++head)
            for (int64_t d = 0; d < 8; ++d) {
                set(b.k, (token * 6 + head) * 8 + d, a.k((token * 2 + head / 3) * 8 + d));
                set(b.v, (token * 6 + head) * 8 + d, a.v((token * 2 + head / 3) * 8 + d));
            }
    a.run();
    b.run();
    EXPECT_TRUE(same_bytes(a.o, b.o));
    EXPECT_TRUE(same_bytes(a.lse, b.lse));
    EXPECT_TRUE(same_bytes(a.dq, b.dq));
    std::vector<double> dk(static_cast<std::size_t>(a.dk.numel())), dv = dk;
    for (int64_t token = 0; token < grouped.tokens(); ++token)
        for (int64_t head = 0; head < 6; ++head)
            for (int64_t d = 0; d < 8; ++d) {
                dk[static_cast<std::size_t>((token * 2 + head / 3) * 8 + d)] +=
                    b.dk((token * 6 + head) * 8 + d);
                dv[static_cast<std::size_t>((token * 2 + head / 3) * 8 + d)] +=
                    b.dv((token * 6 + head) * 8 + d);
            }
    EXPECT_LE(nmse(a.dk, dk), 1e-12);
    EXPECT_LE(nmse(a.dv, dv), 1e-12);
}

// Scores of several thousand neither overflow nor lose the sum.
TEST(Attention, LargeScoresStayFinite) {
    const Shape shape{1, 40, 1, 1, 8};
    Problem problem(shape, DType::f32);
    fill(problem.q, [&](int64_t i) { return 100.0 * problem.q(i); });
    fill(problem.k, [&](int64_t i) { return 100.0 * problem.k(i); });
    problem.run();
    const NaiveResult wanted =
        naive_attention(shape, to_doubles(problem.q), to_doubles(problem.k), to_doubles(problem.v));
    EXPECT_LE(nmse(problem.o, wanted.o), 1e-6);
    for (const HostTensor* gradient : {&problem.dq, &problem.dk, &problem.dv})
        for (int64_t i = 0; i < gradient->numel(); ++i) EXPECT_TRUE(std::isfinite((*gradient)(i)));
}

TEST(Attention, SameBitsForAnyNumberOfThreads) {
    const Shape shape{3, 50, 4, 2, 24};
    Problem one(shape, DType::f32), four(shape, DType::f32);
    const int saved = omp_get_max_threads();
    omp_set_num_threads(1);
    one.run();
    omp_set_num_threads(4);
    four.run();
    omp_set_num_threads(saved);
    expect_same(one, four);
}

TEST(Attention, ZeroTokensAreLegal) {
    Problem problem({0, 16, 4, 2, 8}, DType::bf16);
    problem.run();
}

TEST(Attention, ChecksItsArguments) {
    Problem problem({2, 6, 4, 2, 8}, DType::f32);
    op::Attention args{
        .q = problem.q, .k = problem.k, .v = problem.v, .seq_length = 5, .o = problem.o, .lse = problem.lse};
    EXPECT_THROW(problem.ops.attention(args), Error);  // 12 rows, sequences of 5
    args.seq_length = 6;
    args.v = problem.q;
    EXPECT_THROW(problem.ops.attention(args), Error);  // wrong number of value heads
    args.v = problem.v;
    for (const std::vector<int64_t>& documents :
         {std::vector<int64_t>{0, 5}, {1, 12}, {0, 7, 6, 12}, {0, 13, 12}}) {
        Problem wrong({2, 6, 4, 2, 8, 0, documents}, DType::f32);
        EXPECT_THROW(wrong.forward(), Error) << documents.size();
    }
    Problem uneven({1, 4, 5, 2, 8}, DType::f32);
    EXPECT_THROW(uneven.forward(), Error);  // 5 query heads over 2
}

TEST(Attention, CountsCausalWork) {
    Problem problem({2, 8, 4, 2, 16}, DType::f32);
    problem.forward();
    // 2 products x 2 FLOPs x 16 wide, for 36 (query, key) pairs of 8 heads
    EXPECT_EQ(problem.ops.counts().at("attention").flops, 2.0 * 2 * 16 * 36 * 8);
    EXPECT_EQ(problem.ops.counts().at("attention").calls, 1);
}

// ---- rotary embedding

HostTensor rope_table(int64_t length, int64_t depth) {
    HostTensor table(DType::f32, {length, depth / 2, 2});
    fill(table, [&](int64_t i) {
        const int64_t position = i / depth, pair = i % depth / 2;
        const double angle = static_cast<double>(position) *
                             std::pow(10000.0, -2.0 * static_cast<double>(pair) / static_cast<double>(depth));
        return i % 2 == 0 ? std::cos(angle) : std::sin(angle);
    });
    return table;
}

TEST(Rope, MatchesDoubleFormula) {
    ReferenceOps ops;
    const int64_t length = 9, tokens = 22, heads = 3,
                  depth = 10;  // positions restart after every `length` rows
    const HostTensor table = rope_table(length, depth);
    for (DType dtype : {DType::f32, DType::bf16}) {
        HostTensor x(dtype, {tokens, heads, depth});
        fill_normal(x, 5);
        std::vector<double> wanted(static_cast<std::size_t>(x.numel()));
        for (int64_t row = 0; row < tokens * heads; ++row)
            for (int64_t i = 0; i < depth / 2; ++i) {
                const int64_t entry = (row / heads % length * (depth / 2) + i) * 2;
                const double low = x(row * depth + i), high = x(row * depth + i + depth / 2);
                wanted[static_cast<std::size_t>(row * depth + i)] =
                    low * table(entry) - high * table(entry + 1);
                wanted[static_cast<std::size_t>(row * depth + i + depth / 2)] =
                    high * table(entry) + low * table(entry + 1);
            }
        ops.rope({.table = table, .x = x});
        EXPECT_LE(nmse(x, wanted), dtype == DType::f32 ? 1e-14 : 4e-6);
    }
}

TEST(Rope, BackwardIsTheInverseAndKeepsNorms) {
    ReferenceOps ops;
    const HostTensor table = rope_table(16, 32);
    HostTensor x(DType::f32, {32, 2, 32}), original(DType::f32, {32, 2, 32});
    fill_normal(x, 6);
    fill_normal(original, 6);
    ops.rope({.table = table, .x = x});
    EXPECT_GT(nmse(x, to_doubles(original)), 0.1);
    for (int64_t row = 0; row < 64; ++row) {
        double before = 0, after = 0;
        for (int64_t d = 0; d < 32; ++d) {
            before += original(row * 32 + d) * original(row * 32 + d);
            after += x(row * 32 + d) * x(row * 32 + d);
        }
        EXPECT_NEAR(after / before, 1.0, 1e-6);
    }
    ops.rope({.table = table, .direction = op::RopeDirection::backward, .x = x});
    EXPECT_LE(nmse(x, to_doubles(original)), 1e-13);
}

// The score of two rotated rows depends on their distance only.
TEST(Rope, ScoresDependOnDistanceOnly) {
    ReferenceOps ops;
    const int64_t length = 12, depth = 16;
    const HostTensor table = rope_table(length, depth);
    HostTensor q(DType::f32, {length, 1, depth}), k(DType::f32, {length, 1, depth});
    fill(q, [&](int64_t i) { return random_normal(1, 0, static_cast<uint64_t>(i % depth)); });
    fill(k, [&](int64_t i) { return random_normal(2, 0, static_cast<uint64_t>(i % depth)); });
    ops.rope({.table = table, .x = q});
    ops.rope({.table = table, .x = k});
    const auto score = [&](int64_t i, int64_t j) {
        double dot = 0;
        for (int64_t d = 0; d < depth; ++d) dot += q(i * depth + d) * k(j * depth + d);
        return dot;
    };
    for (int64_t i = 3; i < length; ++i) EXPECT_NEAR(score(i, i - 3), score(3, 0), 1e-5);
    EXPECT_GT(std::abs(score(3, 0) - score(4, 0)), 1e-3);
}

TEST(Rope, ZeroTokensAndOddHeadsAreHandled) {
    ReferenceOps ops;
    const HostTensor table = rope_table(4, 8);
    HostTensor none(DType::bf16, {0, 2, 8}), odd(DType::f32, {4, 1, 7});
    ops.rope({.table = table, .x = none});
    EXPECT_THROW(ops.rope({.table = table, .x = odd}), Error);
}

// ---- packed projection

TEST(PackedQkv, SplitAndMergeAreInverse) {
    ReferenceOps ops;
    const int64_t tokens = 7, heads = 4, kv_heads = 2, depth = 6, width = (heads + 2 * kv_heads) * depth;
    for (DType dtype : {DType::f32, DType::bf16}) {
        HostTensor packed(dtype, {tokens, width}), again(dtype, {tokens, width});
        fill_normal(packed, 9);
        HostTensor q(dtype, {tokens, heads, depth}), k(dtype, {tokens, kv_heads, depth}),
            v(dtype, {tokens, kv_heads, depth});
        ops.split_qkv({.qkv = packed, .q = q, .k = k, .v = v});
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t i = 0; i < heads * depth; ++i)
                EXPECT_EQ(q(t * heads * depth + i), packed(t * width + i));
            for (int64_t i = 0; i < kv_heads * depth; ++i) {
                EXPECT_EQ(k(t * kv_heads * depth + i), packed(t * width + heads * depth + i));
                EXPECT_EQ(v(t * kv_heads * depth + i), packed(t * width + (heads + kv_heads) * depth + i));
            }
        }
        ops.merge_qkv({.q = q, .k = k, .v = v, .qkv = again});
        EXPECT_TRUE(same_bytes(packed, again));
    }
    HostTensor q(DType::bf16, {0, heads, depth}), k(DType::bf16, {0, kv_heads, depth}),
        v(DType::bf16, {0, kv_heads, depth}), packed(DType::bf16, {0, width});
    ops.split_qkv({.qkv = packed, .q = q, .k = k, .v = v});
    ops.merge_qkv({.q = q, .k = k, .v = v, .qkv = packed});
}

}  // namespace
}  // namespace fp8flow
