// SPDX-License-Identifier: MIT
// Tables of the rotary embedding against the frequencies of Transformers 5.24 (modeling_rope_utils), and the
// order of a head's rows: whatever a checkpoint rotates, our operation gives the same scores.
#include "layers/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

namespace fp8flow {
namespace {

ModelSpec scaled(RopeType type, double base, double factor) {
    ModelSpec model;
    model.rotary_base = base;
    model.rope.rope_type = type;
    model.rope.rotary_scaling_factor = factor;
    return model;
}

// The angle of position 1 in pair i, and what cos and sin are multiplied by.
void expect_frequencies(const ModelSpec& model, std::array<double, 6> want, double scale) {
    const std::vector<float> table = rope_table(model, 2, 64, 64);
    const int64_t pairs[] = {0, 5, 10, 16, 20, 31};
    for (size_t n = 0; n < want.size(); ++n) {
        const float* entry = table.data() + (32 + pairs[n]) * 2;
        EXPECT_NEAR(std::atan2(entry[1], entry[0]) / want[n], 1.0, 3e-6) << pairs[n];
        EXPECT_NEAR(std::hypot(entry[0], entry[1]), scale, 1e-6) << pairs[n];
    }
}

TEST(Rope, FrequenciesAreThoseOfTransformers) {
    ModelSpec yarn = scaled(RopeType::yarn, 1e4, 40);
    yarn.rope.mscale_all_dim = 1;
    expect_frequencies(yarn, {1, 0.237137362, 0.0562341288, 0.00550000044, 0.000790569407, 3.33380353e-06},
                       1.0);
    EXPECT_NEAR(rope_softmax_factor(yarn.rope), 1.8738542, 1e-6);  // DeepSeek-V3
    yarn.rope.mscale_all_dim = yarn.rope.mscale = 0.707;
    EXPECT_NEAR(rope_softmax_factor(yarn.rope), 1.5896, 1e-4);  // DeepSeek-V2-Lite
    expect_frequencies(scaled(RopeType::yarn, 1.5e5, 32),
                       {1, 0.155322984, 0.0194509663, 0.000580947497, 1.8188337e-05, 3.0235114e-07},
                       1.3465735902799727);
    ModelSpec no_ramp = scaled(RopeType::yarn, 1e4, 40);  // all pairs but the first make less than a rotation
    no_ramp.rope.original_max_position_embeddings = 6;
    expect_frequencies(no_ramp, {1, 0.00592843428, 0.00140585331, 0.00025, 7.90569415e-05, 3.33380353e-06},
                       1.36888794541139);
    ModelSpec llama = scaled(RopeType::llama3, 5e5, 8);
    llama.rope.original_max_position_embeddings = 8192;
    expect_frequencies(llama, {1, 0.128687382, 0.0165604409, 0.000524846022, 3.42810235e-05, 3.7673226e-07},
                       1.0);
    expect_frequencies(scaled(RopeType::linear, 1e4, 4),
                       {0.25, 0.0592843406, 0.0140585322, 0.00249999994, 0.000790569466, 3.33380376e-05},
                       1.0);
    expect_frequencies(scaled(RopeType::ntk, 1e4, 1000),
                       {1, 0.0778267746, 0.00605700685, 0.000282886943, 3.66873319e-05, 1.33352143e-07}, 1.0);
}

// rotated[first + ...] as the checkpoint's own model rotates a row.
std::vector<double> theirs(std::vector<double> x, const RopeHead& head, int64_t position) {
    for (int64_t i = 0; i < head.rotated / 2; ++i) {
        const auto a = static_cast<size_t>(head.first + (head.interleaved ? 2 * i : i));
        const auto b =
            static_cast<size_t>(head.first + (head.interleaved ? 2 * i + 1 : i + head.rotated / 2));
        const double angle =
            static_cast<double>(position) *
            std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(head.rotated));
        const double u = x[a], v = x[b];
        x[a] = u * std::cos(angle) - v * std::sin(angle);
        x[b] = v * std::cos(angle) + u * std::sin(angle);
    }
    return x;
}

TEST(Rope, PermutedRowsGiveTheScoresOfTheCheckpoint) {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (const RopeHead& head :
         {RopeHead{.dim = 64, .rotated = 64}, RopeHead{64, 64, 0, true}, RopeHead{128, 64, 0, false},
          RopeHead{128, 32, 0, true}, RopeHead{192, 64, 128, true}, RopeHead{192, 64, 128, false},
          RopeHead{.dim = 32, .rotated = 0}}) {
        SCOPED_TRACE(testing::Message() << head.dim << " " << head.rotated << " " << head.interleaved);
        const std::vector<int64_t> rows = rope_rows(head);
        std::vector<int64_t> sorted = rows;
        std::sort(sorted.begin(), sorted.end());
        for (int64_t d = 0; d < head.dim; ++d) ASSERT_EQ(sorted[static_cast<size_t>(d)], d);
        const auto dim = static_cast<size_t>(head.dim), first = static_cast<size_t>(head.first),
                   half = (dim - first) / 2;
        const std::vector<float> table = rope_table(ModelSpec{}, 8, head.dim - head.first, head.rotated);
        std::vector<double> q(dim), k(dim);
        for (size_t d = 0; d < dim; ++d) q[d] = normal(random), k[d] = normal(random);
        const auto ours = [&](const std::vector<double>& x, size_t position) {
            std::vector<double> y(dim);
            for (size_t i = 0; i < first; ++i) y[i] = x[static_cast<size_t>(rows[i])];
            for (size_t i = 0; i < half; ++i) {
                const double c = table[(position * half + i) * 2], s = table[(position * half + i) * 2 + 1];
                const size_t low = first + i, high = low + half;
                const double u = x[static_cast<size_t>(rows[low])], v = x[static_cast<size_t>(rows[high])];
                y[low] = u * c - v * s;
                y[high] = v * c + u * s;
            }
            return y;
        };
        const std::vector<double> a = theirs(q, head, 7), b = theirs(k, head, 3), c = ours(q, 7),
                                  d = ours(k, 3);
        double want = 0, got = 0;
        for (size_t i = 0; i < dim; ++i) want += a[i] * b[i], got += c[i] * d[i];
        EXPECT_NEAR(got, want, 1e-5);
    }
}

// The plain table is what it was before frequencies could be scaled.
TEST(Rope, ThePlainTableKeepsItsBits) {
    ModelSpec model;
    model.rotary_base = 1e6;
    const std::vector<float> table = rope_table(model, 16, 128, 128);
    for (int64_t position = 0; position < 16; ++position)
        for (int64_t i = 0; i < 64; ++i) {
            const double angle =
                static_cast<double>(position) * std::pow(1e6, -static_cast<double>(i) / 64.0);
            ASSERT_EQ(table[static_cast<size_t>((position * 64 + i) * 2)],
                      static_cast<float>(std::cos(angle)));
            ASSERT_EQ(table[static_cast<size_t>((position * 64 + i) * 2 + 1)],
                      static_cast<float>(std::sin(angle)));
        }
}

}  // namespace
}  // namespace fp8flow
