// SPDX-License-Identifier: MIT
// Router top-k against formulas in double written another way (sort everything, then normalise); gradients by
// central differences; NaN, Inf, ties and every width of router that has broken somebody.
#include "kernels/reference/reference_ops.h"
#include "tests/support/files.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

namespace fp8flow::test {
namespace {

constexpr double kEps = 0x1p-23;
const int64_t kExperts[] = {1, 2, 3, 8, 31, 32, 33, 64, 128, 256, 257, 384, 512};

std::vector<int64_t> topks_of(int64_t experts) {
    std::set<int64_t> topks{experts};
    for (int64_t k : {1, 2, 6, 8})
        if (k <= experts) topks.insert(k);
    return {topks.begin(), topks.end()};
}

struct Variant {
    const char* name;
    op::RouterOptions options;
    bool has_bias = false;
};

// All ways to score, with and without group limit where the numbers allow one.
std::vector<Variant> variants_of(int64_t experts, int64_t topk) {
    std::vector<Variant> variants = {
        {"post", {}},
        {"pre", {.pre_softmax = true}},
        {"sigmoid", {.score = op::Score::sigmoid, .scaling_factor = 2.5f}},
        {"sigmoid + bias", {.score = op::Score::sigmoid}, true},
        {"sigmoid as it is", {.score = op::Score::sigmoid, .normalise = false, .scaling_factor = 2.5f}},
    };
    const std::size_t plain = variants.size();
    for (auto [groups, group_topk] : {std::pair{2, 1}, {4, 2}, {8, 4}, {3, 2}}) {
        if (experts % groups != 0 || group_topk > topk || group_topk * (experts / groups) < topk) continue;
        for (std::size_t i = 0; i < plain; ++i) {
            Variant limited = variants[i];
            limited.options.num_groups = groups;
            limited.options.group_topk = group_topk;
            limited.name = "group-limited";
            variants.push_back(limited);
        }
    }
    return variants;
}

// Indices by descending value; NaN last; equal values by ascending index.
std::vector<int64_t> sorted_indices(const std::vector<double>& values) {
    std::vector<int64_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](int64_t i) {
        return std::isnan(values[i]) ? std::pair{1, 0.0} : std::pair{0, -values[i]};
    };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
    return order;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

std::vector<double> softmax(std::vector<double> values) {  // of moderate values: no shift needed in double
    double sum = 0;
    for (double& v : values) sum += v = std::exp(v);
    for (double& v : values) v /= sum;
    return values;
}

std::vector<double> scores_of(const std::vector<double>& logits, const op::RouterOptions& options) {
    if (options.score == op::Score::softmax) return options.pre_softmax ? softmax(logits) : logits;
    std::vector<double> scores;
    for (double l : logits) scores.push_back(sigmoid(l));
    return scores;
}

std::vector<int64_t> choose(const std::vector<double>& logits, const std::vector<double>& bias,
                            const op::RouterOptions& options, int64_t topk) {
    std::vector<double> values = scores_of(logits, options);
    for (std::size_t e = 0; e < bias.size(); ++e) values[e] += bias[e];
    const int64_t experts = static_cast<int64_t>(values.size());
    std::vector<int64_t> order = sorted_indices(values);
    if (options.num_groups > 0) {
        const int64_t size = experts / options.num_groups;
        std::vector<double> group_scores;
        for (int64_t g = 0; g < options.num_groups; ++g) {
            std::vector<double> members(values.begin() + g * size, values.begin() + (g + 1) * size);
            const std::vector<int64_t> best = sorted_indices(members);
            double sum = 0;
            for (int64_t i = 0; i < topk / options.group_topk; ++i) sum += members[best[i]];
            group_scores.push_back(sum);
        }
        const std::vector<int64_t> groups = sorted_indices(group_scores);
        const std::set<int64_t> kept(groups.begin(), groups.begin() + options.group_topk);
        std::erase_if(order, [&](int64_t e) { return kept.count(e / size) == 0; });
    }
    order.resize(static_cast<std::size_t>(topk));
    return order;
}

std::vector<double> probs_of(const std::vector<double>& logits, const std::vector<int64_t>& ids,
                             const op::RouterOptions& options) {
    const std::vector<double> scores = scores_of(logits, options);
    std::vector<double> probs;
    for (int64_t id : ids) probs.push_back(scores[id]);
    if (options.score == op::Score::softmax && !options.pre_softmax) probs = softmax(probs);
    if (options.score == op::Score::sigmoid && options.normalise && ids.size() > 1) {
        const double sum = std::accumulate(probs.begin(), probs.end(), 1e-20);
        for (double& p : probs) p /= sum;
    }
    for (double& p : probs) p *= options.scaling_factor;
    return probs;
}

constexpr int64_t kCountedBefore = 3;  // counts accumulate over the micro-batches of a step

struct TopK {
    HostTensor logits, bias, ids, probs, counts;
    op::RouterTopK args;

    TopK(int64_t tokens, int64_t experts, int64_t topk, const Variant& variant)
        : logits(DType::f32, {tokens, experts}),
          ids(DType::i32, {tokens, topk}),
          probs(DType::f32, {tokens, topk}),
          counts(DType::i64, {experts}) {
        // multiples of 1/64: exact ties occur, near ties do not, so that ids are decided in any precision
        fill(logits, [&](int64_t i) { return std::round(64 * random_normal(7, experts, i)) / 64; });
        if (variant.has_bias) {
            bias = HostTensor(DType::f32, {experts});
            fill(bias, [&](int64_t i) { return std::round(8 * random_normal(8, experts, i)) / 64; });
        }
        std::fill_n(counts.as<int64_t>(), experts, kCountedBefore);
        args = {.logits = logits,
                .expert_bias = bias,
                .options = variant.options,
                .ids = ids,
                .probs = probs,
                .counts = counts};
    }
    int64_t experts() const { return logits.view().dim(1); }
    int64_t topk() const { return ids.view().dim(1); }
    int64_t tokens() const { return logits.view().dim(0); }
    void run() { ReferenceOps().router_top_k(args); }
    std::vector<double> logits_of(int64_t t) const { return to_doubles(logits.view()[t]); }
    std::vector<int64_t> ids_of(int64_t t) const {
        const int32_t* data = ids.as<int32_t>() + t * topk();
        return {data, data + topk()};
    }
    void expect_counts() const {
        std::vector<int64_t> want(static_cast<std::size_t>(experts()), kCountedBefore);
        for (int64_t i = 0; i < ids.numel(); ++i) ++want[static_cast<std::size_t>(ids.as<int32_t>()[i])];
        for (int64_t e = 0; e < experts(); ++e) ASSERT_EQ(counts.as<int64_t>()[e], want[e]);
    }
    void expect_distinct_in_range() const {
        for (int64_t t = 0; t < tokens(); ++t) {
            const std::vector<int64_t> chosen = ids_of(t);
            ASSERT_EQ(std::set<int64_t>(chosen.begin(), chosen.end()).size(), chosen.size()) << "token " << t;
            for (int64_t id : chosen) ASSERT_TRUE(id >= 0 && id < experts()) << id;
        }
    }
};

TEST(RouterTopK, EdgeGrid) {
    for (int64_t experts : kExperts)
        for (int64_t topk : topks_of(experts))
            for (const Variant& variant : variants_of(experts, topk)) {
                SCOPED_TRACE(fmt::format("E {} K {} {} groups {}", experts, topk, variant.name,
                                         variant.options.num_groups));
                TopK call(experts > 64 ? 3 : 9, experts, topk, variant);
                call.run();
                call.expect_counts();
                const double bound = 2 * static_cast<double>(experts) * kEps;
                for (int64_t t = 0; t < call.tokens(); ++t) {
                    const std::vector<double> logits = call.logits_of(t);
                    const std::vector<int64_t> ids =
                        choose(logits, to_doubles(call.bias), variant.options, topk);
                    ASSERT_EQ(call.ids_of(t), ids) << "token " << t;
                    const std::vector<double> want = probs_of(logits, ids, variant.options);
                    for (int64_t k = 0; k < topk; ++k) {
                        const double got = call.probs(t * topk + k);
                        ASSERT_LE(std::abs(got - want[k]), bound * std::min(1.0, want[k]))
                            << "token " << t << " k " << k << ": " << got << " for " << want[k];
                    }
                }
            }
}

TEST(RouterTopK, TiesGoToTheLowestId) {
    for (int64_t experts : {8, 33, 257})
        for (const Variant& variant : variants_of(experts, 6)) {
            TopK call(1, experts, 6, variant);
            fill(call.logits, [](int64_t) { return 0.5; });
            if (variant.has_bias) call.bias.zero();
            call.run();
            const int64_t size =
                variant.options.num_groups > 0 ? experts / variant.options.num_groups : experts;
            for (int64_t k = 0; k < 6; ++k) {
                ASSERT_EQ(call.ids_of(0)[k], k) << variant.name << size;
                const double even = variant.options.pre_softmax ? 1.0 / static_cast<double>(experts)
                                    : variant.options.normalise ? 1.0 / 6
                                                                : sigmoid(0.5);
                ASSERT_NEAR(call.probs(k), even * variant.options.scaling_factor, 1e-6);
            }
        }
}

TEST(RouterTopK, NanAndInfinityKeepIdsDistinctAndInRange) {
    const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
    for (int64_t experts : {1, 2, 8, 33, 64, 257})
        for (int64_t topk : topks_of(experts))
            for (const Variant& variant : variants_of(experts, topk)) {
                TopK call(9, experts, topk, variant);
                fill(call.logits, [&](int64_t i) {
                    const int64_t t = i / experts, e = i % experts;
                    const double normal = call.logits(i);
                    switch (t) {
                        case 0: return nan;
                        case 1: return -inf;
                        case 2: return inf;
                        case 3: return e % 2 ? nan : normal;
                        case 4: return e % 3 ? -inf : normal;
                        case 5: return e % 3 ? inf : -inf;
                        case 6: return e % 3 == 0 ? nan : e % 3 == 1 ? -inf : inf;
                        case 7: return e == experts - 1 ? nan : -inf;
                        default: return 3.4e38 * (e % 2 ? 1 : -1);
                    }
                });
                call.run();
                call.expect_distinct_in_range();
                call.expect_counts();
                if (std::string(variant.name) != "post") continue;
                for (int64_t t = 0; t < call.tokens();
                     ++t)  // chosen on the logits themselves: NaN after -Inf
                    ASSERT_EQ(call.ids_of(t), choose(call.logits_of(t), {}, variant.options, topk))
                        << "token " << t;
            }
}

TEST(RouterTopK, GroupLimitExcludesBetterExperts) {
    // group 1 has the best expert, group 0 the best pair: with one group of four, both choices come from
    // group 0
    TopK call(1, 8, 2, {"group-limited", {.num_groups = 2, .group_topk = 1}});
    const double logits[] = {3, 3, 0, 0, 5, 0, 0, 0};
    fill(call.logits, [&](int64_t i) { return logits[i]; });
    call.run();
    EXPECT_EQ(call.ids_of(0), (std::vector<int64_t>{0, 1}));
    call.args.options.num_groups = 0;
    call.run();
    EXPECT_EQ(call.ids_of(0), (std::vector<int64_t>{4, 0}));
    // excluded groups stay excluded, even where everything eligible is -Inf or NaN
    TopK poisoned(1, 8, 4, {"group-limited", {.num_groups = 2, .group_topk = 1}});
    fill(poisoned.logits,
         [](int64_t i) { return i == 1 ? std::nan("") : -std::numeric_limits<double>::infinity(); });
    poisoned.run();
    EXPECT_EQ(poisoned.ids_of(0), (std::vector<int64_t>{4, 5, 6, 7}));
}

TEST(RouterTopK, BiasChoosesButDoesNotWeigh) {
    TopK call(1, 4, 2, {"sigmoid + bias", {.score = op::Score::sigmoid}, true});
    call.logits.zero();
    const double bias[] = {0, 0.25, 0, 0.5};
    fill(call.bias, [&](int64_t i) { return bias[i]; });
    call.run();
    EXPECT_EQ(call.ids_of(0), (std::vector<int64_t>{3, 1}));
    EXPECT_EQ(call.probs(0), 0.5);
    EXPECT_EQ(call.probs(1), 0.5);
}

TEST(RouterTopK, ForcedIds) {
    for (const Variant& variant : variants_of(16, 4)) {
        TopK call(5, 16, 4, variant);
        HostTensor forced(DType::i32, {5, 4});
        for (int64_t i = 0; i < 20; ++i) forced.as<int32_t>()[i] = static_cast<int32_t>((5 * i + 3) % 16);
        call.args.forced_ids = forced;
        call.run();
        EXPECT_TRUE(same_bytes(call.ids, forced));
        call.expect_counts();
        for (int64_t t = 0; t < 5; ++t) {
            const std::vector<double> want = probs_of(call.logits_of(t), call.ids_of(t), variant.options);
            for (int64_t k = 0; k < 4; ++k) EXPECT_NEAR(call.probs(t * 4 + k), want[k], 32 * kEps * want[k]);
        }
        for (const int32_t wrong : {-1, 16, forced.as<int32_t>()[8]}) {
            forced.as<int32_t>()[9] = wrong;
            EXPECT_THROW(call.run(), Error);
        }
    }
}

TEST(RouterTopK, NoTokens) {
    TopK call(0, 8, 2, {"post", {}});
    call.run();
    for (int64_t e = 0; e < 8; ++e) EXPECT_EQ(call.counts(e), kCountedBefore);
    const HostTensor dprobs(DType::f32, {0, 2}), dlogits(DType::f32, {0, 8});
    ReferenceOps().router_top_k_backward(
        {.logits = call.logits, .ids = call.ids, .dprobs = dprobs, .dlogits = dlogits});
}

TEST(RouterTopK, WrongArgumentsNameTheKeyAndBothNumbers) {
    const auto message = [](TopK& call) { return error_or_none(ExitCode::internal, [&] { call.run(); }); };
    TopK too_many(2, 4, 5, {"post", {}});
    expect_contains(message(too_many), "moe_router_topk is 5, must be 1 to num_experts = 4");
    TopK groups(2, 8, 2, {"post", {.num_groups = 3, .group_topk = 1}});
    expect_contains(message(groups), "moe_router_num_groups is 3, must divide num_experts = 8");
    TopK few(2, 8, 4, {"post", {.num_groups = 4, .group_topk = 1}});
    expect_contains(message(few), "leave 2 experts");
    TopK bias(2, 8, 2, {"post", {}, true});
    expect_contains(message(bias), "sigmoid");
}

// d/dlogits of sum_k w_k p_k with the choice fixed.
TEST(RouterTopKBackward, CentralDifferences) {
    for (int64_t experts : kExperts)
        for (int64_t topk : topks_of(experts))
            for (const Variant& variant : variants_of(experts, topk)) {
                if (experts > 64 && topk > 8) continue;
                SCOPED_TRACE(fmt::format("E {} K {} {} groups {}", experts, topk, variant.name,
                                         variant.options.num_groups));
                const int64_t tokens = experts > 64 ? 1 : 4;
                TopK call(tokens, experts, topk, variant);
                call.run();
                HostTensor dprobs(DType::f32, {tokens, topk}), dlogits(DType::f32, {tokens, experts});
                fill_normal(dprobs, 11);
                ReferenceOps().router_top_k_backward({.logits = call.logits,
                                                      .ids = call.ids,
                                                      .dprobs = dprobs,
                                                      .options = variant.options,
                                                      .dlogits = dlogits});
                for (int64_t t = 0; t < tokens; ++t) {
                    std::vector<double> logits = call.logits_of(t);
                    const std::vector<int64_t> ids = call.ids_of(t);
                    const auto loss = [&] {
                        const std::vector<double> probs = probs_of(logits, ids, variant.options);
                        double sum = 0;
                        for (int64_t k = 0; k < topk; ++k) sum += dprobs(t * topk + k) * probs[k];
                        return sum;
                    };
                    double error = 0, size = 0, scale = 0;
                    for (int64_t k = 0; k < topk; ++k) scale += std::pow(dprobs(t * topk + k), 2);
                    for (int64_t e = 0; e < experts; ++e) {
                        // wide routers: the chosen experts and every 13th of the others
                        if (experts > 64 && e % 13 != 0 && std::find(ids.begin(), ids.end(), e) == ids.end())
                            continue;
                        const double want = slope(logits[e], 1e-4, loss), got = dlogits(t * experts + e);
                        error += (got - want) * (got - want);
                        size += want * want;
                    }
                    // where the gradient cancels to nothing (softmax over one expert), the bound is that of
                    // its terms
                    ASSERT_LE(std::sqrt(error), 1e-5 * std::sqrt(size) + 1e-7 * std::sqrt(scale))
                        << "token " << t;
                }
            }
}

}  // namespace
}  // namespace fp8flow::test
