// SPDX-License-Identifier: MIT
// Embedding, cross-entropy and the element-wise ops against double-precision formulas and plain loops.
#include "kernels/core/random.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/files.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

namespace fp8flow {
namespace {

using namespace test;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Runs body once with one thread and once with several.
template <class Body> void with_one_and_four_threads(const Body& body) {
    const int saved = omp_get_max_threads();
    omp_set_num_threads(1);
    body(0);
    omp_set_num_threads(4);
    body(1);
    omp_set_num_threads(saved);
}

// ---- embedding

TEST(Embedding, GathersRows) {
    ReferenceOps ops;
    const int64_t vocab = 11, hidden = 70;
    const HostTensor ids = HostTensor::of<int32_t>({3, 0, 10, 3, 7});
    for (DType table_dtype : {DType::f32, DType::bf16}) {
        for (DType dtype : {DType::f32, DType::bf16}) {
            HostTensor table(table_dtype, {vocab, hidden}), y(dtype, {5, hidden});
            fill_normal(table, 1);
            ops.embedding({.ids = ids, .table = table, .y = y});
            for (int64_t t = 0; t < 5; ++t)
                for (int64_t i = 0; i < hidden; ++i) {
                    const auto value = static_cast<float>(table(ids.as<int32_t>()[t] * hidden + i));
                    EXPECT_EQ(y(t * hidden + i), dtype == DType::bf16 ? round_bf16(value) : value);
                }
        }
    }
}

TEST(Embedding, IdsOutsideTheVocabularyAreDataErrors) {
    ReferenceOps ops;
    HostTensor table(DType::f32, {4, 8}), y(DType::f32, {2, 8}), dtable(DType::f32, {4, 8});
    for (int32_t bad : {4, -1}) {
        const HostTensor ids = HostTensor::of<int32_t>({0, bad});
        expect_contains(
            error_of(ExitCode::data, [&] { ops.embedding({.ids = ids, .table = table, .y = y}); }),
            fmt::format("token id {} at position 1", bad));
        EXPECT_THROW(ops.embedding_backward({.ids = ids, .dy = y, .dtable = dtable}), Error);
    }
}

TEST(Embedding, BackwardAddsRepeatedIdsInOrder) {
    const int64_t tokens = 300, vocab = 7, hidden = 130;
    HostTensor ids(DType::i32, {tokens}), dy(DType::bf16, {tokens, hidden});
    for (int64_t t = 0; t < tokens; ++t)  // id 5 never occurs
        ids.as<int32_t>()[t] = static_cast<int32_t>(random_words(3, 0, static_cast<uint64_t>(t))[0] % 5);
    fill_normal(dy, 4);
    for (Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
        std::vector<float> wanted(static_cast<std::size_t>(vocab * hidden),
                                  mode == Gradient::accumulate ? 0.25f : 0.0f);
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t i = 0; i < hidden; ++i)
                wanted[static_cast<std::size_t>(ids.as<int32_t>()[t] * hidden + i)] +=
                    static_cast<float>(dy(t * hidden + i));
        with_one_and_four_threads([&](int) {
            ReferenceOps ops;
            HostTensor dtable(DType::f32, {vocab, hidden});  // poisoned: overwrite must clear all of it
            if (mode == Gradient::accumulate) fill(dtable, [](int64_t) { return 0.25; });
            ops.embedding_backward({.ids = ids, .dy = dy, .mode = mode, .dtable = dtable});
            EXPECT_TRUE(same_bytes(dtable, HostTensor::of(wanted)));
        });
    }
}

TEST(Embedding, ZeroTokensAreLegal) {
    ReferenceOps ops;
    HostTensor ids(DType::i32, {0}), y(DType::bf16, {0, 8}), table(DType::bf16, {4, 8}),
        dtable(DType::f32, {4, 8});
    ops.embedding({.ids = ids, .table = table, .y = y});
    ops.embedding_backward({.ids = ids, .dy = y, .dtable = dtable});
    for (int64_t i = 0; i < dtable.numel(); ++i)
        EXPECT_EQ(dtable(i), 0.0);  // an empty batch still clears the gradient
}

// ---- cross-entropy

double naive_loss(const double* logits, int64_t vocab, int64_t label) {
    double largest = logits[0], sum = 0;
    for (int64_t i = 1; i < vocab; ++i) largest = std::max(largest, logits[i]);
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(logits[i] - largest);
    return largest + std::log(sum) - logits[label];
}

struct LossProblem {
    LossProblem(int64_t tokens, int64_t columns, int64_t vocab_size, DType gradient_dtype,
                double spread = 2.0)
        : vocab(vocab_size),
          logits(DType::f32, {tokens, columns}),
          labels(DType::i32, {tokens}),
          loss(DType::f32, {tokens}),
          dlogits(gradient_dtype, {tokens, columns}) {
        fill_normal(logits, 11, spread);
        for (int64_t t = 0; t < tokens; ++t) {
            labels.as<int32_t>()[t] = static_cast<int32_t>(random_words(5, 0, static_cast<uint64_t>(t))[0] %
                                                           static_cast<uint32_t>(vocab));
            for (int64_t i = vocab; i < columns; ++i)
                logits.as<float>()[t * columns + i] = kNan;  // pads are never read
        }
    }
    op::CrossEntropy args(float grad_scale = 1.0f) const {
        return {.logits = logits,
                .labels = labels,
                .vocab_size = vocab,
                .grad_scale = grad_scale,
                .loss = loss,
                .dlogits = dlogits};
    }
    int64_t vocab;
    HostTensor logits, labels, loss, dlogits;
};

TEST(CrossEntropy, MatchesDoubleFormula) {
    for (const auto& [columns, vocab] :
         {std::pair<int64_t, int64_t>{128, 128}, {128, 97}, {256, 256}, {384, 259}, {640, 513}, {8, 1}}) {
        for (DType dtype : {DType::f32, DType::bf16}) {
            SCOPED_TRACE(fmt::format("{} of {} columns, {}", vocab, columns, name_of(dtype)));
            ReferenceOps ops;
            const int64_t tokens = 33;
            LossProblem problem(tokens, columns, vocab, dtype);
            const float grad_scale = 0.37f;
            ops.cross_entropy(problem.args(grad_scale));
            const std::vector<double> logits = to_doubles(problem.logits);
            std::vector<double> wanted, gradient(logits.size());
            for (int64_t t = 0; t < tokens; ++t) {
                const double* row = logits.data() + t * columns;
                const int64_t label = problem.labels.as<int32_t>()[t];
                wanted.push_back(naive_loss(row, vocab, label));
                for (int64_t i = 0; i < vocab; ++i)  // exp(-loss if i were the label) is its probability
                    gradient[static_cast<std::size_t>(t * columns + i)] =
                        (std::exp(-naive_loss(row, vocab, i)) - (i == label)) *
                        static_cast<double>(grad_scale);
                for (int64_t i = vocab; i < columns; ++i) EXPECT_EQ(problem.dlogits(t * columns + i), 0.0);
            }
            EXPECT_LE(nmse(problem.loss, wanted), 1e-13);
            EXPECT_LE(nmse(problem.dlogits, gradient), dtype == DType::f32 ? 1e-12 : 4e-6);
        }
    }
}

// More blocks than lanes, with maxima that differ from block to block.
TEST(CrossEntropy, LongRowsMatchDoubleFormula) {
    const int64_t tokens = 3, vocab = 40 * op::kLossBlock + 77, columns = vocab + 3;
    LossProblem problem(tokens, columns, vocab, DType::f32);
    float* logits = problem.logits.as<float>();
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < vocab; ++i)
            logits[t * columns + i] += static_cast<float>(i / op::kLossBlock % 7) * 3.0f - 9.0f;
    const float grad_scale = -0.37f;
    ReferenceOps ops;
    ops.cross_entropy(problem.args(grad_scale));
    const std::vector<double> values = to_doubles(problem.logits);
    std::vector<double> wanted, gradient(values.size());
    for (int64_t t = 0; t < tokens; ++t) {
        const double* row = values.data() + t * columns;
        const int64_t label = problem.labels.as<int32_t>()[t];
        const double loss = naive_loss(row, vocab, label);
        wanted.push_back(loss);
        for (int64_t i = 0; i < vocab; ++i)
            gradient[static_cast<std::size_t>(t * columns + i)] =
                (std::exp(row[i] - row[label] - loss) - (i == label)) * static_cast<double>(grad_scale);
    }
    EXPECT_LE(nmse(problem.loss, wanted), 1e-13);
    EXPECT_LE(nmse(problem.dlogits, gradient), 1e-12);
}

TEST(CrossEntropy, GradientMatchesCentralDifferences) {
    ReferenceOps ops;
    const int64_t tokens = 5, columns = 24, vocab = 19;
    LossProblem problem(tokens, columns, vocab, DType::f32);
    ops.cross_entropy(problem.args());
    std::vector<double> gradient(static_cast<std::size_t>(tokens * columns)),
        logits = to_doubles(problem.logits);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < vocab; ++i) {
            double* row = logits.data() + t * columns;
            const int64_t label = problem.labels.as<int32_t>()[t];
            gradient[static_cast<std::size_t>(t * columns + i)] =
                slope(row[i], 1e-4, [&] { return naive_loss(row, vocab, label); });
        }
    EXPECT_LE(std::sqrt(nmse(problem.dlogits, gradient)), 1e-5);
}

TEST(CrossEntropy, IgnoredLabelsCostNothing) {
    const int saved = omp_get_max_threads();
    omp_set_num_threads(1);  // so that a row before the ignored one could leave something
    ReferenceOps ops;
    LossProblem problem(4, 32, 20, DType::bf16), all(4, 32, 20, DType::bf16);
    ops.cross_entropy(all.args());
    problem.labels.as<int32_t>()[0] = -1;
    problem.labels.as<int32_t>()[2] = -100;
    problem.logits.as<float>()[2 * 32] = kNan;  // an ignored row may hold anything
    ops.cross_entropy(problem.args());
    for (int64_t t : {0, 2}) {
        EXPECT_EQ(problem.loss(t), 0.0);
        for (int64_t i = 0; i < 32; ++i) EXPECT_EQ(problem.dlogits(t * 32 + i), 0.0);
    }
    for (int64_t t : {1, 3}) {  // the neighbours are as without them
        EXPECT_EQ(problem.loss(t), all.loss(t));
        EXPECT_TRUE(same_bytes(problem.dlogits.view()[t], all.dlogits.view()[t]));
    }
    omp_set_num_threads(saved);
}

TEST(CrossEntropy, ExtremeLogitsStayFinite) {
    ReferenceOps ops;
    LossProblem problem(4, 16, 16, DType::f32);
    float* logits = problem.logits.as<float>();
    std::fill_n(logits, 64, 0.0f);
    logits[0] = 1e30f;                     // row 0: the label dominates
    logits[16 + 3] = 1e4f;                 // row 1: another column dominates
    std::fill_n(logits + 32, 16, -3e38f);  // row 2: all equally improbable
    for (int64_t i = 0; i < 16; ++i)
        logits[48 + i] = static_cast<float>(88.0 + 0.1 * static_cast<double>(i));  // exp overflows
    std::fill_n(problem.labels.as<int32_t>(), 4, 0);
    ops.cross_entropy(problem.args());
    EXPECT_EQ(problem.loss(0), 0.0);
    EXPECT_EQ(problem.loss(1), 1e4);
    EXPECT_NEAR(problem.loss(2), std::log(16.0), 1e-6);
    const std::vector<double> row = {to_doubles(problem.logits.view()[3])};
    EXPECT_NEAR(problem.loss(3), naive_loss(row.data(), 16, 0), 1e-6);
    EXPECT_EQ(problem.dlogits(16), -1.0);
    EXPECT_EQ(problem.dlogits(16 + 3), 1.0);
    for (int64_t i = 0; i < 64; ++i) EXPECT_TRUE(std::isfinite(problem.dlogits(i)));
}

TEST(CrossEntropy, NanReachesTheLoss) {
    ReferenceOps ops;
    LossProblem problem(2, 16, 16, DType::f32);
    problem.logits.as<float>()[16 + 5] = kNan;
    ops.cross_entropy(problem.args());
    EXPECT_TRUE(std::isfinite(problem.loss(0)));
    EXPECT_TRUE(std::isnan(problem.loss(1)));
}

TEST(CrossEntropy, EvaluationAloneGivesTheSameLoss) {
    ReferenceOps ops;
    LossProblem a(9, 64, 50, DType::f32), b(9, 64, 50, DType::f32);
    ops.cross_entropy(a.args());
    op::CrossEntropy evaluation = b.args();
    evaluation.dlogits = {};
    ops.cross_entropy(evaluation);
    EXPECT_TRUE(same_bytes(a.loss, b.loss));
}

TEST(CrossEntropy, SameBitsForAnyNumberOfThreads) {
    const LossProblem problems[2] = {{37, 128, 100, DType::bf16}, {37, 128, 100, DType::bf16}};
    with_one_and_four_threads([&](int i) {
        ReferenceOps ops;
        ops.cross_entropy(problems[i].args(0.1f));
    });
    EXPECT_TRUE(same_bytes(problems[0].loss, problems[1].loss));
    EXPECT_TRUE(same_bytes(problems[0].dlogits, problems[1].dlogits));
}

TEST(CrossEntropy, RefusesLabelsPastTheVocabulary) {
    ReferenceOps ops;
    LossProblem problem(3, 32, 20, DType::f32);
    problem.labels.as<int32_t>()[1] = 20;  // inside the padded columns, outside the vocabulary
    EXPECT_THROW(ops.cross_entropy(problem.args()), Error);
    problem.labels.as<int32_t>()[1] = 19;
    op::CrossEntropy args = problem.args();
    args.vocab_size = 33;
    EXPECT_THROW(ops.cross_entropy(args), Error);
    LossProblem none(0, 32, 20, DType::f32);
    ops.cross_entropy(none.args());
}

// ---- element-wise ops

TEST(Sum, AddsInDoubleAndAccumulates) {
    ReferenceOps ops;
    std::vector<float> values(4097, 1.0f);
    values[0] = 16777216.0f;  // 2^24: in fp32 every following 1 would be lost
    HostTensor sum = HostTensor::of<float>({8.0f});
    ops.sum({.values = HostTensor::of(values), .sum = sum});
    EXPECT_EQ(sum(0), 16777216.0 + 4096 + 8);
    HostTensor none(DType::f32, {0});
    ops.sum({.values = none, .sum = sum});
    EXPECT_EQ(sum(0), 16777216.0 + 4096 + 8);
}

TEST(Sum, AddsBlocksOf64First) {
    std::vector<float> values(192, 0.0f);
    values[0] = 0x1p60f;                          // neighbouring doubles are 256 apart
    std::fill_n(values.begin() + 64, 64, 2.01f);  // 128.64 together; one by one each would be lost
    values[128] = -0x1p60f;
    const HostTensor sum = HostTensor::of<float>({0.0f});
    ReferenceOps().sum({.values = HostTensor::of(values), .sum = sum});
    EXPECT_EQ(sum(0), 256.0);
}

TEST(Add, RoundsOnceAndMayWorkInPlace) {
    ReferenceOps ops;
    const int64_t rows = 3, columns = 1111;
    for (DType a_dtype : {DType::f32, DType::bf16}) {
        for (DType dtype : {DType::f32, DType::bf16}) {
            HostTensor a(a_dtype, {rows, columns}), b(DType::bf16, {rows, columns}),
                y(dtype, {rows, columns});
            fill_normal(a, 1);
            fill_normal(b, 2);
            HostTensor wanted(dtype, {rows, columns});
            fill(wanted, [&](int64_t i) { return static_cast<float>(a(i)) + static_cast<float>(b(i)); });
            ops.add({.a = a, .b = b, .y = y});
            EXPECT_TRUE(same_bytes(y, wanted));
            if (a_dtype == dtype) {
                ops.add({.a = a, .b = b, .y = a});
                EXPECT_TRUE(same_bytes(a, wanted));
            }
        }
    }
    HostTensor a(DType::f32, {2, 3}), b(DType::f32, {3, 2});
    EXPECT_THROW(ops.add({.a = a, .b = b, .y = a}), Error);
}

TEST(Cast, EveryNarrowValueSurvivesTheRoundTrip) {
    ReferenceOps ops;
    for (DType dtype : {DType::bf16, DType::f16}) {
        HostTensor narrow(dtype, {1 << 16}), wide(DType::f32, {1 << 16}), again(dtype, {1 << 16});
        for (int i = 0; i < 1 << 16; ++i)
            static_cast<uint16_t*>(narrow.view().data)[i] = static_cast<uint16_t>(i);
        ops.cast({.x = narrow, .y = wide});
        ops.cast({.x = wide, .y = again});
        for (int i = 0; i < 1 << 16; ++i) {
            const uint16_t bits = static_cast<uint16_t*>(again.view().data)[i];
            if (std::isnan(narrow(i)))
                EXPECT_TRUE(std::isnan(wide(i)) && std::isnan(again(i))) << i;
            else
                EXPECT_EQ(bits, i);
        }
    }
}

TEST(Cast, RoundsToNearestEven) {
    ReferenceOps ops;
    const HostTensor x =
        HostTensor::of<float>({1.0f + 0x1.0p-8f, 1.0f + 0x1.8p-7f, 1.0f + 0x1.01p-8f, -3.4e38f, kInf});
    HostTensor y(DType::bf16, {5});
    ops.cast({.x = x, .y = y});
    EXPECT_EQ(to_doubles(y), (std::vector<double>{1.0, 1.0 + 0x1.0p-6, 1.0 + 0x1.0p-7, -kInf, kInf}));
}

TEST(Zero, ClearsExactlyTheTensor) {
    ReferenceOps ops;
    for (DType dtype : {DType::f32, DType::bf16, DType::e4m3, DType::i32, DType::i64}) {
        HostTensor y(dtype, {3, 5});
        ops.zero({.y = y});
        EXPECT_EQ(y.bytes(), std::vector<uint8_t>(static_cast<std::size_t>(y.view().bytes()), 0));
    }
    HostTensor none(DType::f32, {0, 4});
    ops.zero({.y = none});
}

TEST(FillNormal, IsNormalAndTheSameFromAnyFirstElement) {
    ReferenceOps ops;
    constexpr int64_t kCount = 400000;
    HostTensor y(DType::f32, {kCount}), part(DType::f32, {1000});
    ops.fill_normal({.seed = 3, .stream = 9, .first = 0, .standard_deviation = 0.5, .y = y});
    double moments[5] = {};
    for (int64_t i = 0; i < kCount; ++i)
        for (int m = 1; m <= 4; ++m) moments[m] += std::pow(2.0 * y(i), m) / static_cast<double>(kCount);
    // bounds: five standard errors
    EXPECT_NEAR(moments[1], 0.0, 5 / std::sqrt(kCount));
    EXPECT_NEAR(moments[2], 1.0, 5 * std::sqrt(2.0 / kCount));
    EXPECT_NEAR(moments[3], 0.0, 5 * std::sqrt(15.0 / kCount));
    EXPECT_NEAR(moments[4], 3.0, 5 * std::sqrt(96.0 / kCount));
    ops.fill_normal({.seed = 3, .stream = 9, .first = 777, .standard_deviation = 0.5, .y = part});
    for (int64_t i = 0; i < 1000; ++i) EXPECT_EQ(part(i), y(777 + i));
}

// log and cos of kernels/core/random.h against the standard library's.
TEST(FillNormal, DrawsWhatTheTextbookSays) {
    for (uint64_t i = 0; i < 200000; ++i) {
        const auto w = random_words(5, 6, i);
        const double u = (static_cast<double>(((uint64_t{w[0]} << 32) | w[1]) >> 11) + 1.0) * 0x1.0p-53;
        const double v = static_cast<double>(((uint64_t{w[2]} << 32) | w[3]) >> 11) * 0x1.0p-53;
        const double want = std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
        EXPECT_NEAR(random_normal(5, 6, i), want, 1e-7 * std::max(std::abs(want), 1e-6)) << i;
    }
}

struct Found {
    int64_t count, first;
};
Found count_non_finite(const TensorView& x, Found before = {0, -1}) {
    ReferenceOps ops;
    const HostTensor count = HostTensor::of<int64_t>({before.count}),
                     first = HostTensor::of<int64_t>({before.first});
    ops.count_non_finite({.x = x, .count = count, .first = first});
    return {count.as<int64_t>()[0], first.as<int64_t>()[0]};
}

// All FP8 values of every narrow format: how many are no number, and which comes first.
TEST(CountNonFinite, KnowsEveryFormat) {
    struct Case {
        DType dtype;
        int64_t count, first;
    };
    for (const Case& c :
         {Case{DType::e4m3, 2, 0x7F}, Case{DType::e5m2, 8, 0x7C}, Case{DType::e8m0, 1, 0xFF}}) {
        HostTensor fp8(c.dtype, {256});
        for (int i = 0; i < 256; ++i) fp8.view().bytes_ptr()[i] = static_cast<uint8_t>(i);
        const Found found = count_non_finite(fp8);
        EXPECT_EQ(found.count, c.count) << name_of(c.dtype);
        EXPECT_EQ(found.first, c.first) << name_of(c.dtype);
    }
    for (const Case& c : {Case{DType::bf16, 2 * 128, 0x7F80}, Case{DType::f16, 2 * 1024, 0x7C00}}) {
        HostTensor values(c.dtype, {1 << 16});
        for (int i = 0; i < 1 << 16; ++i)
            static_cast<uint16_t*>(values.view().data)[i] = static_cast<uint16_t>(i);
        const Found found = count_non_finite(values);
        EXPECT_EQ(found.count, c.count) << name_of(c.dtype);
        EXPECT_EQ(found.first, c.first) << name_of(c.dtype);
    }
    const HostTensor f32 = HostTensor::of<float>({0.0f, 3.4e38f, -kInf, 1e-45f, kNan, kInf});
    EXPECT_EQ(count_non_finite(f32).count, 3);
    EXPECT_EQ(count_non_finite(f32).first, 2);
}

TEST(CountNonFinite, AddsToWhatWasSeenBefore) {
    HostTensor x(DType::f32, {5000});
    x.zero();
    EXPECT_EQ(count_non_finite(x).first, -1);
    EXPECT_EQ(count_non_finite(x, {3, 17}).count, 3);
    EXPECT_EQ(count_non_finite(x, {3, 17}).first, 17);
    x.as<float>()[4999] = kInf;
    x.as<float>()[2500] = kNan;
    with_one_and_four_threads([&](int) {
        EXPECT_EQ(count_non_finite(x).count, 2);
        EXPECT_EQ(count_non_finite(x).first, 2500);
        EXPECT_EQ(count_non_finite(x, {3, 17}).count, 5);
        EXPECT_EQ(count_non_finite(x, {3, 17}).first, 17);
        EXPECT_EQ(count_non_finite(x, {3, 4000}).first, 2500);
    });
}

// Whole-tensor ops would touch the rows of other layers in a shared buffer.
TEST(ElementWise, ViewsIntoARowArenaAreRefused) {
    ReferenceOps ops;
    HostTensor x(DType::f32, {8, 4});
    x.set_row_base(2);
    EXPECT_THROW(ops.zero({.y = x}), Error);
    EXPECT_THROW(count_non_finite(x), Error);
    EXPECT_THROW(ops.add({.a = x, .b = x, .y = x}), Error);
}

}  // namespace
}  // namespace fp8flow
