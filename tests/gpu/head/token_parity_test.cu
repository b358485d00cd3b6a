// SPDX-License-Identifier: MIT
// Embedding, cross-entropy and the element-wise ops on the GPU against the reference: every byte; NaN only
// has to be NaN on both sides.
#include "kernels/hopper/device/view.h"
#include "tests/support/parity.h"

#include <limits>
#include <string>

namespace fp8flow::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

HostTensor random_ids(int64_t count, int64_t vocab, uint64_t seed) {
    HostTensor ids(DType::i32, {count});
    for (int64_t t = 0; t < count; ++t)
        ids.as<int32_t>()[t] = static_cast<int32_t>(random_words(seed, 0, static_cast<uint64_t>(t))[0] %
                                                    static_cast<uint64_t>(vocab));
    return ids;
}

TEST(TokenParity, Embedding) {
    for (const int64_t tokens : {0, 1, 127, 129}) {
        for (const int64_t hidden : {1, 8, 250, 256, 4360, 8192}) {
            for (const DType table_dtype : {DType::bf16, DType::f32}) {
                SCOPED_TRACE(std::to_string(tokens) + " x " + std::to_string(hidden) + " " +
                             name_of(table_dtype));
                if (too_large_here(tokens * hidden)) continue;
                Parity parity;
                constexpr int64_t kVocab = 61;
                const HostTensor ids = random_ids(tokens, kVocab, 1);
                HostTensor table(table_dtype, {kVocab, hidden}), y(DType::bf16, {tokens, hidden});
                fill_normal(table, 2);
                const op::Embedding args{.ids = ids, .table = table, .y = y};
                parity.check(args);
            }
        }
    }
}

TEST(TokenParity, EmbeddingOfUnknownIdsIsNan) {
    Parity parity;
    const HostTensor ids = HostTensor::of<int32_t>({1, -1, 4, 1 << 30});
    HostTensor table(DType::f32, {4, 16}), y(DType::f32, {4, 16});
    fill_normal(table, 2);
    parity.gpu.embedding({.ids = parity.to_gpu(ids), .table = parity.to_gpu(table), .y = parity.to_gpu(y)});
    const HostTensor got = parity.from_gpu(y);
    for (int64_t i = 0; i < y.numel(); ++i) {
        if (i < 16)
            EXPECT_EQ(got(i), table(16 + i));
        else
            EXPECT_TRUE(std::isnan(got(i))) << i;
    }
}

TEST(TokenParity, EmbeddingBackward) {
    for (const int64_t tokens : {0, 1, 127, 255, 256, 257, 1500, 2100}) {
        for (const int64_t vocab : {1, 37, 4000}) {  // 1: every token has the same id
            for (const int64_t hidden : {3, 264, 2048}) {
                for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
                    SCOPED_TRACE(std::to_string(tokens) + " tokens, V " + std::to_string(vocab) + ", H " +
                                 std::to_string(hidden));
                    if (vocab * hidden > 1'100'000 && mode == Gradient::accumulate) continue;
                    if (too_large_here((vocab + tokens) * hidden)) continue;
                    Parity parity;
                    const HostTensor ids = random_ids(tokens, vocab, 3);
                    HostTensor dy(DType::bf16, {tokens, hidden}), dtable(DType::f32, {vocab, hidden});
                    fill_normal(dy, 4);
                    if (mode == Gradient::accumulate) fill_uniform(dtable, 5, -1, 1);
                    const op::EmbeddingBackward args{.ids = ids, .dy = dy, .mode = mode, .dtable = dtable};
                    parity.check(args);
                }
            }
        }
    }
}

// Several tiles of columns a CTA.
TEST(TokenParity, EmbeddingBackwardOfWideRows) {
    constexpr int64_t kTokens = 4500, kVocab = 900, kHidden = 4360;
    if (too_large_here(kTokens * kHidden)) return;
    Parity parity;
    const HostTensor ids = random_ids(kTokens, kVocab, 3);
    HostTensor dy(DType::bf16, {kTokens, kHidden}), dtable(DType::f32, {kVocab, kHidden});
    fill_normal(dy, 4);
    fill_uniform(dtable, 5, -1, 1);
    const op::EmbeddingBackward args{.ids = ids, .dy = dy, .mode = Gradient::accumulate, .dtable = dtable};
    parity.check(args);
}

// From 8193 tokens on, the sort is a radix sort.
TEST(TokenParity, EmbeddingBackwardOfManyTokens) {
    for (const int64_t tokens : {8192, 8193, 50000}) {
        if (too_large_here(tokens * tokens / 32)) continue;  // all pairs of tokens are compared
        for (const int64_t vocab : {1, 257, 4000}) {
            SCOPED_TRACE(std::to_string(tokens) + " tokens, V " + std::to_string(vocab));
            constexpr int64_t kHidden = 8;
            Parity parity;
            const HostTensor ids = random_ids(tokens, vocab, 3);
            HostTensor dy(DType::bf16, {tokens, kHidden}), dtable(DType::f32, {vocab, kHidden});
            fill_normal(dy, 4);
            fill_uniform(dtable, 5, -1, 1);
            const op::EmbeddingBackward args{
                .ids = ids, .dy = dy, .mode = Gradient::accumulate, .dtable = dtable};
            parity.check(args);
        }
    }
}

TEST(TokenParity, GradientsOfUnknownIdsGoNowhere) {
    Parity parity;
    const HostTensor ids = HostTensor::of<int32_t>({1, -1, 4, 1 << 30, 1, -1});
    HostTensor dy(DType::bf16, {6, 16}), dtable(DType::f32, {4, 16});
    fill_normal(dy, 4);
    parity.gpu.embedding_backward({.ids = parity.to_gpu(ids),
                                   .dy = parity.to_gpu(dy),
                                   .mode = Gradient::overwrite,
                                   .dtable = parity.to_gpu(dtable)});
    const HostTensor got = parity.from_gpu(dtable);
    for (int64_t i = 0; i < dtable.numel(); ++i)
        EXPECT_EQ(got(i), i / 16 == 1 ? dy(i - 16) + dy(4 * 16 + i - 16) : 0.0) << i;
}

struct Logits {
    int64_t tokens, columns, vocab;
};
void expect_same_cross_entropy(std::initializer_list<Logits> shapes) {
    for (const Logits& shape : shapes) {
        if (too_large_here(shape.tokens * shape.columns)) continue;
        for (const DType dtype : {DType::bf16, DType::f32}) {
            for (const bool with_gradient : {true, false}) {
                SCOPED_TRACE(std::to_string(shape.tokens) + " x " + std::to_string(shape.columns) + " " +
                             name_of(dtype));
                Parity parity;
                HostTensor logits(DType::f32, {shape.tokens, shape.columns}),
                    labels = random_ids(shape.tokens, shape.vocab, 6), loss(DType::f32, {shape.tokens}),
                    dlogits(dtype, {shape.tokens, shape.columns});
                fill_normal(logits, 7, 4.0);
                for (int64_t t = 2; t < shape.tokens; t += 5) labels.as<int32_t>()[t] = -100;
                if (shape.tokens > 20) {  // rows that are not numbers stay so, in the same places
                    logits.as<float>()[3 * shape.columns] = kNan;
                    logits.as<float>()[4 * shape.columns] = kInf;
                    logits.as<float>()[5 * shape.columns] = -kInf;
                    logits.as<float>()[6 * shape.columns] = 1e30f;
                    for (int64_t i = 0; i < shape.vocab;
                         i += 700) {  // far below the largest, farther, nothing
                        logits.as<float>()[8 * shape.columns + i] = -45.0f;
                        logits.as<float>()[9 * shape.columns + i] = -65.0f;
                        logits.as<float>()[10 * shape.columns + i] = -kInf;
                    }
                }
                const op::CrossEntropy args{.logits = logits,
                                            .labels = labels,
                                            .vocab_size = shape.vocab,
                                            .grad_scale = 0.013f,
                                            .loss = loss,
                                            .dlogits = with_gradient ? dlogits.view() : TensorView{}};
                parity.check_values(args);
            }
        }
    }
}

TEST(TokenParity, CrossEntropy) {
    expect_same_cross_entropy({{0, 8, 8},
                               {1, 1, 1},
                               {127, 64, 61},
                               {128, 257, 256},
                               {129, 2048, 2048},
                               {5, 4224, 4097},
                               {4, 4099, 4098},
                               {23, 1032, 900},
                               {59, 8192, 8192},
                               {700, 1032, 900}});
}

// Rows of 2, 4 and 8 CTAs; evenly split or not; one iteration of their warps or more.
TEST(TokenParity, CrossEntropyInClusters) {
    expect_same_cross_entropy({{7, 16640, 16500},
                               {300, 17408, 17000},
                               {3, 50304, 50257},
                               {200, 66560, 66000},
                               {23, 70016, 70001},
                               {33, 140000, 139999},
                               {40, 262144, 262144},
                               {70, 129280, 129280}});
}

TEST(TokenParity, Sum) {
    for (const int64_t count : {0, 1, 63, 64, 65, 127, 2049, 16384, 16385, 40000}) {
        SCOPED_TRACE(count);
        Parity parity;
        HostTensor values(DType::f32, {count});
        fill(values, [](int64_t i) {
            return random_normal(8, 0, static_cast<uint64_t>(i)) * (i % 7 == 0 ? 1e8 : 1e-4);
        });
        const HostTensor sum = HostTensor::of<float>({-7.5f});
        const op::Sum args{.values = values, .sum = sum};
        parity.check(args);
    }
}

TEST(TokenParity, AddCastZero) {
    for (const int64_t rows : {0, 1, 127, 128, 129}) {
        for (const int64_t cols : {1, 5, 264}) {
            for (const DType from : {DType::f32, DType::bf16, DType::f16}) {
                for (const DType to : {DType::f32, DType::bf16, DType::f16}) {
                    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols) + " " + name_of(from) +
                                 " -> " + name_of(to));
                    Parity parity;
                    HostTensor a(from, {rows, cols}), b(to, {rows, cols}), y(to, {rows, cols}),
                        c(to, {rows, cols}), z(from, {rows, cols});
                    fill_normal(a, 9, 100.0);
                    fill_normal(b, 10, 1e-3);
                    parity.check(op::Add{.a = a, .b = b, .y = y});
                    parity.check(op::Add{.a = a, .b = b, .y = b});  // y may be an input
                    parity.check(op::Cast{.x = a, .y = c});
                    parity.check(op::Zero{.y = z});
                }
            }
        }
    }
}

TEST(TokenParity, FillNormal) {
    for (const int64_t count : {0, 1, 127, 70001}) {
        for (const int64_t first : {int64_t{0}, int64_t{5}, int64_t{1} << 40}) {
            SCOPED_TRACE(std::to_string(count) + " from " + std::to_string(first));
            Parity parity;
            HostTensor y(DType::f32, {count});
            parity.check(
                op::FillNormal{.seed = 7, .stream = 123, .first = first, .standard_deviation = 0.02, .y = y});
        }
    }
}

TEST(TokenParity, CountNonFinite) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::e4m3, DType::e5m2, DType::e8m0}) {
        for (const int64_t count : {0, 1, 127, 1000, 70001}) {
            for (const int64_t bad : {0, 1, 3}) {
                SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(count) + ", bad " +
                             std::to_string(bad));
                Parity parity;
                HostTensor x(dtype, {count});
                if (dtype == DType::e8m0)
                    fill_pow2(x, 11, -20, 20);
                else
                    fill_normal(x, 11);
                for (int64_t i = 0; i < bad && i < count; ++i) {
                    const int64_t at = count - 1 - i * (count / 4);
                    if (dtype == DType::e8m0)
                        x.view().bytes_ptr()[at] = 0xFF;
                    else
                        set(x, at,
                            i % 2 == 0 ? kNan
                                       : kInf);  // E4M3 has no infinity: it saturates, which counts as finite
                }
                const HostTensor found = HostTensor::of<int64_t>({5}),
                                 first = HostTensor::of<int64_t>({bad == 3 ? 40000 : -1});
                const op::CountNonFinite args{.x = x, .count = found, .first = first};
                parity.check(args);
            }
        }
    }
}

}  // namespace
}  // namespace fp8flow::test
