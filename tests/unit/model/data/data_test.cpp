// SPDX-License-Identifier: MIT
// Order of samples: the permutation, the share of each rank, and the synthetic source against independent
// computations.
#include "model/data/data.h"

#include "model/data/permutation.h"
#include "model/data/synthetic.h"
#include "tests/support/file_data.h"
#include "tests/support/files.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

namespace fp8flow {

using namespace data;

namespace {

TEST(Permutation, IsABijectionForEverySmallSize) {
    for (int64_t n = 1; n <= 300; ++n) {
        for (const uint64_t key : {0ULL, 1ULL, 0xfeedULL}) {
            const Permutation order(n, key);
            std::vector<int> hits(static_cast<size_t>(n), 0);
            for (int64_t i = 0; i < n; ++i) ++hits.at(static_cast<size_t>(order(i)));
            EXPECT_EQ(std::count(hits.begin(), hits.end(), 1), n) << "n " << n << " key " << key;
        }
    }
}

TEST(Permutation, SpreadsAndDependsOnTheKey) {
    const int64_t n = 10007;
    const Permutation a(n, 1), b(n, 2);
    int64_t fixed = 0, same = 0, neighbours = 0;
    double displacement = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        fixed += a(i) == i;
        same += a(i) == b(i);
        neighbours += i > 0 && std::abs(a(i) - a(i - 1)) == 1;
        displacement += static_cast<double>(std::abs(a(i) - i)) / static_cast<double>(n);
    }
    // A random permutation has 1, 1 and 2 of them on average (Poisson), and a mean displacement of n / 3.
    EXPECT_LE(fixed, 8);
    EXPECT_LE(same, 8);
    EXPECT_LE(neighbours, 12);
    EXPECT_NEAR(displacement / static_cast<double>(n), 1.0 / 3.0, 0.01);
}

TEST(Permutation, HoldsLargeSizesAndRefusesOutside) {
    const int64_t n = (int64_t{1} << 40) + 12345;
    const Permutation order(n, 7);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 2000; ++i) {
        const int64_t x = order(n - 1 - i);
        EXPECT_TRUE(x >= 0 && x < n);
        seen.insert(x);
    }
    EXPECT_EQ(seen.size(), 2000u);
    EXPECT_THROW(order(n), Error);
    EXPECT_THROW(order(-1), Error);
}

// The samples of one global batch, micro-batch by micro-batch and rank by rank.
std::vector<int64_t> walk(const Batcher& batcher, int64_t batch) {
    std::vector<int64_t> order;
    for (int64_t m = 0; m < batcher.num_micro_batches(); ++m)
        for (int64_t rank = 0; rank < batcher.data_parallel_size; ++rank) {
            const Batcher::Range range = batcher.samples(batch, m, rank);
            for (int64_t i = 0; i < range.count; ++i) order.push_back(range.first + i);
        }
    return order;
}

TEST(Batcher, EveryWorldSizeSeesTheSameSamplesInTheSameOrder) {
    for (const int64_t global : {1, 7, 12, 16, 24}) {
        for (const int64_t micro : {1, 2, 3, 5}) {
            for (const int64_t ranks : {1, 2, 3, 4, 8}) {
                const Batcher batcher{
                    .global_batch_size = global, .micro_batch_size = micro, .data_parallel_size = ranks};
                for (const int64_t batch : {0, 1, 5}) {
                    std::vector<int64_t> expected(static_cast<size_t>(global));
                    for (int64_t i = 0; i < global; ++i)
                        expected[static_cast<size_t>(i)] = batch * global + i;
                    EXPECT_EQ(walk(batcher, batch), expected) << global << "/" << micro << "/" << ranks;
                }
                for (int64_t m = 0; m < batcher.num_micro_batches(); ++m)
                    for (int64_t rank = 0; rank < ranks; ++rank)
                        EXPECT_LE(batcher.samples(0, m, rank).count, micro);
            }
        }
    }
}

TEST(Batcher, MicroBatchesHoldTheSameSamplesWhereTheProductIsEqual) {
    const Batcher one{.global_batch_size = 16, .micro_batch_size = 4, .data_parallel_size = 1};
    const Batcher four{.global_batch_size = 16, .micro_batch_size = 1, .data_parallel_size = 4};
    EXPECT_EQ(four.num_micro_batches(), 4);
    for (int64_t m = 0; m < 4; ++m) {
        const Batcher::Range all = one.samples(3, m, 0);
        for (int64_t rank = 0; rank < 4; ++rank) {
            EXPECT_EQ(four.samples(3, m, rank).first, all.first + rank);
            EXPECT_EQ(four.samples(3, m, rank).count, 1);
        }
    }
}

TEST(Batcher, SharesAnUnevenRestAndRefusesWrongIndices) {
    const Batcher batcher{.global_batch_size = 7, .micro_batch_size = 2, .data_parallel_size = 2};
    EXPECT_EQ(batcher.num_micro_batches(), 2);
    EXPECT_EQ(batcher.samples(0, 1, 0).count, 2);
    EXPECT_EQ(batcher.samples(0, 1, 1).count, 1);
    const Batcher idle{.global_batch_size = 1, .micro_batch_size = 1, .data_parallel_size = 4};
    EXPECT_EQ(idle.samples(0, 0, 3).count, 0);
    EXPECT_THROW(batcher.samples(0, 2, 0), Error);
    EXPECT_THROW(batcher.samples(0, 0, 2), Error);
    EXPECT_THROW(batcher.samples(-1, 0, 0), Error);
}

Config chain(int64_t symbols, int64_t order, uint64_t seed, int64_t seq_length) {
    Config config;
    config.data.synthetic_vocab_size = symbols;
    config.data.synthetic_order = order;
    config.data.synthetic_seed = seed;
    config.model.seq_length = seq_length;
    return config;
}

// Stationary distribution of a chain of order 1 by Gaussian elimination, as the source uses power iteration.
std::vector<double> solve_stationary(const SyntheticSource& source) {
    const auto n = static_cast<size_t>(source.vocab_size());
    std::vector<std::vector<double>> a(n, std::vector<double>(n + 1, 0.0));
    for (size_t row = 0; row < n; ++row)
        for (size_t col = 0; col < n; ++col)
            a[row][col] = source.probability(static_cast<int64_t>(col), static_cast<int64_t>(row)) -
                          (row == col ? 1.0 : 0.0);
    for (size_t col = 0; col < n; ++col)
        a[n - 1][col] = 1.0;  // the equations are dependent; one becomes "sums to 1"
    a[n - 1][n] = 1.0;
    for (size_t pivot = 0; pivot < n; ++pivot) {
        size_t best = pivot;
        for (size_t row = pivot; row < n; ++row)
            if (std::abs(a[row][pivot]) > std::abs(a[best][pivot])) best = row;
        std::swap(a[pivot], a[best]);
        for (size_t row = 0; row < n; ++row) {
            if (row == pivot) continue;
            const double factor = a[row][pivot] / a[pivot][pivot];
            for (size_t col = pivot; col <= n; ++col) a[row][col] -= factor * a[pivot][col];
        }
    }
    std::vector<double> pi(n);
    for (size_t i = 0; i < n; ++i) pi[i] = a[i][n] / a[i][i];
    return pi;
}

TEST(Synthetic, EntropyOfOrderOneMatchesALinearSolve) {
    for (const double noise : {0.05, 0.3, 1.0}) {
        Config config = chain(40, 1, 3, 32);
        config.data.synthetic_noise = noise;
        const SyntheticSource source(config);
        const std::vector<double> pi = solve_stationary(source);
        double rate = 0.0, unigram = 0.0;
        for (int64_t c = 0; c < 40; ++c) {
            EXPECT_NEAR(source.stationary(c), pi[static_cast<size_t>(c)], 1e-11);
            double row = 0.0, total = 0.0;
            for (int64_t x = 0; x < 40; ++x) {
                const double p = source.probability(c, x);
                row -= p * std::log(p);
                total += p;
            }
            EXPECT_EQ(total, 1.0);
            rate += pi[static_cast<size_t>(c)] * row;
            unigram -= pi[static_cast<size_t>(c)] * std::log(pi[static_cast<size_t>(c)]);
        }
        EXPECT_NEAR(source.entropy_rate_nats(), rate, 1e-10);
        EXPECT_NEAR(source.unigram_entropy_nats(), unigram, 1e-10);
        EXPECT_NEAR(*source.entropy_floor_nats(), rate,
                    1e-10);  // order 1: every target has its whole context
    }
}

TEST(Synthetic, PureNoiseIsTheZipfLaw) {
    Config config = chain(10, 1, 1, 8);
    config.data.synthetic_noise = 1.0;
    const SyntheticSource source(config);
    double harmonic = 0.0, entropy = 0.0;
    for (int i = 1; i <= 10; ++i) harmonic += 1.0 / i;
    for (int i = 1; i <= 10; ++i) {
        EXPECT_NEAR(source.probability(3, i - 1), 1.0 / i / harmonic, 1e-9);
        entropy -= 1.0 / i / harmonic * std::log(1.0 / i / harmonic);
    }
    EXPECT_NEAR(source.entropy_rate_nats(), entropy, 1e-8);
}

// Plug-in estimate of H(x | k symbols before it) from counts of drawn tokens, with the Miller-Madow
// correction of its bias.
double empirical_rate(const SyntheticSource& source, int64_t order, int64_t samples) {
    std::map<int64_t, std::map<int32_t, int64_t>> counts;
    int64_t total = 0;
    for (int64_t i = 0; i < samples; ++i) {
        const std::vector<int32_t> tokens = tokens_of(source, Split::train, i);
        for (size_t t = static_cast<size_t>(order); t < tokens.size(); ++t, ++total) {
            int64_t context = 0;
            for (int64_t j = order; j >= 1; --j)
                context = context * source.vocab_size() + tokens[t - static_cast<size_t>(j)];
            ++counts[context][tokens[t]];
        }
    }
    double rate = 0.0;
    for (const auto& [context, row] : counts) {
        double sum = 0.0;
        for (const auto& [symbol, count] : row) sum += static_cast<double>(count);
        for (const auto& [symbol, count] : row)
            rate -= static_cast<double>(count) / static_cast<double>(total) *
                    std::log(static_cast<double>(count) / sum);
        rate += static_cast<double>(row.size() - 1) / (2.0 * static_cast<double>(total));
    }
    return rate;
}

TEST(Synthetic, EntropyMatchesThePlugInEstimateOfDrawnTokens) {
    const SyntheticSource one(chain(32, 1, 11, 255));
    EXPECT_NEAR(empirical_rate(one, 1, 4000), one.entropy_rate_nats(), 0.005);
    const SyntheticSource two(chain(12, 2, 12, 255));
    EXPECT_NEAR(empirical_rate(two, 2, 4000), two.entropy_rate_nats(), 0.005);
    // This test must detect a wrong order.
    EXPECT_GT(empirical_rate(two, 1, 4000), two.entropy_rate_nats() + 0.05);
}

TEST(Synthetic, WindowsBeginStationaryAndTheFloorCountsShortContexts) {
    const SyntheticSource source(chain(8, 3, 5, 4));
    // Law of each position over many windows: equal to the unigram marginal of the stationary distribution.
    std::vector<double> marginal(8, 0.0);
    for (int64_t c = 0; c < source.num_contexts(); ++c)
        marginal[static_cast<size_t>(c % 8)] += source.stationary(c);
    const int64_t windows = 40000;
    std::vector<std::vector<double>> law(5, std::vector<double>(8, 0.0));
    for (int64_t i = 0; i < windows; ++i) {
        const std::vector<int32_t> tokens = tokens_of(source, Split::held_out, i);
        for (size_t t = 0; t < 5; ++t)
            law[t].at(static_cast<size_t>(tokens[t])) += 1.0 / static_cast<double>(windows);
    }
    for (size_t t = 0; t < 5; ++t)
        for (size_t x = 0; x < 8; ++x)
            EXPECT_NEAR(law[t][x], marginal[x], 0.012) << "position " << t << " symbol " << x;
    // Floor by the chain rule on explicit sums over contexts: targets 1, 2 have 1, 2 symbols, targets 3, 4
    // have all three.
    double h2 = 0.0, h3 = 0.0, h1 = 0.0;
    std::vector<double> pairs(64, 0.0);
    for (int64_t c = 0; c < source.num_contexts(); ++c) {
        pairs[static_cast<size_t>(c / 8)] +=
            source.stationary(c);  // the two oldest symbols: the same law as the two latest
        h3 -= source.stationary(c) * std::log(source.stationary(c));
    }
    for (const double p : pairs) h2 -= p * std::log(p);
    for (const double p : marginal) h1 -= p * std::log(p);
    const double floor = ((h2 - h1) + (h3 - h2) + 2.0 * source.entropy_rate_nats()) / 4.0;
    EXPECT_NEAR(*source.entropy_floor_nats(), floor, 1e-9);
    EXPECT_GT(floor, source.entropy_rate_nats());
    // Windows shorter than the order have short contexts only.
    const SyntheticSource tiny(chain(8, 3, 5, 1));
    EXPECT_NEAR(*tiny.entropy_floor_nats(), h2 - h1, 1e-9);
}

TEST(Synthetic, IsAPureFunctionOfSeedSplitAndIndex) {
    const Config config = chain(64, 2, 9, 64);
    const SyntheticSource a(config), b(config);
    Config other = config;
    other.data.synthetic_seed = 10;
    const SyntheticSource c(other);
    EXPECT_EQ(a.fingerprint(), b.fingerprint());
    EXPECT_NE(a.fingerprint(), c.fingerprint());
    other = config;
    other.data.synthetic_noise /= 2;
    EXPECT_NE(a.fingerprint(), SyntheticSource(other).fingerprint());
    std::set<std::vector<int32_t>> seen;
    for (int64_t i = 0; i < 200; ++i) {
        EXPECT_EQ(tokens_of(a, Split::train, i), tokens_of(b, Split::train, i));
        EXPECT_NE(tokens_of(a, Split::train, i), tokens_of(c, Split::train, i));
        seen.insert(tokens_of(a, Split::train, i));
        seen.insert(tokens_of(a, Split::held_out, i));
    }
    EXPECT_EQ(seen.size(), 400u);  // no held-out window was a train window
    for (const std::vector<int32_t>& tokens : seen)
        EXPECT_TRUE(std::all_of(tokens.begin(), tokens.end(), [](int32_t t) { return t >= 0 && t < 64; }));
}

TEST(Synthetic, GoldenTokens) {
    const SyntheticSource source(chain(16, 1, 1, 15));
    const std::vector<int32_t> golden = {8, 2, 12, 2, 5, 13, 2, 11, 14, 0, 1, 1, 1, 1, 1, 0};
    EXPECT_EQ(tokens_of(source, Split::train, 0), golden);
}

}  // namespace
}  // namespace fp8flow
